"""Identity of problems and candidates: equality, and the names under which they are stored."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any, Protocol

from scheduler.core.records import Key, Schedule
from search_spaces.space import Choice

if TYPE_CHECKING:
    from scheduler.core.hardware import Hardware
    from search_spaces.operation import Operation
    from search_spaces.problem import Problem

# A hashable schedule; a schedule of a backend; a schedule of one version of a backend's kernel.
Fields = tuple[tuple[str, Choice], ...]
Point = tuple[str, Fields]
Versioned = tuple[Point, int]


class Candidate(Protocol):
    """A schedule of a kernel: a candidate, a trial or an entry of a record."""

    @property
    def backend(self) -> str: ...
    @property
    def version(self) -> int: ...
    @property
    def schedule(self) -> Schedule: ...


def key_of(operation: Operation[Any], problem: Problem, hardware: Hardware) -> Key:
    """Returns the key of a problem on a chip in stores."""
    return Key(operation.name, hardware.id, problem.canonical())


def family_of(problem: Problem, field: str) -> str:
    """Returns the canonical text of a problem without `field`, equal for all problems that differ only in it."""
    told = {name: value for name, value in problem.told().items() if name != field}
    return json.dumps(told, sort_keys=True, separators=(",", ":"))


def families_of(problem: Problem) -> list[str]:
    """Returns `family_of` for each field that may be the extent of a range."""
    return [family_of(problem, name) for name, value in vars(problem).items() if type(value) is int]


def fields_of(schedule: Schedule) -> Fields:
    return tuple(sorted(schedule.items()))


def point_of(backend: str, schedule: Schedule) -> Point:
    """Returns the identity of a candidate among those of one problem and one version of the kernels."""
    return backend, fields_of(schedule)


def versioned(candidate: Candidate) -> Versioned:
    """Returns the identity of a candidate across kernel versions."""
    return point_of(candidate.backend, candidate.schedule), candidate.version


def schedule_to_text(schedule: Schedule) -> str:
    """Returns JSON, deterministic for the same schedule."""
    return json.dumps(dict(sorted(schedule.items())))


def label_of(backend: str, schedule: Schedule) -> str:
    """Returns the label of a candidate in a run-off, in `Verdict.tied` and its notes; stored, so it must not change."""
    return f"{backend} {schedule_to_text(schedule)}"
