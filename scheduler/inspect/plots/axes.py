"""Helpers for axes: scales, line labels, point clouds, legends."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
import numpy.typing as npt

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.axis import Axis


def ratio_axis(axes: Axes, which: Literal["x", "y"]) -> None:
    """Sets a logarithmic scale for ratios: 2x and 0.5x are equally far from 1x."""
    from matplotlib.ticker import FixedLocator, FuncFormatter, NullLocator

    axis = axes.xaxis if which == "x" else axes.yaxis
    axes.set(**{f"{which}scale": "log"})
    low, high = sorted(axis.get_view_interval())
    shown = ([tick for tick in ticks if low <= tick <= high] for ticks in _RATIOS)
    room = _TICK * np.log(high / low)
    axis.set_major_locator(FixedLocator(next(t for t in shown if len(t) < 2 or np.diff(np.log(t)).min() >= room)))
    axis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:,.3g}x" if value < 1e3 else f"{value:,.0f}x"))
    axis.set_minor_locator(NullLocator())


# Tick sets for ratios, from dense to sparse, and the share of an axis that one tick label takes.
_RATIOS = (
    tuple(0.5 + 0.02 * step for step in range(51)),
    tuple(0.5 + 0.1 * step for step in range(21)),
    tuple(step * 2.0**power for power in range(-10, 20) for step in (1.0, 1.5)),
    tuple(2.0**power for power in range(-10, 20)),
    *(tuple(10.0 ** (stride * power) for power in range(-20, 21)) for stride in (1, 2, 4, 8)),
)
_TICK = 0.105


def plain_log(axis: Axis) -> None:
    """Sets a logarithmic scale with plain numbers as labels, and no minor ticks."""
    from matplotlib.ticker import FuncFormatter, LogLocator, NullLocator

    low, high = sorted(axis.get_view_interval())
    subs = (1.0,) if high > 50 * low else (1.0, 2.0, 5.0) if high > 8 * low else (1.0, 1.5, 2.0, 3.0, 4.0, 5.0, 7.0)
    base = 10.0 if high < 10**5.5 * low else 100.0
    axis.set_major_locator(LogLocator(base=base, subs=subs, numticks=12))
    axis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:,.10g}"))
    axis.set_minor_locator(NullLocator())


def label_lines(axes: Axes, lines: Sequence[tuple[float, str, str]]) -> None:
    """Labels horizontal lines at their right ends without overlaps, each given as height, text and colour."""
    low, high = axes.get_ylim()
    line = _LINE / _DOWN * (high - low)
    lines = sorted(lines)
    tall = [(words.count("\n") + 1) * line for _, words, _ in lines]
    for place, (_, words, colour) in zip(spread([height for height, *_ in lines], tall, high), lines, strict=True):
        axes.text(
            1.012, place, words, transform=axes.get_yaxis_transform(), va="center", color=colour, fontsize=11
        )  # fmt: skip


# Inches: the height of a label line, and the minimum height of the axes.
_LINE, _DOWN = 0.2, 3.3


def spread(places: Sequence[float], tall: Sequence[float], top: float) -> list[float]:
    """Returns the centres of items of heights `tall`, as close to `places` (ascending) as possible without overlaps.

    No item extends beyond `top`. Items that would are moved down.
    """
    middles: list[float] = []
    end = -np.inf
    for place, each in zip(places, tall, strict=True):
        middles.append(max(place, end + each / 2))
        end = middles[-1] + each / 2
    end = top
    for number in reversed(range(len(middles))):
        middles[number] = min(middles[number], end - tall[number] / 2)
        end = middles[number] - tall[number] / 2
    return middles


def cloud(axes: Axes, x: npt.ArrayLike, y: npt.ArrayLike, colour: str, size: float) -> None:
    """Draws many points as one path. In an SVG, a point then takes a twentieth of the space of a marker."""
    from matplotlib.patches import PathPatch
    from matplotlib.path import Path

    # A dot is a very short line with round caps: renderers omit lines of exactly zero length.
    ends = np.stack([np.column_stack([x, y]), np.column_stack([np.multiply(x, 1.0001), y])], axis=1).reshape(-1, 2)
    codes = np.tile([Path.MOVETO, Path.LINETO], len(ends) // 2)
    axes.add_patch(
        PathPatch(Path(ends, codes), fill=False, ec=colour, lw=size, capstyle="round", alpha=0.75, snap=False)
    )


def time_unit(seconds: float) -> tuple[float, str]:
    """Returns the divisor and the unit for times of about this length."""
    units = ((1.0, "s"), (1e-3, "ms"), (1e-6, "µs"))
    return next(((scale, unit) for scale, unit in units if seconds >= 2 * scale), (1e-6, "µs"))


def legend_right(axes: Axes, handles: Sequence[Any], title: str = "") -> None:
    """Adds a legend to the right of the axes, where it hides no data."""
    axes.legend(
        handles=list(handles), loc="upper left", bbox_to_anchor=(1.01, 1.0), borderaxespad=0.0, title=title or None,
        alignment="left", handlelength=1.3,
    )  # fmt: skip
