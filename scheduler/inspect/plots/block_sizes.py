"""On-chip memory, arithmetic intensity and iterations against the size of a block."""

from __future__ import annotations

from typing import TYPE_CHECKING

from scheduler.inspect.case import Case
from scheduler.inspect.plots.style import drawing, figure

if TYPE_CHECKING:
    from matplotlib.figure import Figure


def block_sizes(case: Case, *, over: str | None = None, backend: str | None = None, dark: bool = False) -> Figure:
    """Around the winner of a backend; by default over each choice that changes one of the three."""
    with drawing(dark) as look:
        return figure("block_sizes", look)
