"""Layout of the command line's output: tables and ledgers."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

from rich import box
from rich.console import RenderableType
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from scheduler.cli.terminal import printable

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
