"""Which question and which candidate it is: what tells them apart, and what they are called where they are stored."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any, Protocol

from scheduler.core.records import Key, Schedule
from search_spaces.space import Choice

if TYPE_CHECKING:
    from scheduler.core.hardware import Hardware
    from search_spaces.operation import Operation
    from search_spaces.problem import Problem

# A schedule as sets and dictionaries can hold it; one of a backend; and that of one version of its kernel.
Fields = tuple[tuple[str, Choice], ...]
Point = tuple[str, Fields]
Versioned = tuple[Point, int]


class Candidate(Protocol):
    """A schedule of a kernel: one to try, a trial, or an entry of a record."""

    @property
    def backend(self) -> str: ...
    @property
    def version(self) -> int: ...
    @property
    def schedule(self) -> Schedule: ...


def key_of(operation: Operation[Any], problem: Problem, hardware: Hardware) -> Key:
    """What stores know the question by."""
    return Key(operation.name, hardware.id, problem.canonical())


def family_of(problem: Problem, field: str) -> str:
    """The canonical text of a problem without one of its fields: the same for all that differ in that alone."""
    told = {name: value for name, value in problem.told().items() if name != field}
    return json.dumps(told, sort_keys=True, separators=(",", ":"))


def families_of(problem: Problem) -> list[str]:
    """`family_of` for each field that may be the extent of a range."""
    return [family_of(problem, name) for name, value in vars(problem).items() if type(value) is int]


def fields_of(schedule: Schedule) -> Fields:
    return tuple(sorted(schedule.items()))


def point_of(backend: str, schedule: Schedule) -> Point:
    """What tells the candidates of one problem apart, as long as their kernels stay as they are."""
    return backend, fields_of(schedule)


def versioned(candidate: Candidate) -> Versioned:
    """What tells candidates apart that may have been tried at different times."""
    return point_of(candidate.backend, candidate.schedule), candidate.version


def schedule_to_text(schedule: Schedule) -> str:
    """JSON, the same for the same schedule."""
    return json.dumps(dict(sorted(schedule.items())))


def label_of(backend: str, schedule: Schedule) -> str:
    """What a candidate is called in a run-off, in `Verdict.tied` and in its notes; stored, so it stays as it is."""
    return f"{backend} {schedule_to_text(schedule)}"
