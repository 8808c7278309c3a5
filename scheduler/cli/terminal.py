"""Output to standard output and standard error, and progress of searches."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import json
import os
import sys
import textwrap
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, Any, TextIO, TypeVar

import typer
from rich import box
from rich.console import Console, RenderableType
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from scheduler.core.text import printable

if TYPE_CHECKING:
    from rich.console import RenderableType

    from scheduler.core.progress import Progress
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


# Number of progress lines in all if standard error is not a terminal.
_SHARE = 10


def counted(label: str, total: int) -> Callable[[Iterable[T]], Iterable[T]]:
    """Returns a function that wraps an iterable of `total` items and shows on standard error how many are done.

    It shows a bar on a terminal, otherwise a line for each tenth. An item is done when the next one is requested.
    """

    def lines(things: Iterable[T]) -> Iterator[T]:
        next_line = 0
        for done, thing in enumerate(things):
            if (share := done * _SHARE // max(total, 1)) >= next_line:
                say(f"{label}: {done} of {total} done")
                next_line = share + 1
            yield thing

    if not sys.stderr.isatty():
        return lines
    from rich.progress import track

    return functools.partial(track, description=label, total=total, console=Console(stderr=True))


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


def labelled(rows: Iterable[tuple[object, object]], *, numbers: bool = False) -> Table:
    """Returns a table of labels, right-aligned `numbers` or not, and texts, folded in their own column."""
    made = Table.grid(padding=(0, 2))
    made.add_column(justify="right" if numbers else "left", no_wrap=True)
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
# Progress on standard error: running searches, and the job to which they belong.


@contextlib.contextmanager
def shown_searches(*, several: bool = False) -> Iterator[_Lines | _Bars]:
    """Shows searches: on a terminal, a bar for each, and one for their job; otherwise, a line for each new best.

    Args:
      several: whether the job has several executors. If so, each search is labeled with its executor.

    Yields:
      An object to call after each trial, as `search` or, in a job, as `step`; and as `ended` after a problem of a job.
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


class _Lines:
    def __init__(self, several: bool) -> None:
        self._several = several
        self._shown: dict[int, str] = {}

    def search(self, task: Task, search: Progress) -> None:
        self._line(task, search, _eta_text(search.eta_s))

    def step(self, step: Step) -> None:
        job = [f"{step.job.done} of {step.job.total} problems done", _eta_text(step.job.eta_s)]
        self._line(
            step.task, step.search, "", self._several * f"{step.executor}: ", f" ({', '.join(filter(None, job))})"
        )

    def _line(self, task: Task, search: Progress, left: str, before: str = "", after: str = "") -> None:
        best = best_text(search)
        if search.done == search.budget or self._shown.get(id(task)) != best:
            self._shown[id(task)] = best
            parts = [f"{search.done}/{search.budget} trials", left, best]
            say(f"{before}{task}: {', '.join(filter(None, parts))}{after}")

    def ended(self, result: Result) -> None:
        if result.state == "failed":
            say(f"{result.task}: failed")


class _Bars:
    def __init__(self, several: bool) -> None:
        from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn

        columns = [TextColumn("{task.fields[label]}", markup=False), BarColumn(bar_width=12), MofNCompleteColumn()]
        columns += [TextColumn("{task.fields[left]}"), TextColumn("{task.fields[best]}", markup=False)]
        self._bars = Progress(*columns, console=Console(stderr=True))
        self._several = several
        self._rows: dict[int, Any] = {}  # by the id of the task; 0 is the job
        self._bars.start()

    def search(self, task: Task, search: Progress, left: bool = True, executor: str = "") -> None:
        best = printable(best_text(search)).partition(":")[0]  # without the schedule, to fit in one line
        eta = _eta_text(search.eta_s) if left else ""
        self._draw(id(task), printable(f"{executor}{task}"), search.done, search.budget, eta, best)

    def step(self, step: Step) -> None:
        self._draw(0, "problems", step.job.done, step.job.total, _eta_text(step.job.eta_s))
        self.search(step.task, step.search, left=False, executor=self._several * f"{step.executor}: ")

    def _draw(self, row: int, label: str, done: int, total: int, left: str, best: str = "") -> None:
        if row not in self._rows:
            self._rows[row] = self._bars.add_task("", total=total, label="", left="", best="")
        self._bars.update(self._rows[row], completed=done, label=label, left=left, best=best)

    def ended(self, result: Result) -> None:
        if (row := self._rows.pop(id(result.task), None)) is not None:
            self._bars.remove_task(row)
        if 0 in self._rows:
            self._bars.advance(self._rows[0])

    def close(self) -> None:
        self._bars.stop()
