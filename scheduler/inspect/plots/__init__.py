"""Plots of tuning results: each function returns a `matplotlib.figure.Figure`, and needs no device.

Plots of one problem (`scheduler.inspect.case.Case`): `best_so_far`, `landscape`, `block_sizes`, `tiles`
and `time_breakdown`. Of many problems: `roofline`. `dark=True` draws on a dark background. `svg` converts a figure to
SVG text. Several of these can share one HTML page.

Raises:
  MissingPackage: matplotlib is not installed (the extra `plots`).
"""

from __future__ import annotations

from scheduler.core.errors import NothingToDraw
from scheduler.inspect.plots.roofline import roofline
from scheduler.inspect.plots.search import best_so_far
from scheduler.inspect.plots.style import available, png, svg
from scheduler.inspect.plots.tiles import block_sizes, tiles
from scheduler.inspect.plots.time_breakdown import landscape, time_breakdown

__all__ = [
    "NothingToDraw",
    "available",
    "best_so_far",
    "block_sizes",
    "landscape",
    "png",
    "roofline",
    "svg",
    "tiles",
    "time_breakdown",
]
