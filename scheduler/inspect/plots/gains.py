"""XLA's time over that of the winner and of the best searched schedule, by problem."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from scheduler.core.records import Record
from scheduler.inspect.plots.style import drawing, figure

if TYPE_CHECKING:
    from matplotlib.figure import Figure


def gains(records: Sequence[Record], *, dark: bool = False) -> Figure:
    """Of one chip; those in which XLA did not run are left out."""
    with drawing(dark) as look:
        return figure("gains", look)
