"""Plots of tuning results: each function returns a `matplotlib.figure.Figure`, and needs no device.

Plots of one problem (`scheduler.inspect.case.Case`): `best_so_far`, `predictions`, `landscape`, `block_sizes`, `tiles`
and `time_breakdown`. Plots of many problems: `roofline` and `gains`. `dark=True` draws on a dark background. `svg`
converts a figure to SVG text. Several of these can share one HTML page.

Raises:
  MissingPackage: matplotlib is not installed (the extra `plots`).
"""

from __future__ import annotations

from scheduler.core.errors import NothingToDraw
from scheduler.inspect.plots.best_so_far import best_so_far
from scheduler.inspect.plots.block_sizes import block_sizes
from scheduler.inspect.plots.files import png, svg
from scheduler.inspect.plots.gains import gains
from scheduler.inspect.plots.landscape import landscape
from scheduler.inspect.plots.predictions import predictions
from scheduler.inspect.plots.roofline import roofline
from scheduler.inspect.plots.style import available
from scheduler.inspect.plots.tiles import tiles
from scheduler.inspect.plots.time_breakdown import time_breakdown

__all__ = [
    "NothingToDraw",
    "available",
    "best_so_far",
    "block_sizes",
    "gains",
    "landscape",
    "png",
    "predictions",
    "roofline",
    "svg",
    "tiles",
    "time_breakdown",
]
