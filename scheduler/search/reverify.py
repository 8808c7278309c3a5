"""Measures stored winners again, interleaved with their competitors, and reports those that are no longer fastest."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Literal

from scheduler.core import arguments
from scheduler.core.errors import NoCandidate
from scheduler.core.fingerprints import Tracer
from scheduler.core.interrupts import Threads
from scheduler.core.records import Entry, Failure, Measurement, Outcome, Record, Schedule, choice_text, label_of
from scheduler.core.text import faster_text
from scheduler.measure.pool import start_runner
from scheduler.measure.runner import Runner, RunnerOptions, Task
from scheduler.model.constants import model_of
from scheduler.model.pruning import illegal, onchip_bytes
from scheduler.prediction import predict, transfer
from scheduler.search import runoff
from scheduler.search.candidates import legal_schedules, reference, traced_by
from scheduler.search.runoff import Result
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
        to_verify: list[_Verification] = []
        for own, record in named:
            assert runner is not None
            if record.key.hardware != runner.hardware.id:
                yield VerifyResult(record, "elsewhere", f"it is for another chip than this one, {runner.hardware.id}")
            elif isinstance(prepared := _prepared(own, record, runner), str):
                yield VerifyResult(record, "broken", prepared)
            else:
                to_verify.append(prepared)
        if not to_verify or runner is None:
            return
        at_once = 1 if runner.searches == 1 else max(runner.searches, runner.slots // COMPILERS_OF_A_RECORD)
        threads = stack.enter_context(Threads[_Verification, VerifyResult](at_once, runner.close))
        for _, reached in threads.map(lambda item: item.verdict(within, seed), to_verify):
            yield reached


def _prepared(operation: Operation[Any], record: Record, runner: Runner) -> _Verification | str:
    """Returns the verification of a record, or why its winner cannot be used."""
    try:
        problem = operation.problem.from_canonical(record.key.problem)
    except ValueError as error:
        return f"its problem is no longer valid for {operation.name}: {error}"
    own = dataclasses.replace(record, imported=None)  # verifies what may not be used before
    tracer = traced_by(operation, problem, runner)
    if isinstance(reason := transfer.recheck(operation, problem, runner.hardware, own, tracer=tracer), str):
        return f"{reason}; tune it again"
    try:
        runner.capacity(operation, problem, record.winner.measurement.l2)
        return _Verification(operation, problem, record, runner, tracer)
    except NoCandidate as error:
        return str(error)


@dataclasses.dataclass(frozen=True)
class _Verification:
    """A record to verify."""

    operation: Operation[Any]
    problem: Problem
    record: Record
    runner: Runner
    fingerprint: Tracer

    def verdict(self, within: float, seed: int) -> VerifyResult:
        with self.runner.reserve(self.operation, self.problem, self.record.winner.measurement.l2):
            rivals, ended = self._timed(self._rivals(), seed)
        result = functools.partial(
            VerifyResult, self.record, rivals=tuple(rivals.values()), refreshed=self._refreshed(rivals, ended)
        )
        won = next(iter(rivals.values())).now
        if isinstance(won, Failure):
            return result("broken", str(won))
        times_s = {label: r.now.median_s for label, r in rivals.items() if isinstance(r.now, Measurement)}
        best = min(times_s, key=times_s.__getitem__)
        excess = won.median_s / times_s[best] - 1
        if excess <= within:
            return result("holds")
        rival = rivals[best]
        named = f"{rival.role}, {choice_text(rival.backend, rival.schedule)}"
        return result("slower", f"{named}, is {faster_text(excess)}")

    def _rivals(self) -> dict[str, Remeasured]:
        """Returns the schedules to measure, without times, by their labels; the winner is the first."""
        operation, problem, hardware = self.operation, self.problem, self.runner.hardware
        found: dict[str, Remeasured] = {}

        def add(role: str, backend: str, schedule: Schedule, predicted_s: float, then: Entry | None = None) -> None:
            version = operation.kernel(backend).version
            rival = Remeasured(role, backend, version, schedule, predicted_s, then, Failure("time", "not timed yet"))
            found.setdefault(label_of(backend, schedule), rival)

        roles = ["winner", "runner-up", *["best of its backend"] * len(self.record.entries)]
        for role, entry in zip(roles, self.record.entries, strict=False):
            add(role, entry.backend, entry.schedule, entry.predicted_s, entry)
        library = operation.library.backend
        add("library", library, {}, model_of(operation, operation.library, hardware).library_seconds(problem))
        with contextlib.suppress(NoCandidate):
            model = predict.predict(operation, problem, hardware, backends=frozenset(operation.backends) - {library})
            add("the model's choice", model.backend, model.schedule, model.predicted_s)
        return found

    def _timed(self, rivals: Mapping[str, Remeasured], seed: int) -> tuple[dict[str, Remeasured], Result]:
        """Returns `rivals` with times from a race of those that compile and are correct, and the race's result."""
        operation, problem, runner, winner = self.operation, self.problem, self.runner, self.record.winner.measurement
        repetitions, repetitions_of_round = runner.hardware.abilities.repetitions

        def task(label: str, repetitions: int, incumbent_s: float | None = None) -> Task:
            rival = rivals[label]
            return Task(operation, problem, rival.backend, rival.schedule, repetitions, winner.l2, incumbent_s)

        def first(label: str) -> Outcome:
            kernel = operation.kernel(rivals[label].backend)
            if reason := illegal(kernel, problem, runner.hardware, rivals[label].schedule):
                return Failure("lower", reason)
            outcome = runner.measure(task(label, repetitions))
            # A library that is far slower than the winner is compiled once, as in a search.
            again = task(label, repetitions, winner.median_s)
            wrong = runner.confirm(again) if isinstance(outcome, Measurement) else None
            return wrong if isinstance(wrong, Failure) else outcome

        with Threads[str, Outcome](runner.capacity(operation, problem), runner.close) as threads:
            now = dict(threads.map(first, rivals))
        times = {label: outcome.median_s for label, outcome in now.items() if isinstance(outcome, Measurement)}
        racing = []
        for label in filter(times.__contains__, rivals):
            kernel = operation.kernel(rivals[label].backend)
            onchip = onchip_bytes(kernel, problem, runner.hardware, rivals[label].schedule)
            racing.append(runoff.Contender(label, kernel.library, onchip, kernel.loses_ties))
        fastest_s = min(times.values(), default=None)
        ended = runoff.run_off_finalists(
            runner,
            racing,
            lambda rival: runner.measure(task(rival.label, repetitions_of_round, fastest_s), again=True),
            seed=seed,
        )
        now |= {**ended.times, **ended.failures}
        return {label: dataclasses.replace(rival, now=now[label]) for label, rival in rivals.items()}, ended

    def _refreshed(self, rivals: Mapping[str, Remeasured], ended: Result) -> Record | None:
        """Returns the record as a search would write it today; None if the library, the baseline, has no time."""
        kept = runoff.fastest_finalists(ended.order, runoff.KEPT_FINALISTS, lambda label: rivals[label].backend)
        if self.operation.library.backend not in (rivals[label].backend for label in kept):
            return None

        def entry(label: str) -> Entry:
            r = rivals[label]
            return Entry(r.backend, r.version, r.schedule, ended.times[label], r.predicted_s, self.fingerprint(r))

        return dataclasses.replace(
            self.record,
            entries=tuple(map(entry, kept)),
            environment=self.runner.environment,
            confidence=ended.verdict,
            reference=reference(self.operation, self.problem, self.runner),
            legal=legal_schedules(self.operation, self.problem, self.runner),
            imported=None,
        )
