"""What pictures put on axes: scales, labels at lines, clouds of points, legends."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
import numpy.typing as npt

from scheduler.inspect.plots.style import HEIGHT

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.axis import Axis


def ratio_axis(axes: Axes, which: Literal["x", "y"]) -> None:
    """Ratios in the logarithm: twice as fast is as far from 1 as half as fast."""
    from matplotlib.ticker import FixedLocator, FuncFormatter, NullLocator

    axis = axes.xaxis if which == "x" else axes.yaxis
    axes.set(**{f"{which}scale": "log"})
    low, high = sorted(axis.get_view_interval())
    wide = (0.25, 0.5, 0.75, 1, 1.5, 2, 3, 4, 6, 8, 12, 16, 24, 32, 64, 128)
    close = (0.5, 0.6, 0.7, 0.8, 0.9, 1, 1.1, 1.2, 1.3, 1.4, 1.6, 1.8, 2)
    closer = tuple(0.9 + 0.02 * step for step in range(16))
    ticks = wide if high / low > 2.2 else close if high / low > 1.25 else closer
    axis.set_major_locator(FixedLocator([tick for tick in ticks if low <= tick <= high]))
    axis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:.3g}x"))
    axis.set_minor_locator(NullLocator())


def plain_log(axis: Axis) -> None:
    """Powers of ten as people write them, no smaller ticks."""
    from matplotlib.ticker import FuncFormatter, LogLocator, NullLocator

    low, high = sorted(axis.get_view_interval())
    subs = (1.0,) if high > 50 * low else (1.0, 2.0, 5.0) if high > 8 * low else (1.0, 1.5, 2.0, 3.0, 4.0, 5.0, 7.0)
    axis.set_major_locator(LogLocator(subs=subs, numticks=12))
    axis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:,.10g}"))
    axis.set_minor_locator(NullLocator())


def label_lines(axes: Axes, lines: Sequence[tuple[float, str, str]]) -> None:
    """Words in the colour of each horizontal line, at its right end: height, words, colour; none over another."""
    low, high = axes.get_ylim()
    inches = HEIGHT - 1.6
    placed = low - (high - low)
    for height, words, colour in sorted(lines):
        tall = (words.count("\n") + 1) * 0.2 / inches * (high - low)
        place = max(height, placed + tall / 2)
        placed = place + tall / 2
        axes.text(
            1.012, place, words, transform=axes.get_yaxis_transform(), va="center", color=colour, fontsize=11
        )  # fmt: skip


def cloud(axes: Axes, x: npt.ArrayLike, y: npt.ArrayLike, colour: str, size: float) -> None:
    """Many points as one path: in an SVG each takes a twentieth of what a marker does."""
    from matplotlib.patches import PathPatch
    from matplotlib.path import Path

    # A dot is a line of no length with round ends; renderers leave out one of exactly none.
    ends = np.stack([np.column_stack([x, y]), np.column_stack([np.multiply(x, 1.0001), y])], axis=1).reshape(-1, 2)
    codes = np.tile([Path.MOVETO, Path.LINETO], len(ends) // 2)
    axes.add_patch(
        PathPatch(Path(ends, codes), fill=False, ec=colour, lw=size, capstyle="round", alpha=0.75, snap=False)
    )


def time_unit(seconds: float) -> tuple[float, str]:
    """By what to divide times of about this length, and the unit they then have."""
    units = ((1.0, "s"), (1e-3, "ms"), (1e-6, "µs"))
    return next(((scale, unit) for scale, unit in units if seconds >= 2 * scale), (1e-6, "µs"))


def legend_right(axes: Axes, handles: Sequence[Any], title: str = "") -> None:
    """What colours stand for, beside the axes, where it hides nothing."""
    axes.legend(
        handles=list(handles), loc="upper left", bbox_to_anchor=(1.01, 1.0), borderaxespad=0.0, title=title or None,
        alignment="left", handlelength=1.3,
    )  # fmt: skip
