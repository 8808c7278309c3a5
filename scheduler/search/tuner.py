"""Times the schedules of one problem on the device and stores the fastest."""

from __future__ import annotations

import collections
import contextlib
import dataclasses
import functools
import inspect
import time
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, NoReturn

from scheduler.core import arguments
from scheduler.core.arguments import allowed_backends
from scheduler.core.errors import NoCandidate, TakesHours
from scheduler.core.interrupts import Threads, interruptible
from scheduler.core.progress import Pace, Progress
from scheduler.core.records import (
    L2,
    L2S,
    Entry,
    Measurement,
    Outcome,
    Record,
    Trial,
    Verdict,
    Versioned,
    key_of,
    label_of,
    versioned,
)
from scheduler.measure import timer
from scheduler.measure.bench import calls_to_confirm
from scheduler.measure.buffers import timing_conditions
from scheduler.measure.pool import start_runner
from scheduler.measure.runner import CompilesAhead, Runner, RunnerOptions, Task
from scheduler.model.pruning import counted
from scheduler.prediction.transfer import WORTH_A_TRIAL, Neighbour, nearest
from scheduler.search.baseline import (
    imported_schedules,
    is_current,
    refuse_to_replace_measured,
    similar_records,
    stale_reason,
)
from scheduler.search.candidates import (
    Candidates,
    EqualPrograms,
    Recorded,
    collect,
    legal_schedules,
    reference,
    search_seconds,
    smaller,
    traced_by,
)
from scheduler.search.final_comparison import (
    FEWEST_ROUNDS,
    FINALISTS,
    KEPT_FINALISTS,
    Contender,
    all_failed,
    fastest_finalists,
    finalists,
    notes_on_results,
    rank_once,
    run_off_finalists,
)
from scheduler.search.named_samplers import MODEL, Sampler, sampler_of
from scheduler.search.task import BUDGET, trials
from scheduler.search.trials import Trials, TrialStore, TrialWriter
from scheduler.search.trials import seconds as time_of
from scheduler.store.lease import leased
from search_spaces.operation import Operation
from search_spaces.problem import Problem

if TYPE_CHECKING:
    from scheduler.search.trial_parameters import TrialParameters

# Trials in a row without an improvement after which a search stops, if no further improvement is expected. The second
# value applies to budgets above the default.
PATIENCE, MORE_PATIENCE = 24, 64
# Longest estimated duration, in seconds, of a search in interpret mode that runs without a time limit.
LONGEST_INTERPRETED_S = 600.0


@interruptible()
def tune(
    operation: Operation[Any],
    problem: Problem,
    *,
    backends: frozenset[str] | None = None,
    force: bool = False,
    first_error: bool = False,
    budget: int | None = None,
    effort: str | None = None,
    seconds: float | None = None,
    seed: int = 0,
    sampler: Sampler = MODEL,
    l2: L2 = "cold",
    store: TrialStore | None = None,
    runner: Runner | None = None,
    options: RunnerOptions | None = None,
    progress: Callable[[Progress], None] | None = None,
) -> Record:
    """Searches the schedules of `problem` by timing them on the device, starting with the library's programs.

    If `store` has a valid record, it is returned without a search (see `baseline.is_current`). A search resumes an
    earlier one of the same problem that was interrupted: measurements of the same kernels under the same conditions
    count as trials and are not repeated. Failed trials are run again, because the kernel may have been fixed.

    If another process that shares `store` is tuning `problem`, this call waits for that process and returns its record.

    Args:
      backends: kernels to try in addition to the library; None tries all that support the problem.
      force: search even if `store` has a valid record.
      first_error: search, and raise the first failure of a candidate (except the library's) instead of continuing.
      budget: maximum number of trials, including the library's. The search stops earlier if no untried candidate can
        win, or if the last trials brought no improvement and none is expected; the record gives the reason. None: set
        by `effort`.
      effort: "quick" (8 trials), "default" (64) or "full" (until nothing improves), in place of a `budget`.
      seconds: time after which no more trials are proposed. Without this limit, a search in interpret mode (on a CPU)
        that would take more than `LONGEST_INTERPRETED_S` is rejected.
      seed: seed of the search; the inputs are always the same.
      sampler: proposes schedules: "model" (the cost model's order, then a surrogate), the name of an Optuna sampler
        ("tpe", "gp", "cmaes", "nsgaii", "qmc", "random"), ``module:NAME``, or any Optuna sampler object.
      l2: whether candidates read their operands from memory ("cold") or, as far as they fit, from the cache ("warm").
      store: receives every trial as it ends, and the record. If a write fails, a warning is issued, and trials are
        written again later and at the end.
      runner: runs the candidates; by default one is started and closed at the end. A `replay.Replay` needs no device:
        the search is then limited to the schedules in the recording.
      options: options of a runner that is started here.
      progress: called before the first trial and after each, from the calling thread.

    Raises:
      TypeError, ValueError: `budget`, `seconds` or `seed` is not a valid number or leaves no trial; `l2` is not a known
        value; a flag is not a bool.
      NoCandidate: no candidate ran; the message counts the reasons.
      TakesHours: the search would take too long in interpret mode; the message suggests alternatives.
      CandidateFailed: the first failure, if `first_error` is set; chained to the candidate's exception, if there is
        one.
      WorkerError: the workers cannot start.
      UnknownChip: the chip is not in the hardware table, so no candidate can be chosen.
    """
    budget = arguments.checked_integer("budget", trials(budget, effort))
    sampler_of(sampler, seed)  # validates the sampler before anything is started
    arguments.checked_positive_or_none("seconds", seconds)
    arguments.checked_seed(seed)
    arguments.checked_choice("l2", l2, L2S)
    arguments.checked_flag("force", force)
    arguments.checked_flag("first_error", first_error)
    with contextlib.ExitStack() as stack:
        if runner is None:
            runner = start_runner(operation, options)
            stack.callback(runner.close)
        runner.capacity(operation, problem, l2)  # raises if the problem does not fit in memory, before a store is read
        if store is not None:
            hardware, tracer = runner.hardware, traced_by(operation, problem, runner)
            if not (force or first_error):
                known = is_current(operation, problem, hardware, store, backends=backends, l2=l2, tracer=tracer)
                if isinstance(known, Record):
                    return known
            made = stack.enter_context(leased(store, key_of(operation, problem, hardware)))
            # A backend that failed for the other process would fail for this one, too.
            if made is not None and not stale_reason(operation, problem, hardware, made, backends, l2, tracer=tracer):
                return made
        return search(
            operation,
            problem,
            runner,
            backends=backends,
            first_error=first_error,
            budget=budget,
            seconds=seconds,
            seed=seed,
            sampler=sampler,
            l2=l2,
            store=store,
            progress=progress,
        )


# Options of `tune` other than `backends` and `store`.
OPTIONS = tuple(
    parameter.name
    for parameter in inspect.signature(tune).parameters.values()
    if parameter.kind is parameter.KEYWORD_ONLY and parameter.name not in ("backends", "store")
)


def search(
    operation: Operation[Any],
    problem: Problem,
    runner: Runner,
    *,
    backends: frozenset[str] | None,
    first_error: bool,
    budget: int,
    seconds: float | None,
    seed: int,
    l2: L2,
    store: TrialStore | None,
    progress: Callable[[Progress], None] | None,
    sampler: Sampler = MODEL,
) -> Record:
    """Runs `tune` without reading the record in `store`. The caller holds the lease of the problem."""
    tuning = _Tuning(operation, problem, runner, budget, l2, store, first_error, sampler)
    return tuning.run(allowed_backends(operation, backends), seconds, seed, progress)


class _Tuning:
    """A running search: its candidates, its trials and its runner."""

    def __init__(
        self,
        operation: Operation[Any],
        problem: Problem,
        runner: Runner,
        budget: int,
        l2: L2,
        store: TrialStore | None,
        first_error: bool,
        sampler: Sampler,
    ) -> None:
        self.operation, self.problem, self.runner, self.sampler = operation, problem, runner, sampler
        self.budget, self.l2, self.first_error = budget, l2, first_error
        self.key = key_of(operation, problem, runner.hardware)
        self.store = store
        self.fingerprint, self.reference = traced_by(operation, problem, runner), reference(operation, problem, runner)
        self.candidates: Candidates
        self.trials: Trials
        self.writer: TrialWriter
        self.stopped, self.excluded = "", 0
        self._finalists: dict[int, Task] = {}  # tasks of all candidates that have been finalists
        self.repetitions, self.repetitions_of_round = runner.hardware.abilities.repetitions

    def run(
        self,
        allowed: frozenset[str],
        seconds: float | None,
        seed: int,
        progress: Callable[[Progress], None] | None,
    ) -> Record:
        if any(0 in result.shape for result in self.problem.results()):
            raise NoCandidate(f"{self.key.operation} {self.problem} has an empty result: there is nothing to compute")
        if self.store is not None:
            refuse_to_replace_measured(self.key, self.runner.hardware, self.store)
        if seconds is None and self.runner.hardware.abilities.interpreted and not isinstance(self.runner, Recorded):
            self._reject_long_search(allowed)
        # Reserve the device before planning, so that problems are served in the order in which they arrive.
        with self.runner.reserve(self.operation, self.problem, self.l2, exclusive=seconds is not None):
            known, near = self._known(), self._near()
            self.candidates = collect(
                self.operation,
                self.problem,
                self.runner,
                allowed=allowed,
                budget=self.budget,
                known=known,
                near=near,
                first=imported_schedules(self.key, self.store),
            )
            self.writer = TrialWriter(self.store, self.key, self.runner.environment, self._trial_parameters())
            self.trials = Trials(
                self.candidates.of, known, self.writer, first_error=self.first_error, fingerprint=self.fingerprint
            )
            self.writer.prepare()
            with self.writer:
                self._search(seconds, seed, progress)
                chosen = finalists(self.trials, lambda index: self.runner.confirm(self._finalist(index)), self.runner)
                if not chosen:
                    self._fail_without_result()
                entries, verdict = self._run_off(chosen, seed)
        record = Record(
            key=self.key,
            entries=entries,
            versions=self.candidates.versions,
            environment=self.runner.environment,
            budget=self.budget,
            tried=len(self.trials.ended),
            space=self.candidates.size,
            confidence=verdict,
            excluded=self.excluded,
            stopped=self.stopped,
            failed=tuple(all_failed(self.trials.ended.values())),
            library=self.operation.library.backend,
            reference=self.reference,
            legal=legal_schedules(self.operation, self.problem, self.runner),
            notes=(*self.candidates.notes, *notes_on_results(self.operation, self.trials, entries)),
        )
        self.writer.finish(lambda store: store.put(record), "the record")
        return record

    def _fail_without_result(self) -> NoReturn:
        """Marks the search as finished, so that a later `tune` tries every candidate again, and raises NoCandidate."""
        self.writer.finish(lambda store: store.finish(self.key), "the end of the search")
        failed = collections.Counter(str(trial.outcome) for trial in self.trials.ended.values())
        raise NoCandidate(
            f"none of {self.candidates.size} schedules of {self.key} ran: dropped {counted(self.candidates.dropped)}; "
            f"failed {counted(failed)}"
        )

    def _reject_long_search(self, allowed: frozenset[str]) -> None:
        """Raises TakesHours if interpreting the candidates would take too long."""

        def estimate_s(problem: Problem) -> float:
            return search_seconds(
                self.operation,
                problem,
                self.runner.hardware,
                backends=allowed,
                budget=self.budget - 1,
                calls=problem.variant_count * (1 + timer.WARM_UP_CALLS + self.repetitions),
                finalists=FINALISTS,
                calls_of_finalist=calls_to_confirm(problem)
                + problem.variant_count * FEWEST_ROUNDS * (timer.WARM_UP_CALLS + self.repetitions_of_round),
            )

        if (wanted_s := estimate_s(self.problem)) <= LONGEST_INTERPRETED_S:
            return
        fitting = smaller(self.problem, lambda problem: estimate_s(problem) <= LONGEST_INTERPRETED_S)
        instead = "" if fitting is None else f"tune a smaller one ({fitting}), or "
        time_s = f"{wanted_s / 60:.0f} minutes" if wanted_s < 7200 else f"{wanted_s / 3600:.0f} hours"
        raise TakesHours(
            f"{self.operation.name} {self.problem} takes {time_s} or more to tune on a CPU, where Pallas kernels are "
            f"interpreted: {instead}set a time limit (--seconds 600, seconds=600)"
        )

    def _known(self) -> dict[Versioned, Trial]:
        """Returns measurements of an interrupted run of this search, made with the same kernels and conditions."""
        if self.store is None:
            return {}
        made = self.store.trials(self.key, self.runner.environment, unfinished=True)
        here = timing_conditions(self.problem, self.runner.hardware, self.l2)
        return {
            versioned(trial): trial
            for trial in made
            if isinstance(trial.outcome, Measurement)
            and (trial.outcome.clock, trial.outcome.l2) == here
            and trial.fingerprint == self.fingerprint(trial)
        }

    def _near(self) -> list[Neighbour]:
        """Returns similar problems, on this chip or a sibling, with their records."""
        if self.store is None:
            return []
        hardware = self.runner.hardware
        records = similar_records(self.operation, self.problem, hardware, self.store)
        return nearest(self.operation, self.problem, hardware, records, within=WORTH_A_TRIAL)

    def _trial_parameters(self) -> TrialParameters | None:
        if self.store is None:
            return None
        from scheduler.search.trial_parameters import TrialParameters

        return TrialParameters(self.operation, self.problem, self.runner.hardware.target)

    def _search(self, seconds: float | None, seed: int, progress: Callable[[Progress], None] | None) -> None:
        from scheduler.search.search import Search  # importing Optuna takes 0.4 s; a cache hit does not need it

        candidates, trials = self.candidates.of, self.trials.ended
        known = {index: time_of(trial) for index, trial in trials.items()}
        programs = [index for index, candidate in enumerate(candidates) if candidate.library]
        budget = max(self.budget, len(known) + any(index not in known for index in programs[:1]))
        first = list(dict.fromkeys([*programs, *self.candidates.seeds]))
        whole = [candidate.whole() for candidate in candidates]
        equal = EqualPrograms(whole, lambda index: self.fingerprint(candidates[index]), trials)
        patience, sampler = PATIENCE if budget <= BUDGET else MORE_PATIENCE, sampler_of(self.sampler, seed)
        search = Search(
            whole, budget=budget, seed=seed, first=first, known=known, patience=patience, sampler=sampler, same=equal
        )
        started = time.perf_counter()
        total = min(budget, len(candidates))
        best = next((trials[index] for index in self.trials.measured()), None)
        pace = Pace(self.runner.slots)

        def step(last: Trial | None) -> Progress:
            elapsed, done = time.perf_counter() - started, len(trials)
            left = pace.left_s(total - done)
            if seconds is not None and left is not None:
                left = min(left, max(0.0, seconds - elapsed))
            return Progress(done, total, best, last, elapsed, left, self.trials.resumed)

        if progress is not None:
            progress(step(next(reversed(trials.values()), None)))
        latest: Progress | None = None
        with Threads[int, Outcome](self.runner.slots, self.runner.close) as threads:
            while True:
                # The first trial (of a library program, if there is one) always runs, even after the time limit: a
                # record needs an entry.
                has_first = threads.running or (programs[0] in trials if programs else trials)
                out_of_time = seconds is not None and bool(has_first) and time.perf_counter() - started > seconds
                while not out_of_time and threads.running < self._capacity() and (index := search.ask()) is not None:
                    threads.start(index, functools.partial(pace.timed, functools.partial(self._measure, index)))
                if threads.running < self._capacity():
                    self._compile_ahead()
                self.writer.flush()  # while the device runs the next candidates
                if latest is not None and progress is not None:
                    progress(latest)
                if not threads.running:
                    equal.warn_of_unused(self.operation.name)
                    self.stopped = f"the {seconds:g} s are over" if out_of_time else search.reason
                    self.excluded = search.excluded
                    return
                index, outcome = threads.next()
                trial = self.trials.end(index, outcome)
                search.tell(index, time_of(trial))
                best = trials[self.trials.measured()[0]] if self.trials.fastest_s is not None else None
                latest = step(trial)

    def _capacity(self) -> int:
        return self.runner.capacity(self.operation, self.problem, self.l2)

    def _task(self, index: int, repetitions: int) -> Task:
        c = self.candidates.of[index]
        return Task(
            self.operation,
            self.problem,
            c.backend,
            c.schedule,
            repetitions,
            self.l2,
            self.trials.fastest_s,
            raising=self.first_error and not c.library,
        )

    def _measure(self, index: int) -> Outcome:
        return self.runner.measure(self._task(index, self.repetitions))

    def _compile_ahead(self) -> None:
        """Lets idle compile processes compile the confirmation runs of the current leaders."""
        if isinstance(self.runner, CompilesAhead):
            trials = self.trials
            for index in fastest_finalists(trials.measured(), FINALISTS, lambda index: trials.ended[index].backend):
                if index not in self._finalists:
                    self.runner.compile_ahead(self._finalist(index))

    def _finalist(self, index: int) -> Task:
        if index not in self._finalists:
            own = f"{self.trials.ended[index].fingerprint} {self.reference}".strip()
            self._finalists[index] = dataclasses.replace(self._task(index, self.repetitions), fingerprint=own)
        return self._finalists[index]

    def _run_off(self, chosen: Sequence[int], seed: int) -> tuple[tuple[Entry, ...], Verdict]:
        """Times the winner, the runner-up and the best of each other backend again, interleaved.

        Returns the entries of the record and the verdict. A single finalist is not timed again. Neither are
        deterministic times (estimates).
        """
        if len(chosen) == 1:
            return tuple(self._entry(i, self.trials.ended[i].outcome) for i in chosen), Verdict()
        loses_ties = self.operation.library.loses_ties
        rivals = {
            Contender(label_of(c.backend, c.schedule), c.library, c.onchip_bytes, c.library and loses_ties): index
            for index, c in ((index, self.candidates.of[index]) for index in chosen)
        }
        index_of = {rival.label: index for rival, index in rivals.items()}
        if self.repetitions_of_round:
            ended = run_off_finalists(
                self.runner,
                list(rivals),
                lambda rival: self.runner.measure(self._task(rivals[rival], self.repetitions_of_round), again=True),
                seed=seed,
            )
        else:
            once = {rival: self.trials.ended[i].outcome for rival, i in rivals.items()}
            ended = rank_once({rival: time for rival, time in once.items() if isinstance(time, Measurement)})
        times: dict[int, Outcome] = {index_of[label]: ended.times[label] for label in ended.order}
        if times:
            for label, failure in ended.failures.items():
                self.trials.refute(index_of[label], failure)
        else:  # every finalist failed in the run-off: use the times of their trials
            times = {i: self.trials.ended[i].outcome for i in chosen}
        order = list(times)
        kept = fastest_finalists(order, KEPT_FINALISTS, lambda i: self.trials.ended[i].backend)
        return tuple(self._entry(i, times[i]) for i in kept), ended.verdict

    def _entry(self, index: int, measured: Outcome) -> Entry:
        assert isinstance(measured, Measurement)
        t = self.trials.ended[index]
        return Entry(t.backend, t.version, t.schedule, measured, t.predicted_s, t.fingerprint)
