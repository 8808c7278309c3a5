"""One job under way: what the threads of its places do, and tell the one that waits for it."""

from __future__ import annotations

import contextlib
import dataclasses
import logging
import queue
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Literal

from scheduler.core.errors import CandidateFailed, NoCandidate, PlaceLost, SchedulerError, StoreError, WorkerError
from scheduler.core.hardware import Hardware
from scheduler.core.identity import key_of
from scheduler.core.progress import JobPace, JobProgress, Progress
from scheduler.core.records import Entry, Key, Record
from scheduler.core.threads import Threads
from scheduler.search.before import before, stored_now
from scheduler.search.job_queue import Queue, Queued, expected_s
from scheduler.search.places import Place
from scheduler.search.ranges import RangeRun
from scheduler.search.settled import settled
from scheduler.search.task import How, RangeTask, Result, Task
from scheduler.store.lease import Lease, Others, leased_if_free
from scheduler.store.store import Store
from search_spaces.errors import DeclarationError

# A place that was lost so often with a search is used no more, though it starts again.
MOST_LOSSES = 2

_log = logging.getLogger("scheduler")


@dataclasses.dataclass(frozen=True)
class Step:
    """A trial of a job has ended, or a search is about to begin with its first.

    Attributes:
      place: where, by its name.
      task: whose.
      search: how far its search is.
      job: how far the job is.
    """

    place: str
    task: Task
    search: Progress
    job: JobProgress


@dataclasses.dataclass(frozen=True)
class Lost:
    """A place that is used no more, and why."""

    place: str
    reason: str


# What ends the job, and, for None, that the thread of a place has ended, are told as well.
Event = Result | Step | Lost | BaseException | None


class JobRun:
    """A job under way. A thread for each place calls `serve`; another reads `events` until each has said None.

    Args:
      tasks: the problems and ranges.
      pace: is told what begins and ends.
      in_order, bound: as in `jobs.run`.
    """

    def __init__(
        self,
        tasks: Sequence[Task | RangeTask],
        places: Sequence[Place],
        store: Store,
        how: How,
        pace: JobPace,
        *,
        in_order: bool,
        bound: Callable[[Task], Task | None],
    ) -> None:
        self.events: queue.SimpleQueue[Event] = queue.SimpleQueue()
        self._tasks, self._places, self._store, self._how = tasks, places, store, how
        self._in_order, self._bound = in_order, bound
        self._queue = Queue(len(places))
        self._others = Others()
        self._leases: set[contextlib.ExitStack] = set()
        # The lanes of a place take problems one after the other, the next when the one before is held: the device is
        # shared in the order of the queue.
        self._entrances = {place: threading.Lock() for place in places}
        self._lock = threading.Lock()  # of the next six
        self._pace = pace
        self._posed: dict[int, RangeRun] = {}  # by the identity of a task: the range that poses it
        self._new: list[Queued] = []  # what is to be put into the queue
        self._sort = False  # the longest first
        self._hardware: Hardware | None = None
        self._refusals: list[str] = []

    def end(self) -> None:
        """Nothing more is begun."""
        self._queue.end()

    def release(self) -> None:
        """Gives back the leases of searches that are left behind: nobody can end what this process computes itself."""
        for lease in list(self._leases):
            lease.close()

    def serve(self, place: Place) -> None:
        """Opens `place`, and searches there until nothing is left."""
        try:
            self._serve(place)
        except BaseException as error:
            self._fail(error)
        self.events.put(None)

    def _fail(self, error: BaseException) -> None:
        self._queue.end()
        self.events.put(error)

    def _serve(self, place: Place) -> None:
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
        self._give_up(place, PlaceLost(lost))

    def _begin(self, place: Place) -> None:
        """Once a first place is open, the chip is known: what needs no search is told, and the rest is put in order.

        Raises:
          WorkerError: the chip of this place is another than that of the first.
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
        """What is new goes into the queue."""
        searches, self._new = self._new, []
        if self._sort:
            searches.sort(key=lambda search: search.expected_s, reverse=True)
        self._queue.put(searches)

    def _pose(self, run: RangeRun, tasks: Sequence[Task]) -> None:
        """What a range wants searched next, or its result."""
        assert self._hardware is not None
        self._pace.more(len(tasks))
        self._pace.likely(run, *run.likely())
        self._posed.update((id(task), run) for task in tasks)
        for task in tasks:
            self._add(task, self._hardware)
        if run.result is not None and not tasks:
            self._tell(run.result)

    def _add(self, task: Task, hardware: Hardware) -> None:
        """It is to be searched, unless it is told now what became of it: it needs no search, or cannot be asked."""
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
        """What comes next of the range that has posed it, if one has."""
        if (run := self._posed.pop(id(task), None)) is not None:
            self._pose(run, run.ended(task, result))

    def _give_up(self, place: Place, error: SchedulerError) -> None:
        """It is used no more. What still waits, where it was the last one, fails; the job, where none has begun."""
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
                left, self._new = self._new, []  # what ranges pose next cannot be searched either

    def _lane(self, place: Place) -> str:
        """Searches at an open place until nothing is left, or why the place was lost."""

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
                except PlaceLost as lost:
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

    def _put_back(self, search: Queued, place: Place, put: Callable[[Queued, Place], None]) -> None:
        with self._lock:
            self._pace.put_back(search)
        put(search, place)

    def _end(self, search: Queued, place: Place, result: Result | None) -> None:
        with self._lock:
            if result is None:
                self._pace.end(search, searched=False)
                self._go_on(search.task, None)
            else:
                self._tell(result, search)
            self._put()
        self._queue.done(place)

    def _result(self, search: Queued, place: Place, held_now: Callable[[], None]) -> Result | Literal["late"] | None:
        """What became of it; None where another process is at it, and "late" where no time is left for it.

        Args:
          held_now: called before the first trial.
        """
        task, hardware, how = search.task, place.hardware, self._how
        key = key_of(task.operation, task.problem, hardware)
        with self._leased(key) as other:
            if other is not None:
                if search.busy == 1:  # all others are under way
                    _log.warning("%s is being tuned by %s; waiting for its record", key, other)
                return None
            held = self._held(task, hardware)
            made = search.busy > 0 and held != search.held  # by the other process
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
                yield lease.enter_context(leased_if_free(self._store, key, self._others))
            finally:
                self._leases.discard(lease)

    def _searched(
        self, search: Queued, bounded: Task, place: Place, reason: str, held_now: Callable[[], None]
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
        with contextlib.suppress(StoreError):  # the search has warned of it
            kept = store.get(record.key) == record
        was = before(task, hardware, had, record, store)
        return Result(task, "tuned", reason, hardware, record, entry, was, resumed, stored=kept)

    def _held(self, task: Task, hardware: Hardware) -> Record | str:
        backends, l2, brief = task.backends, self._how.l2, task.brief
        return settled(task.operation, task.problem, hardware, self._store, backends=backends, l2=l2, brief=brief)


def _known(task: Task, record: Record, hardware: Hardware) -> Result:
    return Result(task, "known", "", hardware, record, _entry(task, record))


def _entry(task: Task, record: Record) -> Entry | None:
    """The fastest among the backends asked for."""
    return record.winner if task.backends is None else record.best(task.backends)
