"""tune(): the schedules of one problem timed on the device, and the fastest of them stored."""

from __future__ import annotations

import collections
import contextlib
import functools
import inspect
import time
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, NoReturn

from scheduler.core import checked
from scheduler.core.backends import allowed_backends
from scheduler.core.errors import MalformedRecord, NoCandidate, TakesHours
from scheduler.core.identity import Point, Versioned, key_of, label_of, versioned
from scheduler.core.interrupts import interruptible
from scheduler.core.progress import Pace, Progress
from scheduler.core.records import L2, L2S, Entry, Failure, Measurement, Outcome, Record, Trial, Verdict
from scheduler.core.threads import Threads
from scheduler.measure import timer
from scheduler.measure.bench import calls_to_confirm
from scheduler.measure.pool import start_runner
from scheduler.measure.reduced import smaller
from scheduler.measure.rotation import condition
from scheduler.measure.runner import CompilesAhead, Runner, RunnerOptions, Task
from scheduler.model.pruning import counted
from scheduler.prediction.transfer import WORTH_A_TRIAL, Neighbour, near, nearest
from scheduler.search.candidates import Candidates, Recorded, collect, fingerprint, identified, reference
from scheduler.search.final_comparison import FEWEST_ROUNDS, Rival, decided_by_one
from scheduler.search.finalists import FINALISTS, KEPT, all_failed, fastest, finalists, run_off
from scheduler.search.interpreter_time import search_seconds
from scheduler.search.named_samplers import MODEL, Sampler, sampler_of
from scheduler.search.settled import settled, useless
from scheduler.search.task import BUDGET, trials
from scheduler.search.trials import Keeper, Keeping, Trials
from scheduler.search.trials import seconds as time_of
from scheduler.store.lease import leased
from search_spaces.operation import Operation
from search_spaces.problem import Problem

if TYPE_CHECKING:
    from scheduler.search.describing import Describing

# A search gives up after so many trials in a row that brought nothing, where nothing more is expected: the second
# number where its budget is larger than the default.
PATIENCE, MORE_PATIENCE = 24, 64
# A search that is longer where kernels are interpreted, in seconds, is wanted by nobody who has not bounded it.
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
        of the last ones and nothing is expected: the record says which. None: what `effort` says.
      effort: "quick" (8 trials), "default" (64) or "full" (until nothing improves), in place of a `budget`.
      seconds: stop proposing trials after so many seconds. Where kernels are interpreted (on a CPU), a search without
        this bound that would take more than `LONGEST_INTERPRETED_S` is refused.
      seed: of the search; the inputs are always the same.
      sampler: what proposes schedules: "model" (the cost model's order, then a surrogate), one of Optuna's samplers
        ("tpe", "gp", "cmaes", "nsgaii", "qmc", "random"), ``module:NAME``, or an object: any sampler of Optuna.
      l2: whether candidates find their operands in memory ("cold") or in the cache, as far as they fit ("warm").
      store: gets every trial as it ends, and the record; where it refuses one, a warning says so, and it gets no more.
      runner: where candidates run; by default one is started and closed at the end. A `replay.Replay` needs no device:
        then only what it holds is searched.
      options: of a runner that is started here.
      progress: called before the first trial and after each, from the calling thread.

    Raises:
      TypeError, ValueError: a `budget`, `seconds` or `seed` that is no such number, or leaves no trial; another `l2`; a
        flag that is neither True nor False.
      NoCandidate: nothing ran; the message counts why.
      TakesHours: kernels are interpreted here, and that would take too long; the message says what to do.
      CandidateFailed: the first failure, where that is wanted, from what the candidate raised, if it did.
      WorkerError: the workers cannot start, or met a defect of the program that is no candidate's.
      UnknownChip: nothing is known of the chip that is here, so that no candidate can be chosen.
    """
    budget = checked.whole("budget", trials(budget, effort))
    sampler_of(sampler, seed)  # refuses what is none, before anything is started
    checked.positive_or_none("seconds", seconds)
    checked.seed(seed)
    checked.one_of("l2", l2, L2S)
    checked.flag("force", force)
    checked.flag("first_error", first_error)
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
            if made is not None and useless(operation, problem, hardware, made, backends, l2) is None:
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


# What `tune` may be told besides what is searched, where it is stored, and among which backends.
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
    store: Keeper | None,
    progress: Callable[[Progress], None] | None,
    sampler: Sampler = MODEL,
    first: Sequence[Point] = (),
    brief: bool = False,
) -> Record:
    """`tune`, whatever `store` holds and whoever else is at it: for who has asked, and holds its lease.

    Args:
      first, brief: as in `task.Task`.
    """
    tuning = _Tuning(operation, problem, runner, budget, l2, store, first_error, sampler)
    return tuning.run(allowed_backends(operation, backends), seconds, seed, progress, first, brief)


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
        sampler: Sampler,
    ) -> None:
        self.operation, self.problem, self.runner, self.sampler = operation, problem, runner, sampler
        self.budget, self.l2, self.first_error = budget, l2, first_error
        self.key = key_of(operation, problem, runner.hardware)
        self.keeping = Keeping(store)
        self.fingerprint = functools.partial(fingerprint, operation, problem, runner)
        self.candidates: Candidates
        self.trials: Trials
        self.stopped, self.excluded = "", 0
        self._finalists: dict[int, Task] = {}  # candidates that were finalists at some time
        self.repetitions, self.repetitions_of_round = runner.hardware.abilities.repetitions

    def run(
        self,
        allowed: frozenset[str],
        seconds: float | None,
        seed: int,
        progress: Callable[[Progress], None] | None,
        first: Sequence[Point],
        brief: bool,
    ) -> Record:
        if any(0 in result.shape for result in self.problem.results()):
            raise NoCandidate(f"{self.key.operation} {self.problem} has an empty result: there is nothing to compute")
        self._refuse_to_replace_measured()
        if seconds is None and self.runner.hardware.abilities.interpreted and not isinstance(self.runner, Recorded):
            self._refuse_hours(allowed)
        # It is held before it is planned, so that problems are held in the order in which they come.
        with self.runner.holding(self.operation, self.problem, self.l2, to_itself=seconds is not None):
            known, near = self._known(), self._near()
            self.candidates = collect(
                self.operation,
                self.problem,
                self.runner,
                allowed=allowed,
                budget=self.budget,
                known=known,
                near=near,
                first=first,
            )
            of, here, keeping = self.candidates.of, self.runner.environment, self.keeping
            self.trials = Trials(
                self.key,
                here,
                of,
                known,
                keeping,
                first_error=self.first_error,
                fingerprint=self.fingerprint,
                described=self._describing(),
            )
            keeping.prepare()
            with keeping:
                self._search(seconds, seed, progress)
                chosen = finalists(self.trials, self._confirm, self.runner)
                if not chosen:
                    self._end_without_answer()
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
            brief=brief,
            reference=reference(self.operation, self.problem, self.runner),
        )
        self.keeping.write(lambda store: store.put(record))
        return record

    def _end_without_answer(self) -> NoReturn:
        """Whoever asks again has changed something, and wants to see it tried."""
        self.keeping.write(lambda store: store.finish(self.key))
        failed = collections.Counter(str(trial.outcome) for trial in self.trials.ended.values())
        raise NoCandidate(
            f"none of {self.candidates.size} schedules of {self.key} ran: dropped {counted(self.candidates.dropped)}; "
            f"failed {counted(failed)}"
        )

    def _refuse_to_replace_measured(self) -> None:
        """Raises NoCandidate where times are estimated, and the store has a record that was measured."""
        if self.keeping.store is None or not self.runner.hardware.abilities.estimates:
            return
        with contextlib.suppress(MalformedRecord):
            record = self.keeping.store.get(self.key)
            if record is not None and not record.estimated:
                raise NoCandidate(
                    f"what is stored of {self.key} was measured there, and no estimate replaces that: tune it on "
                    f"{self.runner.hardware.kind}, or `tile-scheduler forget` it"
                )

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
                calls_of_finalist=calls_to_confirm(problem)
                + FEWEST_ROUNDS * (timer.WARM_UP_CALLS + self.repetitions_of_round),
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

    def _known(self) -> dict[Versioned, Trial]:
        """The trials of an earlier run of this search that were made as this run would make them."""
        if self.keeping.store is None:
            return {}
        made = self.keeping.store.trials(self.key, self.runner.environment, unfinished=True)
        here = condition(self.problem, self.runner.hardware, self.l2)
        return {
            versioned(trial): trial
            for trial in made
            if isinstance(trial.outcome, Measurement)
            and (trial.outcome.clock, trial.outcome.l2) == here
            and trial.fingerprint == self.fingerprint(trial)
        }

    def _near(self) -> list[Neighbour]:
        """Similar problems in the store."""
        if self.keeping.store is None:
            return []
        records = self.keeping.store.nearest(
            near(self.operation, self.problem, self.runner.hardware, within=WORTH_A_TRIAL)
        )
        return nearest(self.operation, self.problem, records, within=WORTH_A_TRIAL)

    def _describing(self) -> Describing | None:
        if self.keeping.store is None:
            return None
        from scheduler.search.describing import Describing

        return Describing(self.operation, self.problem, self.runner.hardware.target)

    def _search(self, seconds: float | None, seed: int, progress: Callable[[Progress], None] | None) -> None:
        from scheduler.search.search import Search  # Optuna takes 0.4 s to import, and a cached answer needs none of it

        candidates, trials = self.candidates.of, self.trials.ended
        known = {index: time_of(trial) for index, trial in trials.items()}
        programs = [index for index, candidate in enumerate(candidates) if candidate.library]
        budget = max(self.budget, len(known) + any(index not in known for index in programs[:1]))
        first = list(dict.fromkeys([*programs, *self.candidates.seeds]))
        whole = [candidate.whole() for candidate in candidates]
        search = Search(
            whole,
            budget=budget,
            seed=seed,
            first=first,
            known=known,
            patience=PATIENCE if budget <= BUDGET else MORE_PATIENCE,
            sampler=sampler_of(self.sampler, seed),
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
        told: Progress | None = None
        with Threads[int, Outcome](self.runner.slots, self.runner.close) as threads:
            while True:
                # The first trial, of a library's program where one takes part, is taken in any case: there must be an
                # answer.
                begun = threads.running or (programs[0] in trials if programs else trials)
                late = seconds is not None and bool(begun) and time.perf_counter() - started > seconds
                while not late and threads.running < self._capacity() and (index := search.ask()) is not None:
                    threads.start(index, functools.partial(pace.timed, functools.partial(self._measure, index)))
                if threads.running < self._capacity():
                    self._compile_ahead()
                self.keeping.flush()  # while the device is at the next ones
                if told is not None and progress is not None:
                    progress(told)
                if not threads.running:
                    self.stopped = f"the {seconds:g} s are over" if late else search.reason
                    self.excluded = search.excluded
                    return
                index, outcome = threads.next()
                trial = self.trials.end(index, outcome)
                search.tell(index, time_of(trial))
                best = trials[self.trials.measured()[0]] if self.trials.fastest_s is not None else None
                told = step(trial)

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
        """Has processes without a candidate to compile compile for the confirmation of those that lead now."""
        if isinstance(self.runner, CompilesAhead):
            trials = self.trials
            for index in fastest(trials.measured(), FINALISTS, lambda index: trials.ended[index].backend):
                if index not in self._finalists:
                    self.runner.compile_ahead(self._finalist(index))

    def _finalist(self, index: int) -> Task:
        if index not in self._finalists:
            task = self._task(index, self.repetitions)
            self._finalists[index] = identified(task, self.runner.hardware.target)
        return self._finalists[index]

    def _confirm(self, index: int) -> Failure | None:
        return self.runner.confirm(self._finalist(index))

    def _run_off(self, chosen: Sequence[int], seed: int) -> tuple[tuple[Entry, ...], Verdict]:
        """The winner, the runner-up and the best of each other backend, timed again in turns, and how sure that is.

        One alone is not timed again: it wins whatever it takes. Nor is anybody whose times are always the same.
        """
        if len(chosen) == 1:
            return tuple(self._entry(i, self.trials.ended[i].outcome) for i in chosen), Verdict()
        yields = self.operation.library.taken_apart
        rivals = {
            Rival(label_of(c.backend, c.schedule), c.library, c.onchip_bytes, c.library and yields): index
            for index, c in ((index, self.candidates.of[index]) for index in chosen)
        }
        labelled = {rival.label: index for rival, index in rivals.items()}
        if self.repetitions_of_round:
            ended = run_off(
                self.runner,
                list(rivals),
                lambda rival: self.runner.measure(self._task(rivals[rival], self.repetitions_of_round), again=True),
                seed=seed,
            )
        else:
            once = {rival: self.trials.ended[i].outcome for rival, i in rivals.items()}
            ended = decided_by_one({rival: time for rival, time in once.items() if isinstance(time, Measurement)})
        times: dict[int, Outcome] = {labelled[label]: ended.times[label] for label in ended.order}
        if times:
            for label, failure in ended.failures.items():
                self.trials.refute(labelled[label], failure)
        else:  # every finalist failed when it ran again: their trials are what is known
            times = {i: self.trials.ended[i].outcome for i in chosen}
        order = list(times)
        kept = fastest(order, KEPT, lambda i: self.trials.ended[i].backend)
        return tuple(self._entry(i, times[i]) for i in kept), ended.verdict

    def _entry(self, index: int, measured: Outcome) -> Entry:
        assert isinstance(measured, Measurement)
        t = self.trials.ended[index]
        return Entry(t.backend, t.version, t.schedule, measured, t.predicted_s, t.fingerprint)
