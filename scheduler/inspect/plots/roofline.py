"""Plots a chip's roofline with every tuned problem, and the speedup over XLA by problem."""

from __future__ import annotations

import collections
import dataclasses
import itertools
import statistics
from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np

from scheduler.core.errors import NothingToDraw
from scheduler.core.records import Record
from scheduler.core.text import digits, ratio_text
from scheduler.inspect.case import Case
from scheduler.inspect.plots.style import HEIGHT, Theme, drawing, figure, fold, letters_width, plain_log, ratio_axis
from scheduler.model.cost import CostModel
from search_spaces import format_problem, load_known

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure


# The markers of operations, in the order of their names; the last one may be that of several.
_MARKERS = "osD^vPX<>*pHd8h"
# Inches: minimum width and height of the left axes, and the height of a text line.
_ACROSS, _DOWN, _LINE = 4.2, 3.2, 0.2


@dataclasses.dataclass(frozen=True)
class Point:
    """One problem.

    Attributes:
      intensity: FLOP/B of compulsory traffic.
      rate, xla_rate: FLOP/s of the winner and of XLA; `xla_rate` is None if XLA did not run.
      roof: FLOP/s that the chip allows at this intensity.
      bound_s: Lower bound of the time by the roofline, in seconds.
    """

    operation: str
    intensity: float
    rate: float
    xla_rate: float | None
    roof: float
    bound_s: float

    @classmethod
    def of(cls, case: Case) -> Point | None:
        """Returns the point of a case; None if it has no record or no FLOPs."""
        if case.record is None or not case.problem.flops:
            return None
        p, library_s = case.problem, case.library_s
        bound_s = CostModel(case.hardware).lower_bound(p)
        return cls(
            case.operation.name,
            p.flops / p.bytes_moved,
            p.flops / case.record.winner.measurement.median_s,
            None if library_s is None else p.flops / library_s,
            p.flops / bound_s,
            bound_s,
        )


def roofline(cases: Sequence[Case], *, dark: bool = False) -> Figure:
    """Plots the cases of one chip. Cases without a record are left out.

    Raises:
      NothingToDraw: No case has a record.
      ValueError: The cases are of several chips.
    """
    points = [point for point in map(Point.of, cases) if point is not None]
    if not points:
        raise NothingToDraw("no record to put under a roofline; tune a problem first")
    if len({case.hardware.id for case in cases}) > 1:
        raise ValueError("a roofline is of one chip, and these records are of several: name one")
    hardware = cases[0].hardware
    title = f"Roofline of {hardware.kind}: {len(points)} tuned problem{'s' * (len(points) > 1)}"
    subtitle = "filled: what answers a call; hollow: XLA; a line joins the two. FLOP and bytes that the problem needs."
    if any(case.took == "estimated" for case in cases):
        subtitle += " Times are estimated by the compiler where the chip was not there."
    with drawing(dark) as look:
        made = figure(title, look, subtitle=subtitle, height=HEIGHT + 0.4)
        left, right = made.subplots(1, 2, width_ratios=(1.25, 1))
        points, names = grouped(points)
        arithmetics = sorted(
            {case.problem.arithmetic for case in cases if Point.of(case)}, key=lambda name: (hardware.peak(name), name)
        )
        _roofs(left, {name: hardware.peak(name) for name in arithmetics}, hardware.hbm_bytes_per_s, points, look)
        for axes, of_roof in ((left, False), (right, True)):
            _points(axes, points, names, look, of_roof=of_roof)
        left.set(xlabel="arithmetic intensity, FLOP/B", ylabel="TFLOP/s")
        right.set(xlabel="time that the roofline allows, µs", ylabel="share of the roofline")
        right.set_xscale("log")
        times = [point.bound_s * 1e6 for point in points]
        right.set_xlim(min(times) / 2, max(times) * 2)
        plain_log(right.xaxis)
        highest = max([1.0, *(rate / p.roof for p in points for rate in (p.rate, p.xla_rate or 0.0))])
        right.set_ylim(0, 1.05 * highest)
        right.axhline(1.0, color=look.ink, lw=1.6)
        right.yaxis.set_major_formatter(lambda value, _: f"{value:.0%}")
        right.grid(axis="y")
        _legend(made, names, look)
        return made


def grouped(points: Sequence[Point]) -> tuple[list[Point], list[str]]:
    """Returns the points and their names, with one name for the rarest operations if there are more than markers."""
    counts = collections.Counter(sorted(point.operation for point in points))
    if len(counts) <= len(_MARKERS):
        return list(points), sorted(counts)
    kept = sorted(name for name, _ in counts.most_common(len(_MARKERS) - 1))
    others = f"{len(counts) - len(kept)} others"
    renamed = [p if p.operation in kept else dataclasses.replace(p, operation=others) for p in points]
    return renamed, [*kept, others]


def _roofs(axes: Axes, peaks: dict[str, float], bandwidth: float, points: Sequence[Point], look: Theme) -> None:
    """Draws the memory slope and the ceiling of each arithmetic, labelled at the left, where no point can be."""
    ceilings = {
        peak: f"{', '.join(names)}: {digits(peak / 1e12)} TFLOP/s"
        for peak, names in itertools.groupby(peaks, lambda name: peaks[name])
    }
    top, every = max(ceilings), [p.intensity for p in points]
    low, high = min([*every, 0.3 * top / bandwidth]) / 2, max([*every, 3 * top / bandwidth]) * 1.6
    for peak, name in ceilings.items():  # room for the label left of where the ceiling begins
        share = min(0.75, (letters_width(name) + 0.3) / _ACROSS)
        low = min(low, high / (high * bandwidth / peak) ** (1 / (1 - share)))
    rates = [rate for p in points for rate in (p.rate, p.xla_rate) if rate is not None]
    bottom, above = min(rates) / 3, top * 2.4
    axes.loglog([low, top / bandwidth], [low * bandwidth / 1e12, top / 1e12], color=look.ink, lw=1.8)
    line = (above / bottom) ** (_LINE / _DOWN)
    place = 0.0
    for peak, name in sorted(ceilings.items()):
        axes.plot([peak / bandwidth, high], [peak / 1e12] * 2, color=look.ink, lw=1.8)
        place = max(peak, place * line)
        axes.annotate(
            name, (peak / bandwidth, place / 1e12), (-9, 3), textcoords="offset points", ha="right", va="center",
            color=look.ink, fontsize=11,
        )  # fmt: skip
    axes.set_xlim(low, high)
    axes.set_ylim(bottom / 1e12, max(above, place * line**1.3) / 1e12)
    plain_log(axes.xaxis)
    plain_log(axes.yaxis)
    axes.grid()
    begins = max(low, bottom / bandwidth)
    middle = begins * (min(ceilings) / bandwidth / begins) ** 0.55
    axes.annotate(
        f"{digits(bandwidth / 1e12)} TB/s", (middle, middle * bandwidth / 1e12), (-6, 5), textcoords="offset points",
        ha="right", va="bottom", color=look.ink, fontsize=11,
    )  # fmt: skip


def _points(axes: Axes, points: Sequence[Point], names: Sequence[str], look: Theme, *, of_roof: bool) -> None:
    for name, marker in zip(names, itertools.cycle(_MARKERS)):
        of_it = [point for point in points if point.operation == name]
        pairs = [p for p in of_it if p.xla_rate is not None]

        def height(rates: Sequence[float | None], of: Sequence[Point]) -> list[float]:
            scale = [p.roof if of_roof else 1e12 for p in of]
            return list(np.array(rates, dtype=float) / scale)

        def along(of: Sequence[Point]) -> list[float]:
            return [p.bound_s * 1e6 if of_roof else p.intensity for p in of]

        before, after = height([p.xla_rate for p in pairs], pairs), height([p.rate for p in pairs], pairs)
        x = along(pairs)
        gap = [np.nan] * len(pairs)  # one line with gaps: an SVG stores the style of each line
        joined = (np.transpose(ends).ravel() for ends in ([x, x, gap], [before, after, gap]))
        axes.plot(*joined, color=look.faint, lw=1.2)
        axes.plot(x, before, marker, mfc="none", mec=look.xla, ms=5.5, mew=1.3, ls="none")
        axes.plot(
            along(of_it), height([p.rate for p in of_it], of_it), marker, color=look.ours, ms=5.5,
            mew=0, ls="none",
        )  # fmt: skip


def _legend(made: Figure, names: Sequence[str], look: Theme) -> None:
    """Adds a legend below both axes."""
    from matplotlib.lines import Line2D

    handles = [
        Line2D([], [], ls="none", marker=marker, color=look.ours, ms=6, label="\n".join(fold(name, 2.15, most=2)))
        for name, marker in zip(names, itertools.cycle(_MARKERS))
    ]
    made.legend(handles=handles, loc="outside lower center", ncols=min(4, len(names)), handletextpad=0.2)


# ------------------------------------------------------------------------------
# Plots a library's time over ours by problem: for the best searched schedule, and for the selected one.

# Up to this many problems have a row each. Otherwise each operation has a row.
_NAMED = 22
# Inches. A README shows 10 inches as 838 pixels, so the thinnest bar is slightly more than one pixel.
_NAME, _GAIN_LINE, _GAP = 3.6, 0.19, 0.12
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
            format_problem(record.key.operation, record.key.problem),
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
    names = [_GAIN_LINE * len(row.name) + _GAP for row in rows]
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
