"""Plots of a search: the best time after each trial, and predicted against measured times."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt
from scipy.stats import kendalltau

from scheduler.core.errors import NothingToDraw
from scheduler.core.records import Measurement, Trial
from scheduler.core.text import digits, share_text
from scheduler.inspect.case import Case
from scheduler.inspect.explain import GROUPS, bounds
from scheduler.inspect.plots.style import Theme, cloud, drawing, figure, label_lines, legend_right, plain_log, time_unit
from scheduler.prediction import predict
from search_spaces.space import Columns

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure


# ------------------------------------------------------------------------------
# Plots the best time after each trial of a search, with XLA and the top prediction for comparison.

# Trials slower than this multiple of the best are drawn at the edge, to keep smaller differences visible.
_SHOWN = 2.0


def best_so_far(case: Case, *, dark: bool = False) -> Figure:
    """Plots the trials of a search, for all backends except the library's.

    Raises:
      NothingToDraw: No trials are stored, they come from a sweep (which has no order), or none of them ran.
    """
    if case.swept:
        raise NothingToDraw(f"a sweep of {case} has no order to draw; replay a search over it")
    library = case.operation.library.backend
    trials = [trial for trial in case.trials if trial.backend != library]
    if not any(isinstance(trial.outcome, Measurement) for trial in trials):
        raise NothingToDraw(f"no trials are kept of {case}; replay a search over a recorded sweep, or tune it again")
    times = np.array([t.outcome.median_s if isinstance(t.outcome, Measurement) else np.nan for t in trials])
    scale, unit = time_unit(float(np.nanmin(times)))
    failed = int(np.isnan(times).sum())
    subtitle = f"{case.problem} on {case.hardware.kind}; {len(trials)} trials besides XLA's, {case.took}"
    subtitle += f", {failed} of which failed" if failed else ""
    best = float(np.nanmin(times)) / scale
    if case.library_s is not None and case.library_s / scale > _SHOWN * best:
        subtitle += f"; XLA takes {digits(case.library_s / scale)} {unit}"
    with drawing(dark) as look:
        made = figure(f"Best time so far, {case.operation.name}", look, subtitle=subtitle)
        axes = made.add_subplot()
        lines = {name: line for name, line in _lines(case, scale, unit, look).items() if line[0] <= _SHOWN * best}
        heights = [height for height, *_ in lines.values()]
        _trials(axes, times / scale, look, max([best, *heights]))
        lines["best"] = (best, f"best {digits(best)} {unit}", look.ours)
        for name, (height, _, colour) in lines.items():
            if name != "best":
                axes.axhline(height, color=colour, lw=1.6, ls="--" if name == "predicted" else "-")
        _, top = axes.get_ylim()
        if (lowest := min([best, *heights])) < best:
            axes.set_ylim(lowest - 0.08 * (top - lowest), top)
        label_lines(axes, list(lines.values()))
        axes.set(xlabel="trial", ylabel=f"time of one launch, {unit}")
        axes.grid(axis="y")
        return made


def _trials(axes: Axes, times: npt.NDArray[np.float64], look: Theme, highest: float) -> None:
    """Draws the trials. Much slower ones and failures are at the upper edge, above `highest`."""
    from matplotlib.lines import Line2D
    from matplotlib.ticker import MaxNLocator

    numbers, best = np.arange(1, len(times) + 1), float(np.nanmin(times))
    reached = np.fmin.accumulate(times)
    slowest = max(highest, *(value for value in times if value <= _SHOWN * best))
    top = max(1.04 * best, slowest + 0.1 * (slowest - best))
    shown, slow, failed = times <= top, times > top, np.isnan(times)
    axes.plot(numbers[shown], times[shown], "o", color=look.faint, ms=4.5, mew=0)
    for which, marker, colour in ((slow, "^", look.faint), (failed, "x", look.bad)):
        if which.any():
            edge = np.full(which.sum(), top)
            axes.plot(numbers[which], edge, marker, color=colour, ms=6, mew=1.6, clip_on=False)
    axes.step(numbers, np.minimum(reached, top), where="post", color=look.ours, lw=2.6)
    axes.set_ylim(best - 0.12 * (top - best), top)
    axes.set_xlim(0.4, len(times) + 0.6)
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    kinds = {
        "best so far": Line2D([], [], color=look.ours, lw=2.6),
        "a trial": Line2D([], [], ls="none", marker="o", color=look.faint, ms=5),
    }
    if slow.any():
        kinds["slower"] = Line2D([], [], ls="none", marker="^", color=look.faint, ms=6)
    if failed.any():
        kinds["failed"] = Line2D([], [], ls="none", marker="x", color=look.bad, ms=6)
    axes.legend(list(kinds.values()), list(kinds), loc="lower left", bbox_to_anchor=(-0.01, 1.0), ncols=4)


def _lines(case: Case, scale: float, unit: str, look: Theme) -> dict[str, tuple[float, str, str]]:
    """Returns height, text and colour for XLA's time and the top prediction's time (measured if it was tried)."""
    lines: dict[str, tuple[float, str, str]] = {}
    if (library_s := case.library_s) is not None:
        lines["xla"] = (library_s / scale, f"XLA {digits(library_s / scale)} {unit}", look.xla)
    tops = [
        (float(pruned.predicted_s[0]), kernel.backend, pruned.schedule(0))
        for kernel, pruned in predict.explain(case.operation, case.problem, case.hardware)
        if not isinstance(pruned, str) and not (kernel.library or kernel.vendor) and len(pruned.points)
    ]
    if tops:
        _, backend, schedule = min(tops, key=lambda top: top[0])
        tried = [
            seconds for trial, seconds in case.measured() if (trial.backend, trial.schedule) == (backend, schedule)
        ]
        if tried:
            value = tried[-1] / scale
            lines["predicted"] = (value, f"top prediction,\n{case.took} {digits(value)} {unit}", look.third)
        else:
            value = tops[0][0] / scale
            lines["predicted"] = (value, f"top prediction,\nnot tried: {digits(value)} {unit}", look.third)
    return lines


# ------------------------------------------------------------------------------
# Plots predicted against measured times, coloured by each schedule's bottleneck.

# Above this number, only every n-th schedule is drawn. The statistics include all of them.
_DRAWN = 2500

Array = npt.NDArray[np.float64]


@dataclasses.dataclass(frozen=True)
class Compared:
    """Schedules of one kernel for one problem: times in seconds, and the bottleneck of each."""

    predicted: Array
    measured: Array
    bound: Sequence[str]


def predictions(cases: Sequence[Case], *, dark: bool = False) -> Figure:
    """Plots predictions of the current model for all trials and entries of `cases`.

    Schedules that the current kernels do not know, and vendors' kernels, are left out.

    Raises:
      NothingToDraw: There are no such schedules.
    """
    found = [compared for case in cases for compared in _of(case)]
    if not found:
        raise NothingToDraw(
            "no measured schedule of today's kernels to compare the model with; sweep or tune a problem"
        )
    predicted, measured = (np.concatenate([getattr(one, name) for one in found]) for name in ("predicted", "measured"))
    bound = np.array([group for one in found for group in one.bound])
    error = float(np.median(np.abs(np.log(predicted / measured))))
    subtitle = f"{len(predicted):,} schedules of "
    subtitle += f"{cases[0].problem}" if len(cases) == 1 else f"{len(cases)} problems"
    kinds = " and ".join(dict.fromkeys(case.hardware.kind for case in cases))
    subtitle += f" on {kinds}; median error {share_text(float(np.expm1(error)))}"
    taus = [float(kendalltau(one.predicted, one.measured).statistic) for one in found if len(one.predicted) > 7]
    if taus:
        subtitle += f"; Kendall's tau {np.nanmedian(taus):.2f}" + (" in the median problem" if len(taus) > 1 else "")
    operations = dict.fromkeys(case.operation.name for case in cases)
    with drawing(dark) as look:
        took = " and ".join(sorted({case.took for case in cases}))
        made = figure(f"Predicted and {took} times: {', '.join(operations)}", look, subtitle=subtitle)
        _draw(made.add_subplot(), predicted * 1e6, measured * 1e6, bound, look, took)
        return made


def _draw(axes: Axes, predicted: Array, measured: Array, bound: npt.NDArray[np.str_], look: Theme, took: str) -> None:
    from matplotlib.lines import Line2D

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
            cloud(axes, measured[which][::step], predicted[which][::step], colours[group], size)
            label = f"{group} ({which.sum():,})"
            handles.append(Line2D([], [], ls="none", marker="o", ms=7, color=colours[group], label=label))
    handles.append(Line2D([], [], color=look.grid, lw=8, label="within 10 %"))
    legend_right(axes, handles, "bound by")
    plain_log(axes.xaxis)
    plain_log(axes.yaxis)
    axes.set(xlabel=f"{took}, µs", ylabel="predicted, µs")


def _of(case: Case) -> Iterator[Compared]:
    """Yields the comparison of each kernel."""
    for kernel in case.operation.kernels:
        if kernel.library or kernel.vendor or kernel.supports(case.problem, case.hardware.target):
            continue
        space = case.problem, case.hardware.target
        points, seconds = [], []
        for one, median_s in _measured(case):
            if (one.backend, one.version) == (kernel.backend, kernel.version):
                try:
                    points.append(kernel.space(*space).decode(one.schedule))
                except ValueError:  # not in the current space
                    continue
                seconds.append(median_s)
        if points:
            footprint = kernel.footprint(case.problem, Columns.of(points), case.hardware.target)
            if footprint is None:
                continue
            model = case.model(kernel)
            parts = model.breakdown(footprint)
            predicted = np.broadcast_to(model.seconds(footprint), (len(points),))
            yield Compared(predicted, np.array(seconds), bounds(parts, len(points)))


def _measured(case: Case) -> Iterator[tuple[Trial, float]]:
    """Yields measured trials. An entry of the record replaces the trial of the same schedule."""
    entries = case.record.entries if case.record is not None else ()
    latest = {(trial.backend, str(sorted(trial.schedule.items()))): trial for trial in case.trials}
    for number, e in enumerate(entries):
        trial = Trial(number, e.backend, e.version, e.schedule, e.measurement, e.predicted_s)
        latest[e.backend, str(sorted(e.schedule.items()))] = trial
    for trial in latest.values():
        if isinstance(trial.outcome, Measurement):
            yield trial, trial.outcome.median_s
