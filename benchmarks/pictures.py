"""Draws the pictures of the documents (docs/pictures), light and dark, from the shipped records and the sweeps.

python benchmarks/pictures.py     # without a device
"""

from __future__ import annotations

import dataclasses
import itertools
import statistics
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt
from harness import ROOT
from matplotlib.lines import Line2D
from matplotlib.patches import PathPatch
from matplotlib.path import Path as Outline
from matplotlib.ticker import FixedLocator, FuncFormatter, NullLocator
from scipy.stats import kendalltau

from scheduler.core.records import Record, key_of
from scheduler.core.text import ratio_text, share_text
from scheduler.inspect import case as cases
from scheduler.inspect import plots
from scheduler.inspect.case import Case
from scheduler.inspect.explain import GROUPS, group_of
from scheduler.inspect.plots.style import Theme, drawing, figure, fold, legend_right, plain_log
from scheduler.model.cost import Breakdown
from scheduler.store.store import shipped
from search_spaces import format_problem, load_known
from search_spaces.space import Columns

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

PICTURES = ROOT / "docs" / "pictures"


def main() -> None:
    for dark in (False, True):
        for name, drawn in pictures(*inputs(), dark=dark):
            file = PICTURES / f"{name}-{'dark' if dark else 'light'}.svg"
            file.write_text(plots.svg(drawn))
            print(file.relative_to(ROOT))


def inputs() -> tuple[list[Record], list[Path]]:
    """The shipped records that are measured, and the recorded sweeps."""
    store = shipped()
    assert store is not None
    return [r for r in store.records() if not r.estimated], sorted((ROOT / "sweeps").rglob("*.jsonl.gz"))


def pictures(records: Sequence[Record], sweeps: Sequence[Path], *, dark: bool) -> Iterator[tuple[str, Figure]]:
    """Yields each picture with its name. Those of one problem are of the sweep with the most measured schedules."""
    swept = {path: cases.of_recording(path) for path in sweeps}
    path = max(swept, key=lambda path: len(swept[path].measured()))
    one = swept[path]
    key = key_of(one.operation, one.problem, one.hardware)
    # The best schedule is that of the final comparison.
    record = next((record for record in records if record.key == key), None)
    tuned = Case(one.operation, one.problem, one.hardware, record) if record else one
    yield "gains", gains(records, dark=dark)
    yield "roofline", plots.roofline([case for case in map(cases.of_record, records) if case], dark=dark)
    yield "best-so-far", plots.best_so_far(cases.of_replay(path), dark=dark)
    yield "predictions", predictions(one, dark=dark)
    yield "landscape", plots.landscape(one, dark=dark)
    yield "block-sizes", plots.block_sizes(tuned, dark=dark)
    yield "tiles", plots.tiles(tuned, dark=dark)
    yield "time-breakdown", plots.time_breakdown(tuned, dark=dark)


# ------------------------------------------------------------------------------
# Plots the faster library's time over ours by operation: for the best searched schedule, and for the selected one.

# Inches. A README shows 10 inches as 838 pixels, so the thinnest bar is slightly more than one pixel.
_NAME, _GAIN_LINE, _GAP = 3.6, 0.19, 0.12
_THINNEST, _STEP, _GAPLESS, _THICKEST = 0.0145, 0.0145, 0.05, 0.16
_PAGE = 8.0
# Points from the axes to the right edges of the columns of text.
_COUNT_AT, _RATIO_AT, _MOST_AT = 50, 104, 158
# Values below this are drawn at the edge, because a single one would leave no room for the others.
_EDGE = 0.5
# Bars end here, too: the longest is thirty times as long. The column of the most says how long it is.
_CUT = 4.0
# What a reader calls the operations. Each row of the picture is a group; others are rows by their own names.
_GROUPS = {
    "matrix products": ("matmul",),
    "gated and float8 products": ("gated_matmul", "scaled_matmul"),
    "grouped products (mixtures of experts)": ("ragged_dot", "ragged_dot_weights", "gated_ragged_dot"),
    "attention": ("flash_attention",),
    "attention, backward": ("flash_attention_backward",),
    "softmax, cross entropy": ("softmax", "softmax_with_lse", "log_softmax", "cross_entropy", "cross_entropy_saving"),
    "norms": ("rms_norm", "add_rms_norm", "layer_norm", "group_norm"),
    "SiLU-and-mul": ("silu_and_mul",),
    "quantization of rows": ("quantize_rows",),
    "row operations, backward": (
        "softmax_backward", "softmax_with_lse_backward", "log_softmax_backward", "cross_entropy_backward",
        "rms_norm_backward", "add_rms_norm_backward", "layer_norm_backward", "group_norm_backward",
        "silu_and_mul_backward",
    ),
}  # fmt: skip


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

    @property
    def group(self) -> str:
        """What a reader calls the operation."""
        return next((name for name, of_it in _GROUPS.items() if self.operation in of_it), self.operation)


def _libraries(record: Record) -> dict[str, str]:
    """Returns library names by backend: XLA's, and the vendors' if the operation is available."""
    named = {record.library: "XLA"}
    try:
        kernels = load_known(record.key.operation).kernels
    except ValueError:
        return named
    return named | {kernel.backend: kernel.vendor for kernel in kernels if kernel.vendor}


def gains(records: Sequence[Record], *, dark: bool = False) -> Figure:
    """Plots the gains of records of one chip by group of operations. Records without a library's time are left out."""
    found = [gain for gain in map(Gain.of, records) if gain is not None]
    chips = dict.fromkeys(record.key.hardware.partition(" (")[0] for record in records)
    order = [*_GROUPS, *sorted({gain.operation for gain in found})]
    found.sort(key=lambda gain: (order.index(gain.group), gain.final, gain.searched or 0.0))
    libraries = sorted({gain.library for gain in found}, reverse=True)
    title = f"The library's time over ours, {' and '.join(chips)}: {len(found)} problems"
    subtitle = f"{' or '.join(libraries)}, the faster; bar: what answers a call; "
    subtitle += "dot: the best searched schedule, where a library answers"
    rows = [Row.of(group, list(of_it)) for group, of_it in itertools.groupby(found, lambda gain: gain.group)]
    with drawing(dark) as look:
        heights = _heights(rows)
        made = figure(title, look, subtitle=subtitle, height=sum(heights) + 2.0)
        axes = made.add_subplot()
        _rows(axes, rows, heights, look)
        axes.set_xlabel(f"its time over ours, logarithmic, cut at {_CUT:g}x; right of 1x ours is faster")
        return made


@dataclasses.dataclass(frozen=True)
class Row:
    """The problems of one group of operations.

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
    low, high = min(low, *(gain.final / 1.03 for row in rows for gain in row.gains)), min(max(1.03, high**1.04), _CUT)
    middles: list[float] = []
    top = 0.0
    for row, height in zip(rows, heights, strict=True):
        middles.append(top + height / 2)
        pitch = min(_THICKEST, (height - _GAP) / len(row.gains))
        # Without room for gaps, bars overlap and form an area.
        thick = 0.86 * pitch if pitch > _GAPLESS else max(_THINNEST, 1.2 * pitch)
        gains = sorted(row.gains, key=lambda gain: (-gain.final, -(gain.searched or 0.0)))
        places = middles[-1] + pitch * (np.arange(len(gains)) - (len(gains) - 1) / 2)
        ends = [min(gain.final, high) for gain in gains]
        axes.barh(places, [end - 1 for end in ends], left=1, height=thick, color=look.ours, lw=0)
        beaten = [(g.searched, y) for g, y in zip(gains, places, strict=True) if g.beaten and g.searched is not None]
        for marker, points in (
            ("o", [(x, y) for x, y in beaten if x >= low]), ("<", [(low, y) for x, y in beaten if x < low]),
        ):  # fmt: skip
            if points:
                axes.plot(*zip(*points, strict=True), marker, color=look.xla, ms=4.5, mew=0, clip_on=False)
        columns = ((_COUNT_AT, f"{len(gains)}"), (_RATIO_AT, row.text), (_MOST_AT, ratio_text(gains[0].final)))
        for right, text in columns:
            colour = look.ink if right == _RATIO_AT else look.faint
            axes.annotate(
                text, (1, middles[-1]), (right, 0), xycoords=axes.get_yaxis_transform(),
                textcoords="offset points", ha="right", va="center_baseline", color=colour,
            )  # fmt: skip
        top += height
        if row is not rows[-1]:
            axes.axhline(top, color=look.grid, lw=0.8)
    axes.annotate(
        "problems, geomean, most", (1, 1), (_MOST_AT, 3), xycoords="axes fraction", textcoords="offset points",
        ha="right", va="bottom", fontsize=11, color=look.faint,
    )  # fmt: skip
    axes.axvline(1.0, color=look.xla, lw=1.6)
    axes.set_yticks(middles, ["\n".join(row.name) for row in rows])
    axes.tick_params(axis="y", length=0, pad=10)
    axes.set_ylim(top, 0)
    axes.set_xlim(low, high)
    _ratio_axis(axes)
    axes.grid(axis="x")


def _ratio_axis(axes: Axes) -> None:
    """Sets a logarithmic scale for ratios: 2x and 0.5x are equally far from 1x."""
    axes.set_xscale("log")
    low, high = axes.get_xlim()
    shown = ([tick for tick in ticks if low <= tick <= high] for ticks in _RATIOS)
    room = _TICK * np.log(high / low)
    axes.xaxis.set_major_locator(FixedLocator(next(t for t in shown if np.diff(np.log(t)).min() >= room)))
    axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:,.3g}x"))
    axes.xaxis.set_minor_locator(NullLocator())


# Tick sets for ratios, from dense to sparse, and the share of an axis that one tick label takes.
_RATIOS = (
    tuple(0.5 + 0.1 * step for step in range(21)),
    tuple(step * 2.0**power for power in range(-10, 20) for step in (1.0, 1.5)),
    tuple(2.0**power for power in range(-10, 20)),
)
_TICK = 0.105


# ------------------------------------------------------------------------------
# Plots predicted against measured times, coloured by each schedule's bottleneck.

# Above this number, only every n-th schedule is drawn. The statistics include all of them.
_DRAWN = 2500

Array = npt.NDArray[np.float64]


def predictions(case: Case, *, dark: bool = False) -> Figure:
    """Plots predicted against measured times of the sweep of a problem, for its best searched backend."""
    kernel = case.best_searched().kernel
    space = kernel.space(case.problem, case.hardware.target)
    ran = [(space.decode(trial.schedule), s) for trial, s in case.measured() if trial.backend == kernel.backend]
    measured, points = np.array([seconds for _, seconds in ran]), Columns.of([point for point, _ in ran])
    footprint, model = case.footprints(kernel, points), case.model(kernel)
    predicted = np.broadcast_to(model.seconds(footprint), measured.shape)
    bound = np.array(bounds(model.breakdown(footprint), len(ran)))
    error = float(np.median(np.abs(np.log(predicted / measured))))
    subtitle = f"{len(ran):,} schedules of {case.problem} on {case.hardware.kind}; median error "
    subtitle += f"{share_text(float(np.expm1(error)))}; Kendall's tau {kendalltau(predicted, measured).statistic:.2f}"
    with drawing(dark) as look:
        made = figure(f"Predicted and measured times: {case.operation.name}", look, subtitle=subtitle)
        _draw(made.add_subplot(), predicted * 1e6, measured * 1e6, bound, look)
        return made


def _draw(axes: Axes, predicted: Array, measured: Array, bound: npt.NDArray[np.str_], look: Theme) -> None:
    low = min(predicted.min(), measured.min()) / 1.15
    high = max(predicted.max(), measured.max()) * 1.15
    axes.set(xscale="log", yscale="log", xlim=(low, high), ylim=(low, high))
    axes.set_box_aspect(1)
    axes.fill_between([low, high], [low / 1.1, high / 1.1], [low * 1.1, high * 1.1], color=look.grid, lw=0, alpha=0.7)
    axes.plot([low, high], [low, high], color=look.ink, lw=1.4)
    colours = dict(zip(GROUPS, look.several, strict=False))
    step = -(-len(predicted) // _DRAWN)
    size = 6.0 if len(predicted) < 300 else 4.0 if len(predicted) < 2000 else 3.0
    handles: list[Line2D] = []
    for group in sorted(GROUPS, key=lambda group: -(bound == group).sum()):
        which = bound == group
        if which.any():
            _cloud(axes, measured[which][::step], predicted[which][::step], colours[group], size)
            label = f"{group} ({which.sum():,})"
            handles.append(Line2D([], [], ls="none", marker="o", ms=7, color=colours[group], label=label))
    handles.append(Line2D([], [], color=look.grid, lw=8, label="within 10 %"))
    legend_right(axes, handles, "bound by")
    plain_log(axes.xaxis)
    plain_log(axes.yaxis)
    axes.set(xlabel="measured, µs", ylabel="predicted, µs")


def bounds(parts: Breakdown, schedules: int) -> list[str]:
    """Returns the group of each schedule's longest overlapped term.

    The group is "start and end" if the serial terms together take longer.
    """

    def full(values: Any) -> Array:
        return np.broadcast_to(np.asarray(values, dtype=np.float64), (schedules,))

    names = list(parts.overlapped)
    terms = np.stack([full(parts.overlapped[name]) for name in names])
    serial, longest = full(sum(parts.serial.values())), terms.argmax(axis=0)
    return [
        "start and end" if serial[index] > terms[longest[index], index] else group_of(names[longest[index]])
        for index in range(schedules)
    ]


def _cloud(axes: Axes, x: Array, y: Array, colour: str, size: float) -> None:
    """Draws many points as one path. In an SVG, a point then takes a twentieth of the space of a marker."""
    # A dot is a very short line with round caps: renderers omit lines of exactly zero length.
    ends = np.stack([np.column_stack([x, y]), np.column_stack([np.multiply(x, 1.0001), y])], axis=1).reshape(-1, 2)
    codes = np.tile([Outline.MOVETO, Outline.LINETO], len(ends) // 2)
    axes.add_patch(
        PathPatch(Outline(ends, codes), fill=False, ec=colour, lw=size, capstyle="round", alpha=0.75, snap=False)
    )


if __name__ == "__main__":
    main()
