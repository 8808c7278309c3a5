"""Plots how tiles cover operands and result, and in which order blocks process them."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, cast

import numpy as np
import numpy.typing as npt

from scheduler.core.errors import NothingToDraw
from scheduler.core.text import digits
from scheduler.inspect.case import Best, Case
from scheduler.inspect.plots.style import Theme, drawing, figure, fold, plain_log
from scheduler.model.cost import arithmetic_intensity
from scheduler.model.pruning import illegal
from scheduler.model.traffic import block_count, block_loads, column, concurrent, walk
from search_spaces.footprint import Footprint, Operand
from search_spaces.space import Choice, Columns, unknown

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure


# Maximum number of tiles drawn along an axis, so that single tiles stay visible.
_DRAWN = 64
# Opacity of blocks loaded in later steps.
_LATER = 0.35
# Inches: text width below the result, and below the operands loaded for its rows.
_RESULT_TEXT, _LEFT_TEXT = 4.4, 1.9


@dataclasses.dataclass(frozen=True)
class LaunchTiles:
    """The tiles of a launch, along two axes of its grid.

    Attributes:
      rows, columns: The two axes; `columns` is None if the grid has only one long axis.
      extents: Number of tiles along each axis of the grid.
      order: ``[tile, axis]``, in the order of processing.
      at_once: Number of concurrent tiles.
      steps: Number of steps of a tile.
    """

    footprint: Footprint
    rows: int
    columns: int | None
    extents: tuple[int, ...]
    order: npt.NDArray[np.int64]
    at_once: int
    steps: int

    def name(self, axis: int) -> str:
        return self.footprint.axes[axis] if self.footprint.axes else f"axis {axis}"


def tiles(case: Case, *, backend: str | None = None, dark: bool = False) -> Figure:
    """Plots the grid of the best schedule of a backend, by default the best searched one, from its footprint.

    Raises:
      NothingToDraw: No kernel except the library's supports the problem.
      ValueError: There is no such backend.
    """
    best = case.best_searched(backend)
    footprint = case.footprint(best)
    plan = _plan(footprint, case)
    loads = footprint.mean_step.loads
    first = min(plan.at_once, len(plan.order))
    needed = [int(np.max(count)) for count in block_loads(footprint, float(first))]
    shared = ", ".join(
        f"{count} of {_name(load, number)}" for number, (load, count) in enumerate(zip(loads, needed, strict=True))
        if np.max(load.bytes) > 0
    )  # fmt: skip
    waves = math.ceil(len(plan.order) / plan.at_once)
    subtitle = (
        f"{case.text(best)}. "
        f"{len(plan.order)} tile{'s' * (len(plan.order) > 1)} in {waves} wave{'s' * (waves > 1)} of {plan.at_once}; "
        f"wave 1 needs these distinct blocks a step: {shared}"
    )
    with drawing(dark) as look:
        made = figure(f"Tiles of {case.operation.name}, in the order in which they are taken", look, subtitle=subtitle)
        _draw(made, plan, loads, look)
        return made


def _plan(f: Footprint, case: Case) -> LaunchTiles:
    extents = tuple(int(np.max(extent)) for extent in f.grid)
    order = walk(extents, int(np.max(f.minor)), int(np.max(f.group)), snake=f.snake)
    long = sorted(sorted(range(len(extents)), key=lambda axis: -extents[axis])[:2])
    columns = long[1] if len(long) > 1 and min(extents[axis] for axis in long) > 1 else None
    rows = long[0] if columns is not None else max(range(len(extents)), key=lambda axis: extents[axis])
    at_once = int(np.max(concurrent(f, case.hardware)))
    return LaunchTiles(f, rows, columns, extents, order, at_once, max(1, round(float(np.max(f.steps)))))


def _draw(made: Figure, plan: LaunchTiles, loads: Sequence[Operand], look: Theme) -> None:
    """Draws the result, with the operands for its rows to the left and those for its columns above."""
    moved = [(n, load) for n, load in enumerate(loads) if np.max(load.bytes) > 0]
    left = [(n, load) for n, load in moved if plan.rows in load.axes and plan.columns not in load.axes]
    above = [(n, load) for n, load in moved if plan.columns in load.axes and plan.rows not in load.axes]
    grid = made.add_gridspec(
        2, 3, width_ratios=(0.5 if left else 0.01, 1.3, 0.5), height_ratios=(0.5 if above else 0.01, 1.3)
    )
    result = made.add_subplot(grid[1, 1])
    rows, columns = _result(result, plan, look)
    first = plan.order[: min(plan.at_once, len(plan.order))]
    if left:
        axes = made.add_subplot(grid[1, 0])
        _operand(axes, left, plan, rows, {int(t[plan.rows]) for t in first}, look, upright=True)
    if above and plan.columns is not None:
        axes = made.add_subplot(grid[0, 1])
        _operand(axes, above, plan, columns, {int(t[plan.columns]) for t in first}, look, upright=False)
    _legend(made.add_subplot(grid[1, 2]), plan, look)


def _result(axes: Axes, plan: LaunchTiles, look: Theme) -> tuple[int, int]:
    """Draws tiles in the colour of their wave, and the path of the first wave.

    Returns the numbers of rows and columns drawn.
    """
    across = plan.extents[plan.columns] if plan.columns is not None else 1
    down = plan.extents[plan.rows]
    rows, columns = min(down, _DRAWN), min(across, _DRAWN)
    wave = np.full((rows, columns), -1)
    way: list[tuple[int, int]] = []
    for number, tile in enumerate(plan.order):
        other = [axis for axis in range(len(plan.extents)) if axis not in (plan.rows, plan.columns)]
        if any(tile[axis] for axis in other):  # only the first plane is drawn
            continue
        j, i = int(tile[plan.rows]), int(tile[plan.columns]) if plan.columns is not None else 0
        if j < rows and i < columns:
            wave[j, i] = number // plan.at_once
            if number < plan.at_once:
                way.append((i, j))
    shades = _shades(plan, look)
    pixels = np.zeros((rows, columns, 4))
    for j in range(rows):
        for i in range(columns):
            pixels[j, i] = shades[min(int(wave[j, i]), len(shades) - 1)] if wave[j, i] >= 0 else (0, 0, 0, 0)
    _blocks(axes, pixels, look)
    for colour, width in ((look.ground, 3.6), (look.ink, 1.4)):  # one of them is visible on any shade
        axes.plot(*zip(*way, strict=True), color=colour, lw=width)
    axes.plot(*way[0], "o", color=look.ink, ms=6)
    axes.plot(*way[-1], "s", color=look.ink, ms=5)
    cut = [f"the first {n} of {of}" for n, of in ((rows, down), (columns, across)) if n < of]
    names = [plan.name(plan.rows)] + ([plan.name(plan.columns)] if plan.columns is not None else [])
    sizes = f"{down} x {across} tiles" if plan.columns is not None else f"{down} tiles"
    label = f"result: {sizes} ({' x '.join(names)})" + (f", {' and '.join(cut)} drawn" if cut else "")
    axes.set_xlabel("\n".join(fold(label, _RESULT_TEXT)), fontsize=11)
    return rows, columns


def _blocks(axes: Axes, colours: npt.NDArray[np.float64], look: Theme) -> None:
    """Draws a block for each colour, ``[row, column, RGBA]``, with lines between them."""
    rows, columns, _ = colours.shape
    axes.imshow(colours, aspect="auto", interpolation="nearest", extent=(-0.5, columns - 0.5, rows - 0.5, -0.5))
    for edge in np.arange(0.5, columns - 0.5):
        axes.axvline(edge, color=look.ground, lw=0.6)
    for edge in np.arange(0.5, rows - 0.5):
        axes.axhline(edge, color=look.ground, lw=0.6)
    axes.set_xticks([])
    axes.set_yticks([])


def _operand(
    axes: Axes, loads: Sequence[tuple[int, Operand]], plan: LaunchTiles, count: int, touched: set[int], look: Theme, *,
    upright: bool,
) -> None:  # fmt: skip
    """Draws blocks of operands along one axis and steps along the other. Blocks of the first wave are filled."""
    from matplotlib.colors import to_rgb

    steps = min(plan.steps, 16)
    pixels = np.zeros((count, steps, 4))
    colour = _shades(plan, look)[0]
    for index in range(count):
        for step in range(steps):
            strength = 1.0 if step == 0 else _LATER
            pixels[index, step] = (*colour[:3], strength) if index in touched else (*to_rgb(look.grid), 1.0)
    _blocks(axes, pixels if upright else pixels.transpose(1, 0, 2), look)
    words = [f"{_name(load, number)}: {digits(float(np.max(load.bytes)) / 1024)} KiB a step" for number, load in loads]
    more = f"{plan.steps} step{'s' * (plan.steps > 1)}" + (f", {steps} drawn" if steps < plan.steps else "")
    if upright:
        axes.set_xlabel("\n".join(line for text in (*words, more) for line in fold(text, _LEFT_TEXT)), fontsize=11)
    else:
        axes.set_title("; ".join([*words, more]), loc="center", fontsize=11)


def _legend(axes: Axes, plan: LaunchTiles, look: Theme) -> None:
    from matplotlib.lines import Line2D
    from matplotlib.patches import Patch

    axes.set_axis_off()
    shades = _shades(plan, look)
    waves = math.ceil(len(plan.order) / plan.at_once)
    handles: list[Patch | Line2D] = [
        Patch(color=shade, label=f"wave {number + 1}" + (" and later" if number + 1 == len(shades) < waves else ""))
        for number, shade in enumerate(shades)
    ]
    handles.append(Line2D([], [], color=look.ink, marker="o", ms=6, lw=1.3, label="order of wave 1"))
    handles.append(Patch(color=shades[0], label="loaded, first step"))
    handles.append(Patch(color=(*shades[0][:3], _LATER), label="loaded, later steps"))
    handles.append(Patch(color=look.grid, label="not loaded by wave 1"))
    axes.legend(handles=handles, loc="upper left", borderaxespad=0.0, bbox_to_anchor=(0, 1))


def _shades(plan: LaunchTiles, look: Theme) -> list[tuple[float, float, float, float]]:
    """Returns a colour for each wave. The last colour is for all later waves."""
    from matplotlib.colors import to_rgb

    waves = min(6, math.ceil(len(plan.order) / plan.at_once))
    ours, ground = np.array(to_rgb(look.ours)), np.array(to_rgb(look.ground))
    mixed = [ours * share + ground * (1 - share) for share in np.linspace(1.0, 0.25, max(waves, 2))[:waves]]
    return [(float(r), float(g), float(b), 1.0) for r, g, b in mixed]


def _name(load: Operand, number: int) -> str:
    return load.name or f"operand {number}"


# ------------------------------------------------------------------------------
# Plots on-chip memory, arithmetic intensity and iterations against the size of a block.

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
