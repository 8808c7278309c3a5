"""Row programs on Hopper."""

from __future__ import annotations

from typing import Any

from search_spaces.footprint import Footprint
from search_spaces.kernel import Kernel
from search_spaces.rows.problem import RowProblem
from search_spaces.space import Columns, Space
from search_spaces.target import Target


class HopperRows(Kernel[RowProblem, Any]):
    """A row program on Hopper."""

    backend = "mosaic_gpu"

    def supports(self, problem: RowProblem, target: Target) -> str | None:
        return "is not written yet"

    def space(self, problem: RowProblem, target: Target) -> Space[Any]:
        raise NotImplementedError

    def footprint(self, problem: RowProblem, schedules: Columns, target: Target) -> Footprint:
        raise NotImplementedError

    def run(self, problem: RowProblem, schedule: Any, target: Target, /, *args: Any, **params: Any) -> Any:
        raise NotImplementedError
