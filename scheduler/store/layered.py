"""The cache of calls: the user's store and the shipped store, opened lazily; failures only produce warnings."""

from __future__ import annotations

import itertools
import threading
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, TypeVar

from scheduler.core import safe_text
from scheduler.core.errors import MalformedRecord, StoreError
from scheduler.core.records import Environment, Key, Miss, Record, Trial, preferred
from scheduler.core.similar import Near
from scheduler.store import noting, patience
from scheduler.store.lease import Lease

if TYPE_CHECKING:
    from scheduler.store.store import Store
    from scheduler.store.studies import Described

T = TypeVar("T")


class Cache:
    """The user's store combined with the shipped one. It supports searches as a `Store` does (`trials.Keeper`).

    Records that were put here are also kept in memory, so that a read-only store does not cause a second search.
    """

    def __init__(self) -> None:
        self._guard = threading.Lock()
        self._user: Store | None = None
        self._shipped: Store | None = None
        self._opened = False
        self._unwritable = False
        self._put: dict[Key, Record] = {}

    def find(self, key: Key, *, shared_only: bool) -> Iterator[tuple[str, Record]]:
        """Yields records of `key` with their source, the user's before the shipped; `shared_only`: only the shipped."""
        self._open()
        if not shared_only:
            if (record := self._put.get(key)) is not None:
                yield "this process", record
            elif (record := self._patiently(lambda store: store.get(key))) is not None:
                yield "the user's cache", record
        if (record := self._try(lambda store: store.get(key), self._shipped)) is not None:
            yield "the shipped cache.db", record

    def ask(self, question: Callable[[Store], T], *, shared_only: bool = False) -> list[T]:
        """Returns the result of each store, the user's before the shipped; an unreadable store is skipped."""
        self._open()
        own = None if shared_only else self._patiently(question)
        return [answer for answer in (own, self._try(question, self._shipped)) if answer is not None]

    def remembered(self, *, operation: str, hardware: str) -> list[Record]:
        """Returns the records of an operation on a chip that this process put here, stored or not."""
        return [r for key, r in self._put.items() if (key.operation, key.hardware) == (operation, hardware)]

    def nearest(self, near: Near) -> list[Record]:
        """Returns the nearest records of both stores and of this process, one per key."""
        found = self.remembered(operation=near.operation, hardware=near.hardware)
        found += itertools.chain.from_iterable(self.ask(lambda store: store.nearest(near)))
        return list(preferred(found).values())

    def remember(self, record: Record) -> None:
        """Makes this process use `record`, even if it could not be stored."""
        self._put[record.key] = record

    def put(self, record: Record) -> None:
        self._open()
        self.remember(record)
        self._write(lambda store: store.put(record))

    def get(self, key: Key) -> Record | None:
        self._open()
        return self._try(lambda store: store.get(key), self._user) or self._put.get(key)

    def lease(self, key: Key, owner: str, seconds: float, *, silent: Lease | None = None) -> Lease:
        self._open()
        return self._write(lambda store: store.lease(key, owner, seconds, silent=silent)) or Lease(owner, 0.0)

    def release(self, key: Key, owner: str) -> None:
        self._write(lambda store: store.release(key, owner))

    def prepare_trials(self) -> None:
        self._open()
        if self._user is not None and not self._unwritable:
            self._user.prepare_trials()

    def add_trial(self, key: Key, trial: Trial, environment: Environment, described: Described | None = None) -> None:
        self._open()
        self._write(lambda store: store.add_trial(key, trial, environment, described))

    def replace_trial(self, key: Key, trial: Trial) -> None:
        self._write(lambda store: store.replace_trial(key, trial))

    def trials(self, key: Key, environment: Environment, *, unfinished: bool) -> list[Trial]:
        self._open()
        return self._try(lambda store: store.trials(key, environment, unfinished=unfinished), self._user) or []

    def finish(self, key: Key) -> None:
        self._open()
        self._write(lambda store: store.finish(key))

    def note(self, miss: Miss) -> None:
        """Queues a miss for the user's store; if the store rejects it, it is lost silently."""
        self._open()
        if self._user is not None and not self._unwritable and not patience.given_up(self._user.location):
            noting.note(self._user, miss)

    def close(self) -> None:
        with self._guard:
            for store in (self._user, self._shipped):
                self._try(lambda store: store.close(), store)

    def _open(self) -> None:
        with self._guard:
            if self._opened:
                return
            from scheduler.store import store  # importing SQLAlchemy takes 0.4 s

            for attribute, open_store in (
                ("_user", lambda: store.Store(store.default_url())),
                ("_shipped", store.shipped),
            ):
                try:
                    setattr(self, attribute, open_store())
                except StoreError as error:
                    warn_once(f"{error} (calls go on without it)")
            self._opened = True

    def _write(self, use: Callable[[Store], T]) -> T | None:
        """Writes to the user's store; after a failure, stops writing but continues reading."""
        if self._user is None or self._unwritable:
            return None
        try:
            return use(self._user)
        except StoreError as error:
            self._unwritable = True
            warn_once(f"{error} (calls go on without it)")
            return None

    def _patiently(self, use: Callable[[Store], T]) -> T | None:
        """Returns the result of the user's store for a call, with a timeout."""
        if self._user is None or patience.given_up(self._user.location):
            return None
        return self._try(lambda store: patience.patiently(store.location, lambda: use(store)), self._user)

    def _try(self, use: Callable[[Store], T], store: Store | None) -> T | None:
        if store is None:
            return None
        try:
            return use(store)
        except StoreError as error:
            # One warning and no retry at each call. A single malformed record, however, leaves the others readable.
            if store is self._user and not isinstance(error, MalformedRecord | patience.TooLong):
                self._user = None
            warn_once(f"{error} (calls go on without it)")
            return None


_warned: set[str] = set()


def warn_once(message: str) -> None:
    """Issues a warning once per process and message."""
    if message not in _warned:
        _warned.add(message)
        safe_text.warn(message)
