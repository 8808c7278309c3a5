"""Runs a job: one thread per executor, which reports events to the calling thread."""

from __future__ import annotations

import contextlib
import dataclasses
import logging
import queue
import threading
import time
from collections.abc import Callable, Sequence
from typing import Literal

from scheduler.core.errors import CandidateFailed, ExecutorLost, NoCandidate, SchedulerError, StoreError, WorkerError
from scheduler.core.hardware import Hardware
from scheduler.core.interrupts import Threads
from scheduler.core.progress import JobPace, JobProgress, Progress
from scheduler.core.records import Entry, Record, key_of
from scheduler.search.baseline import baseline_of, is_current, stored_evidence
from scheduler.search.job_queue import Executor, Queue, Queued, expected_s
from scheduler.search.task import Result, Task
from scheduler.store.lease import LeaseWatcher, leased_if_free
from scheduler.store.store import Store
from search_spaces.space import DeclarationError

# An executor is not used again after it was lost this often during a search, even if it can start.
MOST_LOSSES = 2

_log = logging.getLogger("scheduler")


@dataclasses.dataclass(frozen=True)
class Step:
    """A trial of a job has ended, or a search is about to start its first trial.

    Attributes:
      executor: name of the executor.
      task: the task of the search.
      search: progress of the search.
      job: progress of the job.
    """

    executor: str
    task: Task
    search: Progress
    job: JobProgress


@dataclasses.dataclass(frozen=True)
class Lost:
    """An executor that is no longer used, and the reason."""

    executor: str
    reason: str


# An exception ends the job. None reports that the thread of an executor has ended.
Event = Result | Step | Lost | BaseException | None


class JobRun:
    """A running job. One thread per executor calls `serve`. Another thread reads `events`, until one None per executor.

    Args:
      tasks: the problems.
      pace: is notified of searches that start and end.
      in_order, bound: as in `jobs.run`.
    """

    def __init__(
        self,
        tasks: Sequence[Task],
        executors: Sequence[Executor],
        store: Store,
        pace: JobPace,
        *,
        in_order: bool,
        bound: Callable[[Task], Task | None],
    ) -> None:
        self.events: queue.SimpleQueue[Event] = queue.SimpleQueue()
        self._tasks, self._executors, self._store = tasks, executors, store
        self._in_order, self._bound = in_order, bound
        self._queue = Queue(len(executors))
        self._lease_watcher = LeaseWatcher()
        self._leases: set[contextlib.ExitStack] = set()
        # The lanes of an executor take problems one at a time, after the previous one has reserved its device memory.
        # The device is thus shared in the order of the queue.
        self._entry_locks = {executor: threading.Lock() for executor in executors}
        self._lock = threading.Lock()  # guards the next three attributes
        self._pace = pace
        self._first: Executor | None = None  # that opened: it determines the chip
        self._refusals: list[str] = []

    def end(self) -> None:
        """Stops starting searches."""
        self._queue.end()

    def release(self) -> None:
        """Releases the leases of searches that are abandoned: a computation in this process cannot be interrupted."""
        for lease in list(self._leases):
            lease.close()

    def serve(self, executor: Executor) -> None:
        """Opens `executor` and runs searches there until none is left."""
        try:
            self._serve(executor)
        except BaseException as error:
            self._fail(error)
        self.events.put(None)

    def _fail(self, error: BaseException) -> None:
        self._queue.end()
        self.events.put(error)

    def _serve(self, executor: Executor) -> None:
        lost = ""
        for _ in range(MOST_LOSSES):
            try:
                executor.open()
                self._begin(executor)
            except SchedulerError as refused:
                self._remove_executor(executor, refused)
                return
            with Threads[int, str](executor.searches, executor.close) as lanes:
                reasons = [lost for _, lost in lanes.map(lambda _: self._lane(executor), range(executor.searches))]
            with self._lock:
                self._pace.lanes -= executor.searches
            if not (lost := next(filter(None, reasons), "")):
                return
        self._remove_executor(executor, ExecutorLost(lost))

    def _begin(self, executor: Executor) -> None:
        """Registers an opened executor. The first one determines the chip, and all tasks are then reported or queued.

        Raises:
          WorkerError: the chip of this executor differs from that of the first.
        """
        with self._lock:
            if self._first is None:
                self._first = executor
                searches = [search for task in self._tasks if (search := self._queued(task, executor)) is not None]
                if not self._in_order and (len(self._executors) > 1 or executor.searches > 1):
                    searches.sort(key=lambda search: search.expected_s, reverse=True)
                self._queue.put(searches)
            elif self._first.hardware.id != executor.hardware.id:
                raise WorkerError(f"it is {executor.hardware.id}, and the job is tuned for {self._first.hardware.id}")
            self._pace.lanes += executor.searches
        self._queue.opened(executor)

    def _queued(self, task: Task, executor: Executor) -> Queued | None:
        """Returns the search of a task; reports its result if a valid record exists or the task cannot be searched."""
        hardware = executor.hardware
        try:
            current = is_current(task, executor.hardware, self._store, executor.tracer(task))
            if isinstance(current, Record) and not task.options.searches_known:
                self._report(_known(task, current, hardware))
                return None
            search = Queued(task, expected_s(task, hardware), current)
        except (SchedulerError, DeclarationError) as error:
            self._report(Result(task, "failed", str(error), hardware))
            return None
        self._pace.expect(search, search.expected_s)
        return search

    def _report(self, result: Result, search: Queued | None = None) -> None:
        self._pace.end(search, searched=result.state == "tuned")
        self.events.put(result)

    def _remove_executor(self, executor: Executor, error: SchedulerError) -> None:
        """Removes an executor. If it was the last one, the waiting tasks fail; if none ever opened, the job fails."""
        with self._lock:
            self._refusals.append(f"{executor.name}: {error}")
            if self._first is None and len(self._refusals) == len(self._executors):
                raise error if len(self._executors) == 1 else WorkerError("; ".join(self._refusals))
            self.events.put(Lost(executor.name, str(error)))
            hardware = None if self._first is None else self._first.hardware
            for search in self._queue.remove_executor(executor):
                reason = f"no executor is left to search it ({'; '.join(self._refusals)})"
                self._report(Result(search.task, "failed", reason, hardware), search)

    def _lane(self, executor: Executor) -> str:
        """Runs searches at an open executor. Returns "" when none is left, or the reason why the executor was lost."""

        while True:
            with contextlib.ExitStack() as entering:
                entering.enter_context(self._entry_locks[executor])
                if (search := self._queue.take(executor)) is None:
                    return ""
                with self._lock:
                    self._pace.begin(search)
                started = time.perf_counter()
                try:
                    result = self._result(search, executor, entering.close)
                except ExecutorLost as lost:
                    if search.lost_on is None:
                        self._put_back(search, executor, self._queue.requeue_lost)
                    else:
                        both = f"{search.lost_on.name} was lost with its search, and then {executor.name}: {lost}"
                        self._end(search, executor, Result(search.task, "failed", both, executor.hardware))
                    return str(lost)
                except CandidateFailed as first:
                    self._fail(first)
                    return ""
                except (SchedulerError, DeclarationError) as error:
                    result = Result(search.task, "failed", str(error), executor.hardware)
                except BaseException as defect:
                    self._fail(defect)
                    return ""
            if result is None:
                self._put_back(search, executor, self._queue.defer)
            elif result == "late":
                self._end(search, executor, None)
            else:
                self._end(search, executor, dataclasses.replace(result, elapsed_s=time.perf_counter() - started))

    def _put_back(self, search: Queued, executor: Executor, put: Callable[[Queued, Executor], None]) -> None:
        with self._lock:
            self._pace.put_back(search)
        put(search, executor)

    def _end(self, search: Queued, executor: Executor, result: Result | None) -> None:
        with self._lock:
            if result is None:
                self._pace.end(search, searched=False)
            else:
                self._report(result, search)
        self._queue.done(executor)

    def _result(
        self, search: Queued, executor: Executor, on_reserved: Callable[[], None]
    ) -> Result | Literal["late"] | None:
        """Returns the result of a search; None if another process is running it; "late" if no time is left for it.

        Args:
          on_reserved: called before the first trial.
        """
        task, hardware = search.task, executor.hardware
        key = key_of(task.operation, task.problem, hardware)
        with contextlib.ExitStack() as lease:
            self._leases.add(lease)
            lease.callback(self._leases.discard, lease)
            if (other := lease.enter_context(leased_if_free(self._store, key, self._lease_watcher))) is not None:
                if search.busy == 1:  # all others are running
                    _log.warning("%s is being tuned by %s; waiting for its record", key, other)
                return None
            current = is_current(task, executor.hardware, self._store, executor.tracer(task))
            new = search.busy > 0 and current != search.current  # a record of the other process
            if isinstance(current, Record) and (new or not task.options.searches_known):
                return _known(task, current, hardware)
            if (bounded := self._bound(task)) is None:
                return "late"
            return self._search(search, bounded, executor, current if isinstance(current, str) else "", on_reserved)

    def _search(
        self, search: Queued, bounded: Task, executor: Executor, reason: str, on_reserved: Callable[[], None]
    ) -> Result:
        task, hardware, store, resumed = search.task, executor.hardware, self._store, 0
        evidence = stored_evidence(task, hardware, store)

        def watch(step: Progress) -> None:
            nonlocal resumed
            resumed = step.resumed
            on_reserved()
            with self._lock:
                self._pace.step(search, step)
                self.events.put(Step(executor.name, task, step, self._pace.now()))

        record = executor.search(bounded, store, watch)
        entry = _entry(task, record)
        if entry is None:
            requested = ", ".join(sorted(task.options.backends or ()))
            failures = "; ".join(map(str, record.failed)) or "`tile-scheduler explain` says what became of them"
            raise NoCandidate(f"no schedule of {requested} ran for {task}: {failures}")
        kept = False
        with contextlib.suppress(StoreError):  # the search has issued a warning
            kept = store.get(record.key) == record
        baseline = baseline_of(task, hardware, evidence, record, store)
        return Result(task, "tuned", reason, hardware, record, entry, baseline, resumed, stored=kept)


def _known(task: Task, record: Record, hardware: Hardware) -> Result:
    return Result(task, "known", "", hardware, record, _entry(task, record))


def _entry(task: Task, record: Record) -> Entry | None:
    """Returns the fastest entry among the requested backends."""
    backends = task.options.backends
    return record.winner if backends is None else record.best(backends)
