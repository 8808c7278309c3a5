"""Forks processes from one process that has imported their modules, so that each of them starts in milliseconds.

Importing JAX takes more than a second of CPU time. JAX starts no thread before it starts a backend, so a process that
has only imported JAX can be forked.
"""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
import traceback
from collections.abc import Callable, Mapping, Sequence, Set
from pathlib import Path
from typing import IO, NoReturn

PR_SET_PDEATHSIG, PR_SET_CHILD_SUBREAPER = 1, 36  # <linux/prctl.h>
LAST_WORDS_BYTES = 8192
KILLED_WITHIN_S = 30.0  # a driver may keep a killed process that hangs on its device alive for seconds
# How long a process may take to start, which includes its imports.
START_LIMIT_S = 180.0
POLL_S = 0.005
# A request to fork; any other request is the id of a process, and asks for its exit status.
_FORK, _RUNNING, _REFUSED = b"fork", b"running", b"!"


class ForkServer:
    """A process that runs `serve`. Any thread may use it.

    Args:
      command: the program; two arguments are appended, as in `start`.
    """

    def __init__(self, command: Sequence[str], environment: Mapping[str, str]) -> None:
        self._said = tempfile.TemporaryFile()  # noqa: SIM115 (lives as long as the process)
        self._channel, end = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._channel.settimeout(START_LIMIT_S)
        self._lock = threading.Lock()
        with end:
            self._process = start(command, environment, end, self._said)

    @property
    def alive(self) -> bool:
        return self._process.poll() is None

    def fork(self, channel: socket.socket, output: IO[bytes]) -> Forked:
        """Forks a process that has these two files.

        Raises:
          OSError: no process can be started; the message gives the reason.
        """
        with self._lock, contextlib.suppress(ConnectionError):
            socket.send_fds(self._channel, [_FORK], [channel.fileno(), output.fileno()])
            if reply := self._channel.recv(1024):
                if reply.startswith(_REFUSED):
                    raise OSError(reply.removeprefix(_REFUSED).decode(errors="replace"))
                return Forked(self, int(reply))
        raise OSError(f"the process that starts others ended: {last_words(self._process, self._said)}")

    def status(self, pid: int) -> int | None:
        """Returns the exit code of a process, as `subprocess` does; None while the process runs."""
        with self._lock, contextlib.suppress(OSError):
            self._channel.send(str(pid).encode())
            if reply := self._channel.recv(1024):
                return None if reply == _RUNNING else int(reply)
        return -signal.SIGKILL  # the server has ended, and with it all its processes

    def kill(self) -> None:
        """Kills the server and all its processes."""
        self._process.kill()

    def close(self) -> None:
        self.kill()
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(KILLED_WITHIN_S)
        self._channel.close()
        self._said.close()


class Forked:
    """A process that a `ForkServer` forked, with the interface of `subprocess.Popen`."""

    def __init__(self, server: ForkServer, pid: int) -> None:
        self._server, self.pid = server, pid
        self.returncode: int | None = None

    def poll(self) -> int | None:
        if self.returncode is None:
            self.returncode = self._server.status(self.pid)
        return self.returncode

    def wait(self, timeout: float) -> int:
        until = time.monotonic() + timeout
        while (code := self.poll()) is None:
            if time.monotonic() > until:
                raise subprocess.TimeoutExpired(str(self.pid), timeout)
            time.sleep(POLL_S)
        return code


def start(
    command: Sequence[str], environment: Mapping[str, str], channel: socket.socket, output: IO[bytes]
) -> subprocess.Popen[bytes]:
    """Starts a program, which gets two more arguments: the file descriptor of its channel, and the id of this process.

    The program is a session leader: Ctrl-C in a terminal reaches only this process, and its whole group can be killed.
    """
    return subprocess.Popen(
        [*command, str(channel.fileno()), str(os.getpid())],
        stdin=subprocess.DEVNULL,
        stdout=output,
        stderr=subprocess.STDOUT,
        env=environment,
        pass_fds=[channel.fileno()],
        start_new_session=True,
    )


def last_words(process: subprocess.Popen[bytes] | Forked, said: IO[bytes]) -> str:
    """Returns the exit status and the last line of output: the exception of a traceback, or a failed check."""
    try:
        status = process.wait(KILLED_WITHIN_S)
    except subprocess.TimeoutExpired:
        return "it closed its channel and goes on"
    how = f"exit status {status}" if status >= 0 else signal.Signals(-status).name
    file = said.fileno()
    text = os.pread(file, LAST_WORDS_BYTES, max(0, os.fstat(file).st_size - LAST_WORDS_BYTES))
    lines = [line for line in text.decode(errors="replace").splitlines() if line[:1].strip("* ")]
    return f"{how}: {lines[-1].strip()[:500]}" if lines else f"{how}, nothing said"


# ------------------------------------------------------------------------------
# The side of the started process.


def channel_to_parent() -> socket.socket:
    """Returns the channel of a process that `start` started, and makes this process die with its parent.

    Children of this process do not inherit the channel.
    """
    end, parent = map(int, sys.argv[-2:])
    _die_with(parent)
    os.set_inheritable(end, False)
    return socket.socket(fileno=end)


def serve(run: Callable[[socket.socket], None]) -> None:
    """Forks a process for each request; the process calls `run` with its channel. Returns when the parent ends.

    Processes that a forked process leaves behind become children of this process (prctl(2)), which kills them.
    """
    control = channel_to_parent()
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    _prctl(PR_SET_CHILD_SUBREAPER, 1)
    own, forked = os.getpid(), set[int]()
    while True:
        request, files, _, _ = socket.recv_fds(control, 64, 2)
        if not request:
            return
        if request != _FORK:
            ended, status = os.waitpid(int(request), os.WNOHANG)
            forked.discard(ended)
            if ended:
                _kill_children(forked)
            control.send(str(os.waitstatus_to_exitcode(status)).encode() if ended else _RUNNING)
            continue
        try:
            pid = os.fork()
        except OSError as error:
            control.send(_REFUSED + str(error).encode())
        else:
            if not pid:
                control.close()
                _run(run, own, *files)
            forked.add(pid)
            control.send(str(pid).encode())
        for file in files:
            os.close(file)


def _run(run: Callable[[socket.socket], None], parent: int, channel: int, output: int) -> NoReturn:
    """Calls `run` in a forked process, and ends the process."""
    status = 1
    try:
        os.setsid()
        _die_with(parent)
        with open(os.devnull, "rb") as nothing:
            os.dup2(nothing.fileno(), 0)
        for standard in (1, 2):
            os.dup2(output, standard)
        os.close(output)
        run(socket.socket(fileno=channel))
        status = 0
    except SystemExit as end:
        status = end.code if isinstance(end.code, int) else int(end.code is not None)
    except BaseException:
        traceback.print_exc()
    finally:
        with contextlib.suppress(Exception):
            sys.stdout.flush()
            sys.stderr.flush()
        os._exit(status)


def _kill_children(but: Set[int]) -> None:
    """Kills the children of this process, and theirs, except `but`."""
    with contextlib.suppress(OSError):  # not Linux
        while left := set(map(int, Path(f"/proc/self/task/{os.getpid()}/children").read_text().split())) - but:
            for pid in left:
                os.kill(pid, signal.SIGKILL)
                os.waitpid(pid, 0)


def _die_with(parent: int) -> None:
    """Makes the operating system kill this process when its parent process `parent` ends."""
    _prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:  # the parent ended before the signal was set
        os._exit(1)


def _prctl(option: int, value: int) -> None:
    if sys.platform == "linux":
        import ctypes

        ctypes.CDLL(None).prctl(option, value)
