"""The store of records, trials and the model's constants in SQL: its queries, and where stores lie.

Anything a cache holds is text that is parsed and checked: nothing is unpickled or evaluated.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import sqlalchemy as sa

from scheduler.core import codec
from scheduler.core.errors import MalformedRecord, StoreError
from scheduler.core.ranges import Range
from scheduler.core.records import Calibration, Environment, Key, Record, Trial
from scheduler.core.similar import Near
from scheduler.store import rows, text_files
from scheduler.store.database import Database
from scheduler.store.lease import Lease
from scheduler.store.misses import Misses
from scheduler.store.place import default_url as default_url
from scheduler.store.ranges import Ranges
from scheduler.store.rows import Head
from scheduler.store.schema import (
    CONSTANTS,
    KERNEL_ON_CHIP,
    KEY,
    LEASES,
    MIGRATIONS,
    SCHEDULES,
    Step,
)
from scheduler.store.similar import CANDIDATES, similar
from scheduler.store.studies import Described, Studies


class Store:
    """Records and trials in an SQLite file, in memory, or in a PostgreSQL database.

    Safe with several threads and processes. A file that is missing reads as empty and is made by the first write. One
    that this process may not write, on a read-only mount, say, is read as it is. A database of another program is
    refused: an SQLite file that has tables, and not ours; in PostgreSQL, where a schema is often shared, one that has
    some of our tables' names, and not all. Every failure is a `StoreError` that says what to do; whether that stops
    anything is for the caller to decide.

    Args:
      url: a path, ":memory:", or an SQLAlchemy URL.
      readonly: never write. An SQLite file must then be complete in itself and stay as it is, as `shipped()` is.
      migrations: the steps that make today's schema out of an older one.

    Attributes:
      location: the path or URL, without a password, for messages.
      in_memory: what it holds goes with this object.
      misses: what calls asked for and no record answered.
      ranges: extents that were tuned from a lowest to a highest value.

    Raises:
      StoreError: a URL that is none, or a kind of database or a driver that is missing.
    """

    def __init__(
        self, url: str | Path, *, readonly: bool = False, migrations: tuple[Sequence[Step], ...] = MIGRATIONS
    ) -> None:
        self._database = Database(url, readonly=readonly, migrations=migrations)
        self.location, self.in_memory = self._database.location, self._database.in_memory
        self.misses = Misses(self._database)
        self.ranges = Ranges(self._database)
        self._studies = Studies(self._database)

    def require_writable(self) -> None:
        """Asks before much is spent on what is then to be written here.

        Raises:
          StoreError: this store may only be read, and what to do.
        """
        self._database.require_writable()

    def get(self, key: Key) -> Record | None:
        """The record of `key`, or None.

        Raises:
          MalformedRecord: what the cache holds for `key` cannot be read.
          StoreError: the cache cannot be read at all.
        """
        for *_, line in self._database.select(_BY_KEY, _asked(key)):
            try:
                return rows.record_of(key, line)
            except ValueError as error:
                raise MalformedRecord(
                    f"the record of {key} in {self.location} is malformed ({error}); tune it again"
                ) from error
        return None

    def nearest(self, near: Near, *, estimated: bool | None = None) -> list[Record]:
        """Records of the most similar problems, the nearest first; malformed ones are skipped with a warning.

        An index finds them: what it costs does not grow with the records that are stored.

        Args:
          near: which problem, how far, and how many.
          estimated: only those whose times are estimates, or only those that were measured.

        Raises:
          StoreError: the cache cannot be read.
        """
        kinds = (0, 1) if estimated is None else (int(estimated),)
        found: list[Record] = []
        with self._database.reading() as select:
            for within, most in (*((within, CANDIDATES) for within in near.stages), (near.within, -1)):
                texts, reach = similar(select, near, within, kinds, most)
                keys = (Key(near.operation, near.hardware, text) for text in near.in_order(texts, reach))
                lines = (tuple(row) for key in keys for row in select(_BY_KEY, _asked(key)))
                found = list(itertools.islice(self._decoded(lines), near.most))
                if len(found) == near.most or (within, reach) == (near.within, within):
                    break
        return found

    def put(self, record: Record) -> None:
        """Store `record` in place of any of the same key; its search is then finished.

        Raises:
          StoreError: it cannot be written; or it is an estimate, and what is stored was measured, which stays.
        """
        with self._database.write() as connection:
            if not self._put(connection, record):
                raise StoreError(f"{record.key} was measured in {self.location}: no estimate replaces that")

    def put_all(self, records: Iterable[Record], ranges: Iterable[Range] = ()) -> list[Key]:
        """Store records as `put` does, and ranges: all of them, or none where one cannot be written.

        Returns:
          the keys of estimates of what was measured, which are left out.

        Raises:
          StoreError: they cannot be written.
        """
        with self._database.write() as connection:
            left = [record.key for record in records if not self._put(connection, record)]
            self.ranges.put_all(connection, ranges)
        return left

    def _put(self, connection: sa.Connection, record: Record) -> bool:
        """Whether it was stored: no estimate replaces what was measured."""
        if record.estimated:
            held = connection.execute(sa.select(SCHEDULES.c.record).where(*_is(SCHEDULES, record.key))).first()
            if held is not None and rows.was_measured(record.key, held[0]):
                return False
        connection.execute(self._database.upsert(SCHEDULES, KEY), rows.of_record(record))
        self._studies.finish(connection, record.key)
        return True

    def finish(self, key: Key) -> None:
        """Say that the search of `key` came to its end, though without a record: its trials are not resumed.

        Raises:
          StoreError: the cache cannot be written.
        """
        with self._database.write() as connection:
            self._studies.finish(connection, key)

    def forget(self, key: Key) -> int:
        """Delete the record of `key` and its trials.

        Returns:
          how many rows that were; 0 where nothing was known.

        Raises:
          StoreError: the cache cannot be written.
        """
        if self._database.empty():
            return 0
        count = self._studies.forget(key)
        with self._database.write() as connection:
            return count + connection.execute(sa.delete(SCHEDULES).where(*_is(SCHEDULES, key))).rowcount

    def prepare_trials(self) -> None:
        """Make what trials are stored in, ahead of the first.

        Raises:
          StoreError: it cannot be written.
        """
        self._studies.prepare()

    def add_trial(self, key: Key, trial: Trial, environment: Environment, described: Described | None = None) -> None:
        """Store a trial as it ends, so that a search that is killed loses none.

        Args:
          described: as in `Studies.add`.

        Raises:
          StoreError: it cannot be written.
        """
        self._studies.add(key, trial, environment, described)

    def replace_trial(self, key: Key, trial: Trial) -> None:
        """Give the latest stored trial of this number another outcome: what passed for right was found wrong.

        Raises:
          StoreError: it cannot be written.
        """
        self._studies.replace(key, trial)

    def trials(self, key: Key, environment: Environment | None = None, *, unfinished: bool = False) -> list[Trial]:
        """The trials of `key` in the order they ended; malformed ones are skipped with a warning.

        Args:
          key: of the search.
          environment: only those measured under these versions of jax, jaxlib and the driver (at any date), which
            a search that resumes need not repeat.
          unfinished: only those of a search that was cut short.

        Raises:
          StoreError: the cache cannot be read.
        """
        return self._studies.trials(key, environment, unfinished=unfinished)

    def last_trials(self, key: Key) -> list[Trial]:
        """The trials of the last search of `key` that came to its end, or, for want of any, of the one cut short.

        In the order they ended; of a schedule that was tried again, as after a failure, the last.

        Raises:
          StoreError: the cache cannot be read.
        """
        return self._studies.last(key)

    def unfinished(self, operation: str | None = None, problem: str | None = None) -> dict[Key, list[Trial]]:
        """The trials of every search that goes on, or was cut short, by key in the order of their names.

        Args:
          operation, problem: only those of this operation or this problem (`Key`).

        Raises:
          StoreError: the cache cannot be read.
        """
        return self._studies.unfinished(operation, problem)

    def lease(self, key: Key, owner: str, seconds: float, *, silent: Lease | None = None) -> Lease:
        """Takes or renews the lease of `key`: `owner` is the one that tunes it.

        Args:
          seconds: for which it counts to versions of this program that go by the clock.
          silent: a lease of another that was seen not to be renewed: it is taken over, if it is the same still.

        Returns:
          the one that holds now: of `owner`, unless another took it before. A store in memory or opened read-only is
          shared with nobody, and there whoever asks holds it.

        Raises:
          StoreError: the cache cannot be written.
        """
        taken = Lease(owner, time.time() + seconds)
        if not self._database.shared:
            return taken
        insert = self._database.insert(LEASES).values(**vars(key), **vars(taken))
        free = LEASES.c.owner == owner
        if silent is not None:
            free |= (LEASES.c.owner == silent.owner) & (LEASES.c.expires_s == silent.expires_s)
        new = {name: insert.excluded[name] for name in vars(taken)}
        with self._database.write() as connection:
            connection.execute(insert.on_conflict_do_update(index_elements=KEY, set_=new, where=free))
            held = connection.execute(sa.select(LEASES.c.owner, LEASES.c.expires_s).where(*_is(LEASES, key))).one()
        return Lease(*held)

    def release(self, key: Key, owner: str) -> None:
        """Gives the lease of `key` back, where `owner` holds it.

        Raises:
          StoreError: the cache cannot be written.
        """
        if self._database.shared:
            with self._database.write() as connection:
                connection.execute(sa.delete(LEASES).where(*_is(LEASES, key), LEASES.c.owner == owner))

    def records(self, *, operation: str | None = None, hardware: str | None = None) -> Iterator[Record]:
        """Records sorted by operation, hardware and problem; malformed ones are skipped with a warning.

        They are read before the first one is returned: no lock is held in between.

        Args:
          operation, hardware: only those of this operation or this `Hardware.id`.

        Raises:
          StoreError: the cache cannot be read.
        """
        wanted = {"operation": operation, "hardware": hardware}
        query = sa.select(*(SCHEDULES.c[name] for name in (*KEY, "record"))).where(
            *(SCHEDULES.c[name] == value for name, value in wanted.items() if value is not None)
        )
        # Sorted here because every database sorts text by rules of its own.
        return self._decoded(rows.by_key(self._database.select(query), self.location))

    def heads(self, *, operation: str | None = None, problem: str | None = None) -> list[Head]:
        """What is stored, in no order: a list of thousands is filtered and sorted by it before any record is read.

        Args:
          operation, problem: only those of this operation or this problem (`Key`).

        Raises:
          StoreError: the cache cannot be read.
        """
        columns = SCHEDULES.c
        wanted = {"operation": operation, "problem": problem}
        query = sa.select(*(columns[name] for name in (*KEY, "jax", "estimated"))).where(
            *(columns[name] == value for name, value in wanted.items() if value is not None)
        )
        found = rows.with_key(self._database.select(query), self.location)
        return [Head(Key(*key), str(jax), bool(estimated)) for *key, jax, estimated in found]

    def read(self, keys: Iterable[Key]) -> Iterator[Record]:
        """The records of these keys, in their order; malformed ones are skipped with a warning.

        Raises:
          StoreError: the cache cannot be read.
        """
        asked = list(map(_asked, keys))
        return self._decoded([tuple(row) for row in self._database.select(_BY_KEY, *asked)] if asked else [])

    def texts(self, *, operation: str, hardware: str) -> list[str]:
        """Records as they are stored, in no order.

        Raises:
          StoreError: the cache cannot be read.
        """
        columns = SCHEDULES.c
        query = sa.select(columns.record).where(columns.operation == operation, columns.hardware == hardware)
        return [line for (line,) in self._database.select(query) if isinstance(line, str)]

    def keys(self, *, operation: str | None = None) -> list[Key]:
        """Every key that has a record or a trial, sorted.

        Raises:
          StoreError: the cache cannot be read.
        """
        query = sa.select(*(SCHEDULES.c[name] for name in KEY))
        query = query if operation is None else query.where(SCHEDULES.c.operation == operation)
        found = {Key(*row) for row in rows.by_key(self._database.select(query), self.location)}
        found |= self._studies.keys(operation)
        return sorted(found, key=lambda key: (key.operation, key.hardware, key.problem))

    def put_calibration(self, calibration: Calibration) -> None:
        """Store fitted constants in place of any of the same kernel on the same chip.

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
        """Fitted constants sorted by hardware, operation and backend; malformed ones are skipped with a warning.

        Raises:
          StoreError: the cache cannot be read.
        """
        wanted = {"hardware": hardware, "operation": operation}
        columns = [CONSTANTS.c[name] for name in (*KERNEL_ON_CHIP, "calibration")]
        query = sa.select(*columns).where(
            *(CONSTANTS.c[name] == value for name, value in wanted.items() if value is not None)
        )
        found: list[Calibration] = []
        for *names, line in rows.by_key(self._database.select(query), self.location):
            try:
                found.append(codec.calibration_from_text(line))
            except ValueError as error:
                rows.say_once(f"{self.location}: constants of {' '.join(names)} are skipped, malformed ({error})")
        return found

    def close(self) -> None:
        self._studies.close()
        self._database.close()

    def _decoded(self, found: Iterable[tuple[Any, ...]]) -> Iterator[Record]:
        for *names, line in found:
            key = Key(*names)
            try:
                yield rows.record_of(key, line)
            except ValueError as error:
                rows.say_once(f"{self.location}: the record of {key} is skipped, it is malformed ({error})")


def shipped() -> Store | None:
    """The read-only records that come with this package, from a checkout or a wheel; None where there are none."""
    package = Path(__file__).parents[1]
    places = [package / "cache.db"]
    if (package.parent / "pyproject.toml").exists():  # Beside an installed package lie the files of others.
        places.append(package.parent / "cache.db")
    return next((Store(place, readonly=True) for place in places if place.exists()), None)


def build_shipped(records: Path, cache_db: Path) -> int:
    """Make `cache_db` anew from the text under `records`; the same text makes the same bytes with the same SQLite.

    The model's fitted constants and the ranges come along.

    Returns:
      how many records it holds.

    Raises:
      StoreError: the text cannot be read, or the file cannot be written.
    """
    found, calibrations = text_files.read_records(records), text_files.read_calibrations(records)
    store = Store(":memory:")
    store.put_all(found, text_files.read_ranges(records))
    for calibration in calibrations:
        store.put_calibration(calibration)
    store._database.copy_to(cache_db)
    store.close()
    return len(found)


# Made once: that takes longer than to run it.
_BY_KEY = sa.select(*(SCHEDULES.c[name] for name in (*KEY, "record"))).where(
    *(SCHEDULES.c[name] == sa.bindparam(f"{name}_") for name in KEY)
)


def _asked(key: Key) -> dict[str, str]:
    """The parameters of `_BY_KEY`."""
    return {f"{name}_": value for name, value in vars(key).items()}


def _is(table: sa.TableClause, key: Key) -> list[sa.ColumnElement[bool]]:
    return [table.c[name] == getattr(key, name) for name in KEY]
