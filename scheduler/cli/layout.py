"""How the command line lays out what it prints: numbers with units, schedules, tables and ledgers."""

from __future__ import annotations

import collections
import dataclasses
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

from rich import box
from rich.console import RenderableType
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from scheduler.core.records import Schedule, choice_text, schedule_text

Json = dict[str, Any]


# Of a list: wider lines are harder to follow than schedules that are told in two.
WIDEST = 150


def seconds_text(seconds: float) -> str:
    """Three digits and a unit: "1.23 ms"."""
    for unit, scale in (("s", 1.0), ("ms", 1e-3), ("us", 1e-6)):
        if seconds >= scale:
            return f"{digits(seconds / scale)} {unit}"
    return f"{digits(seconds / 1e-9)} ns"


def digits(value: float) -> str:
    return f"{value:.0f}" if value >= 100 else f"{value:.3g}"


def first_line(text: str, most: int = 160) -> str:
    line = text.splitlines()[0] if text else text
    return line if len(line) <= most else f"{line[: most - 3]}..."


def difference(schedule: Schedule, base: Schedule) -> str:
    """What of `schedule` is not as in `base`; a field that only `base` has is at its default."""
    told = {name: value for name, value in schedule.items() if name not in base or base[name] != value}
    return schedule_text(told | dict.fromkeys(base.keys() - schedule.keys(), "default")) or "the same"


def schedule_rows(choices: Iterable[tuple[object, str, Schedule]]) -> Iterator[tuple[object, str]]:
    """Label and schedule: of each backend the first in full, the others by what differs from it."""
    first: dict[str, tuple[object, Schedule]] = {}
    for label, backend, schedule in choices:
        if backend in first:
            base, of = first[backend]
            yield label, f"{difference(schedule, of)} (else as {base})"
        elif schedule:
            first[backend] = label, schedule
            yield label, schedule_text(schedule)


@dataclasses.dataclass(frozen=True)
class _Abbreviated:
    """Choices as text; `base` says what their schedules have in common where the texts leave that out."""

    texts: Sequence[str]
    base: Sequence[str] = ()


def abbreviated(choices: Sequence[tuple[str, Schedule]], width: int) -> _Abbreviated:
    """In full, or, if one of them is wider than `width`, without what most schedules of its backend have in common."""
    full = [choice_text(backend, schedule) for backend, schedule in choices]
    if max(map(len, full), default=0) <= width - 2:
        return _Abbreviated(full)
    usual: dict[str, Schedule] = {}
    for backend in dict.fromkeys(backend for backend, _ in choices):
        of = [schedule for name, schedule in choices if name == backend]
        counts = {name: collections.Counter(schedule.get(name) for schedule in of) for name in of[0]}
        common = {name: count.most_common(1)[0] for name, count in counts.items() if None not in count}
        if shared := {name: value for name, (value, count) in common.items() if value is not None and count > 1}:
            usual[backend] = shared
    short = [
        f"{backend} {difference(schedule, usual[backend])}" if backend in usual else choice_text(backend, schedule)
        for backend, schedule in choices
    ]
    base = "; ".join(choice_text(backend, schedule) for backend, schedule in usual.items())
    return _Abbreviated(short, [f"where a schedule is silent: {base}"])


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
