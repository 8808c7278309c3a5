"""The queue of a job: selects the next problem for each of several executors."""

from __future__ import annotations

import dataclasses
import math
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from typing import Any, Protocol

from scheduler.core.arguments import allowed_backends
from scheduler.core.errors import DeviceLost, ExecutorLost, WorkerError
from scheduler.core.fingerprints import Tracer
from scheduler.core.hardware import Hardware
from scheduler.core.interrupts import WAKE_S
from scheduler.core.progress import Progress
from scheduler.core.records import Record
from scheduler.measure.compilers import Compilers, count_of
from scheduler.measure.pool import start_runner
from scheduler.measure.runner import Runner, RunnerOptions
from scheduler.model.constants import model_of
from scheduler.search import tuner
from scheduler.search.candidates import traced_by
from scheduler.search.task import Task
from scheduler.search.trials import TrialStore
from search_spaces.operation import Operation

# ------------------------------------------------------------------------------
# Executors of a job's problems: their interface, and local devices that implement it.


class Executor(Protocol):
    """Tunes whole problems, each on one device from its first trial to the end of its final comparison.

    Only one thread at a time calls `open` or `close`. Up to `searches` threads call `search`, always between two calls
    of `open`. `close` may be called while another thread is in `open` or `search`.

    Attributes:
      name: for messages: "GPU 2".
      hardware: the chip; set by `open`.
      searches: number of problems tuned at once; set by `open`.
    """

    name: str
    hardware: Hardware
    searches: int

    def tracer(self, task: Task) -> Tracer | None:
        """Returns what traces the schedules of a task in other processes; None if there is none here."""

    def open(self) -> None:
        """Starts the processes that run candidates, unless they are running. Blocks.

        It is also called after `search` raised `ExecutorLost`.

        Raises:
          SchedulerError: the executor cannot start; it is not used again.
        """

    def search(self, task: Task, store: TrialStore, progress: Callable[[Progress], None]) -> Record:
        """Searches one problem without reading its record in `store`; the caller holds the lease. Blocks.

        Args:
          store: has earlier trials and similar problems. On return it has all trials and the record, as far as writes
            succeeded. Only this process writes to it.
          progress: called before the first trial and after each, from any thread.

        Raises:
          ExecutorLost: the executor was lost, for reasons unrelated to the problem: retry the problem on another one.
          SchedulerError: as `tuner.tune`; the problem failed.
        """

    def close(self) -> None:
        """Closes the executor for good. Running searches raise an error soon."""


class DeviceExecutor:
    """A local device: one runner, started on first use.

    Args:
      start: starts the runner.
      name: for messages.
      owned: whether the runner is closed with the executor.
      compilers: compile processes shared by the executors of a host; each executor closes them once.
    """

    def __init__(
        self,
        start: Callable[[], Runner],
        name: str = "the device",
        *,
        owned: bool = True,
        compilers: Compilers | None = None,
    ) -> None:
        self.name = name
        self.hardware: Hardware
        self.searches = 1
        self._start, self._owned, self._compilers = start, owned, compilers
        self._lock = threading.Lock()
        self._runner: Runner | None = None
        self._closed = False

    @classmethod
    def of(cls, runner: Runner) -> DeviceExecutor:
        """Returns the executor of a runner that the caller has started and will close."""
        return cls(lambda: runner, owned=False)

    @classmethod
    def for_operation(
        cls,
        operation: Operation[Any],
        options: RunnerOptions | None = None,
        name: str = "the device",
        compilers: Compilers | None = None,
    ) -> DeviceExecutor:
        """Returns the device of `options`, run in other processes if those can load `operation`."""
        return cls(lambda: start_runner(operation, options, compilers), name, compilers=compilers)

    def open(self) -> None:
        if self._runner is not None:
            return
        runner = self._start()
        with self._lock:
            self._runner = runner
        if self._closed:  # closed while the runner was starting
            self._end(runner)
            raise WorkerError(f"{self.name} was closed")
        self.hardware, self.searches = runner.hardware, runner.searches

    def tracer(self, task: Task) -> Tracer | None:
        return None if self._runner is None else traced_by(task.operation, task.problem, self._runner)

    def search(self, task: Task, store: TrialStore, progress: Callable[[Progress], None]) -> Record:
        if (runner := self._runner) is None:  # lost, as another search has found
            raise ExecutorLost(f"{self.name} was lost")
        try:
            return tuner.search(task, runner, store, progress)
        except WorkerError as error:
            ended = self._runner is not runner and not self._closed  # by another search, after the device was lost
            if not ended and not isinstance(error, DeviceLost):
                raise
            self._end(runner)
            raise ExecutorLost(str(error)) from error

    def close(self) -> None:
        first, self._closed = not self._closed, True
        if (runner := self._runner) is not None:
            self._end(runner)
        if first and self._compilers is not None:
            self._compilers.close()

    def _end(self, runner: Runner) -> None:
        """Closes the runner, unless another thread has."""
        with self._lock:
            mine = self._runner is runner
            self._runner = None if mine else self._runner
        if mine and self._owned:
            runner.close()


def gpu_executors(
    operation: Operation[Any], indices: Sequence[int], options: RunnerOptions | None = None
) -> list[DeviceExecutor]:
    """Returns the visible GPUs with these indices. They share the compile processes of this host.

    Args:
      operation: one of the operations to tune.
      options: of the runner of each; `device` is ignored.
    """
    options = options or RunnerOptions()
    if len(indices) == 1:
        return [
            DeviceExecutor.for_operation(
                operation, dataclasses.replace(options, device=indices[0]), f"GPU {indices[0]}"
            )
        ]
    share = options.workers or max(1, count_of(None) // len(indices))
    compilers = Compilers(share * len(indices), users=len(indices))
    each = dataclasses.replace(options, workers=share)
    return [
        DeviceExecutor.for_operation(operation, dataclasses.replace(each, device=index), f"GPU {index}", compilers)
        for index in indices
    ]


# Delay before retrying a problem that another process is tuning.
RETRY_S = 1.0
# Maximum time for which an executor takes only one problem, even with several lanes, while other executors start.
STARTING_S = 60.0
# Time of a trial without its device time, and the number of trials of a search with the library alone.
TRIAL_S = 0.25
LIBRARY_TRIALS = 3


@dataclasses.dataclass(eq=False)
class Queued:
    """A problem that is waiting or running.

    Attributes:
      expected_s: expected duration of the search.
      current: the stored record, or the reason why there is no valid one.
      lost_on: the executor that was lost while it ran this search; None if there is none.
      busy: how often another process was found tuning the problem.
      not_before_s: earliest time of the next attempt, by `time.monotonic`.
    """

    task: Task
    expected_s: float
    current: Record | str
    lost_on: Executor | None = None
    busy: int = 0
    not_before_s: float = 0.0


class Queue:
    """The waiting problems of a job, shared by threads of several executors.

    The queue balances the load: an executor that runs several problems leaves the last ones to those that run fewer.
    Call `opened` for an executor before taking problems for it.

    Args:
      executors: number of executors.
    """

    def __init__(self, executors: int) -> None:
        self._changed = threading.Condition()
        self._executors = executors
        self._waiting: list[Queued] = []
        self._states: dict[int, _ExecutorState] = {}  # keyed by the id of an opened executor
        self._began = time.monotonic()
        self._ended = False

    def put(self, searches: Iterable[Queued]) -> None:
        """Appends searches, in this order."""
        with self._changed:
            self._waiting += searches
            self._changed.notify_all()

    def opened(self, executor: Executor) -> None:
        """Marks `executor` as available, for the first time or again."""
        with self._changed:
            self._states.setdefault(id(executor), _ExecutorState(executor)).lost = False

    def take(self, executor: Executor) -> Queued | None:
        """Returns the next search for `executor`, or None when all have ended or the executor is lost. Blocks.

        It blocks while no search can start at this executor. Call `done`, `defer` or `requeue_lost` afterwards.
        """
        with self._changed:
            state = self._states[id(executor)]
            while not self._ended and not state.lost and (self._waiting or self._any_running()):
                if (found := self._next(state)) is not None:
                    self._waiting.remove(found)
                    state.running += 1
                    return found
                self._changed.wait(WAKE_S)
        return None

    def _any_running(self) -> bool:
        return any(each.running for each in self._states.values())

    def done(self, executor: Executor) -> None:
        """Marks a search that ran at `executor` as finished."""
        self._end_search(executor)

    def defer(self, search: Queued, executor: Executor) -> None:
        """Requeues a search that another process is running. It is retried after all others have started."""
        search.busy += 1
        search.not_before_s = time.monotonic() + RETRY_S
        self._end_search(executor, search, -1)

    def requeue_lost(self, search: Queued, executor: Executor) -> None:
        """Requeues a search that was running when `executor` was lost.

        Another executor takes it next, or the same executor after it is `opened` again.
        """
        with self._changed:
            search.lost_on, self._states[id(executor)].lost = executor, True
            self._end_search(executor, search, 0)

    def remove_executor(self, executor: Executor) -> list[Queued]:
        """Removes an executor for good. Returns the waiting searches if it was the last executor."""
        with self._changed:
            self._states.pop(id(executor), None)
            self._executors -= 1
            self._changed.notify_all()
            if self._executors:
                return []
            left, self._waiting = self._waiting, []
            return left

    def end(self) -> None:
        """Stops starting searches."""
        with self._changed:
            self._ended = True
            self._changed.notify_all()

    def _end_search(self, executor: Executor, search: Queued | None = None, at: int = 0) -> None:
        with self._changed:
            self._states[id(executor)].running -= 1
            if search is not None:
                self._waiting.insert(at if at >= 0 else len(self._waiting), search)
            self._changed.notify_all()

    def _next(self, state: _ExecutorState) -> Queued | None:
        fitting = [search for search in self._waiting if search.lost_on is not state.executor or self._executors == 1]
        if state.running and len(fitting) <= self._left_to_others(state):
            return None
        if free := [search for search in fitting if not search.busy]:
            return free[0]
        now = time.monotonic()
        return next((search for search in fitting if search.not_before_s <= now), None)

    def _left_to_others(self, state: _ExecutorState) -> float:
        """Returns how many problems to leave to executors that run fewer, before this executor takes one more."""
        others = [each for each in self._states.values() if each is not state]
        starting = self._executors - 1 - len(others)
        if starting > 0 and time.monotonic() - self._began < STARTING_S:
            return math.inf
        return sum(max(0, min(state.running, each.executor.searches) - each.running) for each in others)


@dataclasses.dataclass(eq=False)
class _ExecutorState:
    """An executor, the number of searches running there, and whether it takes none until it is opened again."""

    executor: Executor
    running: int = 0
    lost: bool = False


def expected_s(task: Task, hardware: Hardware) -> float:
    """Returns the expected duration of a search in seconds, for ordering.

    Each trial takes a fixed overhead and its device time: the library's predicted time, for every repetition.
    """
    operation, problem, options = task.operation, task.problem, task.options
    library = operation.library
    has_kernels = any(
        kernel.backend in allowed_backends(operation, options.backends)
        and kernel.supports(problem, hardware.target) is None
        for kernel in operation.kernels_on(hardware.target.platform)
        if kernel is not library
    )
    trials = options.budget if has_kernels else min(options.budget, LIBRARY_TRIALS)
    run_s = model_of(operation, library, hardware).library_seconds(problem)
    search_s = trials * (TRIAL_S + hardware.abilities.repetitions[0] * run_s)
    return search_s if options.seconds is None else min(search_s, options.seconds)
