"""A process that answers messages one by one: it may hang or die, and it never outlives the one that started it.

Messages go over a socket pair of their own, whose end the process inherits as a file descriptor. What else is written
to standard output (sitecustomize, an import, a C library, atexit) is kept with standard error, for its last words.
"""

from __future__ import annotations

import contextlib
import math
import os
import select
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor

from scheduler.core.interrupts import WAKE_S
from scheduler.measure.protocol import Announcement, Message, decode, encode

PR_SET_PDEATHSIG = 1  # <linux/prctl.h>
LAST_WORDS_BYTES = 8192
LONGEST_MESSAGE_BYTES = 2**26
KILLED_WITHIN_S = 30.0  # a driver may keep a process that hangs on its device for seconds after the kill

Limit = Callable[[str], float | None]
Ended = Callable[[str, float], None]


class Overrun(TimeoutError):
    """A step that took longer than it may.

    Attributes:
      step: its name.
    """

    def __init__(self, step: str, limit_s: float) -> None:
        super().__init__(f"{step} did not end within {limit_s:.3g} s")
        self.step = step


class Children:
    """What starts processes: they end when this object is shut down, or with this process, whatever kills it."""

    def __init__(self) -> None:
        # Linux sends the parent-death signal when the thread that forked ends (prctl(2)): one that stays has to fork.
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="scheduler-children")

    def start(self, arguments: Sequence[str], environment: Mapping[str, str]) -> Child:
        """Runs Python with `arguments`; after them come the channel's file descriptor and this process's id: see
        `channel_to_parent`.

        Raises:
          EOFError: the system starts no process now, and why.
        """
        try:
            return self._thread.submit(Child, [sys.executable, *arguments], environment).result()
        except (OSError, RuntimeError) as error:
            raise EOFError(f"no process can be started: {error}") from error

    def shut_down(self) -> None:
        self._thread.shutdown()


class Child:
    """One process, its channel, and what it printed. For one thread at a time; `kill` is for any.

    Args:
      command: its last two arguments are added here: the file descriptor of its end of the channel, and this process's
        id.
    """

    def __init__(self, command: Sequence[str], environment: Mapping[str, str]) -> None:
        self._said = tempfile.TemporaryFile()  # noqa: SIM115 (lives as long as the process)
        self._channel, end = socket.socketpair()
        try:
            # A session of its own: Ctrl-C in a terminal is for the parent alone, and the whole group can be killed.
            self._process = subprocess.Popen(
                [*command, str(end.fileno()), str(os.getpid())],
                stdin=subprocess.DEVNULL,
                stdout=self._said,
                stderr=subprocess.STDOUT,
                env=environment,
                pass_fds=[end.fileno()],
                start_new_session=True,
            )
        except BaseException:
            self._channel.close()
            self._said.close()
            raise
        finally:
            end.close()
        self._unread = b""

    def ask(self, message: Message, first: str, limit_s: Limit, ended: Ended) -> Message:
        """The answer to `message`; an `Announcement` before it tells what the process does next.

        Args:
          first: the step that begins with the message.
          limit_s: seconds that a step may take; None sets no limit.
          ended: told each step that came to its end, and its seconds.

        Raises:
          Overrun: a step took longer than it may; the process still runs.
          EOFError: the process is gone, in which step, and its last words.
        """
        step = first
        if line := self._line(0.0):  # it would be taken for the answer
            raise EOFError(f"the process said before it was asked {line[:60]!r}")
        with contextlib.suppress(OSError):  # it is gone: reading tells
            self._channel.sendall(encode(message))
        while True:
            started, limit = time.monotonic(), limit_s(step)
            line = self._line(limit)
            if line is None:
                assert limit is not None
                raise Overrun(step, limit)
            if not line:
                raise EOFError(f"the process ended in {step}: {self._last_words()}")
            ended(step, time.monotonic() - started)
            try:
                reply = decode(line)
            except ValueError as error:  # a candidate found the channel, and wrote to it
                raise EOFError(f"the process said in {step} {error}") from None
            if not isinstance(reply, Announcement):
                return reply
            step = reply.step

    @property
    def pid(self) -> int:
        return self._process.pid

    def kill(self) -> None:
        if self._process.returncode is None:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.killpg(self._process.pid, signal.SIGKILL)

    def close(self) -> None:
        self.kill()
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(KILLED_WITHIN_S)
        for file in (self._channel, self._said):
            with contextlib.suppress(OSError):
                file.close()

    def _line(self, limit_s: float | None) -> bytes | None:
        """The next line; empty where the process is gone, None where time ran out."""
        file = self._channel.fileno()
        ready = select.poll()
        ready.register(file, select.POLLIN)
        until = None if limit_s is None else time.monotonic() + limit_s
        while b"\n" not in self._unread:
            left_s = math.inf if until is None else until - time.monotonic()
            if not ready.poll(max(0.0, min(left_s, WAKE_S)) * 1000):
                if self._process.poll() is not None and not ready.poll(0):  # a process it started may hold its end
                    return b""
                if left_s <= WAKE_S:
                    return None
                continue
            try:
                read = self._channel.recv(65536)
            except ConnectionError:  # it ended with a message unread
                read = b""
            if not read:
                return b""
            self._unread += read
            if len(self._unread) > LONGEST_MESSAGE_BYTES and b"\n" not in read:
                self._unread += b"\n"
        line, _, self._unread = self._unread.partition(b"\n")
        return line

    def _last_words(self) -> str:
        """How it ended, and the last line that it said: of a trace, the exception; of a failed check, the check."""
        try:
            status = self._process.wait(KILLED_WITHIN_S)
        except subprocess.TimeoutExpired:
            return "it closed its channel and goes on"
        how = f"exit status {status}" if status >= 0 else signal.Signals(-status).name
        file = self._said.fileno()
        text = os.pread(file, LAST_WORDS_BYTES, max(0, os.fstat(file).st_size - LAST_WORDS_BYTES))
        lines = [line for line in text.decode(errors="replace").splitlines() if line[:1].strip("* ")]
        return f"{how}: {lines[-1].strip()[:500]}" if lines else f"{how}, nothing said"


def channel_to_parent() -> socket.socket:
    """The channel of a process that a `Child` started, which ends when its parent does. No process that it starts
    inherits the channel.
    """
    end, parent = map(int, sys.argv[-2:])
    _die_with(parent)
    os.set_inheritable(end, False)
    return socket.socket(fileno=end)


def _die_with(parent: int) -> None:
    """Makes the kernel kill this process when process `parent`, which started it, is gone."""
    if sys.platform == "linux":
        import ctypes

        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:  # it went before it could be watched
        os._exit(1)
