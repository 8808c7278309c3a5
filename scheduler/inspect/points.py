"""What was tried of a problem as points of one space: the kernel, every field of its schedule, and all choices."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from scheduler.core.identity import Point, point_of
from scheduler.core.records import Environment, Key, Record, Trial
from scheduler.inspect.bound import bounds
from scheduler.inspect.case import Case
from scheduler.model.constants import model_of
from search_spaces.kernel import Kernel
from search_spaces.space import Choice, Columns

# The choice of a kernel, beside the fields of its schedule.
BACKEND = "backend"


@dataclasses.dataclass(frozen=True)
class Modelled:
    """A schedule as the cost model has it.

    Attributes:
      floor_s: seconds below which it cannot come, 0 where that is not known.
      bound: the group of terms that bounds it (`bound.GROUPS`).
    """

    floor_s: float
    bound: str


@dataclasses.dataclass(frozen=True)
class Tried:
    """What was tried of one problem on one chip.

    Attributes:
      trials: in the order they were made.
      environment: under which; None where that is not known.
      record: what came out, where it did.
      case: None where the operation, the problem or the chip is not known here: choices are then those that were tried.
      final_s: seconds of those that were measured once more, in a final comparison or the second pass of a sweep.
      recording: the file of a recorded sweep, "" for a search.
    """

    key: Key
    trials: Sequence[Trial]
    environment: Environment | None = None
    record: Record | None = None
    case: Case | None = None
    final_s: Mapping[Point, float] = dataclasses.field(default_factory=dict)
    recording: str = ""

    def __str__(self) -> str:
        return f"{self.key}{', swept' if self.recording else ''}"

    def kernels(self) -> dict[str, Kernel[Any, Any]]:
        """Those that can do the problem, by backend."""
        if self.case is None:
            return {}
        problem, target = self.case.problem, self.case.hardware.target
        return {k.backend: k for k in self.case.operation.kernels if k.supports(problem, target) is None}

    def points(self) -> list[dict[str, Choice]]:
        """Of each trial, the kernel and the whole schedule: with the fields that stores leave out."""
        defaults = {backend: space.defaults for backend, space in self._spaces().items()}
        return [
            {BACKEND: trial.backend}
            | {_name(field): v for field, v in {**defaults.get(trial.backend, {}), **trial.schedule}.items()}
            for trial in self.trials
        ]

    def choices(self) -> dict[str, tuple[Choice, ...]]:
        """What each may be: what today's spaces offer, in their order, and what was tried besides; numbers ascend."""
        pairs: list[tuple[str, Choice]] = [(BACKEND, backend) for backend in self._spaces()]
        for space in self._spaces().values():
            pairs += [(_name(field), value) for field, values in space.choices.items() for value in values]
        pairs += [pair for point in self.points() for pair in point.items()]
        found: dict[str, dict[tuple[type, Choice], Choice]] = {}
        for name, value in pairs:
            found.setdefault(name, {})[type(value), value] = value  # by type as well: 1 == True
        return {name: _ascending(tuple(values.values())) for name, values in found.items()}

    def modelled(self) -> dict[Point, Modelled]:
        """What the model says of those that are schedules of today's spaces; the library's it knows as one program."""
        found: dict[Point, Modelled] = {}
        for backend, kernel in self.kernels().items():
            points = self._legal(backend, kernel)
            if self.case is None or kernel.library or not points:
                continue
            columns = Columns.of([schedule for _, schedule in points])
            footprint = kernel.footprint(self.case.problem, columns, self.case.hardware.target)
            if footprint is None:
                continue
            model = model_of(self.case.operation, kernel, self.case.hardware)
            floors = np.broadcast_to(model.floor(footprint), (len(points),))
            bound = bounds(model.breakdown(footprint), len(points))
            for (point, _), floor_s, by in zip(points, floors, bound, strict=True):
                found[point] = Modelled(float(floor_s), by)
        return found

    def _spaces(self) -> dict[str, Any]:
        if self.case is None:
            return {}
        problem, target = self.case.problem, self.case.hardware.target
        return {backend: kernel.space(problem, target) for backend, kernel in self.kernels().items()}

    def _legal(self, backend: str, kernel: Kernel[Any, Any]) -> list[tuple[Point, Any]]:
        """Those trials of a kernel that its space of today has, decoded."""
        assert self.case is not None, "no case has no kernels"
        space = kernel.space(self.case.problem, self.case.hardware.target)
        found = []
        for trial in self.trials:
            if (trial.backend, trial.version) != (backend, kernel.version):
                continue
            try:
                schedule = space.decode(trial.schedule)
            except ValueError:
                continue
            if space.broken(schedule) is None:
                found.append((point_of(trial.backend, trial.schedule), schedule))
        return found


def _name(field: str) -> str:
    """That of a field of a schedule, told from the choice of a kernel."""
    return f"schedule.{field}" if field == BACKEND else field


def _ascending(values: tuple[Choice, ...]) -> tuple[Choice, ...]:
    """Numbers in their order; tuples, and what is of several types, as text."""
    kinds = {type(value) for value in values}
    if kinds in ({int}, {float}):
        return tuple(sorted(values))  # type: ignore[type-var]
    return values if len(kinds) == 1 and tuple not in kinds else tuple(dict.fromkeys(map(str, values)))
