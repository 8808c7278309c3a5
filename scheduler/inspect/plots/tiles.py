"""How tiles lie on operands and result, and in which order blocks walk them."""

from __future__ import annotations

from typing import TYPE_CHECKING

from scheduler.inspect.case import Case
from scheduler.inspect.plots.style import drawing, figure

if TYPE_CHECKING:
    from matplotlib.figure import Figure


def tiles(case: Case, *, backend: str | None = None, dark: bool = False) -> Figure:
    """Of the best schedule of a backend, by default the best searched one."""
    with drawing(dark) as look:
        return figure("tiles", look)
