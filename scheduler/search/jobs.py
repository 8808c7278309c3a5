"""Offline tuning jobs: a list of problems, each searched once, none of them able to stop the rest."""

from __future__ import annotations

import contextlib
import dataclasses
import time
import tomllib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, Literal, TypeVar

from scheduler.core.backends import named_backends
from scheduler.core.errors import CandidateFailed, NoCandidate, SchedulerError, StoreError
from scheduler.core.hardware import Hardware
from scheduler.core.identity import key_of, point_of
from scheduler.core.progress import Progress
from scheduler.core.records import L2, AllFailed, Entry, Key, Measurement, Record, Schedule, Trial
from scheduler.measure.pool import start_runner
from scheduler.measure.runner import Runner, RunnerOptions
from scheduler.prediction.predict import predict
from scheduler.prediction.validation import recheck
from scheduler.search.settled import settled
from scheduler.search.tuner import tune
from scheduler.store.store import Store, shipped
from search_spaces import load, load_known
from search_spaces.errors import DeclarationError
from search_spaces.operation import Operation
from search_spaces.problem import Problem
from search_spaces.space import unknown

BUDGET = 64
T = TypeVar("T")


@dataclasses.dataclass(frozen=True)
class Task:
    """One problem to tune.

    Attributes:
      budget: trials.
      seconds: stop proposing trials after so many seconds; None sets no limit.
      backends: kernels to try beside the library; None tries all.
      count: how often the function that the job is for poses the problem.
    """

    operation: Operation[Any]
    problem: Problem
    budget: int = BUDGET
    seconds: float | None = None
    backends: frozenset[str] | None = None
    count: int = 1

    def __str__(self) -> str:
        return f"{self.operation.name} {self.problem}"


@dataclasses.dataclass(frozen=True)
class Malformed:
    """An entry of a job that is no problem: what was written, and why it cannot be read."""

    text: str
    reason: str

    def __str__(self) -> str:
        return self.text


@dataclasses.dataclass(frozen=True)
class Before:
    """What a call would have got before the search: a stored schedule, or the model's answer.

    Attributes:
      seconds: its time; a prediction unless `measured`, because this search did not try it.
    """

    backend: str
    schedule: Schedule
    seconds: float
    measured: bool


@dataclasses.dataclass(frozen=True)
class Result:
    """What became of one task.

    Attributes:
      state: "tuned" now; "known": it was tuned before, and that still holds; or "failed".
      reason: why it failed, or why an older answer no longer held; "" where there is nothing to say.
      hardware: where it ran; None where it failed before that was known.
      record: the whole outcome, None where it failed.
      entry: the fastest schedule among the backends asked for.
      before: None where nothing was measured now, or no answer was possible.
      resumed: trials that an earlier run of the search had made before it was cut short.
      elapsed_s: wall time spent.
      stored: False where the store refused the record.
    """

    task: Task | Malformed
    state: Literal["tuned", "known", "failed"]
    reason: str = ""
    hardware: Hardware | None = None
    record: Record | None = None
    entry: Entry | None = None
    before: Before | None = None
    resumed: int = 0
    elapsed_s: float = 0.0
    stored: bool = True

    @property
    def library(self) -> Entry | None:
        """The library's own entry in the record."""
        return None if self.record is None else self.record.library_entry

    @property
    def broken(self) -> tuple[AllFailed, ...]:
        """Backends of which nothing ran in this search, by their own fault."""
        if self.record is None or self.state == "known":  # another search has said so, and nobody asks for it now
            return ()
        return tuple(lost for lost in self.record.failed if lost.own)


def parse(text: str, *, own: Sequence[str] = ()) -> list[Task | Malformed]:
    """The tasks of a job written in TOML.

    At the top: `operation` (its name; ``package.module:NAME`` or ``file.py:NAME`` only where `own` names it, too) and
    what all problems share: `budget`, `seconds`, `backends` (names with commas, or "pallas"), and a table `[fields]`.
    Then one table `[[problem]]` each, with its fields and, where it differs, its own `operation`, `budget`, `seconds`
    or `backends`; and `count`, which says how often a function poses it, where that is no field of the problem.

    Raises:
      ValueError: the text is no TOML, or what the problems share is wrong. A single bad problem is `Malformed` instead.
    """
    try:
        job = tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        raise ValueError(f"a job is TOML, and this is not: {error}") from error
    known = [*_SETTINGS, "fields", "problem"]
    for name in job:
        if name not in known:
            raise ValueError(f"a job has no {unknown(name, known)}")
    problems, fields = job.pop("problem", []), job.pop("fields", {})
    if not isinstance(problems, list) or not all(isinstance(table, dict) for table in problems) or not problems:
        raise ValueError("a job needs at least one table [[problem]]")
    if not isinstance(fields, dict):
        raise ValueError(f"the fields that problems share are a table [fields], not {fields!r}")
    if isinstance(shared := job.get("operation"), str):
        _operation(shared, own)  # misspelt here, it is wrong for every problem
    return [_task(job, fields, table, own) for table in problems]


def _operation(name: str, own: Sequence[str]) -> Operation[Any]:
    try:
        return load(name) if name in own else load_known(name)
    except ValueError as error:
        raise ValueError(f"{error} (--own {name})" if ":" in name and name not in own else str(error)) from None


def part(of: Sequence[T], text: str) -> list[T]:
    """Every n-th from the i-th, for the text ``i/n``: what one of n GPUs or hosts takes of what they share.

    Raises:
      ValueError: the text is not of that form, or i is not among 1 to n.
    """
    words = text.split("/")
    if len(words) != 2 or not all(word.strip().isdecimal() for word in words):
        raise ValueError(f"a part is written i/n, as in 1/4, not {text!r}")
    number, count = (int(word) for word in words)
    if not 1 <= number <= count:
        raise ValueError(f"of {count} parts there is none of number {number}")
    return list(of[number - 1 :: count])


def parse_backends(operation: Operation[Any], text: str | None) -> frozenset[str] | None:
    """Backends from text: None for all, "pallas" for all but the library's, else names with commas between them.

    Raises:
      ValueError: the operation has no such backend; the message names those it has.
    """
    if not isinstance(text, str | None):
        raise ValueError(f'backends={text!r} is no text: names with commas between them, or "pallas"')
    names = [name.strip() for name in text.split(",")] if text is not None else None
    return named_backends(operation, names[0] if names and len(names) == 1 else names)


def run(
    tasks: Iterable[Task | Malformed],
    *,
    store: Store,
    runner: Runner | None = None,
    options: RunnerOptions | None = None,
    seed: int = 0,
    l2: L2 = "cold",
    force: bool = False,
    first_error: bool = False,
    progress: Callable[[Task, Progress], None] | None = None,
) -> Iterator[Result]:
    """Tunes what is not tuned yet, and yields what became of each task as it ends, in order.

    Args:
      store: knows what is tuned, and gets every trial and record.
      runner: where candidates run; by default one is started for all tasks and closed at the end.
      options: of a runner that is started here.
      l2: as in `tuner.tune`; what was measured cold is tuned again where it is to be warm.
      force: tune again what is tuned already.
      first_error: as in `tuner.tune`; it ends the job.
      progress: called after each trial, from the calling thread.

    Raises:
      CandidateFailed: as `tuner.tune`.
      WorkerError: the workers cannot start at all. What else goes wrong with one task is its `Result`.
    """
    with contextlib.ExitStack() as stack:
        for task in tasks:
            if isinstance(task, Malformed):
                yield Result(task, "failed", task.reason)
                continue
            if runner is None:
                runner = start_runner(task.operation, options)
                stack.callback(runner.close)
            started = time.perf_counter()
            try:
                result = _run_one(task, store, runner, seed, l2, force, first_error, progress)
            except CandidateFailed:
                raise
            except (SchedulerError, DeclarationError) as error:
                result = Result(task, "failed", str(error), runner.hardware)
            yield dataclasses.replace(result, elapsed_s=time.perf_counter() - started)


def _run_one(
    task: Task,
    store: Store,
    runner: Runner,
    seed: int,
    l2: L2,
    force: bool,
    first_error: bool,
    progress: Callable[[Task, Progress], None] | None,
) -> Result:
    operation, problem, hardware = task.operation, task.problem, runner.hardware
    known = settled(operation, problem, hardware, store, backends=task.backends, l2=l2)
    if isinstance(known, Record) and not (force or first_error):
        return Result(task, "known", "", hardware, known, _entry(task, known))
    reason = known if isinstance(known, str) else ""
    served = _served(task, hardware, store)
    resumed = 0

    def watch(step: Progress) -> None:
        nonlocal resumed
        resumed = step.resumed
        if progress is not None:
            progress(task, step)

    record = tune(
        operation,
        problem,
        backends=task.backends,
        force=True,
        first_error=first_error,
        budget=task.budget,
        seconds=task.seconds,
        seed=seed,
        l2=l2,
        store=store,
        runner=runner,
        progress=watch,
    )
    entry = _entry(task, record)
    if entry is None:
        asked = ", ".join(sorted(task.backends or ()))
        why = "; ".join(map(str, record.failed)) or "`tile-scheduler explain` says what became of them"
        raise NoCandidate(f"no schedule of {asked} ran for {task}: {why}")
    trials: list[Trial] = []
    kept = False
    with contextlib.suppress(StoreError):  # the search has warned of it
        kept = store.get(record.key) == record
        trials = store.trials(record.key, runner.environment)
    others: list[Record] = []
    with contextlib.suppress(StoreError):
        stored_now = store.records(operation=record.key.operation, hardware=record.key.hardware)
        others = [other for other in stored_now if other.key != record.key]
    before = _before(task, hardware, served, record, trials, others)
    return Result(task, "tuned", reason, hardware, record, entry, before, resumed, stored=kept)


def _entry(task: Task, record: Record) -> Entry | None:
    """The fastest among the backends asked for."""
    return record.winner if task.backends is None else record.best(task.backends)


def _served(task: Task, hardware: Hardware, store: Store) -> Entry | None:
    """What a call gets now: from the user's own records, or from those that come with this package."""
    key = key_of(task.operation, task.problem, hardware)
    with contextlib.ExitStack() as stack:
        stores = [store]
        with contextlib.suppress(StoreError):
            if (other := shipped()) is not None:
                stores.append(stack.enter_context(contextlib.closing(other)))
        records = [_readable(kept, key) for kept in stores]
    for record in records:
        if record is not None:
            held = recheck(task.operation, task.problem, hardware, record, backends=task.backends)
            if isinstance(held, Entry):
                return held
    return None


def _readable(store: Store, key: Key) -> Record | None:
    with contextlib.suppress(StoreError):
        return store.get(key)
    return None


def _before(
    task: Task,
    hardware: Hardware,
    held: Entry | None,
    record: Record,
    trials: Sequence[Trial],
    others: Sequence[Record],
) -> Before | None:
    if held is not None:
        backend, schedule, fallback_s, measured = held.backend, held.schedule, held.measurement.median_s, True
    else:
        try:
            answer = predict(task.operation, task.problem, hardware, backends=task.backends, records=others)
        except NoCandidate:
            return None
        backend, schedule, fallback_s, measured = answer.backend, answer.schedule, answer.predicted_s, False
    # Times of the run-off compare best with the winner's; a trial's is the next best.
    times = {point_of(t.backend, t.schedule): t.outcome for t in trials}
    times |= {point_of(e.backend, e.schedule): e.measurement for e in record.entries}
    match times.get(point_of(backend, schedule)):
        case Measurement(median_s=median_s):
            return Before(backend, schedule, median_s, measured=True)
        case _:
            return Before(backend, schedule, fallback_s, measured)


_SETTINGS = ("operation", "budget", "seconds", "backends")


def _task(
    job: Mapping[str, Any], fields: Mapping[str, Any], table: Mapping[str, Any], named: Sequence[str]
) -> Task | Malformed:
    settings = {**job, **{name: value for name, value in table.items() if name in _SETTINGS}}
    own = {name: value for name, value in table.items() if name not in _SETTINGS}
    text = " ".join(f"{name}={value}" for name, value in own.items())
    try:
        name = settings.get("operation")
        if not isinstance(name, str):
            raise ValueError('no operation: write operation = "matmul" (or yours) at the top of the job')
        text = f"{name} {text}"
        operation = _operation(name, named)
        fields_of = [field.name for field in dataclasses.fields(operation.problem)]
        count = 1 if "count" in fields_of else own.pop("count", 1)
        known = [*fields_of, *_SETTINGS, "count"]
        for field, value in (both := {**fields, **own}).items():
            if field not in known:
                raise ValueError(f"no field {unknown(field, known)}")
            if not isinstance(value, (int, str)):
                raise ValueError(f"{field}={value!r} is no integer, truth value or string")
        return Task(
            operation,
            operation.problem.parse({field: str(value) for field, value in both.items()}),
            budget=_positive("budget", settings.get("budget", BUDGET), int),
            seconds=None if (s := settings.get("seconds")) is None else _positive("seconds", s, int, float),
            backends=parse_backends(operation, settings.get("backends")),
            count=_positive("count", count, int),
        )
    except ValueError as error:
        return Malformed(text, str(error))


def _positive(name: str, value: Any, *kinds: type) -> Any:
    if type(value) not in kinds or value <= 0:
        raise ValueError(f"{name}={value!r} is not a positive number")
    return value
