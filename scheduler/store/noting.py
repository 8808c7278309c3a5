"""Misses on their way into a store: a thread writes them in batches, so no call waits for a store or fails by it."""

from __future__ import annotations

import atexit
import dataclasses
import logging
import os
import queue
import threading
import time
from typing import TYPE_CHECKING

from scheduler.core.errors import StoreError
from scheduler.core.records import Key, Miss

if TYPE_CHECKING:
    from scheduler.store.store import Store

# What comes meanwhile is written with it.
BATCH_S = 0.5
# A store that refused is asked again after so long, and after so many refusals never again.
RETRY_S, ATTEMPTS = 5.0, 3
# More that wait for a store are not kept.
MOST_WAITING = 100_000
# A process that ends waits no longer for what is not yet written, and one that forks for what is being written.
EXIT_S, FORK_S = 1.0, 0.1

_log = logging.getLogger("scheduler")


class _Writer:
    """One thread, and the misses that wait for it by their stores and keys."""

    def __init__(self) -> None:
        self._came: queue.SimpleQueue[tuple[Store, Miss] | threading.Event] = queue.SimpleQueue()
        self._waiting: dict[Store, dict[Key, Miss]] = {}
        self._asked: list[threading.Event] = []
        self._refusals: dict[str, int] = {}
        self._starting = threading.Lock()
        self.writing = threading.Lock()
        self.started = False

    def add(self, store: Store, miss: Miss) -> None:
        if self._came.qsize() < MOST_WAITING and self._refusals.get(store.location, 0) < ATTEMPTS:
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
        """Waits for something to write, then for what comes within a batch, unless somebody waits for the end."""
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
            _log.debug("misses are not noted, try %d of %d: %s", refusals, ATTEMPTS, error)
            if refusals < ATTEMPTS:
                return
        except Exception as error:  # nobody asked for this thread, so nobody is to read its traceback
            _log.debug("misses are lost: %r", error)
        else:
            self._refusals.pop(store.location, None)
        del self._waiting[store]


_writer = _Writer()


def note(store: Store, miss: Miss) -> None:
    """Adds `miss` to those of `store`, soon. Returns at once, whatever becomes of it."""
    _writer.add(store, miss)


def flush(seconds: float = EXIT_S) -> bool:
    """Waits until what was noted is written, or given up; False where that takes longer than so many seconds."""
    return _writer.flush(seconds)


_forking = threading.local()


def _pause() -> None:
    """A database's library that is forked while it works keeps its locks in the child, where nobody gives them back."""
    writer = _writer
    _forking.paused = writer if writer.writing.acquire(timeout=FORK_S) else None


def _resume() -> None:
    if _forking.paused is not None:
        _forking.paused.writing.release()


def _renew() -> None:
    """In a process that was forked no thread writes, and what waits is the parent's to write."""
    global _writer
    _writer = _Writer()


atexit.register(flush)
os.register_at_fork(before=_pause, after_in_parent=_resume, after_in_child=_renew)
