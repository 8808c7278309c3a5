"""Collects the measurements of an operation on one chip from recorded sweeps and from stores."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from scheduler.core import hardware as chips
from scheduler.core.errors import RecordingError
from scheduler.core.hardware import Hardware
from scheduler.core.identity import point_of
from scheduler.core.records import Environment, Measurement, Trial
from scheduler.measure import replay
from scheduler.measure.rotation import condition
from scheduler.store.store import Store
from search_spaces.operation import Operation
from search_spaces.problem import Problem


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


def recorded(operation: Operation[Any], path: Path) -> Measured:
    """Reads a recorded sweep. Times of a second pass, if there is one, replace those of the first.

    Raises:
      RecordingError: the file cannot be read, or holds another operation.
    """
    head, trials = replay.read(path)
    if head.operation != operation.name:
        raise RecordingError(f"{path} holds a sweep of {head.operation}, not of {operation.name}")
    chip = chips.swept(head)
    latest = {point_of(trial.backend, trial.schedule): trial for trial in (*trials, *replay.read_again(path))}
    return Measured(chip, {operation.problem.from_canonical(head.problem): list(latest.values())}, [head.environment])


def stored(operation: Operation[Any], hardware: Hardware, store: Store) -> Measured:
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
        _, l2 = condition(problem, hardware)
        trials[problem] = [
            trial for trial in latest.values() if not isinstance(trial.outcome, Measurement) or trial.outcome.l2 == l2
        ]
        environments.append(record.environment)
    return Measured(hardware, trials, environments)


def merged(parts: Iterable[Measured]) -> Measured:
    """Merges several data sets of one chip. The trials of the same problem are concatenated.

    Raises:
      RecordingError: the data sets are of several chips, or there are none.
    """
    several = list(parts)
    if names := {part.hardware.id for part in several} - {several[0].hardware.id if several else ""}:
        raise RecordingError(
            f"these were measured on several chips ({', '.join(sorted(names))}, ...): take one at a time"
        )
    if not several:
        raise RecordingError("nothing was measured: name recorded sweeps")
    trials: dict[Problem, list[Trial]] = {}
    for part in several:
        for problem, made in part.trials.items():
            trials.setdefault(problem, []).extend(made)
    return Measured(several[0].hardware, trials, [e for part in several for e in part.environments])
