"""The SQL store of records, trials and model constants, and the locations of stores.

A cache holds only text, which is parsed and validated: nothing is unpickled or evaluated.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import time
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import platformdirs
import sqlalchemy as sa

from scheduler.core import codec
from scheduler.core.errors import MalformedRecord, StoreError
from scheduler.core.neighbours import Near
from scheduler.core.records import Calibration, Environment, Key, Record, Trial
from scheduler.core.text import log_once
from scheduler.store import queries, text_files
from scheduler.store.database import CACHE_VARIABLE, Database, Select
from scheduler.store.lease import Lease
from scheduler.store.misses import Misses
from scheduler.store.queries import CANDIDATES, Head, similar
from scheduler.store.schema import (
    CONSTANTS,
    DECISIONS,
    KERNEL_ON_CHIP,
    KEY,
    LEASES,
    MIGRATIONS,
    SCHEDULES,
)
from scheduler.store.studies import Described, Studies

# ------------------------------------------------------------------------------
# Location of the user's cache.


def default_url() -> str:
    """Returns `TILE_SCHEDULER_CACHE` (a path or an SQLAlchemy URL) or, if unset, a file in the user's cache directory.

    Raises:
      StoreError: the variable is not set, and the user has no cache directory.
    """
    if given := os.environ.get(CACHE_VARIABLE):
        return given
    with contextlib.suppress(RuntimeError):
        if (place := platformdirs.user_cache_path("tile-scheduler", False)).is_absolute():
            return str(place / "cache.db")
    raise StoreError(f"this user has no home directory for the cache: set {CACHE_VARIABLE} to a file")


class Store:
    """Records and trials in an SQLite file, in memory, or in a PostgreSQL database.

    Safe for concurrent threads and processes. A missing file reads as empty, and the first write creates it. A file
    without write permission, for example on a read-only mount, can be read. A database of another program is rejected:
    an SQLite file that has tables but not this program's; in PostgreSQL, where a schema is often shared, a schema with
    some but not all of this program's table names. Every failure raises a `StoreError` that says what to do; the caller
    decides whether to continue.

    Args:
      url: a path, ":memory:", or an SQLAlchemy URL.
      readonly: never write. An SQLite file must then be complete in itself and must not change, as for `shipped()`.
      migrations: the steps from an older schema to the current one.

    Attributes:
      location: the path or URL, without a password, for messages.
      in_memory: whether the content is lost with this object.
      misses: cache misses of calls.

    Raises:
      StoreError: an invalid URL, an unsupported database, or a missing driver.
    """

    def __init__(
        self, url: str | Path, *, readonly: bool = False, migrations: tuple[Sequence[str], ...] = MIGRATIONS
    ) -> None:
        self._database = Database(url, readonly=readonly, migrations=migrations)
        self.location, self.in_memory = self._database.location, self._database.in_memory
        self.misses = Misses(self._database)
        self._studies = Studies(self._database)

    def require_writable(self) -> None:
        """Checks that the store can be written, to fail before expensive work.

        Raises:
          StoreError: the store is read-only; the message says what to do.
        """
        self._database.require_writable()

    def reading(self) -> contextlib.AbstractContextManager[Any]:
        """Lets all reads within this context share a connection."""
        return self._database.reading()

    def get(self, key: Key) -> Record | None:
        """Returns the record of `key`, or None.

        Raises:
          MalformedRecord: the stored record of `key` cannot be read.
          StoreError: the cache cannot be read.
        """
        for *_, line in self._database.select(_BY_KEY, queries.asked(key)):
            try:
                return queries.record_of_row(key, line)
            except ValueError as error:
                raise MalformedRecord(
                    f"the record of {key} in {self.location} is malformed ({error}); tune it again"
                ) from error
        return None

    def nearest(self, near: Near, *, estimated: bool | None = None) -> list[Record]:
        """Returns records of the most similar problems, nearest first; malformed ones are skipped with a warning.

        The query uses an index, so its cost does not grow with the number of stored records.

        Args:
          near: the problem, the maximum distance and the maximum number of records.
          estimated: True for estimates only, False for measured records only, None for both.

        Raises:
          StoreError: the cache cannot be read.
        """
        kinds = (0, 1) if estimated is None else (int(estimated),)
        found: list[Record] = []
        with self._database.reading() as select:
            for within, most in (*((within, CANDIDATES) for within in near.stages), (near.within, -1)):
                texts, reach = similar(select, near, within, kinds, most)
                keys = (Key(near.operation, near.hardware, text) for text in near.in_order(texts, reach))
                lines = (tuple(row) for key in keys for row in select(_BY_KEY, queries.asked(key)))
                found = list(itertools.islice(self._decoded(lines), near.most))
                if len(found) == near.most or (within, reach) == (near.within, within):
                    break
        return found

    def put(self, record: Record) -> None:
        """Stores `record`, replacing one of the same key, and marks its search as finished.

        Raises:
          StoreError: it cannot be written, or the stored record has precedence (`Record.precedence`).
        """
        if self.put_all([record]):
            kind = "an estimate" if record.estimated else "an imported record"
            raise StoreError(f"{self.location} has a measured record of {record.key}, which {kind} does not replace")

    def put_all(self, records: Iterable[Record]) -> list[Key]:
        """Stores records as `put` does, in one transaction with few statements.

        Returns:
          the keys of the records that were skipped because the stored one has precedence (`Record.precedence`).

        Raises:
          StoreError: they cannot be written; nothing was stored.
        """
        with self._database.write() as connection:
            new = {record.key: record for record in records}
            contested = [key for key, record in new.items() if record.precedence]
            held = _by_keys(lambda query, values: connection.execute(query, values).all(), contested)
            lines = ((Key(*names), line) for *names, line in held)
            left = {key for key, line in lines if queries.has_precedence(key, line, new[key])}
            rows = [queries.row_of_record(record) for key, record in new.items() if key not in left]
            if rows:
                connection.execute(self._database.upsert(SCHEDULES, KEY), rows)
            # After an import, an interrupted search on this machine can still resume.
            self._studies.finish(
                connection, [key for key, record in new.items() if record.imported is None and key not in left]
            )
        return [key for key in new if key in left]

    def finish(self, key: Key) -> None:
        """Marks the search of `key` as finished without a record, so that its trials are not resumed.

        Raises:
          StoreError: the cache cannot be written.
        """
        with self._database.write() as connection:
            self._studies.finish(connection, [key])

    def forget(self, *keys: Key) -> int:
        """Deletes the records of `keys` and their trials.

        Returns:
          the number of deleted rows and trials.

        Raises:
          StoreError: the cache cannot be written.
        """
        if not keys or self._database.empty():
            return 0
        count = self._studies.forget(keys)
        with self._database.write() as connection:
            return count + connection.execute(_DELETE, list(map(queries.asked, keys))).rowcount

    def prepare_trials(self) -> None:
        """Creates the tables for trials, ahead of the first trial.

        Raises:
          StoreError: it cannot be written.
        """
        self._studies.prepare()

    def save_trials(
        self, key: Key, trials: Sequence[Trial], environment: Environment, parameters: Described | None = None
    ) -> None:
        """Stores trials of a running search, so that a killed search loses none; may be repeated after a failure.

        A stored trial of the same number and schedule gets the new outcome.

        Args:
          parameters: as in `Studies.save`.

        Raises:
          StoreError: they cannot be written; none of them was stored.
        """
        self._studies.save(key, trials, environment, parameters)

    def trials(self, key: Key, environment: Environment | None = None, *, unfinished: bool = False) -> list[Trial]:
        """Returns the trials of `key` in the order they ended; malformed ones are skipped with a warning.

        Args:
          key: of the search.
          environment: only trials under these versions of jax, jaxlib and the driver (at any date), which a resumed
            search need not repeat.
          unfinished: only trials of an interrupted search.

        Raises:
          StoreError: the cache cannot be read.
        """
        return self._studies.trials(key, environment, unfinished=unfinished)

    def last_trials(self, key: Key) -> list[Trial]:
        """Returns the trials of the last finished search of `key`, or of the interrupted one if none finished.

        Trials are in the order they ended. If a schedule was tried several times, for example after a failure, only the
        last trial is returned.

        Raises:
          StoreError: the cache cannot be read.
        """
        return self._studies.last(key)

    def unfinished(self, operation: str | None = None, problem: str | None = None) -> dict[Key, list[Trial]]:
        """Returns the trials of every running or interrupted search, by key, sorted by key.

        Args:
          operation, problem: only searches of this operation or this problem (`Key`).

        Raises:
          StoreError: the cache cannot be read.
        """
        return self._studies.unfinished(operation, problem)

    def lease(self, key: Key, owner: str, seconds: float, *, expired: Lease | None = None) -> Lease:
        """Takes or renews the lease of `key`, which gives `owner` the right to tune it.

        Args:
          seconds: the expiry time for older versions of this program, which compare clocks.
          expired: an expired lease of another owner; it is taken over unless it has changed.

        Returns:
          the current lease: of `owner`, or of another owner that took it before. A store in memory or opened read-only
          is not shared, so `owner` always gets the lease.

        Raises:
          StoreError: the cache cannot be written.
        """
        taken = Lease(owner, time.time() + seconds)
        if not self._database.shared:
            return taken
        insert = self._database.insert(LEASES).values(**vars(key), **vars(taken))
        free = LEASES.c.owner == owner
        if expired is not None:
            free |= (LEASES.c.owner == expired.owner) & (LEASES.c.expires_s == expired.expires_s)
        new = {name: insert.excluded[name] for name in vars(taken)}
        with self._database.write() as connection:
            connection.execute(insert.on_conflict_do_update(index_elements=KEY, set_=new, where=free))
            held = connection.execute(sa.select(LEASES.c.owner, LEASES.c.expires_s).where(*_is(LEASES, key))).one()
        return Lease(*held)

    def release(self, key: Key, owner: str) -> None:
        """Releases the lease of `key` if `owner` holds it.

        Raises:
          StoreError: the cache cannot be written.
        """
        if self._database.shared:
            with self._database.write() as connection:
                connection.execute(sa.delete(LEASES).where(*_is(LEASES, key), LEASES.c.owner == owner))

    def records(self, *, operation: str | None = None, hardware: str | None = None) -> Iterator[Record]:
        """Yields records sorted by operation, hardware and problem; malformed ones are skipped with a warning.

        All records are read before the first one is yielded, so no lock is held during iteration.

        Args:
          operation, hardware: only records of this operation or this `Hardware.id`.

        Raises:
          StoreError: the cache cannot be read.
        """
        wanted = {"operation": operation, "hardware": hardware}
        query = sa.select(*(SCHEDULES.c[name] for name in (*KEY, "record"))).where(
            *(SCHEDULES.c[name] == value for name, value in wanted.items() if value is not None)
        )
        # Sorted here because the collation of text depends on the database.
        return self._decoded(queries.rows_by_key(self._database.select(query), self.location))

    def heads(self, *, operation: str | None = None, problem: str | None = None) -> list[Head]:
        """Returns summaries of all records, unordered, to filter and sort thousands of them without parsing records.

        Args:
          operation, problem: only records of this operation or this problem (`Key`).

        Raises:
          StoreError: the cache cannot be read.
        """
        columns = SCHEDULES.c
        wanted = {"operation": operation, "problem": problem}
        query = sa.select(*(columns[name] for name in (*KEY, "jax", "estimated"))).where(
            *(columns[name] == value for name, value in wanted.items() if value is not None)
        )
        found = queries.row_with_key(self._database.select(query), self.location)
        return [Head(Key(*key), jax if type(jax) is str else "", bool(estimated)) for *key, jax, estimated in found]

    def read(self, keys: Iterable[Key]) -> Iterator[Record]:
        """Yields the records of these keys, in the same order; malformed ones are skipped with a warning.

        Raises:
          StoreError: the cache cannot be read.
        """
        wanted = list(keys)
        with self._database.reading() as select:
            found = {Key(*row[:3]): row for row in _by_keys(select, wanted)}
        return self._decoded([found[key] for key in wanted if key in found])

    def texts(self, *, operation: str, hardware: str) -> list[str]:
        """Returns the text of records, unordered.

        Raises:
          StoreError: the cache cannot be read.
        """
        columns = SCHEDULES.c
        query = sa.select(columns.record).where(columns.operation == operation, columns.hardware == hardware)
        return [line for (line,) in self._database.select(query) if isinstance(line, str)]

    def keys(self, *, operation: str | None = None) -> list[Key]:
        """Returns every key with a record or a trial, sorted.

        Raises:
          StoreError: the cache cannot be read.
        """
        query = sa.select(*(SCHEDULES.c[name] for name in KEY))
        query = query if operation is None else query.where(SCHEDULES.c.operation == operation)
        found = {Key(*row) for row in queries.rows_by_key(self._database.select(query), self.location)}
        found |= self._studies.keys(operation)
        return sorted(found, key=lambda key: (key.operation, key.hardware, key.problem))

    def put_calibration(self, calibration: Calibration) -> None:
        """Stores fitted constants, replacing those of the same kernel on the same chip.

        Raises:
          StoreError: they cannot be written.
        """
        new = {
            "hardware": calibration.hardware,
            "operation": calibration.operation,
            "backend": calibration.backend,
            "kernel_version": calibration.version,
            "date": calibration.environment.date,
            "calibration": codec.calibration_to_text(calibration),
        }
        with self._database.write() as connection:
            connection.execute(self._database.upsert(CONSTANTS, KERNEL_ON_CHIP), new)

    def calibrations(self, *, hardware: str | None = None, operation: str | None = None) -> list[Calibration]:
        """Returns fitted constants sorted by hardware, operation and backend; skips malformed ones with a warning.

        Raises:
          StoreError: the cache cannot be read.
        """
        wanted = {"hardware": hardware, "operation": operation}
        columns = [CONSTANTS.c[name] for name in (*KERNEL_ON_CHIP, "calibration")]
        query = sa.select(*columns).where(
            *(CONSTANTS.c[name] == value for name, value in wanted.items() if value is not None)
        )
        found: list[Calibration] = []
        for *names, line in queries.rows_by_key(self._database.select(query), self.location):
            try:
                found.append(codec.calibration_from_text(line))
            except ValueError as error:
                log_once(f"{self.location}: constants of {' '.join(names)} are skipped, malformed ({error})")
        return found

    def state(self) -> str:
        """Returns a text that changes if records or constants do; raises a StoreError if it cannot be read."""
        sums = (
            (SCHEDULES, sa.func.sum(SCHEDULES.c.median_s)),
            (CONSTANTS, sa.func.sum(sa.func.length(CONSTANTS.c.calibration))),
        )
        columns: list[Any] = [[sa.func.count(), x] for _, x in sums]
        asked = [sa.select(*each).select_from(of) for (of, _), each in zip(sums, columns, strict=True)]
        return repr([tuple(row) for query in asked for row in self._database.select(query) if row[0]])

    def put_decision(self, key: str, decision: str) -> None:
        """Stores a decision of `optimize` as text, replacing the one with the same key.

        Raises:
          StoreError: it cannot be written.
        """
        with self._database.write() as connection:
            connection.execute(self._database.upsert(DECISIONS, ["key"]), {"key": key, "decision": decision})

    def decision(self, key: str) -> str | None:
        """Returns the text that `put_decision` stored for `key`.

        Raises:
          StoreError: the cache cannot be read.
        """
        found = self._database.select(sa.select(DECISIONS.c.decision).where(DECISIONS.c.key == key))
        return str(found[0][0]) if found else None

    def close(self) -> None:
        self._studies.close()
        self._database.close()

    def _decoded(self, found: Iterable[tuple[Any, ...]]) -> Iterator[Record]:
        for *names, line in found:
            key = Key(*names)
            try:
                yield queries.record_of_row(key, line)
            except ValueError as error:
                log_once(f"{self.location}: the record of {key} is skipped, it is malformed ({error})")


def require_store(given: object) -> None:
    """Raises a TypeError if an argument `store` is neither a `Store` nor None."""
    if given is not None and not isinstance(given, Store):
        instead = f": pass scheduler.Store({str(given)!r})" if isinstance(given, str | os.PathLike) else ""
        raise TypeError(f"store must be a scheduler.Store, found {given!r}{instead}")


def shipped() -> Store | None:
    """Returns the read-only store that comes with this package, from a checkout or a wheel, or None."""
    package = Path(__file__).parents[1]
    places = [package / "cache.db"]
    if (package.parent / "pyproject.toml").exists():  # The parent of an installed package has other packages' files.
        places.append(package.parent / "cache.db")
    return next((Store(place, readonly=True) for place in places if place.exists()), None)


def build_shipped(records: Path, cache_db: Path) -> int:
    """Builds `cache_db` from the text under `records`, byte for byte reproducible with the same version of SQLite.

    The result includes the model's fitted constants.

    Returns:
      the number of records.

    Raises:
      StoreError: the text cannot be read, or the file cannot be written.
    """
    found, calibrations = text_files.read_records(records), text_files.read_calibrations(records)
    store = Store(":memory:")
    store.put_all(found)
    for calibration in calibrations:
        store.put_calibration(calibration)
    store._database.copy_to(cache_db)
    store.close()
    return len(found)


# Constructed once, because construction takes longer than execution.
_BY_KEY = sa.select(*(SCHEDULES.c[name] for name in (*KEY, "record"))).where(*queries.of_key(SCHEDULES))
_DELETE = sa.delete(SCHEDULES).where(*queries.of_key(SCHEDULES))


_BY_KEYS = sa.select(*(SCHEDULES.c[name] for name in (*KEY, "record"))).where(
    sa.tuple_(*(SCHEDULES.c[name] for name in KEY)).in_(sa.bindparam("keys", expanding=True))
)
# Three variables per key: SQLite before 3.32 has a limit of 999.
_KEYS_PER_QUERY = 300


def _by_keys(select: Select, keys: Sequence[Key]) -> Iterator[tuple[Any, ...]]:
    """Yields the key and the text of the stored records of these keys, unordered."""
    for start in range(0, len(keys), _KEYS_PER_QUERY):
        values = [tuple(vars(key).values()) for key in keys[start : start + _KEYS_PER_QUERY]]
        yield from map(tuple, select(_BY_KEYS, {"keys": values}))


def _is(table: sa.TableClause, key: Key) -> list[sa.ColumnElement[bool]]:
    return [table.c[name] == getattr(key, name) for name in KEY]
