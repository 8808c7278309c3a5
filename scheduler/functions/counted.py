"""Problems with how often a function poses them, and by which lines."""

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
      count: how often one call of the function poses it; inside a `shard_map`, on each device.
      lines: of the user's code that pose it, each once.
      least_s: seconds of all of them by the chip's roofline: what no schedule can undercut.
    """

    operation: Operation[Any]
    problem: Problem
    count: int
    lines: tuple[Call, ...]
    least_s: float


class Tally:
    """Problems as they are met: each is one row, however often and wherever it is posed."""

    def __init__(self, hardware: Hardware) -> None:
        self._bound = CostModel(hardware).lower_bound
        self._found: dict[tuple[Operation[Any], Problem], tuple[int, dict[Call, None]]] = {}

    def add(self, operation: Operation[Any], problem: Problem, count: int, lines: Iterable[Call | None]) -> None:
        """Counts a problem that equations of these lines pose together."""
        before, known = self._found.get((operation, problem), (0, {}))
        known |= {line: None for line in lines if line is not None}
        self._found[operation, problem] = before + count, known

    def rows(self) -> tuple[Counted, ...]:
        """The most expensive first."""
        rows = [
            Counted(operation, problem, count, tuple(sorted(lines, key=_in_order)), count * self._bound(problem))
            for (operation, problem), (count, lines) in self._found.items()
        ]
        return tuple(sorted(rows, key=lambda row: -row.least_s))


def _in_order(line: Call) -> tuple[str, int]:
    return line.file, line.line
