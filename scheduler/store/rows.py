"""Conversion between database rows and records; malformed rows are reported once per process."""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Iterable, Sequence
from typing import Any

from scheduler.core import codec
from scheduler.core.identity import schedule_to_text
from scheduler.core.records import Key, Record
from scheduler.store.schema import place_columns


@dataclasses.dataclass(frozen=True)
class Head:
    """The columns of a record, available without parsing it.

    Attributes:
      jax: the version of jax that it was made with.
      estimated: as in `Record`.
    """

    key: Key
    jax: str
    estimated: bool


_log = logging.getLogger("scheduler")
_said: set[str] = set()


def by_key(rows: Iterable[Sequence[Any]], location: str) -> list[tuple[Any, ...]]:
    """Returns rows sorted by their first three columns, independent of the database's collation.

    A row in which one of these columns is not text is skipped with a warning: SQLite stores any type in any column.
    """
    return sorted(with_key(rows, location), key=lambda row: row[:3])


def with_key(rows: Iterable[Sequence[Any]], location: str) -> list[tuple[Any, ...]]:
    """Returns the same rows as `by_key`, unordered."""
    found = [tuple(row) for row in rows]
    known = [row for row in found if type(row[0]) is type(row[1]) is type(row[2]) is str]
    if strange := len(found) - len(known):
        say_once(f"{location}: {strange} rows are skipped, what they are known by is no text")
    return known


def record_of(key: Key, line: str) -> Record:
    """Parses the record stored under `key`; raises a ValueError with the reason if it is malformed."""
    record = codec.record_from_text(line)
    if record.key != key:
        raise ValueError(f"it is the record of {record.key}")
    return record


def of_record(record: Record) -> dict[str, Any]:
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


def was_measured(key: Key, line: str) -> bool:
    """Whether a stored record is a measurement; False for a malformed record."""
    try:
        return not record_of(key, line).estimated
    except ValueError:
        return False


def say_once(message: str) -> None:
    """Logs a warning once per process, because rows are read repeatedly."""
    if message not in _said:
        _said.add(message)
        _log.warning("%s", message)
