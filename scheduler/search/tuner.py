"""Times the schedules of one problem on the device and stores the fastest."""

from __future__ import annotations

import collections
import contextlib
import dataclasses
import functools
import time
from collections.abc import Callable, Sequence
from typing import Any, NoReturn

from scheduler.core.arguments import allowed_backends
from scheduler.core.errors import NoCandidate, TakesHours
from scheduler.core.interrupts import Threads, interruptible
from scheduler.core.progress import Pace, Progress
from scheduler.core.records import (
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
from scheduler.measure.runner import CompilesAhead, Runner, RunnerOptions
from scheduler.measure.runner import Task as MeasureTask
from scheduler.model.pruning import counted
from scheduler.prediction.transfer import WORTH_A_TRIAL, Neighbour, nearest
from scheduler.search import baseline, candidates, runoff
from scheduler.search.task import BUDGET, SearchOptions, Task, sampler_of
from scheduler.search.trials import TrialParameters, Trials, TrialStore, TrialWriter
from scheduler.search.trials import seconds as time_of
from scheduler.store.lease import leased
from search_spaces.operation import Operation
from search_spaces.problem import Problem

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
    store: TrialStore | None = None,
    runner: Runner | None = None,
    options: RunnerOptions | None = None,
    progress: Callable[[Progress], None] | None = None,
    **search_options: Any,
) -> Record:
    """Searches the schedules of `problem` by timing them on the device, starting with the library's programs.

    If `store` has a valid record, it is returned without a search (see `baseline.is_current`). A search resumes an
    earlier one of the same problem that was interrupted: measurements of the same kernels under the same conditions
    count as trials and are not repeated. Failed trials are run again, because the kernel may have been fixed.

    If another process that shares `store` is tuning `problem`, this call waits for that process and returns its record.

    Args:
      store: receives every trial as it ends, and the record. If a write fails, a warning is issued, and trials are
        written again later and at the end.
      runner: runs the candidates; by default one is started and closed at the end. A `replay.Replay` needs no device:
        the search is then limited to the schedules in the recording.
      options: options of a runner that is started here.
      progress: called before the first trial and after each, from the calling thread.
      search_options: the fields of `SearchOptions`.

    Raises:
      TypeError, ValueError: as `SearchOptions`.
      NoCandidate: no candidate ran; the message counts the reasons.
      TakesHours: the search would take too long in interpret mode; the message suggests alternatives.
      CandidateFailed: the first failure, if `first_error` is set; chained to the candidate's exception, if there is
        one.
      WorkerError: the workers cannot start.
      UnknownChip: the chip is not in the hardware table, so no candidate can be chosen.
    """
    task = Task(operation, problem, SearchOptions(**search_options))
    with contextlib.ExitStack() as stack:
        if runner is None:
            runner = start_runner(operation, options)
            stack.callback(runner.close)
        if store is not None:
            hardware, tracer = runner.hardware, candidates.traced_by(operation, problem, runner)
            if not task.options.searches_known:
                known = baseline.is_current(task, hardware, store, tracer)
                if isinstance(known, Record):
                    return known
            made = stack.enter_context(leased(store, key_of(operation, problem, hardware)))
            # A backend that failed for the other process would fail for this one, too.
            if made is not None and not baseline.stale_reason(task, hardware, made, tracer):
                return made
        return search(task, runner, store, progress)


def search(task: Task, runner: Runner, store: TrialStore | None, progress: Callable[[Progress], None] | None) -> Record:
    """Runs `tune` without reading the record in `store`. The caller holds the lease of the problem."""
    runner.capacity(task.operation, task.problem, task.options.l2)  # raises if memory does not suffice
    return _Tuning(task, runner, store, progress).run()


class _Tuning:
    """A running search: its candidates, its trials and its runner."""

    def __init__(
        self, task: Task, runner: Runner, store: TrialStore | None, progress: Callable[[Progress], None] | None
    ) -> None:
        self.task, self.operation, self.problem, self.options = task, task.operation, task.problem, task.options
        self.runner, self.store, self.progress = runner, store, progress
        self.key = key_of(task.operation, task.problem, runner.hardware)
        self.fingerprint = candidates.traced_by(task.operation, task.problem, runner)
        self.reference = candidates.reference(task.operation, task.problem, runner)
        self.candidates: candidates.Candidates
        self.trials: Trials
        self.writer: TrialWriter
        self.stopped, self.excluded = "", 0
        self._finalists: dict[int, MeasureTask] = {}  # tasks of all candidates that have been finalists
        self.repetitions, self.repetitions_of_round = runner.hardware.abilities.repetitions

    def run(self) -> Record:
        options = self.options
        if any(0 in result.shape for result in self.problem.results()):
            raise NoCandidate(f"{self.key.operation} {self.problem} has an empty result: there is nothing to compute")
        if self.store is not None:
            baseline.refuse_to_replace_measured(self.key, self.runner.hardware, self.store)
        if (
            options.seconds is None
            and self.runner.hardware.abilities.interpreted
            and not isinstance(self.runner, candidates.Recorded)
        ):
            self._reject_long_search()
        # Reserve the device before planning, so that problems are served in the order in which they arrive.
        with self.runner.reserve(self.operation, self.problem, options.l2, exclusive=options.seconds is not None):
            known, near, parameters = self._known(), list[Neighbour](), None
            if self.store is not None:
                hardware = self.runner.hardware
                records = baseline.similar_records(self.operation, self.problem, hardware, self.store)
                near = nearest(self.operation, self.problem, hardware, records, within=WORTH_A_TRIAL)
                parameters = TrialParameters(self.operation, self.problem, hardware.target)
            self.candidates = candidates.collect(
                self.task, self.runner, known, near, baseline.imported_schedules(self.key, self.store)
            )
            self.writer = TrialWriter(self.store, self.key, self.runner.environment, parameters)
            self.trials = Trials(
                self.candidates.of, known, self.writer, first_error=options.first_error, fingerprint=self.fingerprint
            )
            self.writer.prepare()
            with self.writer:
                self._search()
                chosen = runoff.finalists(
                    self.trials, lambda index: self.runner.confirm(self._finalist(index)), self.runner
                )
                if not chosen:
                    self._fail_without_result()
                entries, verdict = self._run_off(chosen)
        record = Record(
            key=self.key,
            entries=entries,
            versions=self.candidates.versions,
            environment=self.runner.environment,
            budget=options.budget,
            tried=len(self.trials.ended),
            space=self.candidates.size,
            confidence=verdict,
            excluded=self.excluded,
            stopped=self.stopped,
            failed=tuple(runoff.all_failed(self.trials.ended.values())),
            library=self.operation.library.backend,
            reference=self.reference,
            legal=candidates.legal_schedules(self.operation, self.problem, self.runner),
            notes=(*self.candidates.notes, *runoff.notes_on_results(self.operation, self.trials, entries)),
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

    def _reject_long_search(self) -> None:
        """Raises TakesHours if interpreting the candidates would take too long."""

        def estimate_s(problem: Problem) -> float:
            return candidates.search_seconds(
                self.operation,
                problem,
                self.runner.hardware,
                backends=allowed_backends(self.operation, self.options.backends),
                budget=self.options.budget - 1,
                calls=problem.variant_count * (1 + timer.WARM_UP_CALLS + self.repetitions),
                finalists=runoff.FINALISTS,
                calls_of_finalist=calls_to_confirm(problem)
                + problem.variant_count * runoff.FEWEST_ROUNDS * (timer.WARM_UP_CALLS + self.repetitions_of_round),
            )

        if (wanted_s := estimate_s(self.problem)) <= LONGEST_INTERPRETED_S:
            return
        fitting = candidates.smaller(self.problem, lambda problem: estimate_s(problem) <= LONGEST_INTERPRETED_S)
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
        here = timing_conditions(self.problem, self.runner.hardware, self.options.l2)
        return {
            versioned(trial): trial
            for trial in made
            if isinstance(trial.outcome, Measurement)
            and (trial.outcome.clock, trial.outcome.l2) == here
            and trial.fingerprint == self.fingerprint(trial)
        }

    def _search(self) -> None:
        from scheduler.search.search import Search  # importing Optuna takes 0.4 s; a cache hit does not need it

        trials, seconds, seed = self.trials.ended, self.options.seconds, self.options.seed
        known = {index: time_of(trial) for index, trial in trials.items()}
        programs = [index for index, candidate in enumerate(self.candidates.of) if candidate.library]
        budget = max(self.options.budget, len(known) + any(index not in known for index in programs[:1]))
        first = list(dict.fromkeys([*programs, *self.candidates.seeds]))
        whole = [candidate.whole() for candidate in self.candidates.of]
        equal = candidates.EqualPrograms(whole, lambda index: self.fingerprint(self.candidates.of[index]), trials)
        patience, sampler = PATIENCE if budget <= BUDGET else MORE_PATIENCE, sampler_of(self.options.sampler, seed)
        search = Search(
            whole, budget=budget, seed=seed, first=first, known=known, patience=patience, sampler=sampler, same=equal
        )
        started = time.perf_counter()
        total = min(budget, len(whole))
        best = next((trials[index] for index in self.trials.measured()), None)
        pace = Pace(self.runner.slots)

        def step(last: Trial | None) -> Progress:
            elapsed, done = time.perf_counter() - started, len(trials)
            left = pace.left_s(total - done)
            if seconds is not None and left is not None:
                left = min(left, max(0.0, seconds - elapsed))
            return Progress(done, total, best, last, elapsed, left, self.trials.resumed)

        if self.progress is not None:
            self.progress(step(next(reversed(trials.values()), None)))
        latest: Progress | None = None
        with Threads[int, Outcome](self.runner.slots, self.runner.close) as threads:
            while True:
                # The first trial (of a library program, if there is one) always runs, even after the time limit: a
                # record needs an entry.
                has_first = threads.running or (programs[0] in trials if programs else trials)
                out_of_time = seconds is not None and bool(has_first) and time.perf_counter() - started > seconds
                while not out_of_time and threads.running < self._capacity() and (index := search.ask()) is not None:
                    measure = functools.partial(self.runner.measure, self._task(index, self.repetitions))
                    threads.start(index, functools.partial(pace.timed, measure))
                if threads.running < self._capacity():
                    self._compile_ahead()
                self.writer.flush()  # while the device runs the next candidates
                if latest is not None and self.progress is not None:
                    self.progress(latest)
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
        return self.runner.capacity(self.operation, self.problem, self.options.l2)

    def _task(self, index: int, repetitions: int) -> MeasureTask:
        c = self.candidates.of[index]
        return MeasureTask(
            self.operation,
            self.problem,
            c.backend,
            c.schedule,
            repetitions,
            self.options.l2,
            self.trials.fastest_s,
            raising=self.options.first_error and not c.library,
        )

    def _compile_ahead(self) -> None:
        """Lets idle compile processes compile the confirmation runs of the current leaders."""
        if isinstance(self.runner, CompilesAhead):
            trials = self.trials
            for index in runoff.fastest_finalists(
                trials.measured(), runoff.FINALISTS, lambda index: trials.ended[index].backend
            ):
                if index not in self._finalists:
                    self.runner.compile_ahead(self._finalist(index))

    def _finalist(self, index: int) -> MeasureTask:
        if index not in self._finalists:
            own = f"{self.trials.ended[index].fingerprint} {self.reference}".strip()
            self._finalists[index] = dataclasses.replace(self._task(index, self.repetitions), fingerprint=own)
        return self._finalists[index]

    def _run_off(self, chosen: Sequence[int]) -> tuple[tuple[Entry, ...], Verdict]:
        """Times the winner, the runner-up and the best of each other backend again, interleaved.

        Returns the entries of the record and the verdict. A single finalist is not timed again. Neither are
        deterministic times (estimates).
        """
        if len(chosen) == 1:
            return tuple(self._entry(i, self.trials.ended[i].outcome) for i in chosen), Verdict()
        loses_ties = self.operation.library.loses_ties
        rivals = {
            runoff.Contender(
                label_of(c.backend, c.schedule), c.library, c.onchip_bytes, c.library and loses_ties
            ): index
            for index, c in ((index, self.candidates.of[index]) for index in chosen)
        }
        index_of = {rival.label: index for rival, index in rivals.items()}
        if self.repetitions_of_round:
            ended = runoff.run_off_finalists(
                self.runner,
                list(rivals),
                lambda rival: self.runner.measure(self._task(rivals[rival], self.repetitions_of_round), again=True),
                seed=self.options.seed,
            )
        else:
            once = {rival: self.trials.ended[i].outcome for rival, i in rivals.items()}
            ended = runoff.rank_once({rival: time for rival, time in once.items() if isinstance(time, Measurement)})
        times: dict[int, Outcome] = {index_of[label]: ended.times[label] for label in ended.order}
        if times:
            for label, failure in ended.failures.items():
                self.trials.refute(index_of[label], failure)
        else:  # every finalist failed in the run-off: use the times of their trials
            times = {i: self.trials.ended[i].outcome for i in chosen}
        order = list(times)
        kept = runoff.fastest_finalists(order, runoff.KEPT_FINALISTS, lambda i: self.trials.ended[i].backend)
        return tuple(self._entry(i, times[i]) for i in kept), ended.verdict

    def _entry(self, index: int, measured: Outcome) -> Entry:
        assert isinstance(measured, Measurement)
        t = self.trials.ended[index]
        return Entry(t.backend, t.version, t.schedule, measured, t.predicted_s, t.fingerprint)
