"""Predicted against measured times, coloured by what bounds each schedule."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from scheduler.inspect.case import Case
from scheduler.inspect.plots.style import drawing, figure

if TYPE_CHECKING:
    from matplotlib.figure import Figure


def predictions(cases: Sequence[Case], *, dark: bool = False) -> Figure:
    """Of one chip, with trials or with records."""
    with drawing(dark) as look:
        return figure("predictions", look)
