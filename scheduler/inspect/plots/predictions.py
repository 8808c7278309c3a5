"""Plots predicted against measured times, coloured by each schedule's bottleneck."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt
from scipy.stats import kendalltau

from scheduler.core.errors import NothingToDraw
from scheduler.core.quantities import share_text
from scheduler.core.records import Measurement, Trial
from scheduler.inspect.bound import GROUPS, bounds
from scheduler.inspect.case import Case
from scheduler.inspect.plots.axes import cloud, legend_right, plain_log
from scheduler.inspect.plots.style import Theme, drawing, figure
from search_spaces.space import Columns

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

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
