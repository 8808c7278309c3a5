"""The SQLite file that a URL of Optuna's names: which one that is, and whether studies may be written into it."""

from __future__ import annotations

import contextlib
import sqlite3
from pathlib import Path

from scheduler.core.errors import StoreError
from scheduler.core.redaction import shown_url


def of_url(url: str) -> Path | None:
    """The SQLite file that a URL names, None for a server's.

    Raises:
      StoreError: it is no URL, or of a database in memory.
    """
    if "://" not in url:
        shown = shown_url(url)
        raise StoreError(f"{shown!r} is no URL of an Optuna storage; a file is named so: sqlite:///{shown.lstrip('/')}")
    kind, _, place = url.partition("://")
    if kind.partition("+")[0] != "sqlite":
        return None
    path = Path(place.removeprefix("/").partition("?")[0])
    if str(path) in (".", ":memory:"):
        raise StoreError(
            f"{shown_url(url)} is in memory, and gone when this command ends; name a file: sqlite:///study.db"
        )
    return path


def refuse_foreign(path: Path) -> None:
    """A file that another program made is left alone.

    Raises:
      StoreError: it is no database of Optuna's, or its directory is missing.
    """
    if not path.parent.is_dir():
        raise StoreError(f"{path} cannot be made: there is no directory {path.parent}")
    if not path.exists():
        return
    try:
        with contextlib.closing(sqlite3.connect(f"{path.absolute().as_uri()}?mode=ro", uri=True)) as connection:
            tables = {name for (name,) in connection.execute("SELECT name FROM sqlite_master WHERE type = 'table'")}
    except sqlite3.Error as error:
        raise StoreError(f"{path} cannot be read as a database ({error}); name another file") from error
    if tables and "studies" not in tables:
        raise StoreError(f"{path} is no storage of Optuna but a database of another program; name another file")


def without_waiting(path: Path) -> sqlite3.Connection:
    """A connection that leaves it to the operating system when it writes."""
    connection = sqlite3.connect(path, timeout=30, check_same_thread=False)
    connection.execute("PRAGMA synchronous=OFF")
    return connection
