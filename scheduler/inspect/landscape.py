"""The best time over two choices of a space, all others left open, and what each pair lost to which reason."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from scheduler.core.errors import NothingToDraw
from scheduler.core.records import Measurement, Schedule
from scheduler.inspect.case import Best, Case
from scheduler.model.cost import arithmetic_intensity
from scheduler.model.pruning import Pruned, prune
from search_spaces.kernel import Kernel
from search_spaces.space import Choice, unknown

# With fewer measured schedules than this, what the model predicts of all of them tells more.
_TELLING = 8


@dataclasses.dataclass(frozen=True)
class Cell:
    """The schedules in which two choices have these values.

    Attributes:
      best_s: the least time of those, seconds; None where there is none.
      legal: how many there are.
      dropped: reason -> how many it removed.
    """

    best_s: float | None
    legal: int
    dropped: Mapping[str, int]

    @property
    def reason(self) -> str:
        """Why nothing is left, in words: the last reason, to which those came that had passed all before; else ""."""
        return "" if self.legal else next(reversed(list(self.dropped)), "")


@dataclasses.dataclass(frozen=True)
class Landscape:
    """The best times over two choices.

    Attributes:
      backend: whose space it is.
      x, y: the names of the choices, with their values in `xs` and `ys`.
      cells: ``cells[j][i]`` has ``ys[j]`` and ``xs[i]``.
      measured: how many measured schedules they are of; 0 where they are the model's.
      best: the schedule that stands out: the winner's, or the top prediction.
      took: whether these were measured, or estimated by a compiler, in a word.
    """

    backend: str
    x: str
    y: str
    xs: tuple[Choice, ...]
    ys: tuple[Choice, ...]
    cells: tuple[tuple[Cell, ...], ...]
    measured: int
    best: Best
    took: str = "measured"

    @property
    def best_s(self) -> float:
        """The least time of all cells, seconds."""
        return min(cell.best_s for row in self.cells for cell in row if cell.best_s is not None)

    @property
    def reasons(self) -> tuple[str, ...]:
        """Those for which cells are empty, the most frequent first."""
        found = [cell.reason for row in self.cells for cell in row if cell.reason]
        return tuple(sorted(dict.fromkeys(found), key=lambda reason: -found.count(reason)))

    def place(self, schedule: Schedule) -> tuple[int, int] | None:
        """Column and row of a schedule with all of its fields; None where it is of none of these."""
        if schedule.get(self.x) not in self.xs or schedule.get(self.y) not in self.ys:
            return None
        return self.xs.index(schedule[self.x]), self.ys.index(schedule[self.y])


def landscape(case: Case, *, over: tuple[str, str] | None = None, backend: str | None = None) -> Landscape:
    """That of a backend, by default the best searched one's.

    Args:
      over: two choices; by default the two that change the arithmetic intensity most, then the best time: numbers
        before others.

    Raises:
      NothingToDraw: no kernel but the library's can do it, or its schedules differ in fewer than two choices.
      ValueError: the backend is none of the operation, or has no such choices.
    """
    best = case.best_searched(backend)
    kernel, problem, hardware = best.kernel, case.problem, case.hardware
    model = case.model(kernel)
    pruned = prune(kernel, problem, hardware, model)
    measured = _measured(case, kernel, pruned)
    known = measured if len(measured) >= _TELLING else _predicted(pruned)
    names = over or _telling(case, pruned, known)
    if len(names) < 2:
        raise NothingToDraw(f"the schedules of {kernel.backend} for {problem} differ in fewer than two choices")
    for name in names:
        if name not in pruned.space.choices:
            raise ValueError(f"{kernel.backend} has no choice {unknown(name, pruned.space.choices)}")
    x, y = names
    if x == y:
        raise ValueError(f"a landscape is over two choices, and {x} is one")
    xs, ys = _ordered(pruned.space.choices[x]), _ordered(pruned.space.choices[y])

    def cell(i: Choice, j: Choice) -> Cell:
        part = prune(kernel, problem, hardware, model, only={x: i, y: j})
        times = [seconds for schedule, seconds in known if schedule[x] == i and schedule[y] == j]
        return Cell(min(times, default=None), len(part.points), part.dropped)

    cells = tuple(tuple(cell(i, j) for i in xs) for j in ys)
    return Landscape(kernel.backend, x, y, xs, ys, cells, len(measured) if known is measured else 0, best, case.took)


def _measured(case: Case, kernel: Kernel[Any, Any], pruned: Pruned) -> list[tuple[Schedule, float]]:
    """Whole schedules of today's version of the kernel that ran, and their times."""
    found = []
    for trial in case.trials:
        ours = (trial.backend, trial.version) == (kernel.backend, kernel.version)
        if ours and isinstance(trial.outcome, Measurement):
            try:
                found.append((vars(pruned.space.decode(trial.schedule)), trial.outcome.median_s))
            except ValueError:  # no point of today's space
                continue
    return found


def _predicted(pruned: Pruned) -> list[tuple[Schedule, float]]:
    return [(pruned.points.row(index), float(pruned.predicted_s[index])) for index in range(len(pruned.points))]


def _telling(case: Case, pruned: Pruned, known: Sequence[tuple[Schedule, float]]) -> tuple[str, ...]:
    """The two choices that matter most, in the order of the space."""
    footprint = pruned.kernel.footprint(case.problem, pruned.points, case.hardware.target)
    every = np.broadcast_to(0.0 if footprint is None else arithmetic_intensity(footprint), (len(pruned.points),))
    intensity = [(pruned.points.row(index), float(value)) for index, value in enumerate(every) if value > 0]

    def spread(of: Sequence[tuple[Schedule, float]], name: str) -> float:
        """How much the least differs between values of a choice, in steps of 1 %."""
        least: dict[Choice, float] = {}
        for schedule, value in of:
            least[schedule[name]] = min(value, least.get(schedule[name], value))
        return round(float(np.ptp(np.log(list(least.values())))), 2) if least else 0.0

    def rank(name: str) -> tuple[bool, float, float]:
        return not _is_number(pruned.space.choices[name][0]), -spread(intensity, name), -spread(known, name)

    varying = [name for name, values in pruned.space.choices.items() if len(values) > 1]
    ranked = sorted(varying, key=rank)
    chosen = set(ranked[:2])
    return tuple(reversed([name for name in varying if name in chosen]))


def _is_number(value: Choice) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _ordered(values: Sequence[Choice]) -> tuple[Choice, ...]:
    return tuple(sorted(values)) if all(map(_is_number, values)) else tuple(values)  # type: ignore[type-var]
