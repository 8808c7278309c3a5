"""Plots the best time after each trial of a search, with XLA and the top prediction for comparison."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from scheduler.core.errors import NothingToDraw
from scheduler.core.records import Measurement
from scheduler.core.text import digits
from scheduler.inspect.case import Case
from scheduler.inspect.plots.style import Theme, drawing, figure, label_lines, time_unit
from scheduler.prediction import predict

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure


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
        predicted_s, backend, schedule = min(tops, key=lambda top: top[0])
        tried = [s for trial, s in case.measured() if (trial.backend, trial.schedule) == (backend, schedule)]
        value, how = (tried[-1] / scale, case.took) if tried else (predicted_s / scale, "not tried:")
        lines["predicted"] = (value, f"top prediction,\n{how} {digits(value)} {unit}", look.third)
    return lines
