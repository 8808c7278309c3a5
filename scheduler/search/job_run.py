"""A running job: the threads of its places, and the events that they report to the waiting thread."""

from __future__ import annotations

import contextlib
import dataclasses
import logging
import queue
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Literal

from scheduler.core.errors import CandidateFailed, ExecutorLost, NoCandidate, SchedulerError, StoreError, WorkerError
from scheduler.core.hardware import Hardware
from scheduler.core.interrupts import Threads
from scheduler.core.progress import JobPace, JobProgress, Progress
from scheduler.core.records import Entry, Key, Record, key_of
from scheduler.search.baseline import before, is_current, stored_now
from scheduler.search.job_queue import Executor, Queue, Queued, expected_s
from scheduler.search.ranges import RangeRun
from scheduler.search.task import RangeTask, Result, SearchOptions, Task
from scheduler.store.lease import Lease, LeaseWatcher, leased_if_free
from scheduler.store.store import Store
from search_spaces.space import DeclarationError

# A place is not used again after it was lost this often during a search, even if it can start.
MOST_LOSSES = 2

_log = logging.getLogger("scheduler")


@dataclasses.dataclass(frozen=True)
class Step:
    """A trial of a job has ended, or a search is about to start its first trial.

    Attributes:
      place: name of the place.
      task: the task of the search.
      search: progress of the search.
      job: progress of the job.
    """

    place: str
    task: Task
    search: Progress
    job: JobProgress


@dataclasses.dataclass(frozen=True)
class Lost:
    """A place that is no longer used, and the reason."""

    place: str
    reason: str


# An exception ends the job. None reports that the thread of a place has ended.
Event = Result | Step | Lost | BaseException | None


class JobRun:
    """A running job. One thread per place calls `serve`. Another thread reads `events`, until one None per place.

    Args:
      tasks: problems and ranges.
      pace: is notified of searches that start and end.
      in_order, bound: as in `jobs.run`.
    """

    def __init__(
        self,
        tasks: Sequence[Task | RangeTask],
        places: Sequence[Executor],
        store: Store,
        how: SearchOptions,
        pace: JobPace,
        *,
        in_order: bool,
        bound: Callable[[Task], Task | None],
    ) -> None:
        self.events: queue.SimpleQueue[Event] = queue.SimpleQueue()
        self._tasks, self._places, self._store, self._how = tasks, places, store, how
        self._in_order, self._bound = in_order, bound
        self._queue = Queue(len(places))
        self._lease_watcher = LeaseWatcher()
        self._leases: set[contextlib.ExitStack] = set()
        # The lanes of a place take problems one at a time, each after the previous one has reserved its device memory.
        # The device is thus shared in the order of the queue.
        self._entrances = {place: threading.Lock() for place in places}
        self._lock = threading.Lock()  # guards the next six attributes
        self._pace = pace
        self._posed: dict[int, RangeRun] = {}  # id of a task -> the range that it belongs to
        self._new: list[Queued] = []  # searches to append to the queue
        self._sort = False  # longest first
        self._hardware: Hardware | None = None
        self._refusals: list[str] = []

    def end(self) -> None:
        """Stops starting searches."""
        self._queue.end()

    def release(self) -> None:
        """Releases the leases of searches that are abandoned: a computation in this process cannot be interrupted."""
        for lease in list(self._leases):
            lease.close()

    def serve(self, place: Executor) -> None:
        """Opens `place` and runs searches there until none is left."""
        try:
            self._serve(place)
        except BaseException as error:
            self._fail(error)
        self.events.put(None)

    def _fail(self, error: BaseException) -> None:
        self._queue.end()
        self.events.put(error)

    def _serve(self, place: Executor) -> None:
        lost = ""
        for _ in range(MOST_LOSSES):
            try:
                place.open()
                self._begin(place)
            except SchedulerError as refused:
                self._give_up(place, refused)
                return
            with Threads[int, str](place.searches, place.close) as lanes:
                reasons = [lost for _, lost in lanes.map(lambda _: self._lane(place), range(place.searches))]
            with self._lock:
                self._pace.lanes -= place.searches
            if not (lost := next(filter(None, reasons), "")):
                return
        self._give_up(place, ExecutorLost(lost))

    def _begin(self, place: Executor) -> None:
        """Registers an opened place. The first one determines the chip, and all tasks are then reported or queued.

        Raises:
          WorkerError: the chip of this place differs from that of the first.
        """
        with self._lock:
            if self._hardware is None:
                self._hardware = place.hardware
                for task in self._tasks:
                    if isinstance(task, RangeTask):
                        run = RangeRun(task, self._how, place.hardware, self._store)
                        self._pose(run, run.begin())
                    else:
                        self._add(task, place.hardware)
                self._sort = not self._in_order and (len(self._places) > 1 or place.searches > 1)
                self._put()
            elif self._hardware.id != place.hardware.id:
                raise WorkerError(f"it is {place.hardware.id}, and the job is tuned for {self._hardware.id}")
            self._pace.lanes += place.searches
        self._queue.opened(place)

    def _put(self) -> None:
        """Moves new searches into the queue."""
        searches, self._new = self._new, []
        if self._sort:
            searches.sort(key=lambda search: search.expected_s, reverse=True)
        self._queue.put(searches)

    def _pose(self, run: RangeRun, tasks: Sequence[Task]) -> None:
        """Adds the next tasks of a range, or reports its result."""
        assert self._hardware is not None
        self._pace.more(len(tasks))
        self._pace.likely(run, *run.likely())
        self._posed.update((id(task), run) for task in tasks)
        for task in tasks:
            self._add(task, self._hardware)
        if run.result is not None and not tasks:
            self._tell(run.result)

    def _add(self, task: Task, hardware: Hardware) -> None:
        """Queues the task, or reports its result at once if a valid record exists or the task cannot be searched."""
        try:
            held = self._held(task, hardware)
            if isinstance(held, Record) and not self._how.searches_known:
                self._tell(_known(task, held, hardware))
                return
            search = Queued(task, expected_s(task, hardware), held)
        except (SchedulerError, DeclarationError) as error:
            self._tell(Result(task, "failed", str(error), hardware))
            return
        self._pace.expect(search, search.expected_s)
        self._new.append(search)

    def _tell(self, result: Result, search: Queued | None = None) -> None:
        self._pace.end(search, searched=result.state == "tuned")
        self.events.put(result)
        if isinstance(result.task, Task):
            self._go_on(result.task, result)

    def _go_on(self, task: Task, result: Result | None) -> None:
        """Continues the range that the task belongs to, if there is one."""
        if (run := self._posed.pop(id(task), None)) is not None:
            self._pose(run, run.ended(task, result))

    def _give_up(self, place: Executor, error: SchedulerError) -> None:
        """Removes a place. If it was the last one, the waiting tasks fail; if none ever opened, the job fails."""
        with self._lock:
            self._refusals.append(f"{place.name}: {error}")
            if self._hardware is None and len(self._refusals) == len(self._places):
                raise error if len(self._places) == 1 else WorkerError("; ".join(self._refusals))
            self.events.put(Lost(place.name, str(error)))
            left = self._queue.leave(place)
            while left:
                for search in left:
                    reason = f"no place is left to search it ({'; '.join(self._refusals)})"
                    self._tell(Result(search.task, "failed", reason, self._hardware), search)
                left, self._new = self._new, []  # nor can the next tasks of ranges be searched

    def _lane(self, place: Executor) -> str:
        """Runs searches at an open place. Returns "" when none is left, or the reason why the place was lost."""

        while True:
            with contextlib.ExitStack() as entering:
                entering.enter_context(self._entrances[place])
                if (search := self._queue.take(place)) is None:
                    return ""
                with self._lock:
                    self._pace.begin(search)
                started = time.perf_counter()
                try:
                    result = self._result(search, place, entering.close)
                except ExecutorLost as lost:
                    if search.lost_on is None:
                        self._put_back(search, place, self._queue.lose)
                    else:
                        both = f"{search.lost_on.name} was lost with its search, and then {place.name}: {lost}"
                        self._end(search, place, Result(search.task, "failed", both, place.hardware))
                    return str(lost)
                except CandidateFailed as first:
                    self._fail(first)
                    return ""
                except (SchedulerError, DeclarationError) as error:
                    result = Result(search.task, "failed", str(error), place.hardware)
                except BaseException as defect:
                    self._fail(defect)
                    return ""
            if result is None:
                self._put_back(search, place, self._queue.put_aside)
            elif result == "late":
                self._end(search, place, None)
            else:
                self._end(search, place, dataclasses.replace(result, elapsed_s=time.perf_counter() - started))

    def _put_back(self, search: Queued, place: Executor, put: Callable[[Queued, Executor], None]) -> None:
        with self._lock:
            self._pace.put_back(search)
        put(search, place)

    def _end(self, search: Queued, place: Executor, result: Result | None) -> None:
        with self._lock:
            if result is None:
                self._pace.end(search, searched=False)
                self._go_on(search.task, None)
            else:
                self._tell(result, search)
            self._put()
        self._queue.done(place)

    def _result(self, search: Queued, place: Executor, held_now: Callable[[], None]) -> Result | Literal["late"] | None:
        """Returns the result of a search; None if another process is running it; "late" if no time is left for it.

        Args:
          held_now: called before the first trial.
        """
        task, hardware, how = search.task, place.hardware, self._how
        key = key_of(task.operation, task.problem, hardware)
        with self._leased(key) as other:
            if other is not None:
                if search.busy == 1:  # all others are running
                    _log.warning("%s is being tuned by %s; waiting for its record", key, other)
                return None
            held = self._held(task, hardware)
            made = search.busy > 0 and held != search.held  # a record of the other process
            if isinstance(held, Record) and (made or not how.searches_known):
                return _known(task, held, hardware)
            if (bounded := self._bound(task)) is None:
                return "late"
            return self._searched(search, bounded, place, held if isinstance(held, str) else "", held_now)

    @contextlib.contextmanager
    def _leased(self, key: Key) -> Iterator[Lease | None]:
        with contextlib.ExitStack() as lease:
            self._leases.add(lease)
            try:
                yield lease.enter_context(leased_if_free(self._store, key, self._lease_watcher))
            finally:
                self._leases.discard(lease)

    def _searched(
        self, search: Queued, bounded: Task, place: Executor, reason: str, held_now: Callable[[], None]
    ) -> Result:
        task, hardware, store, resumed = search.task, place.hardware, self._store, 0
        had = stored_now(task, hardware, store)

        def watch(step: Progress) -> None:
            nonlocal resumed
            resumed = step.resumed
            held_now()
            with self._lock:
                self._pace.step(search, step)
                self.events.put(Step(place.name, task, step, self._pace.now()))

        record = place.search(bounded, self._how, store, watch)
        entry = _entry(task, record)
        if entry is None:
            asked = ", ".join(sorted(task.backends or ()))
            why = "; ".join(map(str, record.failed)) or "`tile-scheduler explain` says what became of them"
            raise NoCandidate(f"no schedule of {asked} ran for {task}: {why}")
        kept = False
        with contextlib.suppress(StoreError):  # the search has issued a warning
            kept = store.get(record.key) == record
        was = before(task, hardware, had, record, store)
        return Result(task, "tuned", reason, hardware, record, entry, was, resumed, stored=kept)

    def _held(self, task: Task, hardware: Hardware) -> Record | str:
        backends, l2, brief = task.backends, self._how.l2, task.brief
        return is_current(task.operation, task.problem, hardware, self._store, backends=backends, l2=l2, brief=brief)


def _known(task: Task, record: Record, hardware: Hardware) -> Result:
    return Result(task, "known", "", hardware, record, _entry(task, record))


def _entry(task: Task, record: Record) -> Entry | None:
    """Returns the fastest entry among the requested backends."""
    return record.winner if task.backends is None else record.best(task.backends)
