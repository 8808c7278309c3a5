"""Computes the best time for each pair of values of two choices of a space, and why other pairs have no schedule."""

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

# With fewer measured schedules than this, the model's predictions are shown instead.
_TELLING = 8


@dataclasses.dataclass(frozen=True)
class Cell:
    """The schedules in which two choices have these values.

    Attributes:
      best_s: Their minimum time in seconds; None if none has a time.
      legal: Number of legal schedules.
      dropped: Reason -> number of schedules removed.
    """

    best_s: float | None
    legal: int
    dropped: Mapping[str, int]

    @property
    def reason(self) -> str:
        """The last reason that removed a schedule, if none is left; otherwise ""."""
        return "" if self.legal else next(reversed(list(self.dropped)), "")


@dataclasses.dataclass(frozen=True)
class Landscape:
    """The best times over two choices.

    Attributes:
      backend: The backend of the space.
      x, y: Names of the choices, with their values in `xs` and `ys`.
      cells: ``cells[j][i]`` has ``ys[j]`` and ``xs[i]``.
      measured: Number of measured schedules; 0 if the times are predictions.
      best: The highlighted schedule: the winner, or the top prediction.
      took: "measured" or "estimated" (by a compiler).
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
        """The minimum time of all cells, in seconds."""
        return min(cell.best_s for row in self.cells for cell in row if cell.best_s is not None)

    @property
    def reasons(self) -> tuple[str, ...]:
        """Reasons for empty cells, the most frequent first."""
        found = [cell.reason for row in self.cells for cell in row if cell.reason]
        return tuple(sorted(dict.fromkeys(found), key=lambda reason: -found.count(reason)))

    def place(self, schedule: Schedule) -> tuple[int, int] | None:
        """Returns the column and row of a complete schedule; None if it is in no cell."""
        if schedule.get(self.x) not in self.xs or schedule.get(self.y) not in self.ys:
            return None
        return self.xs.index(schedule[self.x]), self.ys.index(schedule[self.y])


def landscape(case: Case, *, over: tuple[str, str] | None = None, backend: str | None = None) -> Landscape:
    """Computes the landscape of a backend, by default of the best searched one.

    Args:
      over: Two choices. By default numeric choices come first, then those that change the arithmetic intensity most,
        then those that change the best time most.

    Raises:
      NothingToDraw: No kernel except the library's supports the problem, or its schedules differ in fewer than two
        choices.
      ValueError: The operation has no such backend, or the backend has no such choices.
    """
    best = case.best_searched(backend)
    kernel, problem, hardware = best.kernel, case.problem, case.hardware
    model = case.model(kernel)
    pruned = prune(kernel, problem, hardware, model)
    measured = _measured(case, kernel, pruned)
    predicted = [(pruned.points.row(index), float(time_s)) for index, time_s in enumerate(pruned.predicted_s)]
    known = measured if len(measured) >= _TELLING else predicted
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
    """Returns complete schedules that ran with the current version of the kernel, and their times."""
    found = []
    for trial in case.trials:
        ours = (trial.backend, trial.version) == (kernel.backend, kernel.version)
        if ours and isinstance(trial.outcome, Measurement):
            try:
                found.append((vars(pruned.space.decode(trial.schedule)), trial.outcome.median_s))
            except ValueError:  # not in the current space
                continue
    return found


def _telling(case: Case, pruned: Pruned, known: Sequence[tuple[Schedule, float]]) -> tuple[str, ...]:
    """Returns the two most important choices, in the order of the space."""
    footprint = pruned.kernel.footprint(case.problem, pruned.points, case.hardware.target)
    every = np.broadcast_to(0.0 if footprint is None else arithmetic_intensity(footprint), (len(pruned.points),))
    intensity = [(pruned.points.row(index), float(value)) for index, value in enumerate(every) if value > 0]

    def spread(of: Sequence[tuple[Schedule, float]], name: str) -> float:
        """Returns the logarithmic range of the minimum over the values of a choice, rounded to 0.01 (steps of 1 %)."""
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
