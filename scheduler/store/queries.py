"""Queries of the store: rows as records, and similar problems."""

from __future__ import annotations

import dataclasses
import functools
import itertools
import operator
from collections.abc import Iterable, Sequence
from typing import Any

import sqlalchemy as sa

from scheduler.core import codec
from scheduler.core.neighbours import Near
from scheduler.core.records import Key, Record, schedule_to_text
from scheduler.core.text import log_once
from scheduler.store.database import Select
from scheduler.store.schema import KEY, SCHEDULES, SUM_COLUMNS, place_columns

# ------------------------------------------------------------------------------
# Conversion between database rows and records; malformed rows are reported once per process.


@dataclasses.dataclass(frozen=True)
class Head:
    """The columns of a record, available without parsing it.

    Attributes:
      jax: the version of jax that it was made with; "" if the column holds no text.
      estimated: as in `Record`.
    """

    key: Key
    jax: str
    estimated: bool

    @property
    def precedence(self) -> int:
        """As in `Record`, except that no column tells whether it was imported."""
        return 2 * self.estimated


def rows_by_key(rows: Iterable[Sequence[Any]], location: str) -> list[tuple[Any, ...]]:
    """Returns rows sorted by their first three columns, independent of the database's collation.

    A row in which one of these columns is not text is skipped with a warning: SQLite stores any type in any column.
    """
    return sorted(row_with_key(rows, location), key=lambda row: row[:3])


def row_with_key(rows: Iterable[Sequence[Any]], location: str) -> list[tuple[Any, ...]]:
    """Returns the same rows as `rows_by_key`, unordered."""
    found = [tuple(row) for row in rows]
    known = [row for row in found if type(row[0]) is type(row[1]) is type(row[2]) is str]
    if strange := len(found) - len(known):
        log_once(f"{location}: {strange} rows are skipped, because their key is not text")
    return known


def record_of_row(key: Key, line: str) -> Record:
    """Parses the record stored under `key`; raises a ValueError with the reason if it is malformed."""
    record = codec.record_from_text(line)
    if record.key != key:
        raise ValueError(f"it is the record of {record.key}")
    return record


def of_key(table: sa.TableClause) -> list[sa.ColumnElement[bool]]:
    """Returns the conditions for the rows of one key, which is a parameter of the statement (`asked`)."""
    return [table.c[name] == sa.bindparam(f"{name}_") for name in KEY]


def asked(key: Key) -> dict[str, str]:
    """Returns the parameters of statements with the conditions `of_key`."""
    return {f"{name}_": value for name, value in vars(key).items()}


def row_of_record(record: Record) -> dict[str, Any]:
    """Returns the columns of a record: its text, and the values for queries."""
    winner, library = record.winner, record.library_entry
    return {
        **vars(record.key),
        **vars(record.environment),
        "backend": winner.backend,
        "kernel_version": winner.version,
        "schedule": schedule_to_text(winner.schedule),
        "median_s": winner.measurement.median_s,
        "xla_s": library.measurement.median_s if library else None,
        "record": codec.record_to_text(record),
        **place_columns(record.key.problem, estimated=record.estimated),
    }


def has_precedence(key: Key, line: str, other: Record) -> bool:
    """Whether the stored record of `key` has precedence over `other`; False for a malformed record."""
    try:
        return record_of_row(key, line).precedence < other.precedence
    except ValueError:
        return False


# ------------------------------------------------------------------------------
# Index lookup of problems that may be similar to a given one, by the numbers in their texts.

# Number of problems in a first query; a second query without a limit follows if they do not suffice.
CANDIDATES = 64


def similar(
    select: Select, near: Near, within: float, kinds: Sequence[int], most: int
) -> tuple[list[tuple[float, str]], float]:
    """Returns problems that may be near enough with lower bounds on their distances, and the distance covered
    completely.

    Args:
      kinds: values of `estimated`.
      most: maximum number of rows per spelling and kind; a negative number means no limit, as in SQLite.
    """
    texts: list[tuple[float, str]] = []
    reach = within
    for (place, left), kind in itertools.product(near.places(within), kinds):
        beyond = within - left
        rows_found = select(
            _SIMILAR if most >= 0 else _ALL_SIMILAR,
            {
                "operation_": near.operation,
                "hardware_": near.hardware,
                "pattern_": place.pattern,
                "estimated_": kind,
                "lowest": place.size - left,
                "highest": place.size + left,
                "left": left,
                **{f"{name}_": value for name, value in zip(SUM_COLUMNS, place.sums, strict=True)},
            },
        )
        texts += [(beyond + least, text) for text, least in rows_found if isinstance(text, str)]
        if len(rows_found) == most:
            reach = min(reach, beyond + rows_found[-1][1])
    return texts, reach


def _statement() -> sa.Select[Any]:
    """Returns the query for problems of one pattern that may be near enough, with lower bounds on their distances."""
    columns, given = SCHEDULES.c, sa.bindparam
    apart = (sa.func.abs(columns[name] - given(f"{name}_", type_=sa.Double)) for name in SUM_COLUMNS)
    least = functools.reduce(operator.add, apart)
    return sa.select(columns.problem, least.label("doublings")).where(
        *(columns[name] == given(f"{name}_") for name in ("operation", "hardware", "pattern", "estimated")),
        columns.size.between(given("lowest"), given("highest")),
        least <= given("left"),
    )


# Constructed once, because construction takes longer than execution.
_ALL_SIMILAR = _statement()
_SIMILAR = _ALL_SIMILAR.order_by(sa.literal_column("doublings")).limit(CANDIDATES)
