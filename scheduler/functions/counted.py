"""Counts the problems of a function, with the lines of the user's code that compute them."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable
from typing import Any

from scheduler.core.frames import Call
from scheduler.core.hardware import Hardware
from scheduler.model.cost import CostModel
from search_spaces.operation import Operation
from search_spaces.problem import Problem


@dataclasses.dataclass(frozen=True)
class Counted:
    """One problem of a function.

    Attributes:
      count: How often one call of the function runs it; inside a `shard_map`, how often on each device.
      lines: Lines of the user's code that compute it, without duplicates.
      least_s: Lower bound of the seconds for all runs together, by the chip's roofline.
    """

    operation: Operation[Any]
    problem: Problem
    count: int
    lines: tuple[Call, ...]
    least_s: float


class Tally:
    """Collects problems, with one row for each distinct problem."""

    def __init__(self, hardware: Hardware) -> None:
        self._bound = CostModel(hardware).lower_bound
        self._found: dict[tuple[Operation[Any], Problem], tuple[int, dict[Call, None]]] = {}

    def add(self, operation: Operation[Any], problem: Problem, count: int, lines: Iterable[Call | None]) -> None:
        """Adds a problem computed by equations of these lines together."""
        before, known = self._found.get((operation, problem), (0, {}))
        known |= {line: None for line in lines if line is not None}
        self._found[operation, problem] = before + count, known

    def rows(self) -> tuple[Counted, ...]:
        """Returns the problems, the most expensive first."""
        rows = [
            Counted(operation, problem, count, tuple(sorted(lines, key=_in_order)), count * self._bound(problem))
            for (operation, problem), (count, lines) in self._found.items()
        ]
        return tuple(sorted(rows, key=lambda row: -row.least_s))


def _in_order(line: Call) -> tuple[str, int]:
    return line.file, line.line
