"""Plots on-chip memory, arithmetic intensity and iterations against the size of a block."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, cast

import numpy as np
import numpy.typing as npt

from scheduler.core.errors import NothingToDraw
from scheduler.inspect.case import Best, Case
from scheduler.inspect.plots.axes import plain_log
from scheduler.inspect.plots.style import Theme, drawing, figure
from scheduler.model.cost import arithmetic_intensity
from scheduler.model.feasibility import illegal
from scheduler.model.traffic import block_count, column
from search_spaces.space import Choice, Columns, unknown

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

KIB = 1024
_MOST = 4  # choices with distinct colours


@dataclasses.dataclass(frozen=True)
class Line:
    """The effect of one choice while all others stay fixed.

    Attributes:
      values: Values of the choice.
      onchip_bytes, intensity, iterations: One element per value.
      legal: Whether a schedule with that value can run here.
    """

    name: str
    values: npt.NDArray[np.int64]
    onchip_bytes: npt.NDArray[np.float64]
    intensity: npt.NDArray[np.float64]
    iterations: npt.NDArray[np.float64]
    legal: npt.NDArray[np.bool_]


def block_sizes(case: Case, *, over: str | None = None, backend: str | None = None, dark: bool = False) -> Figure:
    """Plots the effect of block sizes, around the best schedule of a backend.

    By default the plot covers each numeric choice that changes the intensity or the iterations. Values outside the
    space, up to four times the largest, show the limit of on-chip memory.

    Raises:
      NothingToDraw: No kernel except the library's supports the problem, or no choice changes the intensity or the
        iterations.
      ValueError: There is no such backend or choice.
    """
    best = case.best_searched(backend)
    choices = best.kernel.space(case.problem, case.hardware.target).choices
    numbers = [name for name, values in choices.items() if _is_size(values[0]) and _is_size(best.schedule[name])]
    if over is not None and over not in numbers:
        raise ValueError(f"{best.kernel.backend} has no choice {unknown(over, numbers)} that is a number")
    lines = [_line(case, best, name, cast("Sequence[int]", choices[name])) for name in ([over] if over else numbers)]
    telling = [line for line in lines if over or np.ptp(line.intensity) > 0 or np.ptp(line.iterations) > 0]
    if not telling:
        raise NothingToDraw(f"no size of {best.kernel.backend} changes what a block of {case} loads or how often")
    subtitle = case.text(best)
    with drawing(dark) as look:
        made = figure(
            f"What the size of a block of {case.operation.name} changes", look,
            subtitle=f"{subtitle}; filled: legal; hollow: not in the space, or does not fit; ring: the schedule itself",
        )  # fmt: skip
        panels = made.subplots(1, 3)
        _panels(panels, telling[:_MOST], case, best, look)
        handles, names = panels[0].get_legend_handles_labels()
        made.legend(handles, names, loc="outside lower center", ncols=_MOST)
        return made


def _line(case: Case, best: Best, name: str, values: Sequence[int]) -> Line:
    declared, largest = {int(value) for value in values}, int(max(values))
    if min(declared) > 0 and largest > 1:
        try:
            with np.errstate(all="ignore"):
                line = _at(case, best, name, sorted({*declared, 2 * largest, 4 * largest}))
            if np.isfinite([line.onchip_bytes, line.intensity, line.iterations]).all():
                return line
        except (LookupError, ValueError, ArithmeticError):  # values that the footprint was not written for
            pass
    with np.errstate(all="ignore"):
        return _at(case, best, name, sorted(declared))


def _at(case: Case, best: Best, name: str, values: Sequence[int]) -> Line:
    sizes = np.array(values)
    points = Columns(
        {field: [value] * len(sizes) for field, value in best.schedule.items()} | {name: sizes}, len(sizes)
    )
    f = case.footprints(best.kernel, points)

    def full(of: Any) -> npt.NDArray[np.float64]:
        return np.broadcast_to(column(of), (len(sizes),))

    legal = [
        illegal(best.kernel, case.problem, case.hardware, dict(best.schedule) | {name: int(size)}) is None
        for size in sizes
    ]
    return Line(
        name, sizes, full(f.onchip_bytes), full(arithmetic_intensity(f)), full(block_count(f) * column(f.steps)),
        np.array(legal),
    )  # fmt: skip


def _panels(panels: Sequence[Axes], lines: Sequence[Line], case: Case, best: Best, look: Theme) -> None:
    onchip, intensity, iterations = panels
    limit = case.hardware.onchip_bytes / KIB
    for line, colour in zip(lines, look.several, strict=False):
        for axes, heights in (
            (onchip, line.onchip_bytes / KIB), (intensity, line.intensity), (iterations, line.iterations),
        ):  # fmt: skip
            axes.plot(line.values, heights, color=colour, lw=1.8, label=line.name)
            axes.plot(line.values, heights, "o", mfc=look.ground, mec=colour, ms=7, mew=1.6)
            axes.plot(line.values[line.legal], heights[line.legal], "o", color=colour, ms=7)
            here = line.values == best.schedule[line.name]
            axes.plot(line.values[here], heights[here], "o", mfc="none", mec=look.ink, ms=13, mew=1.8)
    # The axis is cut: values far beyond the limit need not be visible.
    top = min(2.5 * limit, max(float(line.onchip_bytes.max()) for line in lines) / KIB)
    onchip.axhspan(limit, max(1.15 * limit, 1.05 * top), color=look.bad, alpha=0.13, lw=0)
    onchip.axhline(limit, color=look.bad, lw=1.6)
    onchip.set_ylim(0, max(1.15 * limit, 1.05 * top))
    onchip.set_title(f"on-chip KiB of a block (limit {limit:.0f})", fontsize=12)
    intensity.set_ylim(bottom=0)
    intensity.set_title("intensity of a step, FLOP/B", fontsize=12)
    iterations.set_yscale("log")
    iterations.set_title("iterations of the launch", fontsize=12)
    plain_log(iterations.yaxis)
    for axes in panels:
        _sizes(axes, lines)
        axes.grid()


def _sizes(axes: Axes, lines: Sequence[Line]) -> None:
    """Labels sizes in powers of two if they are positive."""
    from matplotlib.ticker import FixedLocator, NullLocator

    every = [int(value) for line in lines for value in line.values]
    if min(every) > 0:
        axes.set_xscale("log", base=2)
        first, last = math.floor(math.log2(min(every))), math.ceil(math.log2(max(every)))
        ticks = [2**power for power in range(first, last + 1, -(-(last - first + 1) // 6))]
        axes.xaxis.set_major_locator(FixedLocator(ticks))
        axes.xaxis.set_minor_locator(NullLocator())
        axes.xaxis.set_major_formatter(lambda value, _: f"{value:.0f}")
    axes.set_xlabel(lines[0].name if len(lines) == 1 else "size")


def _is_size(value: Choice) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)
