"""How the command line lays out what it prints: schedules, tables and ledgers."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

from rich import box
from rich.console import RenderableType
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from scheduler.core.records import Schedule, choice_text, schedule_text

Json = dict[str, Any]


# Of a list: wider lines are harder to follow than schedules on two lines.
WIDEST = 150


def first_line(text: str, most: int = 160) -> str:
    line = text.splitlines()[0] if text else text
    return line if len(line) <= most else f"{line[: most - 3]}..."


def difference(schedule: Schedule, base: Schedule) -> str:
    """What of `schedule` is not as in `base`; a field that only `base` has is at its default."""
    changed = {name: value for name, value in schedule.items() if name not in base or base[name] != value}
    return schedule_text(changed | dict.fromkeys(base.keys() - schedule.keys(), "default")) or "the same"


@dataclasses.dataclass(frozen=True)
class Compared:
    """Candidates as text.

    Attributes:
      texts: one of each.
      note: by what those are shown that are not in full: a line, or none.
    """

    texts: Sequence[str]
    note: Sequence[str]


def compared(
    choices: Sequence[tuple[str, Schedule]], bases: Mapping[str, tuple[str, Schedule]] | None = None
) -> Compared:
    """Each backend and schedule: of a backend the first in full, the others by what differs from it.

    Args:
      bases: backend -> a schedule that is shown elsewhere, and its name: all of that backend show what differs from it.
    """
    known = dict(bases or {})
    texts, named = [], []
    for backend, schedule in choices:
        if backend in known and schedule:
            name, base = known[backend]
            texts.append(f"{backend} {difference(schedule, base)}")
            named.append(name)
        else:
            texts.append(choice_text(backend, schedule))
            if schedule:
                known.setdefault(backend, (f"the first of {backend}", schedule))
    names = " and ".join(dict.fromkeys(named))
    return Compared(texts, [f"schedules are shown by what differs from {names}"] if names else [])


def table(*columns: str, numbers: Sequence[str] = ()) -> Table:
    """An empty table; the columns named in `numbers` are set flush right."""
    made = Table(box=box.SIMPLE_HEAD, pad_edge=False, show_edge=False)
    for name in columns:
        number = name in numbers
        made.add_column(name, justify="right" if number else "left", overflow="fold", no_wrap=number)
    return made


def texts(*cells: object) -> list[Text]:
    """Cells in which nothing is markup."""
    return [Text(str(cell)) for cell in cells]


def labelled(rows: Iterable[tuple[object, object]]) -> Table:
    """Words beside what they stand for, which is folded under itself."""
    made = Table.grid(padding=(0, 2))
    made.add_column(no_wrap=True)
    made.add_column(overflow="fold")
    for label, text in rows:
        made.add_row(*texts(label, text))
    return made


@dataclasses.dataclass(frozen=True)
class Row:
    """One row of a `ledger`: what it is of, figures, and lines that stand under it."""

    of: str
    figures: Sequence[str]
    under: Sequence[str] = ()


def ledger(
    title: str, columns: Sequence[str], groups: Iterable[tuple[Sequence[str], Sequence[Row]]], width: int
) -> Iterator[RenderableType]:
    """Rows of which each takes lines of its own, with figures flush right, in groups below lines that head them."""
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
            yield from (Padding(Text(text, overflow="fold"), (0, 0, 0, 2)) for text in row.under if text)
