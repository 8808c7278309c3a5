"""Where the pieces meet: tune(), the paid answer."""

from __future__ import annotations

import collections
import contextlib
import dataclasses
import functools
import re
import time
import warnings
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, Protocol, runtime_checkable

from scheduler.core.backends import allowed_backends
from scheduler.core.codec import label_of
from scheduler.core.errors import CandidateFailed, MalformedRecord, NoCandidate, StoreError, TakesHours
from scheduler.core.hardware import Hardware
from scheduler.core.identity import key_of
from scheduler.core.progress import Pace, Progress
from scheduler.core.records import (
    L2,
    AllFailed,
    Entry,
    Environment,
    Failure,
    Key,
    Measurement,
    Outcome,
    Record,
    Schedule,
    Trial,
    Verdict,
)
from scheduler.core.threads import Threads
from scheduler.measure import timer
from scheduler.measure.bench import condition
from scheduler.measure.pool import start_runner
from scheduler.measure.runner import Runner, RunnerOptions, Task
from scheduler.model.constants import model_of
from scheduler.model.pruning import Candidate, prune
from scheduler.prediction.predict import counted
from scheduler.prediction.transfer import WORTH_A_TRIAL, Neighbour, nearest
from scheduler.prediction.validation import recheck
from scheduler.search.final_comparison import FEWEST_ROUNDS, MOST_ROUNDS, Rival, race
from scheduler.search.final_comparison import Result as RaceResult
from scheduler.search.interpreter_time import search_seconds, smaller
from scheduler.store.lease import Leases, leased
from search_spaces.kernel import Operation, Problem
from search_spaces.space import Choice

_Point = tuple[str, int, tuple[tuple[str, Choice], ...]]  # backend, version, schedule: what tells trials apart

FINALISTS = 4
# Of the legal schedules, the search chooses among this share that the model ranks first, but never among too few.
KEPT_SHARE = 0.25
KEPT_PER_TRIAL = 4
# A search gives up after so many trials in a row that brought nothing, where the surrogate expects nothing more.
PATIENCE = 24
# A search that is longer where kernels are interpreted, in seconds, is wanted by nobody who has not bounded it.
LONGEST_INTERPRETED_S = 600.0


@runtime_checkable
class Recorded(Protocol):
    """A runner that measures nothing: it tells what was measured once, and of some schedules only."""

    def version(self, backend: str, schedule: Schedule) -> int | None:
        """The kernel version that was measured with this schedule, or None where it was not."""


class Keeper(Leases, Protocol):
    """What keeps a search while it runs and what it found: a `Store`, or the cache as calls see it."""

    def put(self, record: Record) -> None: ...
    def records(self, *, operation: str, hardware: str) -> Iterable[Record]: ...
    def trials(self, key: Key, environment: Environment, *, unfinished: bool) -> list[Trial]: ...
    def add_trial(self, key: Key, trial: Trial, environment: Environment) -> None: ...
    def replace_trial(self, key: Key, trial: Trial) -> None: ...
    def finish(self, key: Key) -> None: ...


def settled(
    operation: Operation[Any],
    problem: Problem,
    hardware: Hardware,
    store: Keeper,
    *,
    backends: frozenset[str] | None = None,
    l2: L2 = "cold",
) -> Record | str:
    """The record in `store` that makes another search needless, or why one is needed, in words; "" for want of any.

    Such a record holds (`recheck`), was measured as now asked for, and each backend that is asked for, and still
    supports the problem, has run.
    """
    try:
        record = store.get(key_of(operation, problem, hardware))
    except MalformedRecord as error:
        return str(error)
    if record is None:
        return ""
    if reason := _useless(operation, problem, hardware, record, backends, l2):
        return reason
    asked = allowed_backends(operation, backends) | {operation.library.backend}
    failed = [
        str(lost)
        for lost in record.failed
        if lost.backend in asked and operation.kernel(lost.backend).supports(problem, hardware.target) is None
    ]
    return "; ".join(failed) or record


def _useless(
    operation: Operation[Any],
    problem: Problem,
    hardware: Hardware,
    record: Record,
    backends: frozenset[str] | None,
    l2: L2,
) -> str | None:
    """Why a record is no answer to what is now asked for, in words, or None where it is one."""
    entry = recheck(operation, problem, hardware, record, backends=backends)
    if isinstance(entry, str):
        return entry
    if l2 == "warm" and entry.measurement.l2 == "cold":  # a device without a cold state says "warm" whatever was asked
        return "it was measured with its operands in memory"
    return None


def tune(
    operation: Operation[Any],
    problem: Problem,
    *,
    backends: frozenset[str] | None = None,
    force: bool = False,
    first_error: bool = False,
    budget: int = 64,
    seconds: float | None = None,
    seed: int = 0,
    l2: L2 = "cold",
    store: Keeper | None = None,
    runner: Runner | None = None,
    options: RunnerOptions | None = None,
    progress: Callable[[Progress], None] | None = None,
) -> Record:
    """Searches the schedules of `problem` by timing them on the device; the library's programs are the first of them.

    What `store` holds already is the answer where no search is needed (see `settled`). Times that it has from a search
    of this problem that was cut short, by the same kernels and under the same conditions, are not taken again: they
    count as trials of this one. What failed then is tried again, as the kernel may have been mended.

    Where another process that shares `store` is tuning `problem` now, its record is waited for, and is the answer.

    Args:
      backends: kernels to try beside the library; None tries all that support the problem.
      force: search whatever `store` holds.
      first_error: search, and raise the first failure of a candidate, the library's aside, rather than go on.
      budget: trials at most, the library's included. Fewer are made where nothing untried can win, or nothing has come
        of the last ones and nothing is expected: the record says which.
      seconds: stop proposing trials after so many seconds. Where kernels are interpreted (on a CPU), a search without
        this bound that would take more than `LONGEST_INTERPRETED_S` is refused.
      seed: of the search; the inputs are always the same.
      l2: whether candidates find their operands in memory ("cold") or in the cache, as far as they fit ("warm").
      store: gets every trial as it ends, and the record; where it refuses one, a warning says so, and it gets no more.
      runner: where candidates run; by default one is started and closed at the end. A `replay.Replay` needs no device:
        then only what it holds is searched.
      options: of a runner that is started here.
      progress: called before the first trial and after each, from the calling thread.

    Raises:
      TypeError, ValueError: a `budget` or `seconds` that is no such number, or leaves no trial.
      NoCandidate: nothing ran; the message counts why.
      TakesHours: kernels are interpreted here, and that would take too long; the message says what to do.
      CandidateFailed: the first failure, where that is wanted, from what the candidate raised, if it did.
      WorkerError: the workers cannot start, or met a defect of the program that is no candidate's.
      UnknownChip: nothing is known of the chip that is here, so that no candidate can be chosen.
    """
    for name, given, kinds, wanted in (
        ("budget", budget, int, "whole number of trials"),
        ("seconds", seconds, int | float | None, "number, or None"),
    ):
        if not isinstance(given, kinds) or isinstance(given, bool):
            raise TypeError(f"{name}={given!r} is a {type(given).__name__}; give a {wanted}")
    if budget < 1:
        raise ValueError(f"a budget of {budget} trials cannot measure anything; give at least 1")
    if seconds is not None and seconds <= 0:
        raise ValueError(f"seconds={seconds} leaves no time for a trial; give a positive number, or None")
    with contextlib.ExitStack() as stack:
        if runner is None:
            runner = start_runner(operation, options)
            stack.callback(runner.close)
        runner.capacity(operation, problem, l2)  # or the memory holds none, and nothing need be asked
        if store is not None:
            hardware = runner.hardware
            if not (force or first_error):
                known = settled(operation, problem, hardware, store, backends=backends, l2=l2)
                if isinstance(known, Record):
                    return known
            made = stack.enter_context(leased(store, key_of(operation, problem, hardware)))
            # A backend that failed for the other process would fail for this one, too.
            if made is not None and _useless(operation, problem, hardware, made, backends, l2) is None:
                return made
        return _Tuning(operation, problem, runner, budget, l2, store, first_error).run(
            allowed_backends(operation, backends), seconds, seed, progress
        )


class _Tuning:
    """One search under way: what is known of its candidates, and where they run."""

    def __init__(
        self,
        operation: Operation[Any],
        problem: Problem,
        runner: Runner,
        budget: int,
        l2: L2,
        store: Keeper | None,
        first_error: bool,
    ) -> None:
        self.operation, self.problem, self.runner = operation, problem, runner
        self.budget, self.l2, self.store, self.first_error = budget, l2, store, first_error
        self.key = key_of(operation, problem, runner.hardware)
        self.candidates: list[Candidate] = []
        self.trials: dict[int, Trial] = {}  # candidate -> its trial, in the order they ended
        self.resumed = 0  # how many of them an earlier run of this search made
        self.dropped: collections.Counter[str] = collections.Counter()
        self.versions: dict[str, int] = {}
        self.size = 0
        self.incumbent_s: float | None = None
        self.seeds: list[int] = []  # the winners of similar problems, the nearest first
        self.stopped, self.excluded = "", 0
        self.repetitions, self.repetitions_of_round = runner.hardware.abilities.repetitions

    def run(
        self,
        allowed: frozenset[str],
        seconds: float | None,
        seed: int,
        progress: Callable[[Progress], None] | None,
    ) -> Record:
        if seconds is None and self.runner.hardware.abilities.interpreted and not isinstance(self.runner, Recorded):
            self._refuse_hours(allowed)
        self._collect(allowed, self._told())
        self._search(seconds, seed, progress)
        entries, verdict = self._run_off(self._finalists(), seed)
        record = Record(
            key=self.key,
            entries=entries,
            versions=self.versions,
            environment=self.runner.environment,
            budget=self.budget,
            tried=len(self.trials),
            space=self.size,
            confidence=verdict,
            excluded=self.excluded,
            stopped=self.stopped,
            failed=tuple(self._failed()),
        )
        self._keep(lambda store: store.put(record))
        return record

    def _keep(self, write: Callable[[Keeper], None]) -> None:
        """Writes to the store. One that refuses is done without from then on: the search costs more than its trace."""
        if self.store is None:
            return
        try:
            write(self.store)
        except StoreError as error:
            self.store = None
            warnings.warn(f"{error} (the search goes on without it)", RuntimeWarning, stacklevel=2)

    def _refuse_hours(self, allowed: frozenset[str]) -> None:
        """Raises TakesHours where the candidates take too long to interpret."""

        def estimate_s(problem: Problem) -> float:
            return search_seconds(
                self.operation,
                problem,
                self.runner.hardware,
                backends=allowed,
                budget=self.budget - 1,
                calls=1 + timer.WARM_UP_CALLS + self.repetitions,
                finalists=FINALISTS,
                calls_of_finalist=2 + FEWEST_ROUNDS * (timer.WARM_UP_CALLS + self.repetitions_of_round),
            )

        if (wanted_s := estimate_s(self.problem)) <= LONGEST_INTERPRETED_S:
            return
        fitting = smaller(self.problem, lambda problem: estimate_s(problem) <= LONGEST_INTERPRETED_S)
        instead = "" if fitting is None else f"tune a smaller one ({fitting}), or "
        time_s = f"{wanted_s / 60:.0f} minutes" if wanted_s < 7200 else f"{wanted_s / 3600:.0f} hours"
        raise TakesHours(
            f"{self.operation.name} {self.problem} takes {time_s} or more to tune on a CPU, where Pallas kernels are "
            f"interpreted: {instead}say for how long to search (--seconds 600, seconds=600)"
        )

    def _told(self) -> dict[_Point, Trial]:
        """The trials of an earlier run of this search that were made as this run would make them."""
        if self.store is None:
            return {}
        made = self.store.trials(self.key, self.runner.environment, unfinished=True)
        here = condition(self.problem, self.runner.hardware, self.l2)
        return {
            _point(trial): trial
            for trial in made
            if isinstance(trial.outcome, Measurement) and (trial.outcome.clock, trial.outcome.l2) == here
        }

    def _collect(self, allowed: frozenset[str], told: Mapping[_Point, Trial]) -> None:
        """Chooses the candidates, and takes for their trials those of `told`."""
        hardware = self.runner.hardware
        near = self._near()
        winners = _winners(near, besides=self.operation.library.backend)
        won = [(entry.backend, entry.version, tuple(sorted(entry.schedule.items()))) for entry in winners]
        # The library's programs first: whatever ends the search early, there is something to compare with.
        for kernel in sorted(self.operation.kernels, key=lambda kernel: not kernel.library):
            if kernel.backend not in allowed and not kernel.library:
                continue
            if reason := kernel.supports(self.problem, hardware.target):
                self.dropped[f"{kernel.backend}: {reason}"] += 1
                continue
            pruned = prune(kernel, self.problem, hardware, model_of(self.operation, kernel, hardware))
            legal = self._recorded(pruned.candidates())
            keep = max(KEPT_PER_TRIAL * self.budget, int(KEPT_SHARE * len(legal)))
            self.candidates += [
                c for rank, c in enumerate(legal) if rank < keep or _point(c) in told or _point(c) in won
            ]
            self.size += pruned.size
            self.dropped.update(pruned.dropped)
            self.versions[kernel.backend] = legal[0].version if legal else kernel.version
        index = {_point(candidate): i for i, candidate in enumerate(self.candidates)}
        self.trials = {index[point]: trial for point, trial in told.items() if point in index}
        self.seeds = [index[point] for point in dict.fromkeys(won) if point in index]
        self.resumed = len(self.trials)
        self.incumbent_s = min(filter(None, map(_seconds, self.trials.values())), default=None)

    def _near(self) -> list[Neighbour]:
        """Similar problems in the store."""
        if self.store is None:
            return []
        records = self.store.records(operation=self.key.operation, hardware=self.key.hardware)
        return nearest(self.operation, self.problem, records, within=WORTH_A_TRIAL)

    def _recorded(self, legal: list[Candidate]) -> list[Candidate]:
        """Those that the runner can tell about, as of the kernel version that it knows."""
        if not isinstance(self.runner, Recorded):
            return legal
        versions = [(candidate, self.runner.version(candidate.backend, candidate.schedule)) for candidate in legal]
        found = [
            dataclasses.replace(candidate, version=version) for candidate, version in versions if version is not None
        ]
        if len(found) < len(legal):
            self.dropped["not in the recording"] += len(legal) - len(found)
        return found

    def _search(self, seconds: float | None, seed: int, progress: Callable[[Progress], None] | None) -> None:
        from scheduler.search.search import Search  # Optuna takes 0.4 s to import, and a cached answer needs none of it

        known = {index: _seconds(trial) for index, trial in self.trials.items()}
        budget = max(self.budget, len(known) + (0 not in known))
        programs = [index for index, candidate in enumerate(self.candidates) if candidate.library]
        first = list(dict.fromkeys([*programs, *self.seeds]))
        whole = [candidate.whole() for candidate in self.candidates]
        search = Search(whole, budget=budget, seed=seed, first=first, known=known, patience=PATIENCE)
        started = time.perf_counter()
        total = min(budget, len(self.candidates))
        best = min(filter(_seconds, self.trials.values()), key=_time, default=None)
        pace = Pace(self.runner.slots)

        def tell(last: Trial | None) -> None:
            if progress is not None:
                elapsed, done = time.perf_counter() - started, len(self.trials)
                left = pace.left_s(total - done)
                if seconds is not None and left is not None:
                    left = min(left, max(0.0, seconds - elapsed))
                progress(Progress(done, total, best, last, elapsed, left, self.resumed))

        tell(next(reversed(self.trials.values()), None))
        with self._threads() as threads:
            while True:
                # The first trial, of a library's program, is taken in any case: there must be an answer.
                late = (
                    seconds is not None
                    and bool(threads.running or 0 in self.trials)
                    and time.perf_counter() - started > seconds
                )
                while not late and threads.running < self._capacity() and (index := search.ask()) is not None:
                    threads.start(index, functools.partial(pace.timed, functools.partial(self._measure, index)))
                if not threads.running:
                    self.stopped = f"the {seconds:g} s are over" if late else search.reason
                    self.excluded = search.excluded
                    return
                index, outcome = threads.next()
                trial = self._end_trial(index, outcome)
                time_s = _seconds(trial)
                search.tell(index, time_s)
                if time_s is not None and (best is None or time_s < _time(best)):
                    best = trial
                tell(trial)

    def _threads(self) -> Threads[int, Any]:
        """Who interrupts a search waits for no candidate: its runner is closed."""
        return Threads(self.runner.slots, self.runner.close)

    def _capacity(self) -> int:
        return self.runner.capacity(self.operation, self.problem, self.l2)

    def _task(self, index: int, repetitions: int) -> Task:
        c = self.candidates[index]
        return Task(
            self.operation,
            self.problem,
            c.backend,
            c.schedule,
            repetitions,
            self.l2,
            self.incumbent_s,
            raising=self.first_error and not c.library,
        )

    def _measure(self, index: int) -> Outcome:
        return self.runner.measure(self._task(index, self.repetitions))

    def _confirm(self, index: int) -> Failure | None:
        return self.runner.confirm(self._task(index, self.repetitions))

    def _end_trial(self, index: int, outcome: Outcome) -> Trial:
        self._raise_first(index, outcome)
        c = self.candidates[index]
        number = max((trial.number for trial in self.trials.values()), default=-1) + 1
        trial = Trial(number, c.backend, c.version, c.schedule, outcome, c.predicted_s)
        self.trials[index] = trial
        if isinstance(outcome, Measurement):
            self.incumbent_s = min(outcome.median_s, self.incumbent_s or outcome.median_s)
        self._keep(lambda store: store.add_trial(self.key, trial, self.runner.environment))
        return trial

    def _finalists(self) -> list[int]:
        """The fastest few and the best of each backend, each right for other inputs and on the problem's neighbour.

        One that is not has failed, and the next best takes its place.

        Raises:
          NoCandidate: nobody is left.
        """
        confirmed: set[int] = set()
        while True:
            measured = [i for i, trial in self.trials.items() if isinstance(trial.outcome, Measurement)]
            if not measured:
                # Whoever asks again has changed something, and wants to see it tried.
                self._keep(lambda store: store.finish(self.key))
                failed = collections.Counter(str(trial.outcome) for trial in self.trials.values())
                raise NoCandidate(
                    f"none of {self.size} schedules of {self.key} ran: dropped {counted(self.dropped)}; "
                    f"failed {counted(failed)}"
                )
            ranked = sorted(measured, key=lambda index: _time(self.trials[index]))
            finalists = list(dict.fromkeys([*ranked[:FINALISTS], *self._best_of_each_backend(ranked)]))
            asked = [index for index in finalists if index not in confirmed]
            if not asked:
                return finalists
            with self._threads() as threads:
                for index, failure in threads.map(self._confirm, asked):
                    confirmed.add(index)
                    if failure is not None:
                        self._refute(index, failure)

    def _raise_first(self, index: int, outcome: Outcome) -> None:
        c = self.candidates[index]
        if self.first_error and isinstance(outcome, Failure) and not c.library:
            raise CandidateFailed(f"{label_of(c.backend, c.schedule)}: {outcome}")

    def _refute(self, index: int, failure: Failure) -> None:
        self._raise_first(index, failure)
        trial = self.trials[index] = dataclasses.replace(self.trials[index], outcome=failure)
        self._keep(lambda store: store.replace_trial(self.key, trial))

    def _failed(self) -> Iterable[AllFailed]:
        """The backends that were tried and of which nothing ran, and why."""
        outcomes: dict[str, list[Outcome]] = {}
        for trial in self.trials.values():
            outcomes.setdefault(trial.backend, []).append(trial.outcome)
        for backend, ended in outcomes.items():
            each = [outcome for outcome in ended if isinstance(outcome, Failure)]
            if len(each) < len(ended):
                continue
            alike: dict[tuple[str, str], list[Failure]] = {}
            for failure in each:
                alike.setdefault((failure.stage, _NUMBER.sub("", failure.detail)), []).append(failure)
            # What lacked memory, or a process, says less of the kernel than what its own code did.
            most = max(alike.values(), key=lambda some: (AllFailed(backend, 0, some[0], 0).own, len(some)))
            yield AllFailed(backend, len(each), most[0], len(most))

    def _best_of_each_backend(self, ranked: Sequence[int]) -> list[int]:
        best: dict[str, int] = {}
        for index in ranked:
            best.setdefault(self.candidates[index].backend, index)
        return list(best.values())

    def _run_off(self, finalists: Sequence[int], seed: int) -> tuple[tuple[Entry, ...], Verdict]:
        """The winner, the runner-up and the best of each other backend, timed again in turns, and how sure that is."""
        rivals = {
            Rival(label_of(c.backend, c.schedule), c.library, c.onchip_bytes): index
            for index, c in ((index, self.candidates[index]) for index in finalists)
        }
        labelled = {rival.label: index for rival, index in rivals.items()}
        ended = run_off(
            self.runner,
            list(rivals),
            lambda rival: self.runner.measure(self._task(rivals[rival], self.repetitions_of_round), again=True),
            seed=seed,
        )
        times = {labelled[label]: ended.times[label] for label in ended.order}
        if times:
            for label, failure in ended.failures.items():
                self._refute(labelled[label], failure)
        else:  # every finalist failed when it ran again: their trials are what is known
            times = {i: self.trials[i].outcome for i in finalists}  # type: ignore[misc]
        order = list(times)
        kept = dict.fromkeys([*order[:2], *self._best_of_each_backend(order)])
        entries = (
            Entry(c.backend, c.version, c.schedule, times[i], c.predicted_s)
            for i, c in ((i, self.candidates[i]) for i in kept)
        )
        return tuple(entries), ended.verdict


def run_off(
    runner: Runner, rivals: Sequence[Rival], time_again: Callable[[Rival], Outcome], *, seed: int
) -> RaceResult:
    """A race on the device of `runner`; its verdict also notes who failed, and whether others used the device."""
    others = runner.others()
    most_rounds = FEWEST_ROUNDS if runner.hardware.abilities.interpreted else MOST_ROUNDS
    with Threads[Rival, Outcome](1, runner.close) as threads:  # which Ctrl-C need not wait for
        one_by_one = functools.partial(threads.call, time_again)
        ended = race(rivals, one_by_one, seed=seed, most_rounds=most_rounds)
    others = max(others, runner.others())
    notes = [
        *ended.verdict.notes,
        *(f"{label} failed when it ran again: {failure}" for label, failure in ended.failures.items()),
    ]
    if others:
        notes.append(f"{others} other process{'es were' if others > 1 else ' was'} on the device")
    return dataclasses.replace(ended, verdict=dataclasses.replace(ended.verdict, notes=tuple(notes)))


# What differs between failures for one reason: how large, where, by how much; but not the line that raised.
_NUMBER = re.compile(r"(?<![:.\d])[-+]?(\d[\d.]*(e[-+]?\d+)?|nan|inf)", re.IGNORECASE)


def _point(of: Candidate | Trial) -> _Point:
    return of.backend, of.version, tuple(sorted(of.schedule.items()))


def _winners(near: Sequence[Neighbour], *, besides: str) -> Iterable[Entry]:
    """The best entry of each backend but one of each of these problems, the nearest problem's first."""
    for neighbour in near:
        for backend in dict.fromkeys(entry.backend for entry in neighbour.record.entries if entry.backend != besides):
            if (entry := neighbour.best(backend)) is not None:
                yield entry


def _seconds(trial: Trial) -> float | None:
    return trial.outcome.median_s if isinstance(trial.outcome, Measurement) else None


def _time(trial: Trial) -> float:
    assert not isinstance(trial.outcome, Failure)
    return trial.outcome.median_s
