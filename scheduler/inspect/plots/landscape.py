"""Plots the best time over two choices, measured if known, and the reasons for pruned pairs."""

from __future__ import annotations

import itertools
from typing import TYPE_CHECKING

import numpy as np

from scheduler.core.quantities import digits
from scheduler.inspect import landscape as landscapes
from scheduler.inspect.case import Case
from scheduler.inspect.landscape import Landscape
from scheduler.inspect.plots.axes import time_unit
from scheduler.inspect.plots.style import Theme, drawing, figure, fold, legible_on

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.colors import LinearSegmentedColormap
    from matplotlib.figure import Figure
    from matplotlib.patches import Patch

_HATCHES = ("///", "\\\\\\", "xxx", "---", "+++", "|||", "//", "xx")
# Times above this multiple of the best have one colour. Above this number of cells, numbers are omitted.
_SCALE = 1.6
_NUMBERED = 130
# Width of a reason's line in inches, and its font size in points.
_REASON, _SMALL = 2.1, 10.5


def landscape(
    case: Case, *, over: tuple[str, str] | None = None, backend: str | None = None, dark: bool = False
) -> Figure:
    """Plots the best times of a backend over two choices.

    The default backend is that of the best searched schedule, and the default choices are the most important ones.

    Raises:
      NothingToDraw: The backend has no legal schedule, or fewer than two choices.
      ValueError: There is no such backend, or the backend has no such choices.
    """
    land = landscapes.landscape(case, over=over, backend=backend)
    scale, unit = time_unit(land.best_s)
    source = f"{land.took}, {land.measured:,} schedules" if land.measured else "predicted by the model"
    subtitle = f"{case.problem} on {case.hardware.kind}, {land.backend}: least time of each pair in {unit}, {source}"
    with drawing(dark) as look:
        made = figure(f"{case.operation.name} over {land.x} and {land.y}", look, subtitle=subtitle)
        axes, words = made.subplots(1, 2, width_ratios=(1, 0.36))
        patches = _cells(axes, land, scale, look)
        axes.set_xticks(range(len(land.xs)), list(map(str, land.xs)))
        axes.set_yticks(range(len(land.ys)), list(map(str, land.ys)))
        axes.set(xlabel=land.x, ylabel=land.y, xlim=(-0.5, len(land.xs) - 0.5), ylim=(-0.5, len(land.ys) - 0.5))
        axes.tick_params(length=0)
        for side in axes.spines.values():
            side.set_visible(False)
        _mark(axes, land, look)
        _bar(axes, look)
        _legend(words, patches, look)
        return made


def _cells(axes: Axes, land: Landscape, scale: float, look: Theme) -> list[Patch]:
    """Draws the cells, and returns the legend handle of each reason."""
    from matplotlib.patches import Patch, Rectangle

    shades = _shades(look)
    hatches = dict(zip(land.reasons, itertools.cycle(_HATCHES)))
    size = max(7.5, min(13.0, 78 / max(len(land.xs), 1)))
    untried = False
    for j, row in enumerate(land.cells):
        for i, cell in enumerate(row):
            corner = (i - 0.48, j - 0.48)
            if cell.best_s is not None:
                share = min(1.0, np.log(cell.best_s / land.best_s) / np.log(_SCALE))
                colour = shades(share)
                axes.add_patch(Rectangle(corner, 0.96, 0.96, color=colour, lw=0))
                if len(land.xs) * len(land.ys) <= _NUMBERED:
                    axes.text(
                        i, j, digits(cell.best_s / scale), ha="center", va="center_baseline", fontsize=size,
                        color=legible_on(colour),
                    )  # fmt: skip
            elif cell.legal:
                untried = True
                axes.text(i, j, "?", ha="center", va="center_baseline", color=look.faint, fontsize=size)
            else:
                axes.add_patch(
                    Rectangle(corner, 0.96, 0.96, fill=False, ec=look.faint, lw=0, hatch=hatches[cell.reason])
                )
    patches = [
        Patch(fill=False, ec=look.faint, lw=0.5, hatch=hatch, label="\n".join(fold(reason, _REASON, _SMALL)))
        for reason, hatch in hatches.items()
    ]
    return [*patches, *([Patch(fill=False, lw=0, label="?  legal, not tried")] if untried else [])]


def _mark(axes: Axes, land: Landscape, look: Theme) -> None:
    """Draws a frame around the cell of the highlighted schedule."""
    from matplotlib.patches import Rectangle

    if (place := land.place(land.best.schedule)) is not None:
        corner = (place[0] - 0.48, place[1] - 0.48)
        axes.add_patch(Rectangle(corner, 0.96, 0.96, fill=False, ec=look.xla, lw=3, zorder=4, clip_on=False))


def _shades(look: Theme) -> LinearSegmentedColormap:
    """Returns the colour map, from the best to the worst."""
    from matplotlib.colors import LinearSegmentedColormap

    return LinearSegmentedColormap.from_list("times", look.magnitude)


def _bar(axes: Axes, look: Theme) -> None:
    """Adds a colour bar, in multiples of the best time."""
    from matplotlib.cm import ScalarMappable
    from matplotlib.colors import LogNorm

    assert axes.figure is not None
    ticks = [1, 1.1, 1.2, 1.4, _SCALE]
    bar = axes.figure.colorbar(
        ScalarMappable(LogNorm(1, _SCALE), cmap=_shades(look)), ax=axes, ticks=ticks, fraction=0.05, aspect=28, pad=0.02
    )
    bar.ax.minorticks_off()
    bar.ax.set_yticklabels(["best", "1.1x", "1.2x", "1.4x", f"{_SCALE}x or more"])
    bar.outline.set_visible(False)
    bar.ax.tick_params(length=0)
    bar.ax.invert_yaxis()


def _legend(axes: Axes, patches: list[Patch], look: Theme) -> None:
    from matplotlib.patches import Patch

    axes.set_axis_off()
    frame = Patch(fill=False, ec=look.xla, lw=3, label="holds the best searched\nschedule")
    axes.legend(
        handles=[frame, *patches], loc="upper left", bbox_to_anchor=(0, 1), borderaxespad=0.0, handlelength=1.8,
        handleheight=1.6, labelspacing=0.9, alignment="left", fontsize=_SMALL,
    )  # fmt: skip
