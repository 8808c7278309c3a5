"""The best time after each trial of a search, beside XLA and the top prediction."""

from __future__ import annotations

from typing import TYPE_CHECKING

from scheduler.inspect.case import Case
from scheduler.inspect.plots.style import drawing, figure

if TYPE_CHECKING:
    from matplotlib.figure import Figure


def best_so_far(case: Case, *, dark: bool = False) -> Figure:
    """Raises `NothingToDraw` where no trials are kept, or those of a sweep, whose order says nothing."""
    with drawing(dark) as look:
        return figure("best_so_far", look)
