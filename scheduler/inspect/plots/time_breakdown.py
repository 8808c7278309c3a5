"""Where the time of one launch goes, by the model, beside what was measured."""

from __future__ import annotations

from typing import TYPE_CHECKING

from scheduler.inspect.case import Case
from scheduler.inspect.plots.style import drawing, figure

if TYPE_CHECKING:
    from matplotlib.figure import Figure


def time_breakdown(case: Case, *, dark: bool = False) -> Figure:
    """Of the winner, or of the top prediction where nothing was measured."""
    with drawing(dark) as look:
        return figure("time_breakdown", look)
