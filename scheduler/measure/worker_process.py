"""A process of a pool, and its successors: a process that is lost is replaced."""

from __future__ import annotations

import contextlib
import dataclasses
import os
import sys
import threading
import time
from collections.abc import Sequence
from typing import Any, Protocol

import platformdirs

from scheduler.core.errors import CandidateFailed, RemoteTrace, WorkerError
from scheduler.core.hardware import GIB
from scheduler.core.records import Failure, Outcome
from scheduler.measure import absent_gpu, protocol
from scheduler.measure.gpu import Gpu
from scheduler.measure.limits import START_LIMIT_S
from scheduler.measure.runner import Task
from scheduler.measure.subprocess_pipe import Child, Children, Ended, Limit, Overrun
from search_spaces import locate
from search_spaces.kernel import Target
from search_spaces.operation import Operation

# One process holds this much of a GPU's memory before any operand: its CUDA context and its libraries.
CONTEXT_BYTES = GIB // 2
RESTART_PAUSES_S = (0.5, 5.0)
# Of programs that JAX keeps for the next search; it removes those that were not used for longest.
KEPT_BYTES = GIB
# Of XLA's allocator: the share of a device's memory that a process may take, by its name and by an older one. A worker
# gets its own, whatever the user's programs are to take.
_MEMORY_VARIABLES = ("XLA_CLIENT_MEM_FRACTION", "XLA_PYTHON_CLIENT_MEM_FRACTION")
_ENDED = "its process had ended"


@dataclasses.dataclass(frozen=True)
class WorkerResult:
    """What came of a request.

    Attributes:
      outcome: None where a candidate was confirmed.
      retryable: something else than the candidate may be at fault.
      lost: why the worker has no process any more; "" where it has one.
      programs, refused: as in `protocol.Answer`.
    """

    outcome: Outcome | None
    retryable: bool = False
    lost: str = ""
    programs: protocol.Programs | None = None
    refused: str = ""


class Main(Protocol):
    """What a process is started as.

    Attributes:
      module: the main that the process runs.
      hello: the first message to the process.
    """

    module: str
    hello: protocol.Hello

    def environment(self) -> dict[str, str]:
        """The environment variables of the process."""


class OnDevice:
    """A process that runs candidates on a GPU, or on the CPU where there is no GPU.

    Args:
      programs: a directory that it shares with others.
      keep_programs: as in `RunnerOptions`.
    """

    module = "scheduler.measure.worker"

    def __init__(self, gpu: Gpu, programs: str, keep_programs: bool = True) -> None:
        self._gpu, self._keep_programs = gpu, keep_programs
        self.hello = protocol.Hello(gpu.uuid, "cuda" if gpu.index else "cpu", programs)

    def environment(self) -> dict[str, str]:
        own = inherited()
        if self._gpu.total_bytes:
            share = (self._gpu.free_bytes - CONTEXT_BYTES) / self._gpu.total_bytes
            own[_MEMORY_VARIABLES[0]] = f"{share:.4f}"
        kept = _kept_programs() if self._gpu.index else {}
        return (
            kept
            | own
            | ({} if self._keep_programs else {"JAX_ENABLE_COMPILATION_CACHE": "0"})
            | self._gpu.variables
            | {
                "JAX_PLATFORMS": "cuda,cpu" if self._gpu.index else "cpu",
                "XLA_PYTHON_CLIENT_PREALLOCATE": "false",
            }
        )


class Compiler:
    """A process that compiles for a chip, and sees none.

    Args:
      programs: a directory that it shares with the process that loads what it compiles.

    Attributes:
      hello: there is none before `aim`.
    """

    module = "scheduler.measure.compile_process"
    hello: protocol.Hello

    def __init__(self, programs: str) -> None:
        self._programs = programs

    def aim(self, target: Target) -> None:
        """Says for which chip."""
        self.hello = protocol.Hello("", target.platform, self._programs, target=target)

    def environment(self) -> dict[str, str]:
        # One core each: compilations of several candidates run side by side.
        return inherited() | absent_gpu.ENVIRONMENT | {"OMP_NUM_THREADS": "1"}


def _kept_programs() -> dict[str, str]:
    """Variables by which JAX keeps what it compiles, in this user's cache.

    The next search of a problem loads the programs of libraries, which XLA tuned on the device. Variables of the user
    win.
    """
    try:
        place = platformdirs.user_cache_path("tile-scheduler", False) / "programs"
    except RuntimeError:  # a user without a home
        return {}
    return {
        "JAX_COMPILATION_CACHE_DIR": str(place),
        "JAX_COMPILATION_CACHE_MAX_SIZE": str(KEPT_BYTES),
        "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0",
        "JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES": "-1",
        "JAX_PERSISTENT_CACHE_ENABLE_XLA_CACHES": "none",
    }


def inherited() -> dict[str, str]:
    """This process's own variables but those of a device's memory; modules are found where this process finds them."""
    own = {name: value for name, value in os.environ.items() if name not in _MEMORY_VARIABLES}
    return own | {"PYTHONPATH": os.pathsep.join(path or _here() for path in sys.path)}


class WorkerProcess:
    """Requests block, and are for one thread at a time; `abandon` is for any."""

    def __init__(self, main: Main, children: Children) -> None:
        self._main, self._children = main, children
        self._lock = threading.Lock()
        self._child: Child | None = None
        self._abandoned = self._spawned = False
        self.target: Target | None = None  # the chip that its process found

    @property
    def pid(self) -> int | None:
        """Of the process now, or None where there is none."""
        return None if self._child is None else self._child.pid

    def spawn(self) -> None:
        """Starts a process that imports what it needs, before the first message to it is known; `begin` follows.

        Where none starts, `begin` says why.
        """
        with contextlib.suppress(EOFError):
            self._spawn()

    def begin(self) -> WorkerError | None:
        """Starts a process, in place of any but one that `spawn` started; or why none starts.

        Raises:
          WorkerError: the pool was closed.
        """
        try:
            self._start()
        except WorkerError as refused:
            self._end()
            if self._abandoned:
                raise
            return refused
        return None

    def stop(self) -> None:
        """Ends the process, where there is one, and frees what it holds of the device."""
        with self._lock:
            self._end()

    def abandon(self) -> None:
        """Ends the process from any thread; requests under way raise a WorkerError, and none is replaced."""
        self._abandoned = True
        if (child := self._child) is not None:  # another thread may be ending it
            child.kill()

    def request(self, request: protocol.Request, limit_s: Limit, ended: Ended) -> WorkerResult:
        """What came of `request`: a failure where the process was lost over it twice, or may be blamed for it.

        Raises:
          WorkerError: the worker met a defect of the program, not of the candidate; or the pool was closed.
          CandidateFailed: of a request that is `raising`, from the worker's traceback.
        """
        with self._lock:
            result = self._attempt(request, limit_s, ended)
            return self._attempt(request, limit_s, ended) if result.retryable and not result.lost else result

    def _attempt(self, request: protocol.Request, limit_s: Limit, ended: Ended) -> WorkerResult:
        if self._child is None:
            if self._abandoned:
                raise WorkerError("the worker processes were stopped")
            return WorkerResult(Failure("worker", _ENDED), retryable=True, lost=_ENDED)
        try:
            reply = self._child.ask(request, "prepare", limit_s, ended)
        except Overrun as overrun:
            return WorkerResult(Failure("timeout", str(overrun)), lost=self._replace())
        except EOFError as death:  # it may have been killed from outside
            return WorkerResult(Failure("worker", str(death)), retryable=True, lost=self._replace())
        result = result_of(reply)
        if isinstance(reply, protocol.Answer) and reply.fatal:
            return dataclasses.replace(result, lost=self._replace())
        return result

    def _replace(self) -> str:
        """Starts a process in place of the one that was lost; why none starts, or ""."""
        # What a killed process held of the device may come free only after a while.
        for pause_s in (*RESTART_PAUSES_S, 0.0):
            if (refused := self.begin()) is None:
                return ""
            time.sleep(pause_s)
        return str(refused)

    def _start(self) -> None:
        """Raises a WorkerError with what the process said that does not start."""
        try:
            if not self._spawned:
                self._spawn()
            self._spawned = False
            if self._abandoned or self._child is None:
                raise WorkerError("the worker processes were stopped")
            reply = self._child.ask(self._main.hello, "start", lambda _: START_LIMIT_S, lambda *_: None)
        except (EOFError, TimeoutError) as error:
            raise WorkerError(f"a worker process did not start: {error}") from error
        if not isinstance(reply, protocol.Ready):
            reason = reply.reason if isinstance(reply, protocol.Unable) else reply
            raise WorkerError(f"a worker process found no device: {reason}")
        self.target = reply.target

    def _spawn(self) -> None:
        self._end()
        if not self._abandoned:
            self._child = self._children.start(["-P", "-m", self._main.module], self._main.environment())
            self._spawned = True

    def _end(self) -> None:
        self._spawned = False
        if self._child is not None:
            self._child.close()
            self._child = None


def _here() -> str:
    try:
        return os.getcwd()
    except OSError:  # it is gone
        return ""


def result_of(reply: protocol.Message) -> WorkerResult:
    """The result of a request, of its answer.

    Raises:
      WorkerError: the process met a defect of the program, or this is no answer.
      CandidateFailed: as `WorkerProcess.request`.
    """
    match reply:
        case protocol.Raised(text, trace):
            raise CandidateFailed(text) from RemoteTrace(trace)
        case protocol.Answer(outcome, retryable, _, programs, refused):
            return WorkerResult(outcome, retryable, programs=programs, refused=refused)
        case protocol.Defect(trace):
            raise WorkerError(f"a worker failed outside of any candidate:\n{trace}")
    raise WorkerError(f"a worker answered a request with {reply}")


def stop_all(workers: Sequence[WorkerProcess]) -> None:
    """Ends them: all are abandoned before one is waited for."""
    for worker in workers:
        worker.abandon()
    for worker in workers:
        worker.stop()


def requested(
    task: Task,
    do: protocol.Do,
    beside: tuple[protocol.Held, ...] = (),
    programs: protocol.Programs | None = None,
) -> protocol.Request:
    """The message that asks a process to do this with the candidate of a task."""
    return protocol.Request(
        do=do,
        operation=name_of(task.operation),
        problem=task.problem.canonical(),
        backend=task.backend,
        schedule=dict(task.schedule),
        repetitions=task.repetitions,
        l2=task.l2,
        incumbent_s=task.incumbent_s,
        raising=task.raising,
        beside=beside,
        fingerprint=task.fingerprint,
        programs=programs,
    )


def name_of(operation: Operation[Any]) -> str:
    """The name under which a worker process loads it.

    Raises:
      WorkerError: none can.
    """
    if (name := locate(operation)) is None:
        raise WorkerError(out_of_reach(operation))
    return name


def out_of_reach(operation: Operation[Any]) -> str:
    """Why no worker process can load `operation`, and what to do."""
    return (
        f"no worker process can load {operation.name}, which no module or script holds under a name (it was defined in "
        "a notebook, in a console or within a function): define it at the top level of a file"
    )


def cores() -> int:
    """CPU cores that this process may use."""
    if hasattr(os, "sched_getaffinity"):  # Linux
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1
