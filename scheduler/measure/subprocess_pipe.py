"""A child process that answers messages one by one; it may hang or die, and never outlives its parent.

Messages use a separate socket pair, and the process inherits its end as a file descriptor. Other output to standard
output (sitecustomize, an import, a C library, atexit) is stored with standard error, and is quoted if the process dies.
"""

from __future__ import annotations

import contextlib
import functools
import math
import os
import queue
import select
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from pathlib import Path
from typing import IO

from scheduler.core.interrupts import WAKE_S
from scheduler.measure.fork_server import KILLED_WITHIN_S, Forked, ForkServer, last_words, start
from scheduler.measure.protocol import Message, StepStarted, decode, encode

LONGEST_MESSAGE_BYTES = 2**26
# A timeout says little about a step that could not run for a larger share of the time: it may have waited for another
# process that could not run.
CONTENDED = 0.1

# Seconds in which the process could run (`RunningTime`).
Limit = Callable[[str], float | None]
Ended = Callable[[str, float], None]


class Overrun(TimeoutError):
    """A step exceeded its timeout.

    Attributes:
      step: the name of the step.
      contended: the process had to wait for other processes, or was stopped, for more than `CONTENDED` of the time.
    """

    def __init__(self, step: str, limit_s: float, contended: bool) -> None:
        super().__init__(f"{step} did not end within {limit_s:.3g} s")
        self.step, self.contended = step, contended


class RunningTime:
    """Counts the seconds in which a process could run: on a busy host, a timeout in them ends only what hangs.

    Seconds in which a thread of the process waited for a core, or was stopped, do not count (Linux; proc(5)). Seconds
    in which the calling process could not run count as one interval of `seconds`.

    Attributes:
      waited_s: the seconds so far in which the process could not run.
    """

    def __init__(self, pid: int) -> None:
        self._pid, self._total_s, self.waited_s = pid, 0.0, 0.0
        self._before_s, self._threads = time.monotonic(), _threads(pid)

    def seconds(self) -> float:
        """Returns the seconds so far. Call it at intervals of at most `WAKE_S`."""
        now_s, threads = time.monotonic(), _threads(self._pid)
        passed_s = min(now_s - self._before_s, 2 * WAKE_S)
        waits_s = [0.0]  # threads wait at the same time, so the longest wait is the process's
        for thread, (held_up, ran_ns, waited_ns) in threads.items():
            _, ran_before_ns, waited_before_ns = self._threads.get(thread, (False, 0, 0))
            # Linux counts a wait once it has ended.
            waits_s.append(passed_s if held_up and ran_ns == ran_before_ns else 1e-9 * (waited_ns - waited_before_ns))
        self._total_s += max(0.0, passed_s - max(waits_s))
        self.waited_s += min(passed_s, max(waits_s))
        self._before_s, self._threads = now_s, threads
        return self._total_s


def _threads(pid: int) -> dict[str, tuple[bool, int, int]]:
    """Returns for each thread of a process whether it is runnable or stopped, and the ns that it ran and waited."""
    found = {}
    for thread in Path(f"/proc/{pid}/task").glob("*"):
        with contextlib.suppress(OSError, ValueError):  # the thread has ended
            state = (thread / "stat").read_text().rpartition(")")[2].split()[0]
            ran_ns, waited_ns, _ = map(int, (thread / "schedstat").read_text().split())
            found[thread.name] = (state in "RTt", ran_ns, waited_ns)
    return found


class Children:
    """Starts processes, which stop when this object is shut down, or with this process, however it ends."""

    def __init__(self) -> None:
        # Linux sends the parent-death signal when the forking thread ends (prctl(2)), so a permanent thread forks. The
        # thread is a daemon, because Python joins all others, such as an executor's, before exit handlers run.
        self._thread = threading.Thread(target=self._work, name="scheduler-children", daemon=True)
        self._calls: queue.SimpleQueue[tuple[Callable[[], Child], Future[Child]] | None] = queue.SimpleQueue()
        self._lock, self._shut = threading.Lock(), False  # nothing follows None in the queue
        self._servers: dict[tuple[str, ...], ForkServer] = {}
        self._thread.start()

    def start(self, arguments: Sequence[str], environment: Mapping[str, str], *, forked: bool = False) -> Child:
        """Runs Python with `arguments` (`fork_server.start`).

        Args:
          forked: whether the program calls `fork_server.serve`. It then runs once for all processes that are started
            with the same arguments, in the environment of the first.

        Raises:
          EOFError: the system cannot start a process; the message gives the reason.
        """
        command = [sys.executable, *arguments]
        started: Future[Child] = Future()
        with self._lock:
            if self._shut:
                raise EOFError("no process can be started: all were shut down")
            self._calls.put((functools.partial(self._start, command, environment, forked), started))
        try:
            return started.result()
        except (OSError, RuntimeError) as error:
            raise EOFError(f"no process can be started: {error}") from error

    def _work(self) -> None:
        while (call := self._calls.get()) is not None:
            start_child, started = call
            try:
                started.set_result(start_child())
            except BaseException as error:
                started.set_exception(error)

    def _start(self, command: Sequence[str], environment: Mapping[str, str], forked: bool) -> Child:
        if not forked:
            return Child(functools.partial(start, command, environment))
        key = tuple(command)
        server = self._servers.get(key)
        if server is not None and not server.alive:
            self._servers.pop(key).close()
            server = None
        if server is None:
            server = self._servers[key] = ForkServer(command, environment)
        return Child(server.fork)

    def shut_down(self) -> None:
        for server in list(self._servers.values()):
            server.kill()
        with self._lock:
            self._shut = True
            self._calls.put(None)
        self._thread.join()
        for server in self._servers.values():
            server.close()


class Child:
    """One process, its channel and its output. Only one thread at a time may use it; any thread may call `kill`.

    Args:
      begin: starts the process, which gets the end of the channel and the file for its output.
    """

    def __init__(self, begin: Callable[[socket.socket, IO[bytes]], subprocess.Popen[bytes] | Forked]) -> None:
        self._said = tempfile.TemporaryFile()  # noqa: SIM115 (lives as long as the process)
        self._channel, end = socket.socketpair()
        try:
            self._process = begin(end, self._said)
        except BaseException:
            self._channel.close()
            self._said.close()
            raise
        finally:
            end.close()
        self._unread = b""

    def ask(self, message: Message, first: str, limit_s: Limit, ended: Ended) -> Message:
        """Sends `message` and returns the reply; each `StepStarted` before the reply begins the next step.

        Args:
          first: the step that begins with the message.
          limit_s: returns the timeout of a step in seconds (`RunningTime`); None sets no limit.
          ended: called with each finished step and its duration in seconds.

        Raises:
          Overrun: a step exceeded its timeout; the process still runs.
          EOFError: the process is gone; the message names the step and quotes its last output.
        """
        step = first
        if line := self._line(0.0):  # an unread line would be taken for the reply
            raise EOFError(f"the process said before it was asked {line[:60]!r}")
        with contextlib.suppress(OSError):  # if the process is gone, reading reports it
            self._channel.sendall(encode(message))
        while True:
            started, limit, ran = time.monotonic(), limit_s(step), RunningTime(self._process.pid)
            line = self._line(limit, ran.seconds)
            if line is None:
                assert limit is not None
                raise Overrun(step, limit, ran.waited_s > CONTENDED * (ran.waited_s + limit))
            if not line:
                raise EOFError(f"the process ended in {step}: {last_words(self._process, self._said)}")
            ended(step, time.monotonic() - started)
            try:
                reply = decode(line)
            except ValueError as error:  # a candidate wrote to the channel
                raise EOFError(f"the process said in {step} {error}") from None
            if not isinstance(reply, StepStarted):
                return reply
            step = reply.step

    @property
    def pid(self) -> int:
        return self._process.pid

    def kill(self) -> None:
        """Kills the process and its group: processes that it forked outlive it."""
        pid, ended = self._process.pid, self._process.returncode is not None
        if ended and Path(f"/proc/{pid}").exists():  # another process has its id: none of its group is left
            return
        # A forked process leads a group only after a moment.
        for kill in (os.killpg,) if ended else (os.killpg, os.kill):
            with contextlib.suppress(ProcessLookupError, PermissionError):
                kill(pid, signal.SIGKILL)

    def close(self) -> None:
        self.kill()
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(KILLED_WITHIN_S)
        for file in (self._channel, self._said):
            with contextlib.suppress(OSError):
                file.close()

    def _line(self, limit_s: float | None, passed_s: Callable[[], float] = float) -> bytes | None:
        """Reads the next line; returns b"" if the process is gone, None after the timeout."""
        file = self._channel.fileno()
        ready = select.poll()
        ready.register(file, select.POLLIN)
        while b"\n" not in self._unread:
            left_s = math.inf if limit_s is None else limit_s - passed_s()
            if not ready.poll(max(0.0, min(left_s, WAKE_S)) * 1000):
                if self._process.poll() is not None and not ready.poll(0):  # a grandchild may hold the channel open
                    return b""
                if left_s <= 0:
                    return None
                continue
            try:
                read = self._channel.recv(65536)
            except ConnectionError:  # the process ended before it read a message
                read = b""
            if not read:
                return b""
            self._unread += read
            if len(self._unread) > LONGEST_MESSAGE_BYTES and b"\n" not in read:
                self._unread += b"\n"
        line, _, self._unread = self._unread.partition(b"\n")
        return line
