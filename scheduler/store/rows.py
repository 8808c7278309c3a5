"""Rows as a database has them: made of records and trials; in order, as records, what nobody can read said once."""

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
    """What the columns of a record tell of it, without its text being read.

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
    """Sorted by the three columns of text that they are known by, the same for every database.

    A row in which one of these is no text is skipped with a warning: SQLite keeps whatever it is given.
    """
    return sorted(with_key(rows, location), key=lambda row: row[:3])


def with_key(rows: Iterable[Sequence[Any]], location: str) -> list[tuple[Any, ...]]:
    """The same in no order."""
    found = [tuple(row) for row in rows]
    known = [row for row in found if type(row[0]) is type(row[1]) is type(row[2]) is str]
    if strange := len(found) - len(known):
        say_once(f"{location}: {strange} rows are skipped, what they are known by is no text")
    return known


def record_of(key: Key, line: str) -> Record:
    """A record as it is stored under `key`; a ValueError says why it is none."""
    record = codec.record_from_text(line)
    if record.key != key:
        raise ValueError(f"it is the record of {record.key}")
    return record


def of_record(record: Record) -> dict[str, Any]:
    """The columns of a record: its text, and what queries ask for."""
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
    """Whether a stored record holds measurements; one that nobody can read holds nothing."""
    try:
        return not record_of(key, line).estimated
    except ValueError:
        return False


def say_once(message: str) -> None:
    """A warning, the first time that a process meets it: rows are read again and again."""
    if message not in _said:
        _said.add(message)
        _log.warning("%s", message)
