"""The roofline of a chip with every tuned problem on it: its winner, and XLA."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from scheduler.inspect.case import Case
from scheduler.inspect.plots.style import drawing, figure

if TYPE_CHECKING:
    from matplotlib.figure import Figure


def roofline(cases: Sequence[Case], *, dark: bool = False) -> Figure:
    """The cases are of one chip; those without a record are left out."""
    with drawing(dark) as look:
        return figure("roofline", look)
