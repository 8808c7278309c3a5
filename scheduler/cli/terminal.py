"""Output to standard output and standard error, and progress of searches."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import sys
import textwrap
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, Any, Protocol, TextIO, TypeVar

import typer
from rich import box
from rich.console import Console, RenderableType
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from scheduler.core.text import printable

if TYPE_CHECKING:
    from rich.console import RenderableType

    from scheduler.core.progress import JobProgress, Progress
    from scheduler.search.job_run import Step
    from scheduler.search.task import Result, Task


T = TypeVar("T")

MOST_COLUMNS = 1000
_json_stream: TextIO | None = None  # None: standard output


def console_here() -> Console:
    """Returns the console of standard output.

    Its width is COLUMNS, up to `MOST_COLUMNS`, or the width of the terminal. Without either, it is 120.
    """
    width_text = os.environ.get("COLUMNS", "")
    if width_text.isdecimal() and int(width_text) > 0:
        return Console(highlight=False, width=min(int(width_text), MOST_COLUMNS))
    return Console(highlight=False, width=None if sys.stdout.isatty() else 120)


def console_beside() -> Console:
    """Returns the console of standard error, for text output if standard output is written to a file."""
    return Console(stderr=True, highlight=False, width=None if sys.stderr.isatty() else 120)


def output(*what: RenderableType) -> None:
    """Prints sentences and tables, folded between words to the width of the console."""
    console = console_here()
    for one in what:
        if isinstance(one, str):
            lines = textwrap.wrap(printable(one), console.width, break_long_words=False, break_on_hyphens=False) or [""]
            console.print("\n".join(lines), markup=False, soft_wrap=True)
        else:
            console.print(one, markup=False)


def print_command(command: str) -> None:
    """Prints a command on its own line, without line breaks, so that it can be copied."""
    print(f"  {printable(command)}")


@contextlib.contextmanager
def _stdout_for_json() -> Iterator[None]:
    global _json_stream
    stdout, _json_stream = sys.stdout, sys.stdout
    with contextlib.ExitStack() as stack:
        with contextlib.suppress(OSError):  # the stream has no descriptor: it is not the standard output of a process
            descriptor = stdout.fileno()
            stdout.flush()
            _json_stream = stack.enter_context(open(os.dup(descriptor), "w", encoding=stdout.encoding))
            os.dup2(sys.stderr.fileno(), descriptor)
            stack.callback(os.dup2, _json_stream.fileno(), descriptor)
        stack.enter_context(contextlib.redirect_stdout(sys.stderr))
        yield


def reserve_stdout(context: typer.Context, as_json: bool) -> bool:
    """Reserves standard output for `print_json` until the command ends, if `as_json` is set.

    What a module or a kernel of the user prints goes to standard error.
    """
    if as_json:
        context.with_resource(_stdout_for_json())
    return as_json


def print_json(value: Any) -> None:
    print(json.dumps(value, indent=2, allow_nan=False), file=_json_stream, flush=True)


def say(message: str) -> None:
    print(printable(message), file=sys.stderr, flush=True)


def best_text(progress: Progress) -> str:
    """Formats the best result of a search so far."""
    from scheduler.core.records import choice_text
    from scheduler.core.text import seconds_text

    best = progress.best
    if best is None:
        return "compiling the first candidate" if progress.last is None else "no candidate has run yet"
    time_s = getattr(best.outcome, "median_s", float("nan"))
    prefix = "estimated " if getattr(best.outcome, "estimated", False) else ""
    return f"best {prefix}{seconds_text(time_s)}: {choice_text(best.backend, best.schedule)}"


@contextlib.contextmanager
def shown_progress() -> Iterator[Callable[[Task, Progress], None]]:
    """Shows the progress of searches on standard error: a bar on a terminal, otherwise a line for each new best."""
    if not sys.stderr.isatty():
        shown: dict[Task, str] = {}

        def line(task: Task, progress: Progress) -> None:
            if progress.done == progress.budget or shown.get(task) != best_text(progress):
                shown[task] = best_text(progress)
                left = "" if progress.eta_s is None else f", {progress.eta_s:.0f} s left"
                say(f"{task}: {progress.done}/{progress.budget} trials{left}, {best_text(progress)}")

        yield line
        return

    from rich.progress import BarColumn, MofNCompleteColumn, TextColumn
    from rich.progress import Progress as Bars

    columns = [TextColumn("{task.fields[label]}", markup=False), BarColumn(bar_width=12), MofNCompleteColumn()]
    columns += [TextColumn("{task.fields[left]}"), TextColumn("{task.fields[best]}", markup=False)]
    with Bars(*columns, console=Console(stderr=True)) as bars:
        rows: dict[Task, Any] = {}

        def draw(task: Task, progress: Progress) -> None:
            if task not in rows:
                rows[task] = bars.add_task("", total=progress.budget, label=printable(str(task)), left="", best="")
            left = "" if progress.eta_s is None else f"{progress.eta_s:.0f} s left"
            short = printable(best_text(progress)).partition(":")[0]  # without the schedule, to fit in one line
            bars.update(rows[task], completed=progress.done, total=progress.budget, left=left, best=short)

        yield draw


# Number of progress lines in all if standard error is not a terminal.
_SHARE = 10


@contextlib.contextmanager
def shown_count(label: str, total: int) -> Iterator[Callable[[Iterable[T]], Iterator[T]]]:
    """Shows a count up to `total` on standard error: a bar on a terminal, otherwise a line for each tenth.

    Yields:
      A function that wraps an iterable and counts its items. An item counts as done when the next one is requested.
    """
    if not sys.stderr.isatty():

        def lines(things: Iterable[T]) -> Iterator[T]:
            next_line = 0
            for done, thing in enumerate(things):
                if (share := done * _SHARE // max(total, 1)) >= next_line:
                    say(f"{label}: {done} of {total} done")
                    next_line = share + 1
                yield thing

        yield lines
        return

    from rich.progress import BarColumn, MofNCompleteColumn, TextColumn, TimeRemainingColumn
    from rich.progress import Progress as Bars

    columns = [TextColumn("{task.description}", markup=False), BarColumn(bar_width=12), MofNCompleteColumn()]
    with Bars(*columns, TimeRemainingColumn(), console=Console(stderr=True)) as bars:
        row = bars.add_task(label, total=total)

        def bar(things: Iterable[T]) -> Iterator[T]:
            for thing in things:
                yield thing
                bars.advance(row)

        yield bar


# ------------------------------------------------------------------------------
# Layout of the command line's output: tables and ledgers.

Json = dict[str, Any]


# Maximum width of a ledger. Wider lines are harder to read than schedules folded to two lines.
WIDEST = 150


def table(*columns: str, numbers: Sequence[str] = ()) -> Table:
    """Returns an empty table; the columns named in `numbers` are right-aligned."""
    made = Table(box=box.SIMPLE_HEAD, pad_edge=False, show_edge=False, padding=(0, 1, 0, 0))
    for name in columns:
        number = name in numbers
        made.add_column(name, justify="right" if number else "left", overflow="fold", no_wrap=number)
    return made


def texts(*cells: object) -> list[Text]:
    """Converts cells to plain text, without markup."""
    return [Text(printable(str(cell))) for cell in cells]


def labelled(rows: Iterable[tuple[object, object]]) -> Table:
    """Returns a table of labels and texts, with texts folded in their own column."""
    made = Table.grid(padding=(0, 2))
    made.add_column(no_wrap=True)
    made.add_column(overflow="fold")
    for label, text in rows:
        made.add_row(*texts(label, text))
    return made


@dataclasses.dataclass(frozen=True)
class Row:
    """One row of a `ledger`: its subject `of`, its figures, and the lines under it."""

    of: str
    figures: Sequence[str]
    under: Sequence[str] = ()


def ledger(
    title: str, columns: Sequence[str], groups: Iterable[tuple[Sequence[str], Sequence[Row]]], width: int
) -> Iterator[RenderableType]:
    """Yields groups of rows, each below its heading lines. Rows take one or more lines; figures are right-aligned."""
    groups, width = list(groups), min(width, WIDEST)
    figures = zip(columns, *(row.figures for _, rows in groups for row in rows), strict=True)
    widths = [max(map(len, column)) for column in figures]

    def line(first: str, cells: Sequence[str]) -> Table:
        made = Table.grid(padding=(0, 2, 0, 0), pad_edge=False)
        made.width = width
        made.add_column(ratio=1, overflow="fold")
        for each in widths:
            made.add_column(justify="right", width=each, no_wrap=True)
        made.add_row(*texts(first, *cells))
        return made

    yield line(title, columns)
    yield Text("\u2500" * width)
    for number, (heading, rows) in enumerate(groups):
        yield from ([""] if number else []) + list(heading)
        for row in rows:
            yield line(row.of, row.figures)
            yield from (Padding(Text(printable(text), overflow="fold"), (0, 0, 0, 2)) for text in row.under if text)


# ------------------------------------------------------------------------------
# Progress of a job on standard error: its problems, and the running searches of each executor.


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


def _eta_text(eta_s: float | None) -> str:
    if eta_s is None:
        return ""
    return f"{eta_s:.0f} s left" if eta_s < 180 else f"{eta_s / 60:.0f} min left"


def _search_label(step: Step, several: bool) -> str:
    return f"{step.executor}: {step.task}" if several else str(step.task)


class _Lines:
    def __init__(self, several: bool) -> None:
        self._several = several
        self._shown: dict[int, str] = {}

    def step(self, step: Step) -> None:
        search, which = step.search, id(step.task)
        if search.done < search.budget and self._shown.get(which) == best_text(search):
            return
        self._shown[which] = best_text(search)
        job = [f"{step.job.done} of {step.job.total} problems done", _eta_text(step.job.eta_s)]
        how_far = f"{search.done}/{search.budget} trials, {best_text(search)}"
        say(f"{_search_label(step, self._several)}: {how_far} ({', '.join(filter(None, job))})")

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
        label = printable(_search_label(step, self._several))
        self._bars.update(self._rows[which], completed=search.done, total=search.budget, label=label, said=best)

    def ended(self, result: Result) -> None:
        if (row := self._rows.pop(id(result.task), None)) is not None:
            self._bars.remove_task(row)
        if self._job is not None:
            self._bars.advance(self._job)

    def _draw_job(self, job: JobProgress) -> None:
        if self._job is None:
            self._job = self._bars.add_task("", total=job.total, label="problems", said="")
        self._bars.update(self._job, completed=job.done, said=_eta_text(job.eta_s))

    def close(self) -> None:
        self._bars.stop()
