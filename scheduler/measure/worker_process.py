"""Runs one process of a pool, and replaces the process if it is lost."""

from __future__ import annotations

import contextlib
import dataclasses
import os
import sys
import threading
import time
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Protocol

import platformdirs

from scheduler.core.chip_table import GIB
from scheduler.core.errors import CandidateFailed, RemoteTrace, WorkerError
from scheduler.core.records import Failure, Outcome
from scheduler.measure import protocol
from scheduler.measure.fork_server import START_LIMIT_S
from scheduler.measure.gpu import Gpu
from scheduler.measure.protocol import Finding
from scheduler.measure.subprocess_pipe import Child, Children, Ended, Limit, Overrun
from search_spaces import locate
from search_spaces.target import Target

if TYPE_CHECKING:
    from scheduler.measure.runner import Task
    from search_spaces.operation import Operation

# The GPU memory that one process takes before any operand: its CUDA context and its libraries.
CONTEXT_BYTES = GIB // 2
RESTART_PAUSES_S = (0.5, 5.0)
# The size limit of JAX's persistent compilation cache. JAX removes the least recently used programs.
KEPT_BYTES = GIB
# The environment variable for the share of device memory that XLA's allocator may take, by its current and its older
# name. A worker sets its own share and ignores the user's.
_MEMORY_VARIABLES = ("XLA_CLIENT_MEM_FRACTION", "XLA_PYTHON_CLIENT_MEM_FRACTION")
# The environment of a process that compiles for a GPU without access to one. Without the last variable, JAX's CUDA
# plugin refuses to start if it finds no driver.
WITHOUT_GPU = {"CUDA_VISIBLE_DEVICES": "", "JAX_PLATFORMS": "cpu", "JAX_SKIP_CUDA_CONSTRAINTS_CHECK": "1"}
_ENDED = "its process had ended"


@dataclasses.dataclass(frozen=True)
class WorkerResult:
    """The result of a request.

    Attributes:
      outcome: None if a candidate is correct, or was compiled.
      retryable: the cause may not be the candidate.
      lost: why the worker has no process any more; "" if it has one.
      programs, refused: as in `protocol.Answer`.
    """

    outcome: Outcome | Finding
    retryable: bool = False
    lost: str = ""
    programs: protocol.Programs | None = None
    refused: str = ""


class Main(Protocol):
    """The program that a process runs.

    Attributes:
      module: the main module of the process.
      forked: whether the module forks its processes (`fork_server.serve`).
      init: the first message to the process.
    """

    module: str
    forked: bool
    init: protocol.Init

    def environment(self) -> dict[str, str]:
        """Returns the environment variables of the process."""


class OnDevice:
    """The main program of a process that runs candidates on a GPU, or on the CPU if `gpu` is `Gpu.none()`.

    Args:
      programs: the directory of compiled programs, shared with other processes.
      keep_programs: as in `RunnerOptions`.
    """

    module = "scheduler.measure.worker"
    forked = False

    def __init__(self, gpu: Gpu, programs: str, keep_programs: bool = True) -> None:
        self._gpu, self._keep_programs = gpu, keep_programs
        self.init = protocol.Init(gpu.uuid, "cuda" if gpu.index else "cpu", programs)

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
    """The main program of a process that compiles for a chip without access to a device.

    Args:
      programs: the directory of compiled programs, shared with the process that loads them.

    Attributes:
      init: not set before `set_target`.
    """

    module = "scheduler.measure.compile_process"
    forked = True
    init: protocol.Init

    def __init__(self, programs: str) -> None:
        self._programs = programs

    def set_target(self, target: Target) -> None:
        """Sets the chip to compile for."""
        self.init = protocol.Init("", target.platform, self._programs, target=target)

    def environment(self) -> dict[str, str]:
        # One core per process, because the compilations of several candidates run in parallel.
        return inherited() | WITHOUT_GPU | {"OMP_NUM_THREADS": "1"}


def _kept_programs() -> dict[str, str]:
    """Returns variables that make JAX store its compiled programs in this user's cache directory.

    The next search of a problem loads the library programs that XLA autotuned on the device. Variables that the user
    has set take precedence.
    """
    try:
        place = platformdirs.user_cache_path("tile-scheduler", False) / "programs"
    except RuntimeError:  # the user has no home directory
        return {}
    return {
        "JAX_COMPILATION_CACHE_DIR": str(place),
        "JAX_COMPILATION_CACHE_MAX_SIZE": str(KEPT_BYTES),
        "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0",
        "JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES": "-1",
        "JAX_PERSISTENT_CACHE_ENABLE_XLA_CACHES": "none",
    }


def inherited() -> dict[str, str]:
    """Returns this process's environment without the variables for device memory.

    `PYTHONPATH` is set to `sys.path`, so that the child finds the same modules.
    """
    own = {name: value for name, value in os.environ.items() if name not in _MEMORY_VARIABLES}
    return own | {"PYTHONPATH": os.pathsep.join(path or working_directory() for path in sys.path)}


class WorkerProcess:
    """A worker process that is restarted when it is lost.

    Requests block, and only one thread at a time may send them. Any thread may call `abandon`.
    """

    def __init__(self, main: Main, children: Children) -> None:
        self._main, self._children = main, children
        self._lock = threading.Lock()
        self._child: Child | None = None
        self._abandoned = self._spawned = False
        self.target: Target | None = None  # the chip that the process found

    @property
    def pid(self) -> int | None:
        """The id of the current process, or None if there is none."""
        return None if self._child is None else self._child.pid

    def spawn(self) -> None:
        """Starts a process that imports its modules before the first message to it is known; call `begin` afterwards.

        If the process does not start, `begin` returns the reason.
        """
        with contextlib.suppress(EOFError):
            self._spawn()

    def begin(self) -> WorkerError | None:
        """Starts a process, or uses the one that `spawn` started; returns the error if no process starts.

        Any other running process is stopped first.

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
        """Stops the process if there is one, and frees its device memory."""
        with self._lock:
            self._end()

    def abandon(self) -> None:
        """Kills the process from any thread; requests in progress raise a WorkerError, and no process is restarted."""
        self._abandoned = True
        if (child := self._child) is not None:  # another thread may be stopping it
            child.kill()

    def request(self, request: protocol.Request, limit_s: Limit, ended: Ended) -> WorkerResult:
        """Sends `request` and returns its result; a retryable result is retried once.

        The result is a failure if the process was lost in both attempts, or if the candidate is the probable cause.

        Raises:
          WorkerError: the pool was closed.
          CandidateFailed: the candidate raised an exception and the request has `raising` set; chained to the worker's
            traceback.
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
            return WorkerResult(Failure("timeout", str(overrun)), overrun.contended, lost=self._replace())
        except EOFError as death:  # it may have been killed by another program
            return WorkerResult(Failure("worker", str(death)), retryable=True, lost=self._replace())
        result = result_of(reply)
        if isinstance(reply, protocol.Answer) and reply.fatal:
            return dataclasses.replace(result, lost=self._replace())
        return result

    def _replace(self) -> str:
        """Starts a process in place of the lost one; returns the reason if none starts, else ""."""
        # The device memory of a killed process may be freed only after a delay.
        for pause_s in (*RESTART_PAUSES_S, 0.0):
            if (refused := self.begin()) is None:
                return ""
            time.sleep(pause_s)
        return str(refused)

    def _start(self) -> None:
        """Starts the process; raises a WorkerError with its error message if it does not start."""
        try:
            if not self._spawned:
                self._spawn()
            self._spawned = False
            if self._abandoned or self._child is None:
                raise WorkerError("the worker processes were stopped")
            reply = self._child.ask(self._main.init, "start", lambda _: START_LIMIT_S, lambda *_: None)
        except (EOFError, TimeoutError) as error:
            raise WorkerError(f"a worker process did not start: {error}") from error
        if not isinstance(reply, protocol.Ready):
            reason = reply.reason if isinstance(reply, protocol.InitFailed) else reply
            raise WorkerError(f"a worker process found no device: {reason}")
        self.target = reply.target

    def _spawn(self) -> None:
        self._end()
        if not self._abandoned:
            self._child = self._children.start(
                ["-P", "-m", self._main.module], self._main.environment(), forked=self._main.forked
            )
            self._spawned = True

    def _end(self) -> None:
        self._spawned = False
        if self._child is not None:
            self._child.close()
            self._child = None


def working_directory() -> str:
    """Returns the working directory; "" if it was removed."""
    try:
        return os.getcwd()
    except OSError:
        return ""


def result_of(reply: protocol.Message) -> WorkerResult:
    """Returns the result of a request from the reply to it.

    Raises:
      WorkerError: the message is not a reply.
      CandidateFailed: as in `WorkerProcess.request`.
    """
    match reply:
        case protocol.Raised(text, trace):
            raise CandidateFailed(text) from RemoteTrace(trace)
        case protocol.Answer(outcome, retryable, _, programs, refused):
            return WorkerResult(outcome, retryable, programs=programs, refused=refused)
    raise WorkerError(f"a worker replied to a request with {reply}")


def stop_all(workers: Sequence[WorkerProcess]) -> None:
    """Stops all workers: abandons every worker before waiting for the first."""
    for worker in workers:
        worker.abandon()
    for worker in workers:
        worker.stop()


def request_for(
    task: Task,
    do: protocol.Do,
    others: tuple[protocol.ReservedProblem, ...] = (),
    programs: protocol.Programs | None = None,
) -> protocol.Request:
    """Builds the request to do `do` with the candidate of a task."""
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
        others=others,
        fingerprint=task.fingerprint,
        reference=task.problem.reference_text(),
        programs=programs,
    )


def name_of(operation: Operation[Any]) -> str:
    """Returns the name under which a worker process loads `operation`.

    Raises:
      WorkerError: no process can load it.
    """
    if (name := locate(operation)) is None:
        raise WorkerError(unloadable_reason(operation))
    return name


def unloadable_reason(operation: Operation[Any]) -> str:
    """Explains why no worker process can load `operation`, and how to fix it."""
    return (
        f"no worker process can load {operation.name}, which is no global of a module or script (it was defined in "
        "a notebook, in a console or within a function): define it at the top level of a file"
    )


def cores() -> int:
    """Returns the number of CPU cores that this process may use."""
    if hasattr(os, "sched_getaffinity"):  # Linux
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1
