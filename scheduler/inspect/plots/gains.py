"""Plots a library's time over ours by problem: for the best searched schedule, and for the selected one."""

from __future__ import annotations

import dataclasses
import itertools
import statistics
from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np

from scheduler.core.errors import NothingToDraw
from scheduler.core.quantities import ratio_text
from scheduler.core.records import Record
from scheduler.inspect.plots.axes import ratio_axis
from scheduler.inspect.plots.style import Theme, drawing, figure, fold
from search_spaces import load_known, spelled

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

# Up to this many problems have a row each. Otherwise each operation has a row.
_NAMED = 22
# Inches. A README shows 10 inches as 838 pixels, so the thinnest bar is slightly more than one pixel.
_NAME, _LINE, _GAP = 3.6, 0.19, 0.12
_THINNEST, _STEP, _GAPLESS, _THICKEST = 0.0145, 0.0145, 0.05, 0.16
_PAGE = 8.0
# Points from the axes to the right edges of the columns of text.
_COUNT_AT, _RATIO_AT = 50, 112
# Values below this are drawn at the edge, because a single one would leave no room for the others.
_EDGE = 0.5


@dataclasses.dataclass(frozen=True)
class Gain:
    """A library's time over the times of our schedules, for one record.

    Attributes:
      library: XLA, or the vendor's library (cuDNN) if it ran and is faster.
      searched: The library's time over that of the best searched schedule; None if none ran.
      final: The library's time over that of the winner, which may be the library.
    """

    library: str
    operation: str
    problem: str
    searched: float | None
    final: float

    @property
    def beaten(self) -> bool:
        """Whether the library was selected although a searched schedule ran."""
        return self.searched is not None and self.searched != self.final

    @classmethod
    def of(cls, record: Record) -> Gain | None:
        """Returns the gain of a record; None if any of its libraries did not run.

        If a vendor's library takes part, XLA alone is not a valid baseline.
        """
        libraries = _libraries(record)
        library = record.best(frozenset(libraries))
        vendors = libraries.keys() & record.versions.keys() - {record.library}
        if library is None or not all(record.best(frozenset({vendor})) for vendor in vendors):
            return None
        rival = next((entry for entry in record.entries if entry.backend not in libraries), None)
        library_s = library.measurement.median_s
        return cls(
            libraries[library.backend],
            record.key.operation,
            spelled(record.key.operation, record.key.problem),
            None if rival is None else library_s / rival.measurement.median_s,
            library_s / record.winner.measurement.median_s,
        )


def _libraries(record: Record) -> dict[str, str]:
    """Returns library names by backend: XLA's, and the vendors' if the operation is available."""
    named = {record.library: "XLA"}
    try:
        kernels = load_known(record.key.operation).kernels
    except ValueError:
        return named
    return named | {kernel.backend: kernel.vendor for kernel in kernels if kernel.vendor}


def gains(records: Sequence[Record], *, dark: bool = False) -> Figure:
    """Plots the gains of records of one chip by operation, in ascending order.

    Records without a library's time are left out.

    Raises:
      NothingToDraw: No record has a library's time.
    """
    found = [gain for gain in map(Gain.of, records) if gain is not None]
    if not found:
        raise NothingToDraw("no record has a time of a library to compare with; tune a problem first")
    chips = dict.fromkeys(record.key.hardware.partition(" (")[0] for record in records)
    found.sort(key=lambda gain: (gain.operation, gain.final, gain.searched or 0.0))
    libraries = sorted({gain.library for gain in found}, reverse=True)
    whose, count = "The library" if libraries[1:] else libraries[0], f"{len(found)} problem{'s' * (len(found) > 1)}"
    title = f"{whose}'s time over ours, {' and '.join(chips)}: {count}"
    faster = f"{' or '.join(libraries)}, the faster; " if libraries[1:] else ""
    subtitle = f"{faster}bar: what answers a call; dot: the best searched schedule, where a library answers"
    estimated = sum(record.estimated for record in records)
    subtitle += f"; {estimated} of {len(records)} estimated by the compiler, not measured" if estimated else ""
    several = len({gain.operation for gain in found}) > 1
    if len(found) <= _NAMED:
        rows = [Row.of(f"{gain.operation} {gain.problem}" if several else gain.problem, [gain]) for gain in found]
    else:
        grouped = itertools.groupby(found, lambda gain: gain.operation)
        rows = [Row.of(operation, list(of_it)) for operation, of_it in grouped]
    with drawing(dark) as look:
        heights = _heights(rows)
        made = figure(title, look, subtitle=subtitle, height=sum(heights) + 2.0)
        axes = made.add_subplot()
        _rows(axes, rows, heights, look)
        axes.set_xlabel(f"time of {' or '.join(libraries)} over ours; right of 1x ours is faster")
        return made


@dataclasses.dataclass(frozen=True)
class Row:
    """Problems under one name: all problems of an operation, or a single problem.

    Attributes:
      name: The name, split into lines.
      text: The geometric mean of their gains.
    """

    name: tuple[str, ...]
    gains: tuple[Gain, ...]
    text: str

    @classmethod
    def of(cls, name: str, gains: Sequence[Gain]) -> Row:
        mean = statistics.geometric_mean([gain.final for gain in gains])
        return cls(tuple(fold(name, _NAME, most=4)), tuple(gains), ratio_text(mean))


def _heights(rows: Sequence[Row]) -> list[float]:
    """Returns the height of each row in inches: room for its name, and for its bars if the plot fits on a page."""
    names = [_LINE * len(row.name) + _GAP for row in rows]
    step = min(_STEP, max(0.0, _PAGE - sum(names)) / sum(len(row.gains) for row in rows))
    return [max(name, step * len(row.gains) + _GAP) for name, row in zip(names, rows, strict=True)]


def _rows(axes: Axes, rows: Sequence[Row], heights: Sequence[float], look: Theme) -> None:
    """Draws bars from 1x, the longest on top, in rows from top to bottom. `y` is in inches."""
    low = max(_EDGE, min([0.97, *(g.searched / 1.03 for row in rows for g in row.gains if g.beaten and g.searched)]))
    high = max(max(g.final, g.searched if g.beaten and g.searched else 0) for row in rows for g in row.gains)
    low, high = min(low, *(gain.final / 1.03 for row in rows for gain in row.gains)), max(1.03, high**1.04)
    counted = any(len(row.gains) > 1 for row in rows)
    middles: list[float] = []
    top = 0.0
    for row, height in zip(rows, heights, strict=True):
        middles.append(top + height / 2)
        pitch = min(_THICKEST, (height - _GAP) / len(row.gains))
        # Without room for gaps, bars overlap and form an area.
        thick = 0.86 * pitch if pitch > _GAPLESS else max(_THINNEST, 1.2 * pitch)
        gains = sorted(row.gains, key=lambda gain: (-gain.final, -(gain.searched or 0.0)))
        places = middles[-1] + pitch * (np.arange(len(gains)) - (len(gains) - 1) / 2)
        axes.barh(places, [gain.final - 1 for gain in gains], left=1, height=thick, color=look.ours, lw=0)
        beaten = [(g.searched, y) for g, y in zip(gains, places, strict=True) if g.beaten and g.searched is not None]
        for marker, points in (
            ("o", [(x, y) for x, y in beaten if x >= low]), ("<", [(low, y) for x, y in beaten if x < low]),
        ):  # fmt: skip
            if points:
                axes.plot(*zip(*points, strict=True), marker, color=look.xla, ms=4.5, mew=0, clip_on=False)
        columns = [(_RATIO_AT, row.text, look.ink)]
        columns += [(_COUNT_AT, f"{len(gains)}", look.faint)] if counted else []
        for right, text, colour in columns:
            axes.annotate(
                text, (1, middles[-1]), (right if counted else _COUNT_AT, 0), xycoords=axes.get_yaxis_transform(),
                textcoords="offset points", ha="right", va="center_baseline", color=colour,
            )  # fmt: skip
        top += height
        if height != heights[-1] or len(middles) < len(rows):
            axes.axhline(top, color=look.grid, lw=0.8)
    if counted:
        axes.annotate(
            "problems, geomean", (1, 1), (_RATIO_AT, 3), xycoords="axes fraction", textcoords="offset points",
            ha="right", va="bottom", fontsize=11, color=look.faint,
        )  # fmt: skip
    axes.axvline(1.0, color=look.xla, lw=1.6)
    axes.set_yticks(middles, ["\n".join(row.name) for row in rows])
    axes.tick_params(axis="y", length=0, pad=10)
    axes.set_ylim(top, 0)
    axes.set_xlim(low, high)
    ratio_axis(axes, "x")
    axes.grid(axis="x")
