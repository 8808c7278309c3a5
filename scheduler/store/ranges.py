"""Storage of ranges: extents of problems that were tuned from a lowest to a highest value."""

from __future__ import annotations

import functools
from collections.abc import Collection, Iterable
from typing import Any

import sqlalchemy as sa

from scheduler.core.ranges import Range, range_from_text, range_to_text
from scheduler.store import rows
from scheduler.store.database import Database
from scheduler.store.schema import RANGE_KEY, RANGES


class Ranges:
    """The ranges of one database, which refer to the records at their points. Every failure raises a `StoreError`."""

    def __init__(self, database: Database) -> None:
        self._database = database

    def put(self, of: Range) -> None:
        """Stores a range, replacing one of the same problems with the same lowest and highest value.

        Raises:
          StoreError: it cannot be written.
        """
        with self._database.write() as connection:
            self.put_all(connection, [of])

    def put_all(self, connection: sa.Connection, ranges: Iterable[Range]) -> None:
        """Stores several ranges within the caller's transaction."""
        for of in ranges:
            row = _key(of) | {"date": of.environment.date, "range": range_to_text(of)}
            connection.execute(self._database.upsert(RANGES, RANGE_KEY), row)

    def all(
        self, *, operation: str | None = None, hardware: str | None = None, problems: Collection[str] | None = None
    ) -> list[Range]:
        """Returns ranges sorted by operation, hardware, problem, field and ends; skips malformed ones with a warning.

        Args:
          operation, hardware: only ranges of this operation or this `Hardware.id`.
          problems: only ranges of these problems (`Range.problem`).

        Raises:
          StoreError: the cache cannot be read.
        """
        several = None if problems is None else list(problems)
        wanted = {"operation": operation, "hardware": hardware, "problems": several}
        given = {name: value for name, value in wanted.items() if value is not None}
        found = []
        for *names, line in rows.by_key(self._database.select(_query(*given), given), self._database.location):
            try:
                one = range_from_text(line)
                if [one.operation, one.hardware, one.problem] != names:
                    raise ValueError(f"it is the range {one} on {one.hardware}")
                found.append(one)
            except ValueError as error:
                rows.say_once(
                    f"{self._database.location}: a range of {' '.join(names)} is skipped, malformed ({error})"
                )
        return sorted(found, key=lambda one: (*_key(one).values(),))

    def forget(self, of: Range) -> int:
        """Deletes a range; the records at its points stay.

        Returns:
          the number of deleted rows.

        Raises:
          StoreError: the cache cannot be written.
        """
        if self._database.empty():
            return 0
        with self._database.write() as connection:
            same = (RANGES.c[name] == value for name, value in _key(of).items())
            return connection.execute(sa.delete(RANGES).where(*same)).rowcount


# Constructed once per set of names, because construction takes longer than execution.
@functools.cache
def _query(*given: str) -> sa.Select[Any]:
    """Returns the query of `Ranges.all` with conditions on the given names."""
    conditions = {
        "operation": RANGES.c.operation == sa.bindparam("operation"),
        "hardware": RANGES.c.hardware == sa.bindparam("hardware"),
        "problems": RANGES.c.problem.in_(sa.bindparam("problems", expanding=True)),
    }
    columns = (RANGES.c[name] for name in ("operation", "hardware", "problem", "range"))
    return sa.select(*columns).where(*(conditions[name] for name in given))


def _key(of: Range) -> dict[str, Any]:
    return {name: getattr(of, name) for name in RANGE_KEY}
