"""Measures stored winners again, interleaved with their competitors, and reports those that are no longer fastest."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
from collections.abc import Iterator, Sequence
from typing import Any, Literal

from scheduler.core import arguments
from scheduler.core.errors import NoCandidate
from scheduler.core.hardware import Hardware
from scheduler.core.interrupts import Threads
from scheduler.core.records import Entry, Failure, Measurement, Outcome, Record, Schedule, choice_text, label_of
from scheduler.core.text import faster_text
from scheduler.measure.pool import start_runner
from scheduler.measure.runner import Runner, RunnerOptions, Task
from scheduler.model.constants import model_of
from scheduler.model.pruning import illegal, onchip_bytes
from scheduler.prediction import predict, transfer
from scheduler.search import final_comparison
from scheduler.search.candidates import legal_schedules, reference, traced_by
from scheduler.search.final_comparison import Result
from search_spaces import load_known
from search_spaces.operation import Operation
from search_spaces.problem import Problem

# A winner within this share of the fastest is still valid; a larger excess is worth a new search.
MAX_EXCESS = 0.03
# The rivals of one record keep about this many compile processes busy; each rival is compiled once.
COMPILERS_OF_A_RECORD = 4


@dataclasses.dataclass(frozen=True)
class Remeasured:
    """A schedule that was measured again.

    Attributes:
      role: "winner", "runner-up" or "best of its backend" in the record, "library", or "the model's choice".
      then: its entry in the record; None if it had none.
      now: its new measurement, interleaved with the others, or the failure.
    """

    role: str
    backend: str
    version: int
    schedule: Schedule
    predicted_s: float
    then: Entry | None
    now: Outcome


@dataclasses.dataclass(frozen=True)
class VerifyResult:
    """Whether the winner of a record is still valid.

    Attributes:
      state: "holds"; "slower": another schedule is now faster by more than the limit; "broken": the winner cannot run,
        or is not used; "elsewhere": not measured, because the record is for another chip, is an estimate, or is for an
        operation that cannot be loaded by name.
      reason: the faster schedule and the difference, or why the winner cannot run; "" if it holds.
      rivals: the measured schedules, winner first; empty if nothing was measured.
      refreshed: the record with the new times, order and environment; None if nothing was measured, or the library
        failed.
    """

    record: Record
    state: Literal["holds", "slower", "broken", "elsewhere"]
    reason: str = ""
    rivals: tuple[Remeasured, ...] = ()
    refreshed: Record | None = None

    @property
    def now(self) -> Measurement | None:
        """The winner's new measurement."""
        return next((r.now for r in self.rivals[:1] if isinstance(r.now, Measurement)), None)


def reverify(
    records: Sequence[Record],
    *,
    operation: Operation[Any] | None = None,
    runner: Runner | None = None,
    options: RunnerOptions | None = None,
    within: float = MAX_EXCESS,
    seed: int = 0,
) -> Iterator[VerifyResult]:
    """Measures each record's entries, the library and the model's choice, interleaved. Yields verdicts on the winners.

    Several records are verified at once if candidates compile concurrently. Verdicts are yielded as they are reached.

    Args:
      records: to verify; records of other chips than the runner's cannot be verified.
      operation: the operation of all records; None loads each by its name, from the built-in or already loaded ones.
      runner: runs the schedules; by default one is started for all of them and closed at the end.
      options: options of a runner that is started here.
      within: maximum excess of the winner over the fastest, as a share.
      seed: of the order within each round.

    Raises:
      WorkerError: the workers cannot start.
    """
    arguments.checked_number("within", within)
    arguments.checked_seed(seed)
    named: list[tuple[Operation[Any], Record]] = []
    for record in records:
        if record.estimated:
            yield VerifyResult(
                record, "elsewhere", "it is an estimate of the compiler, without a time to measure again; tune it"
            )
            continue
        try:
            named.append((operation or load_known(record.key.operation), record))
        except ValueError as error:
            yield VerifyResult(record, "elsewhere", f"{error}; give --operation file.py:NAME")
    with contextlib.ExitStack() as stack:
        if named and runner is None:
            runner = start_runner(named[0][0], options)
            stack.callback(runner.close)
        to_verify: list[_RecordToVerify] = []
        for own, record in named:
            assert runner is not None
            if record.key.hardware != runner.hardware.id:
                yield VerifyResult(record, "elsewhere", f"it is for another chip than this one, {runner.hardware.id}")
            elif isinstance(prepared := _prepared(own, record, runner), VerifyResult):
                yield prepared
            else:
                to_verify.append(prepared)
        if not to_verify or runner is None:
            return
        at_once = 1 if runner.searches == 1 else max(runner.searches, runner.slots // COMPILERS_OF_A_RECORD)
        verdict = functools.partial(_verdict, runner=runner, within=within, seed=seed)
        threads = stack.enter_context(Threads[_RecordToVerify, VerifyResult](at_once, runner.close))
        for _, reached in threads.map(verdict, to_verify):
            yield reached


@dataclasses.dataclass(frozen=True)
class _RecordToVerify:
    """A record to measure."""

    operation: Operation[Any]
    problem: Problem
    record: Record


def _prepared(operation: Operation[Any], record: Record, runner: Runner) -> _RecordToVerify | VerifyResult:
    try:
        problem = operation.problem.from_canonical(record.key.problem)
    except ValueError as error:
        return VerifyResult(record, "broken", f"its problem is no longer valid for {operation.name}: {error}")
    own = dataclasses.replace(record, imported=None)  # verifies what may not be used before
    tracer = traced_by(operation, problem, runner)
    if isinstance(reason := transfer.recheck(operation, problem, runner.hardware, own, tracer=tracer), str):
        return VerifyResult(record, "broken", f"{reason}; tune it again")
    try:
        runner.capacity(operation, problem, record.winner.measurement.l2)
        return _RecordToVerify(operation, problem, record)
    except NoCandidate as error:
        return VerifyResult(record, "broken", str(error))


def _verdict(item: _RecordToVerify, runner: Runner, within: float, seed: int) -> VerifyResult:
    operation, problem, record = item.operation, item.problem, item.record
    rivals = _rivals(operation, problem, runner.hardware, record)
    with runner.reserve(operation, problem, record.winner.measurement.l2):
        rivals, ended = _timed(operation, problem, runner, rivals, record, seed)
    measured = {index: rival.now for index, rival in enumerate(rivals) if isinstance(rival.now, Measurement)}
    refreshed = _refreshed(operation, problem, record, runner, rivals, ended)
    won = rivals[0].now
    if isinstance(won, Failure):
        return VerifyResult(record, "broken", str(won), rivals, refreshed)
    best = min(measured, key=lambda index: measured[index].median_s)
    excess = won.median_s / measured[best].median_s - 1
    if excess > within:
        return VerifyResult(
            record, "slower", f"{_description(rivals[best])}, is {faster_text(excess)}", rivals, refreshed
        )
    return VerifyResult(record, "holds", "", rivals, refreshed)


def _rivals(operation: Operation[Any], problem: Problem, hardware: Hardware, record: Record) -> tuple[Remeasured, ...]:
    """Returns the schedules to measure, without times."""
    found: dict[tuple[Any, ...], Remeasured] = {}

    def add(role: str, backend: str, schedule: Schedule, predicted_s: float, then: Entry | None = None) -> None:
        version = operation.kernel(backend).version
        rival = Remeasured(role, backend, version, schedule, predicted_s, then, Failure("time", "not timed yet"))
        found.setdefault((backend, *sorted(schedule.items())), rival)

    roles = ["winner", "runner-up", *["best of its backend"] * len(record.entries)]
    for role, entry in zip(roles, record.entries, strict=False):
        add(role, entry.backend, entry.schedule, entry.predicted_s, entry)
    library = operation.library.backend
    add("library", library, {}, model_of(operation, operation.library, hardware).library_seconds(problem))
    with contextlib.suppress(NoCandidate):
        model = predict.predict(operation, problem, hardware, backends=frozenset(operation.backends) - {library})
        add("the model's choice", model.backend, model.schedule, model.predicted_s)
    return tuple(found.values())


def _timed(
    operation: Operation[Any], problem: Problem, runner: Runner, rivals: Sequence[Remeasured], record: Record, seed: int
) -> tuple[tuple[Remeasured, ...], Result]:
    """Returns `rivals` with times from a race of those that compile and are correct, and the result of the race."""
    repetitions, repetitions_of_round = runner.hardware.abilities.repetitions

    def task(rival: Remeasured, repetitions: int, incumbent_s: float | None = None) -> Task:
        return Task(
            operation,
            problem,
            rival.backend,
            rival.schedule,
            repetitions,
            record.winner.measurement.l2,
            incumbent_s,
        )

    by_label = {_label(rival): rival for rival in rivals}

    def first(label: str) -> Outcome:
        rival = by_label[label]
        if reason := illegal(operation.kernel(rival.backend), problem, runner.hardware, rival.schedule):
            return Failure("lower", reason)
        outcome = runner.measure(task(rival, repetitions))
        # A library that is far slower than the winner is compiled once, as in a search.
        again = task(rival, repetitions, record.winner.measurement.median_s)
        wrong = runner.confirm(again) if isinstance(outcome, Measurement) else None
        return wrong if isinstance(wrong, Failure) else outcome

    with Threads[str, Outcome](runner.capacity(operation, problem), runner.close) as threads:
        now = dict(threads.map(first, by_label))
    fastest_s = min((outcome.median_s for outcome in now.values() if isinstance(outcome, Measurement)), default=None)
    racing = []
    for label, rival in by_label.items():
        if isinstance(now[label], Measurement):
            kernel = operation.kernel(rival.backend)
            onchip = onchip_bytes(kernel, problem, runner.hardware, rival.schedule)
            racing.append(final_comparison.Contender(label, kernel.library, onchip, kernel.loses_ties))
    ended = final_comparison.run_off_finalists(
        runner,
        racing,
        lambda rival: runner.measure(task(by_label[rival.label], repetitions_of_round, fastest_s), again=True),
        seed=seed,
    )
    now |= {**ended.times, **ended.failures}
    return tuple(dataclasses.replace(rival, now=now[_label(rival)]) for rival in rivals), ended


def _refreshed(
    operation: Operation[Any],
    problem: Problem,
    record: Record,
    runner: Runner,
    rivals: Sequence[Remeasured],
    ended: Result,
) -> Record | None:
    """Returns the record as a search would write it today; None if the library, the baseline, has no time."""
    by_label, fingerprint = {_label(rival): rival for rival in rivals}, traced_by(operation, problem, runner)
    kept = final_comparison.fastest_finalists(
        ended.order, final_comparison.KEPT_FINALISTS, lambda label: by_label[label].backend
    )
    if operation.library.backend not in (by_label[label].backend for label in kept):
        return None

    def entry(label: str) -> Entry:
        rival = by_label[label]
        own = fingerprint(rival)
        return Entry(rival.backend, rival.version, rival.schedule, ended.times[label], rival.predicted_s, own)

    return dataclasses.replace(
        record,
        entries=tuple(map(entry, kept)),
        environment=runner.environment,
        confidence=ended.verdict,
        reference=reference(operation, problem, runner),
        legal=legal_schedules(operation, problem, runner),
        imported=None,
    )


def _label(rival: Remeasured) -> str:
    return label_of(rival.backend, rival.schedule)


def _description(rival: Remeasured) -> str:
    return f"{rival.role}, {choice_text(rival.backend, rival.schedule)}"
