"""The store of records, trials and the model's constants in SQL; the only file that knows SQLAlchemy.

Anything a cache holds is text that is parsed and checked: nothing is unpickled or evaluated.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
import logging
import os
import re
import sqlite3
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import platformdirs
import sqlalchemy as sa
from sqlalchemy.dialects import postgresql, sqlite

from scheduler import text
from scheduler.errors import MalformedRecord, StoreError
from scheduler.record import Calibration, Environment, Failure, Key, Measurement, Record, Trial
from search_spaces import aliases

_log = logging.getLogger(__name__)

CACHE_VARIABLE = "TILE_SCHEDULER_CACHE"
BUSY_TIMEOUT_S = 30

# `record` and `trial` are the whole text, and what is read back; the other columns repeat what a person asks SQL for.
_SCHEDULES = sa.table(
    "schedules",
    *map(sa.column, ("operation", "hardware", "problem", "backend", "kernel_version", "schedule", "median_s", "xla_s")),
    *map(sa.column, ("jax", "jaxlib", "driver", "date", "record")),
)
_TRIALS = sa.table(
    "trials",
    *map(sa.column, ("id", "operation", "hardware", "problem", "number", "backend", "kernel_version", "schedule")),
    *map(sa.column, ("predicted_s", "median_s", "failed_stage", "jax", "jaxlib", "driver", "date", "trial")),
    sa.column("finished"),
)
_LEASES = sa.table("leases", *map(sa.column, ("operation", "hardware", "problem", "owner", "expires_s")))
_CONSTANTS = sa.table(
    "constants", *map(sa.column, ("hardware", "operation", "backend", "kernel_version", "date", "calibration"))
)
_KEY = ("operation", "hardware", "problem")
_KERNEL_ON_CHIP = ("hardware", "operation", "backend")

# What brings a file from schema version i to i + 1: statements that stay as they are once released, so that a file of
# any age ends up the same. {serial} is a number that counts up by itself.
MIGRATIONS: tuple[Sequence[str], ...] = (
    (
        "CREATE TABLE schema_version (version BIGINT NOT NULL)",
        "INSERT INTO schema_version VALUES (0)",
        """CREATE TABLE schedules (
             operation TEXT NOT NULL, hardware TEXT NOT NULL, problem TEXT NOT NULL,
             backend TEXT NOT NULL, kernel_version BIGINT NOT NULL, schedule TEXT NOT NULL,
             median_s DOUBLE PRECISION NOT NULL, xla_s DOUBLE PRECISION,
             jax TEXT NOT NULL, jaxlib TEXT NOT NULL, driver TEXT NOT NULL, date TEXT NOT NULL,
             record TEXT NOT NULL,
             PRIMARY KEY (operation, hardware, problem))""",
        """CREATE TABLE trials (
             id {serial} PRIMARY KEY,
             operation TEXT NOT NULL, hardware TEXT NOT NULL, problem TEXT NOT NULL,
             number BIGINT NOT NULL, backend TEXT NOT NULL, kernel_version BIGINT NOT NULL, schedule TEXT NOT NULL,
             predicted_s DOUBLE PRECISION NOT NULL, median_s DOUBLE PRECISION, failed_stage TEXT,
             jax TEXT NOT NULL, jaxlib TEXT NOT NULL, driver TEXT NOT NULL, date TEXT NOT NULL,
             trial TEXT NOT NULL)""",
        "CREATE INDEX trials_by_key ON trials (operation, hardware, problem)",
    ),
    (
        # 1 where the search of the trial came to its end: only the others are there to be resumed.
        "ALTER TABLE trials ADD COLUMN finished BIGINT NOT NULL DEFAULT 0",
        "UPDATE trials SET finished = 1",
    ),
    (
        # Who tunes a problem now, and the Unix time, in seconds, until which that counts unless it is renewed.
        """CREATE TABLE leases (
             operation TEXT NOT NULL, hardware TEXT NOT NULL, problem TEXT NOT NULL,
             owner TEXT NOT NULL, expires_s DOUBLE PRECISION NOT NULL,
             PRIMARY KEY (operation, hardware, problem))""",
    ),
    (
        # What the cost model's constants were fitted to: the trials of one kernel on one chip.
        """CREATE TABLE constants (
             hardware TEXT NOT NULL, operation TEXT NOT NULL, backend TEXT NOT NULL,
             kernel_version BIGINT NOT NULL, date TEXT NOT NULL, calibration TEXT NOT NULL,
             PRIMARY KEY (hardware, operation, backend))""",
    ),
)
_VERSION = sa.table("schema_version", sa.column("version"))
# Tables of every schema since the first: a database that has these is one of ours.
_OLDEST = frozenset({"schema_version", "schedules", "trials"})
# What a transaction that migrates locks first; SQLite's BEGIN IMMEDIATE is such a lock already.
_LOCK = {"postgresql": "SELECT pg_advisory_xact_lock(8090210118)"}
_SERIAL = {"sqlite": "INTEGER", "postgresql": "BIGSERIAL"}
_INSERT: dict[str, Callable[[Any], Any]] = {"sqlite": sqlite.insert, "postgresql": postgresql.insert}


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

    Raises:
      StoreError: a URL that is none, or a kind of database or a driver that is missing.
    """

    def __init__(
        self, url: str | Path, *, readonly: bool = False, migrations: tuple[Sequence[str], ...] = MIGRATIONS
    ) -> None:
        self.readonly = readonly
        self._migrations = migrations
        self._ready = False
        self.location = str(url)
        self._path: Path | None = None
        with self._errors("opened"):
            target = _url(url)
            self.location = target.render_as_string(hide_password=True)
            self._dialect = target.get_backend_name()
            if self._dialect not in _INSERT:
                raise StoreError(f"a cache may be SQLite or PostgreSQL, found {self.location}; set {CACHE_VARIABLE}")
            self.in_memory = self._dialect == "sqlite" and target.database in (None, "", ":memory:")
            self._shared = not self.in_memory and not readonly
            if self._dialect == "sqlite" and not self.in_memory:
                self._path = Path(target.database or "")
                self.location = str(self._path)
            # A connection in memory is the database, so threads take turns with it.
            self._turn: contextlib.AbstractContextManager[Any] = (
                threading.RLock() if self.in_memory else contextlib.nullcontext()
            )
            self._engine = _engine(target, self._path, readonly)

    def require_writable(self) -> None:
        """Asks before much is spent on what is then to be written here.

        Raises:
          StoreError: this store may only be read, and what to do.
        """
        if self.readonly:
            raise StoreError(f"{self.location} was opened read-only; write to another cache (set {CACHE_VARIABLE})")
        if self._path is not None and _frozen(self._path):
            raise StoreError(
                f"{self.location} may only be read (it, or its directory, is read-only for this user); to keep what is "
                f"found, set {CACHE_VARIABLE} to a copy of it in a directory that can be written"
            )

    def get(self, key: Key) -> Record | None:
        """The record of `key`, or None.

        Raises:
          MalformedRecord: what the cache holds for `key` cannot be read.
          StoreError: the cache cannot be read at all.
        """
        query = sa.select(_SCHEDULES.c.record).where(*_is(_SCHEDULES, key))
        for (line,) in self._select(query):
            try:
                return _checked(key, line)
            except ValueError as error:
                raise MalformedRecord(
                    f"the record of {key} in {self.location} is malformed ({error}); tune it again"
                ) from error
        return None

    def put(self, record: Record) -> None:
        """Store `record` in place of any of the same key; its search is then finished.

        Raises:
          StoreError: it cannot be written.
        """
        winner, library = record.winner, record.best(frozenset({"xla"}))
        with self._write() as connection:
            connection.execute(
                _upsert(self._dialect),
                {
                    **vars(record.key),
                    **vars(record.environment),
                    "backend": winner.backend,
                    "kernel_version": winner.version,
                    "schedule": text.schedule_to_text(winner.schedule),
                    "median_s": winner.measurement.median_s,
                    "xla_s": library.measurement.median_s if library else None,
                    "record": text.record_to_text(record),
                },
            )
            connection.execute(_finish(record.key))

    def finish(self, key: Key) -> None:
        """Say that the search of `key` came to its end, though without a record: its trials are not resumed.

        Raises:
          StoreError: the cache cannot be written.
        """
        with self._write() as connection:
            connection.execute(_finish(key))

    def forget(self, key: Key) -> int:
        """Delete the record of `key` and its trials.

        Returns:
          how many rows that were; 0 where nothing was known.

        Raises:
          StoreError: the cache cannot be written.
        """
        with self._errors("read"):
            if self._missing():
                return 0
        with self._write() as connection:
            return sum(connection.execute(sa.delete(t).where(*_is(t, key))).rowcount for t in (_SCHEDULES, _TRIALS))

    def add_trial(self, key: Key, trial: Trial, environment: Environment) -> None:
        """Store a trial as it ends, so that a search that is killed loses none.

        Raises:
          StoreError: it cannot be written.
        """
        with self._write() as connection:
            connection.execute(
                sa.insert(_TRIALS),
                {
                    **vars(key),
                    **vars(environment),
                    "number": trial.number,
                    "backend": trial.backend,
                    "kernel_version": trial.version,
                    "schedule": text.schedule_to_text(trial.schedule),
                    "predicted_s": trial.predicted_s,
                    **_outcome(trial),
                },
            )

    def replace_trial(self, key: Key, trial: Trial) -> None:
        """Give the latest stored trial of this number another outcome: what passed for right was found wrong.

        Raises:
          StoreError: it cannot be written.
        """
        latest = sa.select(sa.func.max(_TRIALS.c.id)).where(
            *_is(_TRIALS, key),
            _TRIALS.c.number == trial.number,
            _TRIALS.c.backend.in_(aliases.spellings(trial.backend)),
        )
        with self._write() as connection:
            connection.execute(sa.update(_TRIALS).where(_TRIALS.c.id == latest.scalar_subquery()), _outcome(trial))

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
        wanted = [_TRIALS.c.finished == 0] if unfinished else []
        if environment is not None:
            wanted += [_TRIALS.c[n] == getattr(environment, n) for n in ("jax", "jaxlib", "driver")]
        return self._trials(key, *wanted)

    def last_trials(self, key: Key) -> list[Trial]:
        """The trials of the last search of `key` that came to its end, or, for want of any, of the one cut short.

        In the order they ended; of a schedule that was tried again, as after a failure, the last.

        Raises:
          StoreError: the cache cannot be read.
        """
        trials = self._trials(key, _TRIALS.c.finished != 0) or self._trials(key)
        begins = max((i for i, trial in enumerate(trials) if trial.number == 0), default=0)
        last = {(t.backend, t.version, *sorted(t.schedule.items())): t for t in trials[begins:]}
        return sorted(last.values(), key=lambda trial: trial.number)

    def _trials(self, key: Key, *wanted: sa.ColumnElement[bool]) -> list[Trial]:
        query = sa.select(_TRIALS.c.id, _TRIALS.c.trial).where(*_is(_TRIALS, key), *wanted).order_by(_TRIALS.c.id)
        return [trial for _, trial in self._decoded_trials((key, *row) for row in self._select(query))]

    def unfinished(self, operation: str | None = None) -> dict[Key, list[Trial]]:
        """The trials of every search that goes on, or was cut short, by key in the order of their names.

        Raises:
          StoreError: the cache cannot be read.
        """
        query = sa.select(*(_TRIALS.c[name] for name in (*_KEY, "id", "trial"))).where(_TRIALS.c.finished == 0)
        query = query if operation is None else query.where(_TRIALS.c.operation == operation)
        rows = ((Key(*row[:3]), *row[3:]) for row in sorted(tuple(row) for row in self._select(query)))
        found: dict[Key, list[Trial]] = {}
        for key, trial in self._decoded_trials(rows):
            found.setdefault(key, []).append(trial)
        return found

    def lease(self, key: Key, owner: str, seconds: float) -> str:
        """Takes or renews the lease of `key`: for so many seconds `owner` is the one that tunes it.

        Returns:
          who holds it now: `owner`, unless another took it before and it has not expired. A store in memory or opened
          read-only is shared with nobody, and there whoever asks holds it.

        Raises:
          StoreError: the cache cannot be written.
        """
        if not self._shared:
            return owner
        now = time.time()
        insert = _INSERT[self._dialect](_LEASES).values(**vars(key), owner=owner, expires_s=now + seconds)
        free = sa.or_(_LEASES.c.owner == owner, _LEASES.c.expires_s < now)
        taken = {name: insert.excluded[name] for name in ("owner", "expires_s")}
        with self._write() as connection:
            connection.execute(insert.on_conflict_do_update(index_elements=_KEY, set_=taken, where=free))
            return str(connection.execute(sa.select(_LEASES.c.owner).where(*_is(_LEASES, key))).scalar_one())

    def release(self, key: Key, owner: str) -> None:
        """Gives the lease of `key` back, where `owner` holds it.

        Raises:
          StoreError: the cache cannot be written.
        """
        if self._shared:
            with self._write() as connection:
                connection.execute(sa.delete(_LEASES).where(*_is(_LEASES, key), _LEASES.c.owner == owner))

    def records(self, *, operation: str | None = None, hardware: str | None = None) -> Iterator[Record]:
        """Records sorted by operation, hardware and problem; malformed ones are skipped with a warning.

        They are read before the first one is returned: no lock is held in between.

        Args:
          operation, hardware: only those of this operation or this `Hardware.id`.

        Raises:
          StoreError: the cache cannot be read.
        """
        wanted = {"operation": operation, "hardware": hardware}
        query = sa.select(*(_SCHEDULES.c[name] for name in (*_KEY, "record"))).where(
            *(_SCHEDULES.c[name] == value for name, value in wanted.items() if value is not None)
        )
        # Sorted here because every database sorts text by rules of its own.
        return self._decoded(sorted(tuple(row) for row in self._select(query)))

    def keys(self, *, operation: str | None = None) -> list[Key]:
        """Every key that has a record or a trial, sorted.

        Raises:
          StoreError: the cache cannot be read.
        """
        found: set[Key] = set()
        for table in (_SCHEDULES, _TRIALS):
            query = sa.select(*(table.c[name] for name in _KEY)).distinct()
            query = query if operation is None else query.where(table.c.operation == operation)
            found.update(Key(*row) for row in self._select(query))
        return sorted(found, key=lambda key: (key.operation, key.hardware, key.problem))

    def put_calibration(self, calibration: Calibration) -> None:
        """Store fitted constants in place of any of the same kernel on the same chip.

        Raises:
          StoreError: they cannot be written.
        """
        insert = _INSERT[self._dialect](_CONSTANTS).values(
            hardware=calibration.hardware,
            operation=calibration.operation,
            backend=calibration.backend,
            kernel_version=calibration.version,
            date=calibration.environment.date,
            calibration=text.calibration_to_text(calibration),
        )
        new = {name: insert.excluded[name] for name in ("kernel_version", "date", "calibration")}
        older = sa.delete(_CONSTANTS).where(
            _CONSTANTS.c.hardware == calibration.hardware,
            _CONSTANTS.c.operation == calibration.operation,
            _CONSTANTS.c.backend.in_(aliases.spellings(calibration.backend)[1:]),
        )
        with self._write() as connection:
            connection.execute(older)
            connection.execute(insert.on_conflict_do_update(index_elements=_KERNEL_ON_CHIP, set_=new))

    def calibrations(self, *, hardware: str | None = None, operation: str | None = None) -> list[Calibration]:
        """Fitted constants sorted by hardware, operation and backend; malformed ones are skipped with a warning.

        Raises:
          StoreError: the cache cannot be read.
        """
        wanted = {"hardware": hardware, "operation": operation}
        columns = [_CONSTANTS.c[name] for name in (*_KERNEL_ON_CHIP, "calibration")]
        query = sa.select(*columns).where(
            *(_CONSTANTS.c[name] == value for name, value in wanted.items() if value is not None)
        )
        found: list[Calibration] = []
        for *names, line in sorted(tuple(row) for row in self._select(query)):
            try:
                found.append(text.calibration_from_text(line))
            except ValueError as error:
                _log.warning("%s: constants of %s are skipped, malformed (%s)", self.location, " ".join(names), error)
        return found

    def close(self) -> None:
        self._engine.dispose()

    def _decoded_trials(self, rows: Iterable[tuple[Key, int, str]]) -> Iterator[tuple[Key, Trial]]:
        for key, number, line in rows:
            try:
                yield key, text.trial_from_text(line)
            except ValueError as error:
                _log.warning("%s: trial %s of %s is skipped, it is malformed (%s)", self.location, number, key, error)

    def _decoded(self, rows: list[tuple[Any, ...]]) -> Iterator[Record]:
        for *names, line in rows:
            key = Key(*names)
            try:
                yield _checked(key, line)
            except ValueError as error:
                _log.warning("%s: the record of %s is skipped, it is malformed (%s)", self.location, key, error)

    def _select(self, query: sa.Select[Any]) -> Sequence[Any]:
        with self._turn, self._errors("read"):
            if self._missing():
                return ()
            self._prepare()
            with self._engine.connect() as connection:
                return connection.execute(query).all()

    @contextlib.contextmanager
    def _write(self) -> Iterator[sa.Connection]:
        with self._turn, self._errors("written"):
            self.require_writable()
            if self._path is not None:
                self._path.parent.mkdir(parents=True, exist_ok=True)
            self._prepare()
            with _writing(self._engine) as connection:
                yield connection

    def _missing(self) -> bool:
        """Whether there is no file yet: nothing to read, and no reason to make one."""
        return self._path is not None and not self.readonly and not self._path.exists()

    def _prepare(self) -> None:
        """Bring the schema to today's version: once in the life of this object, and under the lock of a writer."""
        if self._ready and not self._missing():
            return
        today = len(self._migrations)
        only_read = self.readonly or (self._path is not None and _frozen(self._path))
        with self._engine.connect() as connection:
            version = self._version(connection)
        if version < today:
            if only_read:
                raise StoreError(
                    f"{self.location} has schema {version}, and only a writer may bring it to schema {today}: set "
                    f"{CACHE_VARIABLE} to a copy that can be written; if it is itself a copy of a file in use, it "
                    "lacks what that one's -wal file holds: copy with VACUUM INTO"
                )
            version = self._migrate()
        if version > today:
            raise StoreError(
                f"{self.location} has schema {version}, made by a newer tile-scheduler than this one, which knows "
                f"schema {today}; it was left as it is: upgrade tile-scheduler, or set {CACHE_VARIABLE} to another file"
            )
        if self._path is not None and not only_read:
            _set_journal(self._engine, self._path)
        self._ready = True

    def _migrate(self) -> int:
        """Bring the schema to today's version in one transaction; the version it has then."""
        today = len(self._migrations)
        with _writing(self._engine) as connection:
            if self._dialect in _LOCK:
                connection.exec_driver_sql(_LOCK[self._dialect])
            version = self._version(connection)  # Another process may have been first, even a newer one.
            if version >= today:
                return version
            for statement in itertools.chain(*self._migrations[version:]):
                connection.exec_driver_sql(statement.format(serial=_SERIAL[self._dialect]))
            connection.execute(sa.update(_VERSION).values(version=today))
            return today

    def _version(self, connection: sa.Connection) -> int:
        """The schema's version; 0 where there is none of our tables.

        Raises:
          StoreError: the tables are those of another program.
        """
        inspector = sa.inspect(connection)
        found = {*inspector.get_table_names(), *inspector.get_view_names()}
        if found >= _OLDEST:
            return int(connection.execute(sa.select(_VERSION.c.version)).scalar_one())
        if foreign := found if self._dialect == "sqlite" else found & _OLDEST:
            raise StoreError(
                f"{self.location} is no cache but a database of another program, with the "
                f"table{'s' if len(foreign) > 1 else ''} {_some(sorted(foreign))}; it was left as it is: set "
                f"{CACHE_VARIABLE} to a file of its own, which need not exist"
            )
        return 0

    @contextlib.contextmanager
    def _errors(self, verb: str) -> Iterator[None]:
        """Turn what a database or a file system raises into a `StoreError` with advice."""
        try:
            yield
        except (sa.exc.SQLAlchemyError, OSError, ImportError, ValueError) as error:
            reason = getattr(error, "orig", None) or error
            raise StoreError(f"{self.location} cannot be {verb} ({reason}): {_advice(reason, self._path)}") from error


def default_url() -> str:
    """A user's own cache: `TILE_SCHEDULER_CACHE` (a path or an SQLAlchemy URL), else a file in the cache directory."""
    return os.environ.get(CACHE_VARIABLE) or str(platformdirs.user_cache_path("tile-scheduler", False) / "cache.db")


def shipped() -> Store | None:
    """The read-only records that come with this package, from a checkout or a wheel; None where there are none."""
    package = Path(__file__).parent
    places = [package / "cache.db"]
    if (package.parent / "pyproject.toml").exists():  # Beside an installed package lie the files of others.
        places.append(package.parent / "cache.db")
    return next((Store(place, readonly=True) for place in places if place.exists()), None)


def build_shipped(records: Path, cache_db: Path) -> int:
    """Make `cache_db` anew from the text under `records`; the same text makes the same bytes with the same SQLite.

    The model's fitted constants come along.

    Returns:
      how many records it holds.

    Raises:
      StoreError: the text cannot be read, or the file cannot be written.
    """
    found, calibrations = text.read_records(records), text.read_calibrations(records)
    store = Store(":memory:")
    for record in found:
        store.put(record)
    for calibration in calibrations:
        store.put_calibration(calibration)
    fresh = cache_db.with_name(f"{cache_db.name}.new")
    with store._errors(f"copied to {cache_db}"):
        store._prepare()
        fresh.unlink(missing_ok=True)
        with store._engine.connect().execution_options(begin="") as connection:
            # VACUUM INTO leaves one file in journal mode DELETE, which opens where nothing may be written.
            connection.exec_driver_sql("VACUUM INTO ?", (str(fresh),))
        fresh.replace(cache_db)
    store.close()
    return len(found)


def _checked(key: Key, line: str) -> Record:
    record = text.record_from_text(line)
    if record.key != key:
        raise ValueError(f"it is the record of {record.key}")
    return record


def _outcome(trial: Trial) -> dict[str, Any]:
    """The columns that tell what became of a trial."""
    return {
        "median_s": trial.outcome.median_s if isinstance(trial.outcome, Measurement) else None,
        "failed_stage": trial.outcome.stage if isinstance(trial.outcome, Failure) else None,
        "trial": text.trial_to_text(trial),
    }


@functools.cache
def _upsert(dialect: str) -> Any:
    insert = _INSERT[dialect](_SCHEDULES)
    changed = {column.name: insert.excluded[column.name] for column in _SCHEDULES.columns if column.name not in _KEY}
    return insert.on_conflict_do_update(index_elements=_KEY, set_=changed)


def _finish(key: Key) -> sa.Update:
    return sa.update(_TRIALS).where(*_is(_TRIALS, key)).values(finished=1)


def _is(table: sa.TableClause, key: Key) -> list[sa.ColumnElement[bool]]:
    return [table.c[name] == getattr(key, name) for name in _KEY]


def _url(url: str | Path) -> sa.URL:
    if url == ":memory:":
        return sa.URL.create("sqlite")
    if isinstance(url, Path) or "://" not in url:
        return sa.URL.create("sqlite", database=str(Path(url).expanduser().absolute()))
    parsed = sa.make_url(url)
    # The driver that the extra [postgres] installs.
    return parsed.set(drivername="postgresql+psycopg") if parsed.drivername == "postgresql" else parsed


def _engine(url: sa.URL, path: Path | None, readonly: bool) -> sa.Engine:
    if url.get_backend_name() != "sqlite":
        return sa.create_engine(url, poolclass=sa.NullPool)
    if path is None:
        # isolation_level None: Python's sqlite3 begins no transactions on its own, the listener below does.
        settings = {"timeout": BUSY_TIMEOUT_S, "isolation_level": None, "check_same_thread": False}
        engine = sa.create_engine(url, poolclass=sa.StaticPool, connect_args=settings)
    else:
        # No pool: a connection that is carried across a fork corrupts files.
        connect = functools.partial(_connect, path, readonly)
        engine = sa.create_engine("sqlite://", poolclass=sa.NullPool, creator=connect)
    if not readonly:
        sa.event.listen(engine, "connect", _set_synchronous)
    sa.event.listen(engine, "begin", _begin)
    return engine


def _connect(path: Path, readonly: bool) -> sqlite3.Connection:
    """A connection to a file: one that only reads, where it should or may not write."""
    place, uri = str(path), readonly or _frozen(path)
    if uri:
        # `immutable` needs no locks and no files beside this one, so that it opens where nothing may be written; it
        # would miss what a log holds, and what a writer does that is there now, as its two files tell. `as_uri`
        # quotes: after a bare `#` SQLite silently opens another file.
        used = all(path.with_name(f"{path.name}{ending}").exists() for ending in ("-wal", "-shm"))
        at_rest = _log_of(path) is None and not used
        place = f"{path.absolute().as_uri()}?mode=ro{'&immutable=1' if at_rest else ''}"
    return sqlite3.connect(place, timeout=BUSY_TIMEOUT_S, isolation_level=None, uri=uri)


def _frozen(path: Path) -> bool:
    """Whether there is a file that this process may read only. A log is made and removed in the file's directory."""
    effective = os.access in os.supports_effective_ids
    return path.is_file() and not all(os.access(p, os.W_OK, effective_ids=effective) for p in (path, path.parent))


def _set_synchronous(connection: Any, _: Any) -> None:
    connection.execute("PRAGMA synchronous=NORMAL")


def _begin(connection: sa.Connection) -> None:
    # A writer takes the lock at once. One that reads first and then asks for it fails without waiting, whenever another
    # wrote in between (SQLite, "Isolation In SQLite"): 329 of 400 writes of eight processes were lost so.
    if begin := connection.get_execution_options().get("begin", "BEGIN"):
        connection.exec_driver_sql(begin)


@contextlib.contextmanager
def _writing(engine: sa.Engine) -> Iterator[sa.Connection]:
    with engine.connect().execution_options(begin="BEGIN IMMEDIATE") as connection, connection.begin():
        yield connection


# File systems of this host alone, where a write-ahead log's shared memory works (SQLite, "Write-Ahead Logging", 9).
_LOCAL = frozenset({"ext2", "ext3", "ext4", "xfs", "btrfs", "zfs", "f2fs", "bcachefs", "tmpfs", "ramfs", "overlay"})


def _set_journal(engine: sa.Engine, path: Path) -> None:
    """WAL, where readers and a writer do not wait for each other, on a local disk; DELETE anywhere else."""
    wanted = "wal" if file_system(path) in _LOCAL else "delete"
    with engine.connect().execution_options(begin="") as connection:
        if connection.exec_driver_sql("PRAGMA journal_mode").scalar_one() != wanted:
            # Refused while another process uses the file, or where it may only be read: the next one to open it tries.
            with contextlib.suppress(sa.exc.OperationalError):
                connection.exec_driver_sql(f"PRAGMA journal_mode={wanted}")


def file_system(path: Path, mounts: Path = Path("/proc/mounts")) -> str:
    """The type of the file system that holds `path`, as Linux names it; "" where that is unknown."""
    try:
        lines = mounts.read_text(errors="surrogateescape").splitlines()
    except OSError:
        return ""
    place, found, kind = path.absolute().resolve(), Path(), ""
    for line in lines:
        # Blanks are written \040 and so on (getmntent(3)); of two mounts on one point the later one is seen.
        point = Path(re.sub(r"\\([0-7]{3})", lambda code: chr(int(code[1], 8)), line.split(" ")[1]))
        if place.is_relative_to(point) and len(point.parts) >= len(found.parts):
            found, kind = point, line.split(" ")[2]
    return kind


def _log_of(path: Path) -> Path | None:
    """The log beside a file, of which it is incomplete: one written ahead, or one to undo what was cut short."""
    logs = (path.with_name(f"{path.name}{ending}") for ending in ("-wal", "-journal"))
    return next((log for log in logs if log.exists() and log.stat().st_size > 0), None)


def _some(names: Sequence[str], most: int = 5) -> str:
    left = len(names) - most
    return ", ".join(names[:most]) + (f" and {left} more" if left > 0 else "")


# By the start of the name of SQLite's result code.
_ADVICE = {
    "SQLITE_BUSY": f"another process has kept its lock for {BUSY_TIMEOUT_S} s; end that one, or try again",
    "SQLITE_CANTOPEN": f"set {CACHE_VARIABLE} to a file in a directory that can be written",
    "SQLITE_CORRUPT": "the file is damaged; move it away, and a new one is made",
    "SQLITE_FULL": f"free some space on its disk, or set {CACHE_VARIABLE} to a file on another one",
    "SQLITE_NOTADB": "this is no SQLite file, or a damaged one; move it away, and a new one is made",
    "SQLITE_READONLY": f"set {CACHE_VARIABLE} to a file that can be written",
}


def _advice(reason: object, path: Path | None) -> str:
    if isinstance(reason, ImportError):
        return "pip install 'tile-scheduler[postgres]'"
    if path is not None and isinstance(reason, sqlite3.Error) and _frozen(path) and (log := _log_of(path)):
        return (
            f"what {log.name} holds can be taken over only where both may be written: open it there once, or set "
            f"{CACHE_VARIABLE} to a copy of both"
        )
    code = getattr(reason, "sqlite_errorname", "")
    otherwise = f"see that it exists and may be written, or set {CACHE_VARIABLE} to another place"
    return next((advice for name, advice in _ADVICE.items() if code.startswith(name)), otherwise)
