"""A child process that answers messages one by one; it may hang or die, and never outlives its parent.

Messages use a separate socket pair, and the process inherits its end as a file descriptor. Other output to standard
output (sitecustomize, an import, a C library, atexit) is stored with standard error, and is quoted if the process dies.
"""

from __future__ import annotations

import collections
import contextlib
import functools
import math
import os
import select
import signal
import socket
import statistics
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Protocol

from scheduler.core import fingerprints
from scheduler.core.errors import CandidateFailed
from scheduler.core.hardware import Hardware
from scheduler.core.interrupts import WAKE_S
from scheduler.core.records import Measurement
from scheduler.measure.build import Step, first_line
from scheduler.measure.protocol import (
    Answer,
    Defect,
    Init,
    InitFailed,
    Message,
    Raised,
    Ready,
    Reply,
    Request,
    StepStarted,
    decode,
    encode,
)
from scheduler.measure.runner import RunnerOptions, Task
from scheduler.model.cost import CostModel
from search_spaces import load
from search_spaces.checking import shared_in
from search_spaces.configuration import measurements
from search_spaces.kernel import Target
from search_spaces.operation import Operation
from search_spaces.problem import Problem

PR_SET_PDEATHSIG = 1  # <linux/prctl.h>
LAST_WORDS_BYTES = 8192
LONGEST_MESSAGE_BYTES = 2**26
KILLED_WITHIN_S = 30.0  # a driver may keep a killed process that hangs on its device alive for seconds

Limit = Callable[[str], float | None]
Ended = Callable[[str, float], None]


class Overrun(TimeoutError):
    """A step exceeded its timeout.

    Attributes:
      step: the name of the step.
    """

    def __init__(self, step: str, limit_s: float) -> None:
        super().__init__(f"{step} did not end within {limit_s:.3g} s")
        self.step = step


class Children:
    """Starts processes, which stop when this object is shut down, or with this process, however it ends."""

    def __init__(self) -> None:
        # Linux sends the parent-death signal when the forking thread ends (prctl(2)), so a permanent thread forks.
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="scheduler-children")

    def start(self, arguments: Sequence[str], environment: Mapping[str, str]) -> Child:
        """Runs Python with `arguments`, followed by the file descriptor of the channel and the id of this process.

        See `channel_to_parent`.

        Raises:
          EOFError: the system cannot start a process; the message gives the reason.
        """
        try:
            return self._thread.submit(Child, [sys.executable, *arguments], environment).result()
        except (OSError, RuntimeError) as error:
            raise EOFError(f"no process can be started: {error}") from error

    def shut_down(self) -> None:
        self._thread.shutdown()


class Child:
    """One process, its channel and its output. Only one thread at a time may use it; any thread may call `kill`.

    Args:
      command: two arguments are appended: the file descriptor of the child's end of the channel, and the id of this
        process.
    """

    def __init__(self, command: Sequence[str], environment: Mapping[str, str]) -> None:
        self._said = tempfile.TemporaryFile()  # noqa: SIM115 (lives as long as the process)
        self._channel, end = socket.socketpair()
        try:
            # The child is a session leader: Ctrl-C in a terminal reaches only the parent, and the child's whole group
            # can be killed.
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
        """Sends `message` and returns the reply; each `Announcement` before the reply begins the next step.

        Args:
          first: the step that begins with the message.
          limit_s: returns the timeout of a step in seconds; None sets no limit.
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
            except ValueError as error:  # a candidate wrote to the channel
                raise EOFError(f"the process said in {step} {error}") from None
            if not isinstance(reply, StepStarted):
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
        """Reads the next line; returns b"" if the process is gone, None after the timeout."""
        file = self._channel.fileno()
        ready = select.poll()
        ready.register(file, select.POLLIN)
        until = None if limit_s is None else time.monotonic() + limit_s
        while b"\n" not in self._unread:
            left_s = math.inf if until is None else until - time.monotonic()
            if not ready.poll(max(0.0, min(left_s, WAKE_S)) * 1000):
                if self._process.poll() is not None and not ready.poll(0):  # a grandchild may hold the channel open
                    return b""
                if left_s <= WAKE_S:
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

    def _last_words(self) -> str:
        """Returns the exit status and the last line of output: the exception of a traceback, or a failed check."""
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
    """Returns the channel of a process that a `Child` started, and makes this process die with its parent.

    Children of this process do not inherit the channel.
    """
    end, parent = map(int, sys.argv[-2:])
    _die_with(parent)
    os.set_inheritable(end, False)
    return socket.socket(fileno=end)


def _die_with(parent: int) -> None:
    """Makes the operating system kill this process when its parent process `parent` ends."""
    if sys.platform == "linux":
        import ctypes

        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:  # the parent ended before the signal was set
        os._exit(1)


# ------------------------------------------------------------------------------
# The timeout of each step of a process.

# In seconds. The other values bound the timeouts that adapt to measured durations.
START_LIMIT_S = 180.0
COMPILE_LIMITS_S = (30.0, 120.0)
# XLA autotunes while it compiles, with about 500 runs of a problem. No run is faster than the lower bound, and most are
# many times slower if tensor cores do not accept the layout of the operands. `AUTOTUNED_LIMIT_S` caps the total.
AUTOTUNED_RUNS, AUTOTUNED_LIMIT_S = 10_000, 600.0
# XLA's allocator waits this long for free memory before it reports an error (BFCAllocator::AllocateRaw in
# xla/tsl/framework/bfc_allocator.cc, kMaxMillisToWait). A step that may allocate needs a longer timeout, or it would be
# taken for one that hangs.
ALLOCATOR_RETRY_S = 10.0
RUN_LIMIT_S = 10.0
FIRST_RUN_LIMIT_S = 60.0  # while no candidate has been timed


class Limits:
    """The timeout of each step: as set in `options`, else adapted to this pool's earlier candidates.

    Args:
      options: the timeouts; None adapts.
      hardware: the chip, used for the lower bound of a problem.
    """

    def __init__(self, options: RunnerOptions, hardware: Hardware) -> None:
        self._options, self._hardware = options, hardware
        self._compile_s: collections.deque[float] = collections.deque(maxlen=100)
        self._best_s: dict[tuple[Operation[Any], Problem], float] = {}

    def of(self, task: Task) -> Limit:
        """Returns a function from a step of this task to its timeout in seconds; None means no limit."""

        def limit_s(step: str) -> float | None:
            match step:
                case "wait":  # another holder's own timeout ends a hang
                    return None
                case "run":
                    return self._run_s(task)
                case "compile" if task.operation.kernel(task.backend).library:
                    return self._library_s(task)
                case _:
                    return self._build_s()

        return limit_s

    def saw(self, task: Task, measured: Measurement) -> None:
        what = task.operation, task.problem
        self._best_s[what] = min(measured.median_s, self._best_s.get(what, math.inf))

    def ended(self, step: str, seconds: float) -> None:
        if step == "compile":
            self._compile_s.append(seconds)

    def _build_s(self) -> float:
        if self._options.compile_timeout_s is not None:
            return self._options.compile_timeout_s
        shortest, longest = COMPILE_LIMITS_S
        seen = list(self._compile_s)
        return min(max(4 * statistics.median(seen), shortest), longest) if seen else longest

    def _library_s(self, task: Task) -> float:
        if self._options.compile_timeout_s is not None:
            return self._options.compile_timeout_s
        autotuned_s = AUTOTUNED_RUNS * CostModel(self._hardware).lower_bound(task.problem)
        return COMPILE_LIMITS_S[1] + min(autotuned_s, AUTOTUNED_LIMIT_S)

    def _run_s(self, task: Task) -> float:
        if self._options.run_timeout_s is not None:
            return self._options.run_timeout_s
        best_s = self._best_s.get((task.operation, task.problem))
        if best_s is None:
            return FIRST_RUN_LIMIT_S
        return ALLOCATOR_RETRY_S + max(RUN_LIMIT_S, 20 * best_s * task.repetitions)


# ------------------------------------------------------------------------------
# The main loop of a pool process: it answers requests one by one until its channel closes.


class Service(Protocol):
    """Answers the requests to a process.

    Attributes:
      target: the chip that the answers refer to.
    """

    target: Target

    def answer(self, request: Request) -> Answer: ...


# Creates the service of a process from the first message. An exception means that the process cannot be used.
Begin = Callable[[Init, Callable[[Step], None]], Service]


def converse(begin: Begin) -> None:
    """Answers the requests to this process until the channel closes."""
    channel = channel_to_parent()
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # a KeyboardInterrupt then comes from a candidate
    requests = channel.makefile("r", encoding="utf-8")
    own = os.getpid()

    def say(message: Message) -> None:
        if os.getpid() != own:
            os._exit(0)  # a candidate forked, and this is the forked process
        channel.sendall(encode(message))

    first = requests.readline()
    if not first:
        return
    hello = decode(first)
    assert isinstance(hello, Init)
    try:
        service = begin(hello, lambda step: say(StepStarted(step)))
    except Exception as error:
        say(InitFailed(first_line(error)))
        return
    say(Ready(service.target))
    with shared_in(hello.programs), measurements():
        _serve(service, requests, say)


def loads_otherwise(request: Request, target: Target) -> str:
    """Explains why this process loads a different candidate than the requesting process; "" if it does not."""
    if not request.fingerprint:
        return ""
    operation = load(request.operation)
    problem = operation.problem.from_canonical(request.problem)
    own = fingerprints.of_candidate(operation, problem, request.backend, request.schedule, target)
    if own == request.fingerprint:
        return ""
    return (
        f"a worker process that loads {request.operation} computes something else than the process that tunes it: "
        "something was changed after the import there, or the file was edited meanwhile"
    )


def replied(answer: Callable[[], Answer]) -> Reply:
    """Returns the answer, or the message for the exception that it raised."""
    try:
        return answer()
    except CandidateFailed as failed:  # the task has `raising` set
        return Raised(str(failed), "".join(traceback.format_exception(failed.__cause__)))
    except BaseException:  # a defect: the parent raises it, with the whole traceback
        return Defect(traceback.format_exc())


def _serve(service: Service, requests: Iterable[str], say: Callable[[Message], None]) -> None:
    def answer(line: str) -> Answer:
        request = decode(line)
        assert isinstance(request, Request)
        return service.answer(request)

    for line in requests:
        reply = replied(functools.partial(answer, line))
        say(reply)
        if isinstance(reply, Answer) and reply.fatal:
            os._exit(0)  # skips destructors: their behaviour with a broken CUDA context is undefined
