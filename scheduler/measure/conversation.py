"""The timeout of each step of a pool process, and its main loop: it answers requests until its channel closes."""

from __future__ import annotations

import collections
import dataclasses
import functools
import math
import os
import resource
import signal
import socket
import statistics
import sys
import traceback
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any, Protocol

import jax

from scheduler.core import fingerprints
from scheduler.core.errors import CandidateFailed
from scheduler.core.frames import calls
from scheduler.core.hardware import Hardware
from scheduler.core.records import Failure, Measurement
from scheduler.measure.build import describe_exception, first_line
from scheduler.measure.protocol import (
    Answer,
    Init,
    InitFailed,
    Message,
    Programs,
    Raised,
    Ready,
    Reply,
    Request,
    Step,
    StepStarted,
    decode,
    encode,
)
from scheduler.measure.runner import RunnerOptions, Task
from scheduler.measure.subprocess_pipe import Limit
from scheduler.measure.worker_process import working_directory
from scheduler.model.cost import CostModel
from search_spaces import load
from search_spaces.checking import shared_in
from search_spaces.configuration import measurements
from search_spaces.operation import Operation
from search_spaces.problem import Problem
from search_spaces.space import DeclarationError
from search_spaces.target import Target

# In seconds. The other values bound the timeouts that adapt to measured durations.
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


class Timeouts:
    """The timeout of each step: as set in `options`, else adapted to this pool's earlier candidates.

    Args:
      options: the timeouts; None adapts.
      hardware: the chip, used for the lower bound of a problem.
    """

    def __init__(self, options: RunnerOptions, hardware: Hardware) -> None:
        self._options, self._hardware = options, hardware
        self._compile_s: collections.deque[float] = collections.deque(maxlen=100)
        self._best_s: dict[tuple[Operation[Any], Problem], float] = {}

    def for_task(self, task: Task) -> Limit:
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

    def record_run(self, task: Task, measured: Measurement) -> None:
        key = task.operation, task.problem
        self._best_s[key] = min(measured.median_s, self._best_s.get(key, math.inf))

    def record_compile(self, step: str, seconds: float) -> None:
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


def converse(begin: Begin, channel: socket.socket) -> None:
    """Answers the requests to this process until the channel closes."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # a KeyboardInterrupt then comes from a candidate
    requests = channel.makefile("r", encoding="utf-8")
    own = os.getpid()

    def send(message: Message) -> None:
        if os.getpid() != own:
            os._exit(0)  # a candidate forked, and this is the forked process
        channel.sendall(encode(message))

    first = requests.readline()
    if not first:
        return
    init = decode(first)
    assert isinstance(init, Init)
    try:
        service = begin(init, lambda step: send(StepStarted(step)))
    except Exception as error:
        send(InitFailed(first_line(error)))
        return
    send(Ready(service.target))
    with shared_in(init.programs), measurements():
        _serve(service, requests, send)


def mismatch_reason(request: Request, target: Target) -> str:
    """Explains why this process loads a different candidate than the one in the request; "" if it does not."""
    if not request.fingerprint:
        return ""
    operation = load(request.operation)
    problem = operation.problem.from_canonical(request.problem)
    own = fingerprints.of_candidate(operation, problem, request.backend, request.schedule, target)
    if own == request.fingerprint:
        return ""
    return (
        f"a worker process loads another version of {request.operation} than the process that traced it first: the "
        "file was edited meanwhile, or a value that it reads was changed"
    )


def reply_of(answer: Callable[[], Answer], raising: bool) -> Reply:
    """Returns the answer, or the message for the exception that it raised.

    An exception outside of the candidate's code and of its declaration has one of three causes: the candidate damaged
    its process, the host lacks something, or this package has a defect. The request is retried in a new process, and
    then fails alone.
    """
    try:
        return answer()
    except CandidateFailed as failed:  # the task has `raising` set
        return Raised(str(failed), "".join(traceback.format_exception(failed.__cause__)))
    except BaseException as error:
        detail, innermost = describe_exception(error), next(calls(error), None)
        declared = isinstance(error, DeclarationError) or (innermost is not None and innermost.owner == "user")
        if not declared:
            last = traceback.extract_tb(error.__traceback__)[-1]
            detail += f", outside of any candidate ({Path(last.filename).name}:{last.lineno})"
        if raising:
            return Raised(detail, traceback.format_exc())
        return Answer(Failure("worker", detail), retryable=not declared, fatal="" if declared else detail)


# Settings that change what JAX traces. JAX itself changes others, such as those of its cache.
_SETTINGS = ("jax_enable_x64", "jax_disable_jit", "jax_default_matmul_precision", "jax_numpy_dtype_promotion")


def _shared_state() -> dict[str, Any]:
    """Returns what a candidate may change in its process to the harm of later ones, by name."""
    return {
        "the working directory": working_directory(),
        "the limit of open files": resource.getrlimit(resource.RLIMIT_NOFILE),
        "a timer": any(signal.getitimer(signal.ITIMER_REAL)),
        "the imported modules": [sys.modules.get(name) for name in ("jax", "scheduler", "search_spaces")],
        "the output streams": [stream is None or stream.closed for stream in (sys.stdout, sys.stderr)],
        **{name: jax.config.values[name] for name in _SETTINGS},
    }


def _serve(service: Service, requests: Iterable[str], send: Callable[[Message], None]) -> None:
    def answer(request: Request) -> Answer:
        operation = load(request.operation)
        problem = operation.problem.from_canonical(request.problem, request.reference)
        before = _shared_state()
        if request.do == "trace":
            send(StepStarted("lower"))
            kernel = operation.kernel(request.backend)
            traced = fingerprints.of_schedule(kernel, problem, request.schedule, service.target)
            found = Answer(None, programs=Programs(fingerprint=traced))
        else:
            found = service.answer(request)
        after = _shared_state()
        changed = [name for name, value in before.items() if after[name] != value]
        return dataclasses.replace(found, fatal=f"it changed {', '.join(changed)}") if changed else found

    for line in requests:
        request = decode(line)
        assert isinstance(request, Request)
        reply = reply_of(functools.partial(answer, request), request.raising)
        send(reply)
        if isinstance(reply, Answer) and reply.fatal:
            os._exit(0)  # skips destructors: their behaviour with a broken CUDA context is undefined
