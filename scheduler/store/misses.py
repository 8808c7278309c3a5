"""Storage of cache misses, counted per problem and limited in number."""

from __future__ import annotations

import atexit
import dataclasses
import os
import queue
import threading
import time
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

import sqlalchemy as sa

from scheduler.core.errors import StoreError
from scheduler.core.records import Key, Miss
from scheduler.core.text import log, log_once
from scheduler.store import queries
from scheduler.store.database import Database
from scheduler.store.schema import KEY, MISSES

if TYPE_CHECKING:
    from scheduler.store.store import Store


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
        for row in queries.rows_by_key(self._database.select(sa.select(*MISSES.c)), self._database.location):
            try:
                found.append(_miss(*row))
            except ValueError as error:
                log_once(f"{self._database.location}: the miss of {Key(*row[:3])} is skipped, {error}")
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
        raise ValueError(f"expected a number and four texts, found {(lowered, *texts)!r:.200}")
    return Miss(Key(operation, hardware, problem), lowered, *texts)


# ------------------------------------------------------------------------------
# Background writer of cache misses: a thread writes them in batches, so that no call waits for a store or fails.

# What comes meanwhile is written with it.
# Time to collect a batch.
BATCH_S = 0.5
# Delay of a retry after a failed write, and the number of attempts per store.
RETRY_S, WRITE_ATTEMPTS = 5.0, 3
# Misses beyond this queue length are dropped.
MOST_WAITING = 100_000
# Maximum time that the exit of a process waits for pending writes, and that a fork waits for the current write.
EXIT_WAIT_S, FORK_S = 1.0, 0.1


class _Writer:
    """A thread, and the pending misses by store and key."""

    def __init__(self) -> None:
        self._came: queue.SimpleQueue[tuple[Store, Miss] | threading.Event] = queue.SimpleQueue()
        self._waiting: dict[Store, dict[Key, Miss]] = {}
        self._asked: list[threading.Event] = []
        self._refusals: dict[str, int] = {}
        self._starting = threading.Lock()
        self.writing = threading.Lock()
        self.started = False

    def add(self, store: Store, miss: Miss) -> None:
        if self._came.qsize() < MOST_WAITING and self._refusals.get(store.location, 0) < WRITE_ATTEMPTS:
            self._came.put((store, miss))
            if not self.started:
                self._start()

    def flush(self, seconds: float) -> bool:
        done = threading.Event()
        if self.started:
            self._came.put(done)
        return not self.started or done.wait(seconds)

    def _start(self) -> None:
        with self._starting:
            if not self.started:
                threading.Thread(target=self._work, name="scheduler-misses", daemon=True).start()
                self.started = True

    def _work(self) -> None:
        while True:
            self._gather()
            for store in list(self._waiting):
                with self.writing:
                    self._write(store)
            for done in self._asked:
                done.set()
            self._asked.clear()

    def _gather(self) -> None:
        """Waits for a miss, then collects a batch until the batch time is over or `flush` is called."""
        until = time.monotonic() + RETRY_S if self._waiting else None
        while not self._asked and (until is None or time.monotonic() < until):
            try:
                self._take(self._came.get(timeout=None if until is None else max(0.0, until - time.monotonic())))
            except queue.Empty:
                break
            until = until or time.monotonic() + BATCH_S
        while not self._came.empty():
            self._take(self._came.get())

    def _take(self, came: tuple[Store, Miss] | threading.Event) -> None:
        if isinstance(came, threading.Event):
            self._asked.append(came)
            return
        store, miss = came
        waiting = self._waiting.setdefault(store, {})
        if (before := waiting.get(miss.key)) is not None:
            miss = dataclasses.replace(miss, lowered=before.lowered + miss.lowered, first=before.first)
        waiting[miss.key] = miss

    def _write(self, store: Store) -> None:
        try:
            store.misses.note(self._waiting[store].values())
        except StoreError as error:
            refusals = self._refusals[store.location] = self._refusals.get(store.location, 0) + 1
            log.debug("misses are not noted, try %d of %d: %s", refusals, WRITE_ATTEMPTS, error)
            if refusals < WRITE_ATTEMPTS:
                return
        except Exception as error:  # a background thread must not print tracebacks
            log.debug("misses are lost: %r", error)
        else:
            self._refusals.pop(store.location, None)
        del self._waiting[store]


_writer = _Writer()


def queue_misses(store: Store, miss: Miss) -> None:
    """Queues `miss` for `store` and returns immediately; failures are ignored."""
    _writer.add(store, miss)


def flush_misses(seconds: float = EXIT_WAIT_S) -> bool:
    """Waits until pending misses are written or dropped; returns False after a timeout of `seconds`."""
    return _writer.flush(seconds)


_forking = threading.local()


def _pause() -> None:
    """Waits for the current write before a fork, because a child would inherit the locks of the database library."""
    writer = _writer
    _forking.paused = writer if writer.writing.acquire(timeout=FORK_S) else None


def _resume() -> None:
    if _forking.paused is not None:
        _forking.paused.writing.release()


def _renew() -> None:
    """Resets the writer in a forked child, which has no writer thread; the parent writes the pending misses."""
    global _writer
    _writer = _Writer()


atexit.register(flush_misses)
os.register_at_fork(before=_pause, after_in_parent=_resume, after_in_child=_renew)
