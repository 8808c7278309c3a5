"""Plots a chip's roofline with every tuned problem."""

from __future__ import annotations

import collections
import dataclasses
import itertools
from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np

from scheduler.core.errors import NothingToDraw
from scheduler.core.text import digits
from scheduler.inspect.case import Case
from scheduler.inspect.plots.style import HEIGHT, Theme, drawing, figure, fold, letters_width, plain_log
from scheduler.model.cost import CostModel

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
        from matplotlib.lines import Line2D

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
        handles = [
            Line2D([], [], ls="none", marker=marker, color=look.ours, ms=6, label="\n".join(fold(name, 2.15, most=2)))
            for name, marker in zip(names, itertools.cycle(_MARKERS))
        ]
        made.legend(handles=handles, loc="outside lower center", ncols=min(4, len(names)), handletextpad=0.2)
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
