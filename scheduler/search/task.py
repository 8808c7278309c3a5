"""A problem of a job, or a range of problems, how it is to be searched, and what became of it."""

from __future__ import annotations

import dataclasses
from typing import Any, Literal

from scheduler.core import checked
from scheduler.core.hardware import Hardware
from scheduler.core.identity import Point
from scheduler.core.ranges import Range, with_range
from scheduler.core.records import L2, L2S, AllFailed, Entry, Record, Schedule
from scheduler.search.named_samplers import MODEL, Sampler, sampler_of
from search_spaces.operation import Operation
from search_spaces.problem import Problem

# Trials of a search, by effort: the model's top predictions; enough for most spaces; until nothing improves.
EFFORTS = {"quick": 8, "default": 64, "full": 4096}
BUDGET = EFFORTS["default"]


def trials(budget: int | None, effort: str | None) -> int:
    """The budget of a search: `budget` itself, or that of `effort`.

    Raises:
      ValueError: both are given, or there is no such effort.
    """
    if effort is None:
        return BUDGET if budget is None else budget
    if budget is not None:
        raise ValueError(f"budget={budget} and effort={effort!r} both say how many trials: give one of them")
    return EFFORTS[checked.one_of("effort", effort, tuple(EFFORTS))]


@dataclasses.dataclass(frozen=True)
class Task:
    """One problem to tune.

    Attributes:
      budget: trials.
      seconds: stop proposing trials after so many seconds; None sets no limit.
      backends: kernels to try beside the library; None tries all.
      count: how often the function that the job is for poses the problem.
      first: schedules to try before any other but the libraries', where they are legal.
      brief: a search of few trials, whose record is marked so (`Record.brief`).
      part_of: the range that poses it, or None.
    """

    operation: Operation[Any]
    problem: Problem
    budget: int = BUDGET
    seconds: float | None = None
    backends: frozenset[str] | None = None
    count: int = 1
    first: tuple[Point, ...] = ()
    brief: bool = False
    part_of: RangeTask | None = None

    def __post_init__(self) -> None:
        _require(self)

    def __str__(self) -> str:
        return f"{self.operation.name} {self.problem}"


@dataclasses.dataclass(frozen=True)
class RangeTask:
    """Problems that differ in one extent, from a lowest to a highest value, to tune as a range.

    Attributes:
      lowest, highest: the problems at both ends.
      field: the extent's name.
      budget, seconds, backends: of each search, as in `Task`.
      count: how often the function that the job is for poses each of them.
    """

    operation: Operation[Any]
    lowest: Problem
    highest: Problem
    field: str
    budget: int = BUDGET
    seconds: float | None = None
    backends: frozenset[str] | None = None
    count: int = 1

    def __post_init__(self) -> None:
        _require(self)

    @property
    def low(self) -> int:
        return int(getattr(self.lowest, self.field))

    @property
    def high(self) -> int:
        return int(getattr(self.highest, self.field))

    def at(self, value: int) -> Task:
        """The search of one of its problems.

        Raises:
          ValueError: there is no problem of that value.
        """
        problem = dataclasses.replace(self.lowest, **{self.field: value})
        return Task(self.operation, problem, self.budget, self.seconds, self.backends, self.count, part_of=self)

    def __str__(self) -> str:
        return f"{self.operation.name} {with_range(str(self.lowest), self.field, self.low, self.high)}"


@dataclasses.dataclass(frozen=True)
class How:
    """What all searches of a job have in common: arguments of `tuner.tune`."""

    seed: int = 0
    l2: L2 = "cold"
    force: bool = False
    first_error: bool = False
    sampler: Sampler = MODEL

    def __post_init__(self) -> None:
        checked.seed(self.seed)
        checked.one_of("l2", self.l2, L2S)
        sampler_of(self.sampler, self.seed)  # refuses what is none

    @property
    def searches_known(self) -> bool:
        """Whether a record that holds makes no search needless."""
        return self.force or self.first_error


@dataclasses.dataclass(frozen=True)
class Malformed:
    """An entry of a job that is no problem: what was written, and why it cannot be read."""

    text: str
    reason: str

    def __str__(self) -> str:
        return self.text


@dataclasses.dataclass(frozen=True)
class Before:
    """What a call would have got before the search: of a record, of a range or of the model.

    Attributes:
      seconds: its time; a prediction unless `measured`, because this search did not try it.
    """

    backend: str
    schedule: Schedule
    seconds: float
    measured: bool


@dataclasses.dataclass(frozen=True)
class Result:
    """What became of one task, or of a whole range: then it has no record, but the range.

    Attributes:
      state: "tuned" now; "known": it was tuned before, and that still holds; or "failed".
      reason: why it failed, or why an older answer no longer held; "" where there is nothing to say.
      hardware: where it ran; None where it failed before that was known.
      record: the whole outcome, None where it failed.
      entry: the fastest schedule among the backends asked for.
      before: None where nothing was measured now, or no answer was possible.
      resumed: trials that an earlier run of the search had made before it was cut short.
      elapsed_s: wall time spent.
      stored: False where the store refused the record, or the range.
      range: of a range, what answers its problems; None where it failed.
    """

    task: Task | RangeTask | Malformed
    state: Literal["tuned", "known", "failed"]
    reason: str = ""
    hardware: Hardware | None = None
    record: Record | None = None
    entry: Entry | None = None
    before: Before | None = None
    resumed: int = 0
    elapsed_s: float = 0.0
    stored: bool = True
    range: Range | None = None

    @property
    def library(self) -> Entry | None:
        """The library's own entry in the record."""
        return None if self.record is None else self.record.library_entry

    @property
    def broken(self) -> tuple[AllFailed, ...]:
        """Backends of which nothing ran in this search, by their own fault."""
        if self.record is None or self.state == "known":  # another search has said so, and nobody asks for it now
            return ()
        return tuple(lost for lost in self.record.failed if lost.own)


def _require(task: Task | RangeTask) -> None:
    """Raises TypeError or ValueError where one of a task's numbers is none."""
    checked.whole("budget", task.budget)
    checked.positive_or_none("seconds", task.seconds)
    checked.whole("count", task.count)
