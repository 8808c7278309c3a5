"""Database access: opening, concurrency, migration to the current schema, and translation of errors."""

from __future__ import annotations

import contextlib
import functools
import itertools
import os
import re
import socket
import sqlite3
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import sqlalchemy as sa
from sqlalchemy.dialects import postgresql, sqlite

from scheduler.core.errors import StoreError
from scheduler.core.text import redacted, shown_url, tells
from scheduler.store.schema import OLDEST, SERIAL, VERSION

# ------------------------------------------------------------------------------
# PostgreSQL as a shared store, with timeouts for connections, statements and locks.

CONNECT_S = 5
STATEMENT_MS, LOCK_MS, IDLE_MS = 15_000, 10_000, 60_000
# A server that is suspended neither responds nor enforces its own timeouts, while its host keeps the connection alive.
LONGEST_S = 60.0

# Defaults that the URL overrides. The timeout applies per address: a host name may have several.
_CONNECTION = {
    "connect_timeout": CONNECT_S,
    "keepalives_idle": 30,
    "tcp_user_timeout": 15_000,
    # Poolers (PgBouncer) may use another connection for each transaction, without the earlier prepared statements.
    "prepare_threshold": None,
}
# Set per transaction, because poolers would reject start-up parameters.
_LIMITS = (
    f"SELECT set_config('statement_timeout', '{STATEMENT_MS}', true), set_config('lock_timeout', '{LOCK_MS}', true), "
    f"set_config('idle_in_transaction_session_timeout', '{IDLE_MS}', true)"
)


def postgres_engine(url: sa.URL) -> sa.Engine:
    """Creates an engine that connects anew for each use, because a connection must not be shared across a fork."""
    ours = url.get_driver_name() == "psycopg"
    settings = {name: value for name, value in _CONNECTION.items() if ours and name not in url.query}
    made = sa.create_engine(url, poolclass=sa.NullPool, connect_args=settings)
    if ours:
        sa.event.listen(made, "connect", _watch)
        sa.event.listen(made, "close", _leave)
        if "options" not in url.query:
            sa.event.listen(made, "begin", lambda connection: connection.exec_driver_sql(_LIMITS))
    return made


def _watch(connection: Any, record: Any) -> None:
    timer = threading.Timer(LONGEST_S, _hang_up, (connection,))
    timer.daemon = True
    timer.start()
    record.info["watch"] = timer


def _leave(connection: Any, record: Any) -> None:
    if (timer := record.info.pop("watch", None)) is not None:
        timer.cancel()


def _hang_up(connection: Any) -> None:
    """Shuts a connection down from another thread, so that a blocked read fails as if the server had disconnected."""
    with contextlib.suppress(Exception), socket.socket(fileno=os.dup(connection.pgconn.socket)) as own:
        own.shutdown(socket.SHUT_RDWR)


CACHE_VARIABLE = "TILE_SCHEDULER_CACHE"
BUSY_TIMEOUT_S = 30

# Lock of a migration's transaction; in SQLite, BEGIN IMMEDIATE is sufficient.
_LOCK = {"postgresql": "SELECT pg_advisory_xact_lock(8090210118)"}
_INSERT: dict[str, Callable[[Any], Any]] = {"sqlite": sqlite.insert, "postgresql": postgresql.insert}
# A query and its parameters -> all rows.
Select = Callable[[sa.Select[Any], Mapping[str, Any]], Sequence[Any]]


class Database:
    """An SQLite file, a database in memory, or a PostgreSQL database, for several threads and processes.

    Every failure raises a `StoreError` that says what to do.

    Args:
      url: a path, ":memory:", or an SQLAlchemy URL.
      readonly: never write.
      migrations: the steps from an older schema to the current one.

    Attributes:
      location: the path or URL, without secrets, for messages.
      in_memory: whether the content is lost with this object.
      shared: whether other processes may write to it, too.

    Raises:
      StoreError: an invalid URL, an unsupported database, or a missing driver.
    """

    def __init__(self, url: str | Path, *, readonly: bool, migrations: Sequence[Sequence[str]]) -> None:
        self.readonly = readonly
        self._migrations = migrations
        self._ready = False
        self._url, self.location = str(url), shown_url(url)
        self._path: Path | None = None
        with self.errors("opened"):
            target = _url(url)
            self._dialect = target.get_backend_name()
            if self._dialect not in _INSERT:
                raise StoreError(f"a cache may be SQLite or PostgreSQL, found {self.location}; set {CACHE_VARIABLE}")
            self.in_memory = self._dialect == "sqlite" and target.database in (None, "", ":memory:")
            self.shared = not self.in_memory and not readonly
            if self._dialect == "sqlite" and not self.in_memory:
                self._path = Path(target.database or "")
                self.location = shown_url(self._path)
            # In memory, the connection is the database, so threads share one connection under a lock.
            self._turn: contextlib.AbstractContextManager[Any] = (
                threading.RLock() if self.in_memory else contextlib.nullcontext()
            )
            self._engine = _engine(target, self._path, readonly)
        self._own = threading.local()

    def require_writable(self) -> None:
        """Checks that the store can be written, to fail before expensive work.

        Raises:
          StoreError: the store is read-only; the message says what to do.
        """
        if self.readonly:
            raise StoreError(f"{self.location} was opened read-only; write to another cache (set {CACHE_VARIABLE})")
        if self._path is not None and _frozen(self._path):
            raise StoreError(
                f"{self.location} may only be read (it, or its directory, is read-only for this user); to store, "
                f"set {CACHE_VARIABLE} to a copy of it in a writable directory"
            )

    def insert(self, table: sa.TableClause) -> Any:
        """Returns an INSERT that supports a conflict clause; its syntax depends on the database."""
        return _INSERT[self._dialect](table)

    def upsert(self, table: sa.TableClause, key: Sequence[str]) -> Any:
        """Returns an INSERT that replaces a row with the same `key`."""
        insert = self.insert(table)
        changed = {column.name: insert.excluded[column.name] for column in table.columns if column.name not in key}
        return insert.on_conflict_do_update(index_elements=key, set_=changed)

    def select(self, query: sa.Select[Any], *asked: Mapping[str, Any]) -> Sequence[Any]:
        """Returns the rows of `query` for each set of parameters in `asked`; none if the file does not exist."""
        with self.reading() as select:
            return [row for values in asked or ({},) for row in select(query, values)]

    @contextlib.contextmanager
    def reading(self) -> Iterator[Select]:
        """Runs several queries on one connection, because opening a connection takes longer than a query.

        Within such a context of the same thread, another one has the same connection.
        """
        if (select := getattr(self._own, "select", None)) is not None:
            yield select
            return
        with self._turn, self.errors("read"):
            if self.missing():
                yield lambda query, values: ()
                return
            self._prepare()
            with self._engine.connect() as connection:
                self._own.select = lambda query, values: connection.execute(query, values).all()
                try:
                    yield self._own.select
                finally:
                    del self._own.select

    def turn(self) -> contextlib.AbstractContextManager[Any]:
        """Returns the lock to hold while another engine uses the connection of a database in memory."""
        return self._turn

    def empty(self) -> bool:
        """Whether the file does not exist yet."""
        with self.errors("read"):
            return self.missing()

    @contextlib.contextmanager
    def write(self) -> Iterator[sa.Connection]:
        """Runs a transaction that writes; creates a missing file."""
        with self._turn, self.errors("written"):
            self.require_writable()
            if self._path is not None:
                self._path.parent.mkdir(parents=True, exist_ok=True)
            self._prepare()
            try:
                with _writing(self._engine) as connection:
                    yield connection
            except sa.exc.OperationalError:  # another process may have replaced the file by one without tables
                self._ready = False
                raise

    def copy_to(self, path: Path) -> None:
        """Copies this database to one SQLite file, replacing an existing file."""
        fresh = path.with_name(f"{path.name}.new")
        with self.errors(f"copied to {path}"):
            self._prepare()
            fresh.unlink(missing_ok=True)
            with self._engine.connect().execution_options(begin="") as connection:
                # VACUUM INTO writes a single file in journal mode DELETE, which can be opened without write permission.
                connection.exec_driver_sql("VACUUM INTO ?", (str(fresh),))
            fresh.replace(path)

    def for_optuna(self) -> tuple[str, dict[str, Any]]:
        """Returns the URL and the engine options with which Optuna's storage opens the same database."""
        if self._dialect != "sqlite":
            return self._engine.url.render_as_string(hide_password=False), {}
        if self._path is not None:
            # A file that Optuna made would lack this program's tables, if the file was deleted in this moment.
            connect = functools.partial(_connect, self._path, readonly=False, create=False)
            return "sqlite://", {"poolclass": sa.NullPool, "creator": connect}
        with self._engine.connect() as connection:
            held = connection.connection.dbapi_connection
        return "sqlite://", {"poolclass": sa.StaticPool, "creator": lambda: held}

    def listen(self, engine: sa.Engine) -> None:
        """Makes another engine on this database take the write lock at the beginning of each transaction."""
        if self._dialect == "sqlite":
            sa.event.listen(engine, "connect", _set_synchronous)
            sa.event.listen(engine, "begin", lambda connection: connection.exec_driver_sql("BEGIN IMMEDIATE"))

    def close(self) -> None:
        self._engine.dispose()

    def missing(self) -> bool:
        """Whether the file does not exist yet; a read then returns nothing and does not create it."""
        return self._path is not None and not self.readonly and not self._path.exists()

    def _prepare(self) -> None:
        """Migrates the schema to the current version, once per object, under the write lock."""
        if self._ready and not self.missing():
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
        """Migrates the schema to the current version in one transaction, and returns the resulting version."""
        today = len(self._migrations)
        with _writing(self._engine) as connection:
            if self._dialect in _LOCK:
                connection.exec_driver_sql(_LOCK[self._dialect])
            version = self._version(connection)  # Another process, even a newer version, may have migrated first.
            if version >= today:
                return version
            for step in itertools.chain(*self._migrations[version:]):
                connection.exec_driver_sql(step.format(serial=SERIAL[self._dialect]))
            connection.execute(sa.update(VERSION).values(version=today))
            return today

    def _version(self, connection: sa.Connection) -> int:
        """Returns the schema's version, or 0 if there are no tables.

        Raises:
          StoreError: the tables belong to another program.
        """
        inspector = sa.inspect(connection)
        found = {*inspector.get_table_names(), *inspector.get_view_names()}
        if found >= OLDEST:
            return int(connection.execute(sa.select(VERSION.c.version)).scalar_one())
        if foreign := found if self._dialect == "sqlite" else found & OLDEST:
            raise StoreError(
                f"{self.location} is a database of another program, with the table{'s' if len(foreign) > 1 else ''} "
                f"{_some(sorted(foreign))}, and was not changed: set {CACHE_VARIABLE} to a file of its own, which need "
                "not exist"
            )
        return 0

    @contextlib.contextmanager
    def errors(self, verb: str) -> Iterator[None]:
        """Converts exceptions of databases and file systems to a `StoreError` with advice."""
        try:
            yield
        except (sa.exc.SQLAlchemyError, OSError, ImportError, ValueError, OverflowError, RuntimeError) as error:
            # A RuntimeError: there is no home directory. An OverflowError: a column of integers has an infinity.
            reason = getattr(error, "orig", None) or error
            message = redacted(" ".join(str(reason).split()), self._url)
            refused = StoreError(f"{self.location} cannot be {verb} ({message}): {_advice(reason, self._path)}")
            if not tells(error, self._url):
                raise refused from error
            try:
                raise refused
            except StoreError:  # drop the context, which contains a secret
                refused.__context__ = None
                raise


def _url(url: str | Path) -> sa.URL:
    if url == ":memory:":
        return sa.URL.create("sqlite")
    if isinstance(url, Path) or "://" not in url:
        if isinstance(url, str) and (scheme := _SCHEME.match(url)) is not None:
            raise StoreError(f"expected a path or a URL that begins with {scheme[1]}://, found {shown_url(url)}")
        return sa.URL.create("sqlite", database=str(Path(url).expanduser().absolute()))
    try:
        parsed = sa.make_url(url)
    except (sa.exc.ArgumentError, ValueError):  # the message may contain a password
        raise StoreError(
            "expected the URL of a database, postgresql://USER:PASSWORD@HOST:PORT/DATABASE with special characters of "
            f"user and password percent-encoded, or the path of a file, found {shown_url(url)}"
        ) from None
    if parsed.drivername in ("postgres", "postgresql"):
        return parsed.set(drivername="postgresql+psycopg")  # the driver of the extra [postgres]
    if parsed.get_backend_name() == "sqlite" and (parsed.host or parsed.query):
        raise StoreError(
            f"an SQLite URL must not have {'a host' if parsed.host else 'options'}, found {shown_url(url)}: give the "
            "path alone, or sqlite:/// and the path (four slashes if it is absolute)"
        )
    return parsed


# Typos of a URL in which a slash is missing.
_SCHEME = re.compile(r"\s*(sqlite|postgres(?:ql)?)(\+\w+)?:", re.IGNORECASE)


def _engine(url: sa.URL, path: Path | None, readonly: bool) -> sa.Engine:
    if url.get_backend_name() != "sqlite":
        return postgres_engine(url)
    if path is None:
        # isolation_level None: the listener below begins transactions, instead of Python's sqlite3.
        settings = {"timeout": BUSY_TIMEOUT_S, "isolation_level": None, "check_same_thread": False}
        engine = sa.create_engine(url, poolclass=sa.StaticPool, connect_args=settings)
    else:
        # No pool: a connection that is used across a fork corrupts files.
        connect = functools.partial(_connect, path, readonly=readonly)
        engine = sa.create_engine("sqlite://", poolclass=sa.NullPool, creator=connect)
    if not readonly:
        sa.event.listen(engine, "connect", _set_synchronous)
    sa.event.listen(engine, "begin", _begin)
    return engine


def _connect(path: Path, *, readonly: bool, create: bool = True) -> sqlite3.Connection:
    """Opens a connection to a file, read-only if `readonly` or without write permission."""
    if readonly or _frozen(path):
        # `immutable` needs no locks and no additional files, so it works in a read-only directory. It would miss the
        # content of a log, and changes by a running writer, which is recognized by its -wal and -shm files. `as_uri`
        # quotes the path: after an unquoted `#`, SQLite silently opens another file.
        used = all(path.with_name(f"{path.name}{ending}").exists() for ending in ("-wal", "-shm"))
        at_rest = _log_of(path) is None and not used
        mode = f"ro{'&immutable=1' if at_rest else ''}"
    else:
        mode = "rwc" if create else "rw"
    place = f"{path.absolute().as_uri()}?mode={mode}"
    return sqlite3.connect(place, timeout=BUSY_TIMEOUT_S, isolation_level=None, uri=True)


def _frozen(path: Path) -> bool:
    """Whether a file exists and is read-only. Its directory must be writable too, because logs are created there."""
    effective = os.access in os.supports_effective_ids
    return path.is_file() and not all(os.access(p, os.W_OK, effective_ids=effective) for p in (path, path.parent))


def _set_synchronous(connection: Any, _: Any) -> None:
    connection.execute("PRAGMA synchronous=NORMAL")


def _begin(connection: sa.Connection) -> None:
    # A writer takes the lock immediately. A transaction that reads first and then requests the lock fails without
    # waiting if another one wrote in between (SQLite, "Isolation In SQLite"): 329 of 400 writes by eight processes
    # were lost.
    if begin := connection.get_execution_options().get("begin", "BEGIN"):
        connection.exec_driver_sql(begin)


@contextlib.contextmanager
def _writing(engine: sa.Engine) -> Iterator[sa.Connection]:
    with engine.connect().execution_options(begin="BEGIN IMMEDIATE") as connection, connection.begin():
        yield connection


# Local file systems, on which the shared memory of a write-ahead log works (SQLite, "Write-Ahead Logging", 9).
_LOCAL = frozenset({"ext2", "ext3", "ext4", "xfs", "btrfs", "zfs", "f2fs", "bcachefs", "tmpfs", "ramfs", "overlay"})


def _set_journal(engine: sa.Engine, path: Path) -> None:
    """Sets journal mode WAL on a local disk, so that readers and a writer do not block each other; otherwise DELETE."""
    wanted = "wal" if file_system(path) in _LOCAL else "delete"
    with engine.connect().execution_options(begin="") as connection:
        if connection.exec_driver_sql("PRAGMA journal_mode").scalar_one() != wanted:
            # Fails while another process uses the file or if it is read-only; the next process that opens it tries
            # again.
            with contextlib.suppress(sa.exc.OperationalError):
                connection.exec_driver_sql(f"PRAGMA journal_mode={wanted}")


def file_system(path: Path, mounts: Path = Path("/proc/mounts")) -> str:
    """Returns the type of the file system of `path` in Linux's notation; "" if unknown."""
    try:
        lines = mounts.read_text(errors="surrogateescape").splitlines()
    except OSError:
        return ""
    place, found, kind = path.absolute().resolve(), Path(), ""
    for line in lines:
        # Blanks are escaped as \040 etc. (getmntent(3)); of two mounts on one mount point, the later one is visible.
        point = Path(re.sub(r"\\([0-7]{3})", lambda code: chr(int(code[1], 8)), line.split(" ")[1]))
        if place.is_relative_to(point) and len(point.parts) >= len(found.parts):
            found, kind = point, line.split(" ")[2]
    return kind


def _log_of(path: Path) -> Path | None:
    """Returns the write-ahead log or rollback journal without which a file is incomplete, or None."""
    logs = (path.with_name(f"{path.name}{ending}") for ending in ("-wal", "-journal"))
    return next((log for log in logs if log.exists() and log.stat().st_size > 0), None)


def _some(names: Sequence[str], most: int = 5) -> str:
    left = len(names) - most
    return ", ".join(names[:most]) + (f" and {left} more" if left > 0 else "")


# By prefix of the name of SQLite's result code.
_ADVICE = {
    "SQLITE_BUSY": f"another process has held its lock for {BUSY_TIMEOUT_S} s; end that process, or try again",
    "SQLITE_CANTOPEN": f"set {CACHE_VARIABLE} to a file in a writable directory",
    "SQLITE_CORRUPT": "the file is damaged; move it away, so that a new one is created",
    "SQLITE_IOERR": f"check that it is a file and its disk is not full, or set {CACHE_VARIABLE} to another file",
    "SQLITE_FULL": f"free some space on its disk, or set {CACHE_VARIABLE} to a file on another one",
    "SQLITE_NOTADB": "it is not an SQLite file, or is damaged; move it away, so that a new one is created",
    "SQLITE_READONLY": f"set {CACHE_VARIABLE} to a writable file",
}


def _advice(reason: object, path: Path | None) -> str:
    if isinstance(reason, ImportError):
        return "pip install 'tile-scheduler[postgres]'"
    if path is not None and isinstance(reason, sqlite3.Error) and _frozen(path) and (log := _log_of(path)):
        return (
            f"the content of {log.name} can be merged only if both files are writable: open the cache once with write "
            f"permission, or set {CACHE_VARIABLE} to a copy of both"
        )
    code = getattr(reason, "sqlite_errorname", "")
    if path is None and not isinstance(reason, sqlite3.Error | OSError):
        return f"check that its server runs and is reachable, or set {CACHE_VARIABLE} to a file"
    otherwise = f"check that it exists and is writable, or set {CACHE_VARIABLE} to another file"
    return next((advice for name, advice in _ADVICE.items() if code.startswith(name)), otherwise)
