"""Plots a chip's roofline with every tuned problem, and how near to it the problems of each operation are."""

from __future__ import annotations

import collections
import dataclasses
import itertools
import statistics
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from scheduler.core.errors import NothingToDraw
from scheduler.core.text import digits
from scheduler.inspect.case import Case
from scheduler.inspect.plots.style import HEIGHT, Theme, drawing, figure, fold, letters_width, plain_log
from scheduler.model.cost import CostModel

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure


# The most rows of operations, of which the last one may be that of several; and so many have room in any case.
_ROWS, _ROOM = 26, 15
# Inches: minimum width and height of the left axes, the height of a text line, and that of a row.
_ACROSS, _DOWN, _LINE, _ROW = 3.7, 3.2, 0.2, 0.25
# Of a row's height: how far the points of XLA and of the winners lie from its middle.
_APART = 0.19
# Inches of the name of an operation.
_NAME = 2.3


@dataclasses.dataclass(frozen=True)
class Point:
    """One problem.

    Attributes:
      intensity: FLOP/B of compulsory traffic.
      rate, xla_rate: FLOP/s of the winner and of XLA; `xla_rate` is None if XLA did not run.
      roof: FLOP/s that the chip allows at this intensity.
    """

    operation: str
    intensity: float
    rate: float
    xla_rate: float | None
    roof: float

    @classmethod
    def of(cls, case: Case) -> Point | None:
        """Returns the point of a case; None if it has no record or no FLOPs."""
        if case.record is None or not case.problem.flops:
            return None
        p, library_s = case.problem, case.library_s
        return cls(
            case.operation.name,
            p.flops / p.bytes_moved,
            p.flops / case.record.winner.measurement.median_s,
            None if library_s is None else p.flops / library_s,
            p.flops / CostModel(case.hardware).lower_bound(p),
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
    subtitle = "filled: what answers a call; hollow: XLA; bar: the median. FLOP and bytes that the problem needs."
    if any(case.took == "estimated" for case in cases):
        subtitle += " Times are estimated by the compiler where the chip was not there."
    points, names = grouped(points)
    with drawing(dark) as look:
        made = figure(title, look, subtitle=subtitle, height=max(HEIGHT, _ROW * len(names) + 1.5))
        left, right = made.subplots(1, 2, width_ratios=(1.5, 1))
        arithmetics = sorted(
            {case.problem.arithmetic for case in cases if Point.of(case)}, key=lambda name: (hardware.peak(name), name)
        )
        _roofs(left, {name: hardware.peak(name) for name in arithmetics}, hardware.hbm_bytes_per_s, points, look)
        _points(left, points, look)
        left.set(xlabel="arithmetic intensity, FLOP/B", ylabel="TFLOP/s")
        _shares(right, points, names, look)
        return made


def grouped(points: Sequence[Point]) -> tuple[list[Point], list[str]]:
    """Returns the points and their names, with one name for the rarest operations if there are more than rows."""
    counts = collections.Counter(sorted(point.operation for point in points))
    if len(counts) <= _ROWS:
        return list(points), sorted(counts)
    kept = sorted(name for name, _ in counts.most_common(_ROWS - 1))
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


def _points(axes: Axes, points: Sequence[Point], look: Theme) -> None:
    """Draws the rates over the intensity, XLA's below the winners'."""
    pairs = [(point.intensity, point.xla_rate / 1e12) for point in points if point.xla_rate is not None]
    for of, style in ((pairs, _xla(look)), ([(point.intensity, point.rate / 1e12) for point in points], _ours(look))):
        axes.plot([x for x, _ in of], [y for _, y in of], **style)


def _shares(axes: Axes, points: Sequence[Point], names: Sequence[str], look: Theme) -> None:
    """Draws a row for each operation: its shares of the roofline, with their median."""
    for row, name in enumerate(names):
        of_it = [point for point in points if point.operation == name]
        for side, style, shares in (
            (-1, _ours(look), [point.rate / point.roof for point in of_it]),
            (1, _xla(look), [point.xla_rate / point.roof for point in of_it if point.xla_rate is not None]),
        ):
            if shares:
                y = row + side * _APART
                axes.plot(shares, [y] * len(shares), **style)
                axes.plot([statistics.median(shares)] * 2, [y - _APART, y + _APART], color=style["mec"], lw=2.6)
    highest = max([1.0, *(rate / p.roof for p in points for rate in (p.rate, p.xla_rate or 0.0))])
    axes.set(xlim=(0, 1.03 * highest), ylim=(max(len(names), _ROOM) - 0.5, -0.5), xlabel="share of the roofline")
    axes.axvline(1.0, color=look.ink, lw=1.6)
    axes.xaxis.set_major_formatter(lambda value, _: f"{value:.0%}")
    axes.set_yticks(range(len(names)), ["\n".join(fold(name, _NAME, most=1)) for name in names])
    axes.tick_params(axis="y", length=0)
    axes.grid(axis="x")
    for row in range(1, len(names)):
        axes.axhline(row - 0.5, color=look.grid, lw=0.8)


def _ours(look: Theme) -> dict[str, Any]:
    return {"marker": "o", "ls": "none", "mfc": look.ours, "mec": look.ours, "ms": 3.6, "mew": 0.6}


def _xla(look: Theme) -> dict[str, Any]:
    return {"marker": "o", "ls": "none", "mfc": "none", "mec": look.xla, "ms": 3.6, "mew": 0.8}
