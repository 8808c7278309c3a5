"""Progress of a job on standard error: its problems, and the running searches of each executor."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any, Protocol

from rich.console import Console

from scheduler.cli.terminal import best_text, printable, say

if TYPE_CHECKING:
    from scheduler.core.progress import JobProgress
    from scheduler.search.job_run import Step
    from scheduler.search.task import Result


class Display(Protocol):
    """Receives progress events of a running job."""

    def step(self, step: Step) -> None:
        """Called after each trial, and at the start of a search."""

    def ended(self, result: Result) -> None:
        """Called at the end of a problem."""


@contextlib.contextmanager
def shown_job(*, several: bool) -> Iterator[Display]:
    """Shows the progress of a job.

    On a terminal, shows one bar for the job and one per search. Otherwise, prints a line for each new best.

    Args:
      several: whether the job has several executors. If so, each search is labeled with its executor.
    """
    if not sys.stderr.isatty():
        yield _Lines(several)
        return
    with contextlib.closing(_Bars(several)) as bars:
        yield bars


def _left(eta_s: float | None) -> str:
    if eta_s is None:
        return ""
    return f"{eta_s:.0f} s left" if eta_s < 180 else f"{eta_s / 60:.0f} min left"


def _what(step: Step, several: bool) -> str:
    return f"{step.place}: {step.task}" if several else str(step.task)


class _Lines:
    def __init__(self, several: bool) -> None:
        self._several = several
        self._shown: dict[int, str] = {}

    def step(self, step: Step) -> None:
        search, which = step.search, id(step.task)
        if search.done < search.budget and self._shown.get(which) == best_text(search):
            return
        self._shown[which] = best_text(search)
        job = [f"{step.job.done} of {step.job.total} problems done", _left(step.job.eta_s)]
        how_far = f"{search.done}/{search.budget} trials, {best_text(search)}"
        say(f"{_what(step, self._several)}: {how_far} ({', '.join(filter(None, job))})")

    def ended(self, result: Result) -> None:
        if result.state == "failed":
            say(f"{result.task}: failed")


class _Bars:
    def __init__(self, several: bool) -> None:
        from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn

        columns = [TextColumn("{task.fields[label]}", markup=False), BarColumn(bar_width=12), MofNCompleteColumn()]
        columns += [TextColumn("{task.fields[said]}", markup=False)]
        self._bars = Progress(*columns, console=Console(stderr=True))
        self._several = several
        self._job: Any = None
        self._rows: dict[int, Any] = {}
        self._bars.start()

    def step(self, step: Step) -> None:
        self._draw_job(step.job)
        search, which = step.search, id(step.task)
        if which not in self._rows:
            self._rows[which] = self._bars.add_task("", total=search.budget, label="", said="")
        best = printable(best_text(search)).partition(":")[0]  # without the schedule, to fit in one line
        label = printable(_what(step, self._several))
        self._bars.update(self._rows[which], completed=search.done, total=search.budget, label=label, said=best)

    def ended(self, result: Result) -> None:
        if (row := self._rows.pop(id(result.task), None)) is not None:
            self._bars.remove_task(row)
        if self._job is not None:
            self._bars.advance(self._job)

    def _draw_job(self, job: JobProgress) -> None:
        if self._job is None:
            self._job = self._bars.add_task("", total=job.total, label="problems", said="")
        self._bars.update(self._job, completed=job.done, said=_left(job.eta_s))

    def close(self) -> None:
        self._bars.stop()
