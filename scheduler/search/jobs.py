"""Offline tuning jobs: a list of problems, each searched once. A failed task does not stop the others."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import logging
import queue
import threading
import time
import tomllib
from collections.abc import Callable, Generator, Iterable, Mapping, Sequence
from typing import Any, Literal, TypeVar

from scheduler.core import interrupts
from scheduler.core.arguments import named_backends
from scheduler.core.codec import DEEPEST, require_shallow
from scheduler.core.errors import CandidateFailed, ExecutorLost, NoCandidate, SchedulerError, StoreError, WorkerError
from scheduler.core.hardware import Hardware
from scheduler.core.interrupts import WAKE_S, Threads
from scheduler.core.progress import JobPace, JobProgress, Progress
from scheduler.core.records import Entry, Record, key_of
from scheduler.core.text import warn_safely
from scheduler.search.baseline import baseline_of, is_current, stored_evidence
from scheduler.search.job_queue import Executor, Queue, Queued, expected_s
from scheduler.search.task import Malformed, Result, SearchOptions, Task, problems_of, value_text
from scheduler.store.lease import LeaseWatcher, leased_if_free
from scheduler.store.store import Store
from search_spaces import load, load_known
from search_spaces.operation import Operation
from search_spaces.space import DeclarationError, unknown

T = TypeVar("T")
# An executor is not used again after it was lost this often during a search, even if it can start.
MOST_LOSSES = 2
_log = logging.getLogger("scheduler")


def parse(text: str, *, own: Sequence[str] = (), options: SearchOptions | None = None) -> list[Task | Malformed]:
    """Parses the tasks of a job written in TOML.

    Top-level keys are `operation` (a name; ``package.module:NAME`` or ``file.py:NAME`` only if `own` contains it) and
    the settings shared by all problems: `budget`, `seconds`, `backends` (comma-separated names, or "pallas"), and a
    table `[fields]`. Each `[[problem]]` table has the problem's fields, and may override `operation`, `budget`,
    `seconds` or `backends`. It may also have `count`, the number of calls with this problem in a function, unless the
    problem has a field of that name. One extent may be a range, ``m = [1, 8192]``: a task for each of its
    `task.points`.

    Args:
      options: of each search, apart from the settings of the job.

    Raises:
      ValueError: the text is not TOML, or several problems are all invalid for the same reason. Other invalid problems
        become `Malformed` instead.
    """
    try:
        job = tomllib.loads(text.removeprefix("\ufeff"))  # byte order mark of some editors
        require_shallow(job)
    except RecursionError:
        raise ValueError(f"a job must be TOML with at most {DEEPEST} nested levels, found more") from None
    except ValueError as error:
        raise ValueError(f"a job must be valid TOML: {error}") from error
    known = [*_SETTINGS, "fields", "problem"]
    for name in job:
        if name not in known:
            raise ValueError(f"a job has no {unknown(name, known)}")
    problems, fields = job.pop("problem", []), job.pop("fields", {})
    if not isinstance(problems, list) or not all(isinstance(table, dict) for table in problems) or not problems:
        raise ValueError("a job needs at least one table [[problem]]")
    if not isinstance(fields, dict):
        raise ValueError(f"[fields] of a job must be a table, found {fields!r}")
    options = options or SearchOptions()
    tasks = [task for table in problems for task in _tasks(job, fields, table, own, options)]
    reasons = {task.reason if isinstance(task, Malformed) else "" for task in tasks}
    if len(tasks) > 1 and len(reasons) == 1 and (shared := reasons.pop()):
        raise ValueError(shared)
    return tasks


def _operation(name: str, own: Sequence[str]) -> Operation[Any]:
    try:
        return load(name) if name in own else load_known(name)
    except ValueError as error:
        raise ValueError(f"{error} (--own {name})" if ":" in name and name not in own else str(error)) from None


def part(items: Sequence[T], text: str) -> list[T]:
    """Returns every n-th element from the i-th, for the text ``i/n``: the share of one of n GPUs or hosts.

    Raises:
      ValueError: the text does not have that form, or i is not between 1 and n.
    """
    words = text.split("/")
    if len(words) != 2 or not all(word.strip().isdecimal() for word in words):
        raise ValueError(f"a part must be i/n, as in 1/4, found {text!r}")
    number, count = (int(word) for word in words)
    if not 1 <= number <= count:
        raise ValueError(f"a part i/n must have 1 <= i <= n, found {number}/{count}")
    return list(items[number - 1 :: count])


def parse_backends(operation: Operation[Any], text: str | None) -> frozenset[str] | None:
    """Parses backends: None for all, "pallas" for all except the library's, else comma-separated names.

    Raises:
      ValueError: the operation has no such backend; the message lists the valid ones.
    """
    if not isinstance(text, str | None):
        raise ValueError(f'backends must be comma-separated names or "pallas", found {text!r}')
    names = [name.strip() for name in text.split(",")] if text is not None else None
    return named_backends(operation, names[0] if names and len(names) == 1 else names)


def run(
    tasks: Iterable[Task | Malformed],
    executors: Sequence[Executor] = (),
    *,
    store: Store,
    in_order: bool = False,
    bound: Callable[[Task], Task | None] | None = None,
    progress: Callable[[Step], None] | None = None,
) -> Generator[Result]:
    """Tunes the tasks that are not tuned yet, and yields the result of each task as it ends.

    Malformed and already tuned tasks come first. Each executor takes the next of the remaining tasks as soon as it is
    free. The order is that of `tasks` if only one search runs at a time, else by expected duration, longest first, so
    that no long search is left to a single executor at the end. A problem that another live process sharing `store` is
    tuning is left to that process. Several processes may therefore run the same job, and each problem is tuned once.

    If an executor is lost, its problem is retried once, by another executor if there is one. An executor that can be
    restarted gets a second chance.

    Args:
      executors: where problems are tuned, all with the same kind of chip; closed at the end. Only malformed tasks need
        none.
      store: has the existing records, and receives every trial and record, from this process alone.
      in_order: keep the order of `tasks` even with several executors.
      bound: called from any thread when a search is about to start. Returns the task with its current limits, or None
        if no time is left: the task then has no result.
      progress: called before the first trial of each search and after every trial, from the calling thread.

    Raises:
      CandidateFailed: as `tuner.tune`.
      SchedulerError: no executor can be opened; with one executor, the original error. Other errors of a task are in
        its `Result`.
    """
    listed = list(tasks)
    wanted = [task for task in listed if not isinstance(task, Malformed)]
    pace = JobPace(len(wanted))
    job = _JobRun(wanted, executors, store, pace, in_order=in_order, bound=bound or (lambda task: task))

    def stop() -> None:
        job.end()
        for executor in executors:
            executor.close()

    with contextlib.ExitStack() as stack:
        stack.callback(job.release)
        stack.callback(stop)
        yield from (Result(task, "failed", task.reason) for task in listed if isinstance(task, Malformed))
        if not wanted:
            return
        threads = stack.enter_context(Threads[Executor, None](len(executors), stop))
        for executor in executors:
            threads.start(executor, functools.partial(job.serve, executor))
        serving = len(executors)
        try:
            while serving:
                interrupts.check()
                try:
                    event = job.events.get(timeout=WAKE_S)
                except queue.Empty:
                    continue
                match event:
                    case Result():
                        yield event
                    case Step() if progress is not None:
                        progress(event)
                    case Lost(executor_name, reason):
                        warn_safely(f"{executor_name} is no longer used: {reason}", stacklevel=3)
                    case BaseException():
                        raise event
                    case None:
                        serving -= 1
        except BaseException:
            stop()
            raise


_SETTINGS = ("operation", "budget", "seconds", "backends")


def _tasks(
    job: Mapping[str, Any],
    fields: Mapping[str, Any],
    table: Mapping[str, Any],
    own_names: Sequence[str],
    options: SearchOptions,
) -> Sequence[Task | Malformed]:
    settings = {**job} | {name: value for name, value in table.items() if name in _SETTINGS}
    own = {name: value for name, value in table.items() if name not in _SETTINGS}
    text = " ".join(f"{name}={value}" for name, value in own.items())
    try:
        name = settings.get("operation")
        if not isinstance(name, str):
            raise ValueError('no operation: add operation = "matmul" (or yours) at the top of the job')
        text = f"{name} {text}"
        operation = _operation(name, own_names)
        fields_of = [field.name for field in dataclasses.fields(operation.problem)]
        count = 1 if "count" in fields_of else own.pop("count", 1)
        known = [*fields_of, *_SETTINGS, "count"]
        for field in (both := {**fields, **own}):
            if field not in known:
                raise ValueError(f"no field {unknown(field, known)}")
        search = dataclasses.replace(
            options,
            **{name: settings[name] for name in ("budget", "seconds") if name in settings},
            backends=parse_backends(operation, settings.get("backends")),
        )
        texts = {field: value_text(field, value) for field, value in both.items()}
        return [Task(operation, problem, search, count) for problem in problems_of(operation, texts)]
    except (TypeError, ValueError) as error:
        return [Malformed(text, str(error))]


# ------------------------------------------------------------------------------
# Runs a job: one thread per executor, which reports events to the calling thread.


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


class _JobRun:
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
