"""Measure every schedule of a problem, or a stated sample, into a recording."""

from __future__ import annotations

import collections
import dataclasses
import random
import re
import statistics
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from scheduler.core import checked, fingerprints
from scheduler.core.errors import NoCandidate, RecordingError
from scheduler.core.identity import point_of, schedule_to_text
from scheduler.core.interrupts import interruptible
from scheduler.core.progress import Pace, Progress
from scheduler.core.records import Failure, Measurement, Outcome, Sweep, Trial
from scheduler.core.threads import Threads
from scheduler.measure.replay import Recorder, second_pass
from scheduler.measure.runner import Runner, Task
from scheduler.model.pruning import Candidate
from scheduler.prediction import predict
from search_spaces.operation import Operation
from search_spaces.problem import Problem

REPETITIONS = 5
# Of the second pass.
ROUNDS = 10


def file_name(operation: Operation[Any], problem: Problem) -> str:
    """What a sweep's file is called where many are kept: ``matmul-m64-n64-k64.jsonl.gz``."""
    words = " ".join([operation.name, *(f"{name}{value}" for name, value in problem.told().items())])
    return re.sub(r"[^A-Za-z0-9_.]+", "-", words) + ".jsonl.gz"


@interruptible()
def sweep(
    operation: Operation[Any],
    problem: Problem,
    path: Path,
    runner: Runner,
    *,
    backends: frozenset[str] | None = None,
    sample: int | None = None,
    seed: int = 0,
    repetitions: int = REPETITIONS,
    again: int = 0,
    progress: Callable[[Progress], None] | None = None,
) -> tuple[Sweep, list[Trial]]:
    """Measures the legal schedules of `problem` in random order, the library's first, each into the file as it ends.

    Legal is what is left after the rules, on-chip memory and registers. A file that is there already is gone on with.

    The fastest of so many are partly the luckiest. A second pass measures them, and the library's, once more in turns:
    it chose nothing, so that no choice is compared with times that chose it.

    Args:
      path: of the recording.
      backends: kernels to sweep beside the library; None sweeps all.
      sample: how many schedules to draw at random; None, or more than there are, measures all.
      seed: of the draw and the order.
      repetitions: of each measurement.
      again: how many of the fastest to measure once more in `ROUNDS` rounds, in random order within each; a file that
        has a whole second pass keeps that one.
      progress: called before the first trial and after each.

    Returns:
      what was swept, and every trial of the first pass.

    Raises:
      NoCandidate: no kernel can do the problem here.
      RecordingError: the file cannot be written, or holds another sweep.
    """
    checked.whole_or_none("sample", sample)
    checked.seed(seed)
    checked.whole("repetitions", repetitions)
    checked.whole("again", again, least=0)
    runner.capacity(operation, problem)  # or the memory holds none, and nothing need be planned
    head, chosen = _plan(operation, problem, runner, backends, sample, seed, repetitions, again)
    with Recorder(path, head) as recorder, runner.holding(operation, problem):
        trials = list(recorder.trials)
        resumed, started = len(trials), time.perf_counter()
        _require_unchanged(operation, problem, runner, trials, path)
        done = {point_of(trial.backend, trial.schedule) for trial in trials}
        left = [candidate for candidate in chosen if point_of(candidate.backend, candidate.schedule) not in done]
        times = [
            (trial.outcome.median_s, n) for n, trial in enumerate(trials) if isinstance(trial.outcome, Measurement)
        ]

        pace = Pace(runner.slots)

        def tell() -> None:
            if progress is not None:
                elapsed_s, left_s = time.perf_counter() - started, pace.left_s(len(chosen) - len(trials))
                best, last = trials[min(times)[1]] if times else None, trials[-1] if trials else None
                progress(Progress(len(trials), len(chosen), best, last, elapsed_s, left_s, resumed))

        tell()

        def measure(c: Candidate) -> Outcome:
            return pace.timed(lambda: runner.measure(Task(operation, problem, c.backend, c.schedule, repetitions)))

        with Threads[Candidate, Outcome](runner.capacity(operation, problem), runner.close) as threads:
            for c, outcome in threads.map(measure, left):
                fingerprint = _fingerprint(operation, problem, runner, c) if isinstance(outcome, Measurement) else ""
                trial = Trial(len(trials), c.backend, c.version, c.schedule, outcome, c.predicted_s, fingerprint)
                trials.append(trial)
                recorder.add(trials[-1])
                if isinstance(outcome, Measurement):
                    times.append((outcome.median_s, len(trials) - 1))
                tell()
        fastest = second_pass(recorder.sweep, trials)
        if len(recorder.again) < len(fastest):
            recorder.add_again(_measured_again(operation, problem, runner, fastest, recorder.sweep))
    return recorder.sweep, trials


def _fingerprint(operation: Operation[Any], problem: Problem, runner: Runner, which: Candidate | Trial) -> str:
    kernel, target = operation.kernel(which.backend), runner.hardware.target
    return fingerprints.of_schedule(kernel, problem, which.schedule, target)


def _require_unchanged(
    operation: Operation[Any], problem: Problem, runner: Runner, trials: Sequence[Trial], path: Path
) -> None:
    """Raises a RecordingError where a kernel was edited after the recording was begun."""
    for trial in trials:
        if trial.fingerprint and trial.fingerprint != _fingerprint(operation, problem, runner, trial):
            raise RecordingError(
                f"{path} holds a sweep of another {trial.backend} kernel, which was edited since; delete it, or name "
                "another file"
            )


def _measured_again(
    operation: Operation[Any], problem: Problem, runner: Runner, trials: Sequence[Trial], head: Sweep
) -> list[Trial]:
    """These trials once more, in turns: with the repetitions of all rounds, or the failure that ended them."""
    samples: list[list[Measurement]] = [[] for _ in trials]
    failed: dict[int, Failure] = {}
    order = random.Random(head.seed)

    def measure(i: int) -> Outcome:
        task = Task(operation, problem, trials[i].backend, trials[i].schedule, head.repetitions)
        return runner.measure(task, again=True)

    with Threads[int, Outcome](1, runner.close) as threads:
        for _ in range(head.rounds):
            for i in order.sample(range(len(trials)), len(trials)):
                if i in failed:
                    continue
                match threads.call(measure, i):
                    case Measurement() as measured:
                        samples[i].append(measured)
                    case Failure() as failure:
                        failed[i] = failure

    def outcome(i: int) -> Outcome:
        if i in failed:
            return failed[i]
        taken = tuple(sample for measured in samples[i] for sample in measured.samples_s)
        return dataclasses.replace(samples[i][0], median_s=statistics.median(taken), samples_s=taken)

    return [dataclasses.replace(trial, outcome=outcome(i)) for i, trial in enumerate(trials)]


def _plan(
    operation: Operation[Any],
    problem: Problem,
    runner: Runner,
    backends: frozenset[str] | None,
    sample: int | None,
    seed: int,
    repetitions: int,
    again: int,
) -> tuple[Sweep, list[Candidate]]:
    """The head of the recording, and what to measure in which order."""
    libraries: list[Candidate] = []
    schedules: list[Candidate] = []
    refused: dict[str, str] = {}
    dropped: collections.Counter[str] = collections.Counter()
    space = 0
    for kernel, pruned in predict.explain(operation, problem, runner.hardware):
        if backends is not None and kernel.backend not in backends and not kernel.library:
            continue
        if isinstance(pruned, str):
            refused[kernel.backend] = pruned
            continue
        (libraries if kernel.library else schedules).extend(pruned.candidates())
        space += pruned.size
        dropped.update(pruned.dropped)
    legal = [*libraries, *schedules]
    if not legal:
        raise NoCandidate(f"nothing of {operation.name} {problem} can run on {runner.hardware.kind}: {refused}")
    if sample is not None and sample >= len(schedules):
        sample = None
    # The draw is from an order that no change of the model changes.
    schedules.sort(key=lambda candidate: (candidate.backend, schedule_to_text(candidate.schedule)))
    draw = random.Random(seed)
    chosen = [*libraries, *draw.sample(schedules, len(schedules) if sample is None else sample)]
    target = runner.hardware.target
    head = Sweep(
        operation=operation.name,
        problem=problem.canonical(),
        platform=target.platform,
        kind=target.kind,
        architecture=target.architecture,
        cores=target.cores,
        environment=runner.environment,
        versions={candidate.backend: candidate.version for candidate in legal},
        refused=refused,
        space=space,
        dropped=dict(dropped),
        legal=len(legal),
        sample=sample,
        seed=seed,
        repetitions=repetitions,
        again=again,
        rounds=ROUNDS if again else 0,
        library=operation.library.backend,
    )
    return head, chosen
