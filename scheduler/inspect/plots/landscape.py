"""The best time over two choices, measured where that is known, and what was pruned by its reason."""

from __future__ import annotations

from typing import TYPE_CHECKING

from scheduler.inspect.case import Case
from scheduler.inspect.plots.style import drawing, figure

if TYPE_CHECKING:
    from matplotlib.figure import Figure


def landscape(
    case: Case, *, over: tuple[str, str] | None = None, backend: str | None = None, dark: bool = False
) -> Figure:
    """Over two choices of a backend; by default those that matter most, of the winner's."""
    with drawing(dark) as look:
        return figure("landscape", look)
