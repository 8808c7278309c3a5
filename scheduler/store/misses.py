"""Storage of cache misses, counted per problem and limited in number."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import sqlalchemy as sa

from scheduler.core.records import Key, Miss
from scheduler.store import rows
from scheduler.store.database import Database
from scheduler.store.schema import KEY, MISSES

# Above MOST, the misses with the fewest lowerings, oldest first, are deleted down to KEPT; the gap leaves room for new
# ones.
MOST, KEPT = 10_000, 9_000


class Misses:
    """The cache misses of one database. Every failure raises a `StoreError`."""

    def __init__(self, database: Database) -> None:
        self._database = database

    def note(self, misses: Iterable[Miss]) -> None:
        """Adds lowerings to the stored counts.

        Raises:
          StoreError: they cannot be written.
        """
        # In sorted order, to prevent deadlocks between processes.
        new = [_row(miss) for miss in sorted(misses, key=lambda miss: (*vars(miss.key).values(),))]
        if not new:
            return
        insert = self._database.insert(MISSES)
        given, kept = insert.excluded, MISSES.c
        added = insert.on_conflict_do_update(
            index_elements=KEY,
            set_={
                "lowered": kept.lowered + given.lowered,
                "last": sa.case((given.last > kept.last, given.last), else_=kept.last),
                "line": sa.case((given.line != "", given.line), else_=kept.line),
                "place": sa.case((given.place != "", given.place), else_=kept.place),
            },
        )
        with self._database.write() as connection:
            connection.execute(added, new)
            if (count := connection.execute(sa.select(sa.func.count()).select_from(MISSES)).scalar_one()) > MOST:
                rarest = sa.select(*_key()).order_by(kept.lowered, kept.last).limit(count - KEPT)
                connection.execute(sa.delete(MISSES).where(sa.tuple_(*_key()).in_(rarest)))

    def all(self) -> list[Miss]:
        """Returns all misses, sorted by key; malformed rows are skipped with a warning.

        Raises:
          StoreError: the cache cannot be read.
        """
        found = []
        for row in rows.by_key(self._database.select(sa.select(*MISSES.c)), self._database.location):
            try:
                found.append(_miss(*row))
            except ValueError as error:
                rows.say_once(f"{self._database.location}: the miss of {Key(*row[:3])} is skipped, {error}")
        return found

    def forget(self, keys: Iterable[Key]) -> int:
        """Deletes the misses of these keys.

        Returns:
          the number of deleted misses.

        Raises:
          StoreError: the cache cannot be written.
        """
        if self._database.empty():
            return 0
        with self._database.write() as connection:
            return sum(
                connection.execute(sa.delete(MISSES).where(*(MISSES.c[n] == getattr(key, n) for n in KEY))).rowcount
                for key in keys
            )


def _key() -> list[sa.ColumnElement[Any]]:
    return [MISSES.c[name] for name in KEY]


def _row(miss: Miss) -> dict[str, Any]:
    names = {name: _storable(getattr(miss, name)) for name in ("first", "last", "line", "place")}
    return {**vars(miss.key), "lowered": miss.lowered, **names}


def _storable(text: str) -> str:
    """Removes characters that no database accepts as text: a file name may contain any bytes."""
    return text.encode(errors="replace").decode().replace("\0", "")


def _miss(operation: str, hardware: str, problem: str, lowered: Any, *texts: Any) -> Miss:
    if not isinstance(lowered, int) or not all(isinstance(text, str) for text in texts):
        raise ValueError(f"a number and four texts are wanted, found {(lowered, *texts)!r:.200}")
    return Miss(Key(operation, hardware, problem), lowered, *texts)
