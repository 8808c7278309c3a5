"""Output to standard output and standard error."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import sys
import textwrap
from collections.abc import Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, Any, TextIO, TypeVar

import typer
from rich import box
from rich.console import Console, RenderableType
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from scheduler.core.status_line import StatusLine
from scheduler.core.text import printable

if TYPE_CHECKING:
    from rich.console import RenderableType


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


# Number of progress lines in all if standard error is not a terminal.
_SHARE = 10


def counted(label: str, things: Iterable[T], total: int) -> Iterator[T]:
    """Yields `total` things and says on standard error how many are done: those before the one that is next."""
    status, next_line = StatusLine(say), 0
    with status.shown(label):
        for done, thing in enumerate(things):
            share = done * _SHARE // max(total, 1)
            status.step(f"{done} of {total} done", news=share >= next_line)
            next_line = share + 1
            yield thing


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
