"""One problem on one chip with all that is known of it: what pictures and reports are made of."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from scheduler.core import hardware as chips
from scheduler.core.hardware import Hardware
from scheduler.core.identity import point_of
from scheduler.core.records import Record, Trial
from scheduler.measure import replay
from search_spaces import load
from search_spaces.operation import Operation
from search_spaces.problem import Problem


@dataclasses.dataclass(frozen=True)
class Case:
    """One problem on one chip.

    Attributes:
      record: the outcome of its search; None where none is stored.
      trials: what was tried, in the order it ended: of its last search, or of a recording; empty where none is kept.
      swept: `trials` are those of a recorded sweep, whose order says nothing.
    """

    operation: Operation[Any]
    problem: Problem
    hardware: Hardware
    record: Record | None = None
    trials: tuple[Trial, ...] = ()
    swept: bool = False

    def __str__(self) -> str:
        return f"{self.operation.name} {self.problem} on {self.hardware.kind}"


def of_record(record: Record, trials: Sequence[Trial] = (), operation: Operation[Any] | None = None) -> Case | None:
    """That of a record; None where the table has no such chip, or the operation is not here or not the same any more.

    Args:
      operation: the record's, where it is one of a user's own; else it is loaded by its name.
    """
    chip = chips.identified(record.key.hardware)
    try:
        operation = operation or load(record.key.operation)
        problem = operation.problem.from_canonical(record.key.problem)
    except ValueError:
        return None
    return None if chip is None else Case(operation, problem, chip, record, tuple(trials))


def of_recording(path: Path, operation: Operation[Any] | None = None, record: Record | None = None) -> Case:
    """That of a recorded sweep; where it has a second pass, its times stand for those of the first.

    Raises:
      RecordingError: it cannot be read.
      ValueError: its operation is not here, or its problem is none of it.
    """
    sweep, trials = replay.read(path)
    latest = {point_of(trial.backend, trial.schedule): trial for trial in (*trials, *replay.read_again(path))}
    operation = operation or load(sweep.operation)
    problem = operation.problem.from_canonical(sweep.problem)
    return Case(operation, problem, chips.swept(sweep), record, tuple(latest.values()), swept=True)
