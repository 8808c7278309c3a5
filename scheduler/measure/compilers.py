"""The processes of a pool: compile processes and the measuring process.

A process can be started before this one imports JAX: nothing here imports it.
"""

from __future__ import annotations

import atexit
import contextlib
import dataclasses
import functools
import itertools
import queue
import tempfile
import threading
from pathlib import Path
from typing import TYPE_CHECKING

from scheduler.core import text
from scheduler.core.chip_table import GIB
from scheduler.core.errors import SchedulerError, WorkerError
from scheduler.core.interrupts import WAKE_S, in_thread
from scheduler.core.records import Failure
from scheduler.measure.gpu import Gpu, require_device_lock
from scheduler.measure.protocol import Do, Programs, Request
from scheduler.measure.subprocess_pipe import Children
from scheduler.measure.worker_process import (
    CONTEXT_BYTES,
    Compiler,
    OnDevice,
    WorkerProcess,
    cores,
    request_for,
    stop_all,
)
from search_spaces.target import Target

if TYPE_CHECKING:
    from scheduler.measure.conversation import Timeouts
    from scheduler.measure.runner import Task

# The priority of requests, highest first. The measuring process waits for the "prepare" programs, which check results.
# A search ends when its finalists are confirmed, and cannot choose the next candidate before the last one is traced.
URGENCY: tuple[Do, ...] = ("trace", "prepare", "confirm", "measure")
# The host memory that a compile process takes.
PROCESS_BYTES = GIB


def count_of(wanted: int | None) -> int:
    """Returns how many compile processes to start.

    `wanted` takes precedence. The default is one less than the CPU cores that this process may use (its affinity, as
    set by `taskset`, a container or a batch system), limited by the free memory of the host.
    """
    return wanted or max(1, min(cores() - 1, Gpu.none().free_bytes // PROCESS_BYTES))


class Compilers:
    """Compile processes behind one blocking call. Pools of one host may share them.

    Exceptions, output and crashes during the compilation of a candidate are confined to its process. A lost process is
    replaced, and only the candidate that it was compiling fails.

    Processes start with `start`, compile once `set_target` has been called, and stop with the last call of `close`.

    Args:
      count: the number of processes.
      users: the number of users, each of which calls `close` once.

    Attributes:
      directory: the directory of compiled programs.
    """

    def __init__(self, count: int, users: int = 1) -> None:
        self.count, self._users = count, users
        try:
            self._folder = tempfile.TemporaryDirectory(prefix="tile-scheduler-", ignore_cleanup_errors=True)
        except OSError as error:
            raise WorkerError(f"no directory for compiled programs: {error}; free space, or set TMPDIR") from error
        self.directory = Path(self._folder.name)
        self._children = Children()
        self._main = Compiler(self._folder.name)
        self._target: Target | None = None
        self._processes = [WorkerProcess(self._main, self._children) for _ in range(count)]
        self._free: list[WorkerProcess] = []
        # Requests that wait for a process, each with the queue on which it receives one.
        self._waiting: dict[tuple[int, int], queue.SimpleQueue[WorkerProcess]] = {}
        self._numbers = itertools.count()
        self._refusals: list[WorkerError] = []
        self._started = self._closed = self._warned = False
        self._lock = threading.Lock()  # guards the fields above
        self._target_set = threading.Event()

    def start(self) -> None:
        """Starts the processes once. Does not wait for them."""
        with self._lock:
            if self._started:
                return
            self._started = True
        atexit.register(self._stop)
        for process in self._processes:
            begin = functools.partial(self._begin, process)
            threading.Thread(target=begin, name="scheduler-start", daemon=True).start()

    @property
    def pids(self) -> set[int]:
        return {pid for process in self._processes if (pid := process.pid) is not None}

    def set_target(self, target: Target) -> None:
        """Sets the chip to compile for.

        Raises:
          WorkerError: another pool has set another chip.
        """
        with self._lock:
            if self._target not in (None, target):
                raise WorkerError(f"this host compiles for {self._target.kind}, not for {target.kind}")
            self._target = target
            self._main.set_target(target)
        self._target_set.set()

    def compile(self, task: Task, do: Do, timeouts: Timeouts, programs: Programs | None = None) -> Programs | Failure:
        """Compiles the programs of a candidate; returns their files, or the failure. Blocks.

        If no process can compile for a chip that it does not see, the result is empty and the measuring process
        compiles. A warning reports this once.

        Raises:
          WorkerError: the processes were stopped.
          CandidateFailed: the candidate raised an exception and `task.raising` is set.
        """
        return self._answered(request_for(task, do, programs=programs), task, timeouts)

    def prepare(self, task: Task, parts: int, timeouts: Timeouts) -> None:
        """Starts compiling the programs that check the results of a problem. Does not wait, and ignores failures."""

        def ask(part: int) -> None:
            with contextlib.suppress(SchedulerError):  # the measuring process reports the error again
                self._answered(dataclasses.replace(request_for(task, "prepare"), part=part), task, timeouts)

        for part in range(parts):
            threading.Thread(target=ask, args=(part,), name="scheduler-prepare", daemon=True).start()

    def _answered(self, request: Request, task: Task, timeouts: Timeouts) -> Programs | Failure:
        limit_s = timeouts.for_task(task)
        if (process := self._take(request.do)) is None:
            return Programs()
        try:
            result = process.request(request, limit_s, timeouts.record_compile)
        finally:
            if process.pid is not None:
                self._release(process)
            else:
                self._refuse(WorkerError("a compile process was lost and cannot be restarted"))
        if result.refused:
            self._warn(result.refused)
        if result.outcome is None:
            assert result.programs is not None
            return result.programs
        assert isinstance(result.outcome, Failure)
        return result.outcome

    def forget(self, programs: Programs) -> None:
        """Deletes the files."""
        for name in programs.names:
            (self.directory / name).unlink(missing_ok=True)

    def close(self) -> None:
        with self._lock:
            self._users -= 1
            if self._users > 0:
                return
        self._stop()

    def _stop(self) -> None:
        atexit.unregister(self._stop)
        with self._lock:
            if self._closed:
                return
            self._closed = True
        self._target_set.set()
        stop_all(self._processes)
        self._children.shut_down()
        self._folder.cleanup()

    def _take(self, do: Do) -> WorkerProcess | None:
        """Waits for a free process, by priority of the requests; returns None if no process starts."""
        request = URGENCY.index(do), next(self._numbers)
        given: queue.SimpleQueue[WorkerProcess] = queue.SimpleQueue()
        with self._lock:
            if self._free:
                return self._free.pop(0)
            self._waiting[request] = given
        while True:
            with contextlib.suppress(queue.Empty):
                return given.get(timeout=WAKE_S)
            with self._lock:
                if not self._closed and len(self._refusals) < self.count:
                    continue
                if self._waiting.pop(request, None) is None:  # a process was given meanwhile
                    continue
                if self._closed:
                    raise WorkerError("the worker processes were stopped")
                refused = str(self._refusals[0])
            self._warn(refused)
            return None

    def _warn(self, refused: str) -> None:
        """Warns once that the measuring process compiles."""
        with self._lock:
            warned, self._warned = self._warned, True
        if not warned:
            text.warn_safely(f"the measuring process compiles candidates one by one: {refused}")

    def _release(self, process: WorkerProcess) -> None:
        """Gives a process to the most urgent waiting request."""
        with self._lock:
            if self._waiting:
                self._waiting.pop(min(self._waiting)).put(process)
            else:
                self._free.append(process)

    def _begin(self, process: WorkerProcess) -> None:
        """Starts a process; runs in its own thread."""
        try:
            process.spawn()
            self._target_set.wait()
            if self._closed:
                process.stop()
                raise WorkerError("the worker processes were stopped")
            refused = process.begin()
        except WorkerError as closed:
            refused = closed
        except Exception as defect:  # also raised if the process is stopped meanwhile
            refused = WorkerError(f"a compile process did not start: {defect!r}")
        if refused is None:
            self._release(process)
        else:
            self._refuse(refused)

    def _refuse(self, refused: WorkerError) -> None:
        with self._lock:
            self._refusals.append(refused)


class Processes:
    """The processes of a pool. They start at once, so that they import their modules while this process does.

    Args:
      gpu: the device of the measuring process.
      workers, keep_programs: as in `RunnerOptions`.
      compilers: compile processes that are shared with other pools of this host, and that `close` does not stop.

    Attributes:
      share: the number of compile processes that a pool has on average.
      began: the error if the measuring process does not start, else None.

    Raises:
      WorkerError: too little GPU memory is free.
    """

    def __init__(
        self, gpu: Gpu, workers: int | None = None, keep_programs: bool = True, compilers: Compilers | None = None
    ) -> None:
        require_device_lock(gpu.uuid)
        if gpu.free_bytes < 2 * CONTEXT_BYTES:
            raise WorkerError(
                f"the GPU has {gpu.free_bytes / GIB:.1f} GiB free, measuring needs {2 * CONTEXT_BYTES / GIB:.0f}; "
                "set XLA_PYTHON_CLIENT_PREALLOCATE=false in the process that holds it, or tune before it starts"
            )
        self.gpu, self.share = gpu, count_of(workers)
        self.compilers, self._owns_compilers = compilers or Compilers(self.share), compilers is None
        self._children = Children()
        self.measuring = WorkerProcess(OnDevice(gpu, str(self.compilers.directory), keep_programs), self._children)
        self.began = in_thread(self.measuring.begin, "scheduler-start")
        atexit.register(self.close)
        self.compilers.start()

    def close(self) -> None:
        """Stops the processes. Further calls do nothing."""
        atexit.unregister(self.close)
        self.measuring.abandon()
        self.began.exception()  # ready soon, because the process has been killed
        if self._owns_compilers:
            self.compilers.close()
            self._owns_compilers = False
        self.measuring.stop()
        self._children.shut_down()
