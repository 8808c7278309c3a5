"""Records sweeps (measurements of every schedule of a problem, or of a sample), and collects recorded measurements."""

from __future__ import annotations

import collections
import dataclasses
import hashlib
import random
import re
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from scheduler.core import arguments
from scheduler.core import hardware as chips
from scheduler.core.errors import NoCandidate, RecordingError
from scheduler.core.hardware import Hardware
from scheduler.core.interrupts import Threads, interruptible
from scheduler.core.progress import Pace, Progress
from scheduler.core.records import Environment, Failure, Measurement, Outcome, Sweep, Trial, point_of, schedule_to_text
from scheduler.measure import replay, timer
from scheduler.measure.buffers import timing_conditions
from scheduler.measure.replay import Recorder, second_pass
from scheduler.measure.runner import Runner, Task
from scheduler.model.pruning import Candidate
from scheduler.prediction import predict
from scheduler.search.candidates import traced_by
from scheduler.store.store import Store
from search_spaces.operation import Operation
from search_spaces.problem import Problem

REPETITIONS = 5
# Rounds of the second pass.
ROUNDS = 10
# Characters of a file name, from which on a digest replaces the rest. File systems allow 255.
LONGEST_NAME = 150


def file_name(operation: Operation[Any], problem: Problem) -> str:
    """Returns the file name of a sweep: ``matmul-m64-n64-k64.jsonl.gz``. A digest ends a name that is too long."""
    words = " ".join([operation.name, *(f"{name}{value}" for name, value in problem.non_default_fields().items())])
    name = re.sub(r"[^A-Za-z0-9_.]+", "-", words)
    if len(name) > LONGEST_NAME:
        name = f"{name[:LONGEST_NAME]}-{hashlib.sha256(words.encode()).hexdigest()[:12]}"
    return name + ".jsonl.gz"


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
    """Measures the legal schedules of `problem` in random order, the library's first, and appends each to the file.

    A schedule is legal if it satisfies the rules and the limits of on-chip memory and registers. An existing file is
    resumed.

    The fastest of many measurements are partly the luckiest. A second pass therefore measures the fastest schedules and
    the library's again, interleaved. Its times did not select the schedules, so comparisons between them are unbiased.

    Args:
      path: of the recording.
      backends: kernels to sweep in addition to the library; None sweeps all.
      sample: number of schedules to draw at random; None, or more than there are, measures all.
      seed: of the draw and the order.
      repetitions: of each measurement.
      again: number of the fastest schedules to measure again in `ROUNDS` rounds, in random order within each. If the
        file has a complete second pass, that pass is kept.
      progress: called before the first trial and after each.

    Returns:
      the head of the recording, and every trial of the first pass.

    Raises:
      NoCandidate: no kernel can run the problem here.
      RecordingError: the file cannot be written, or holds another sweep.
    """
    arguments.checked_integer_or_none("sample", sample)
    arguments.checked_seed(seed)
    arguments.checked_integer("repetitions", repetitions)
    arguments.checked_integer("again", again, least=0)
    runner.capacity(operation, problem)  # raises if the problem does not fit in memory, before the sweep is planned
    passes = {"repetitions": repetitions, "again": again, "rounds": ROUNDS if again else 0}
    head, chosen = _plan(operation, problem, runner, backends, sample, seed, **passes)
    with Recorder(path, head) as recorder, runner.reserve(operation, problem):
        trials = list(recorder.trials)
        resumed, started = len(trials), time.perf_counter()
        fingerprint = traced_by(operation, problem, runner)
        for trial in trials:
            if trial.fingerprint and trial.fingerprint != fingerprint(trial):
                raise RecordingError(
                    f"{path} has a sweep of an earlier version of the {trial.backend} kernel; delete the file, or "
                    "choose another one"
                )
        done = {point_of(trial.backend, trial.schedule) for trial in trials}
        left = [candidate for candidate in chosen if point_of(candidate.backend, candidate.schedule) not in done]
        times = [
            (trial.outcome.median_s, n) for n, trial in enumerate(trials) if isinstance(trial.outcome, Measurement)
        ]

        pace = Pace(runner.slots)

        def report() -> None:
            if progress is not None:
                elapsed_s, left_s = time.perf_counter() - started, pace.left_s(len(chosen) - len(trials))
                best, last = trials[min(times)[1]] if times else None, trials[-1] if trials else None
                progress(Progress(len(trials), len(chosen), best, last, elapsed_s, left_s, resumed))

        report()

        def measure(c: Candidate) -> Outcome:
            return pace.timed(lambda: runner.measure(Task(operation, problem, c.backend, c.schedule, repetitions)))

        with Threads[Candidate, Outcome](runner.capacity(operation, problem), runner.close) as threads:
            for c, outcome in threads.map(measure, left):
                digest = fingerprint(c) if isinstance(outcome, Measurement) else ""
                trial = Trial(len(trials), c.backend, c.version, c.schedule, outcome, c.predicted_s, digest)
                trials.append(trial)
                recorder.add(trials[-1])
                if isinstance(outcome, Measurement):
                    times.append((outcome.median_s, len(trials) - 1))
                report()
        fastest = second_pass(recorder.sweep, trials)
        if len(recorder.again) < len(fastest):
            recorder.add_again(_measured_again(operation, problem, runner, fastest, recorder.sweep))
    return recorder.sweep, trials


def _measured_again(
    operation: Operation[Any], problem: Problem, runner: Runner, trials: Sequence[Trial], head: Sweep
) -> list[Trial]:
    """Measures these trials again, interleaved. Each outcome has the repetitions of all rounds, or the failure."""
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
        return failed[i] if i in failed else timer.join(samples[i])

    return [dataclasses.replace(trial, outcome=outcome(i)) for i, trial in enumerate(trials)]


def _plan(
    operation: Operation[Any], problem: Problem, runner: Runner, backends: frozenset[str] | None,
    sample: int | None, seed: int, **passes: int,
) -> tuple[Sweep, list[Candidate]]:  # fmt: skip
    """Returns the head of the recording, with the fields `passes`, and the candidates in the order of measurement."""
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
        raise NoCandidate(f"no schedule of {operation.name} {problem} can run on {runner.hardware.kind}: {refused}")
    if sample is not None and sample >= len(schedules):
        sample = None
    # Sort by an order that does not depend on the model, so that the draw does not either.
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
        library=operation.library.backend,
        **passes,
    )
    return head, chosen


# ------------------------------------------------------------------------------
# Collects the measurements of an operation on one chip from recorded sweeps and from stores.


@dataclasses.dataclass(frozen=True)
class Measured:
    """The measurements of one chip.

    Attributes:
      hardware: the chip.
      trials: the trials of each problem.
      environments: the environments in which they were made.
    """

    hardware: Hardware
    trials: Mapping[Problem, Sequence[Trial]]
    environments: Sequence[Environment] = ()


def recorded_measurements(operation: Operation[Any], path: Path) -> Measured:
    """Reads a recorded sweep. Times of a second pass, if there is one, replace those of the first.

    Raises:
      RecordingError: the file cannot be read, or holds another operation.
    """
    head, trials = replay.read(path)
    if head.operation != operation.name:
        raise RecordingError(f"{path} must be a sweep of {operation.name}, found {head.operation}")
    chip = chips.swept(head)
    latest = {point_of(trial.backend, trial.schedule): trial for trial in (*trials, *replay.read_again(path))}
    return Measured(chip, {operation.problem.from_canonical(head.problem): list(latest.values())}, [head.environment])


def stored_measurements(operation: Operation[Any], hardware: Hardware, store: Store) -> Measured:
    """Reads the finished searches of a store for this hardware. Times of the run-off replace those of the trials.

    Measurements with warm operands, an option of a search, are omitted if cold measurements are possible.

    Raises:
      StoreError: the store cannot be read.
    """
    trials: dict[Problem, list[Trial]] = {}
    environments = []
    for record in store.records(operation=operation.name, hardware=hardware.id):
        try:
            problem = operation.problem.from_canonical(record.key.problem)
        except ValueError:  # written by another version of the operation
            continue
        latest = {point_of(trial.backend, trial.schedule): trial for trial in store.trials(record.key)}
        for number, e in enumerate(record.entries):
            latest[point_of(e.backend, e.schedule)] = Trial(
                number, e.backend, e.version, e.schedule, e.measurement, e.predicted_s
            )
        _, l2 = timing_conditions(problem, hardware)
        trials[problem] = [
            trial for trial in latest.values() if not isinstance(trial.outcome, Measurement) or trial.outcome.l2 == l2
        ]
        environments.append(record.environment)
    return Measured(hardware, trials, environments)


def merged_measurements(parts: Iterable[Measured]) -> Measured:
    """Merges several data sets of one chip. The trials of the same problem are concatenated.

    Raises:
      RecordingError: the data sets are of several chips, or there are none.
    """
    several = list(parts)
    if names := {part.hardware.id for part in several} - {several[0].hardware.id if several else ""}:
        raise RecordingError(
            f"measurements must be from one chip, found several ({', '.join(sorted(names))}, ...): use one at a time"
        )
    if not several:
        raise RecordingError("no measurements found: give recorded sweeps")
    trials: dict[Problem, list[Trial]] = {}
    for part in several:
        for problem, made in part.trials.items():
            trials.setdefault(problem, []).extend(made)
    return Measured(several[0].hardware, trials, [e for part in several for e in part.environments])
