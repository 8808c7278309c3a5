"""The cache of calls: the user's store and the shipped store, opened lazily; failures only produce warnings."""

from __future__ import annotations

import contextlib
import itertools
import math
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Generic, TypeVar

from scheduler.core.errors import MalformedRecord, StoreError
from scheduler.core.neighbours import Near
from scheduler.core.records import Environment, Key, Miss, Record, Trial, preferred
from scheduler.core.text import warn_once
from scheduler.store.lease import Lease

if TYPE_CHECKING:
    from scheduler.store.store import Store
    from scheduler.store.studies import Described


# ------------------------------------------------------------------------------
# Timeouts for stores: calls wait a few seconds for a store in total per process, whatever its state.
#
# Only time that the store takes counts. Time in which this process computes, or waits for a CPU on a busy host, does
# not.

T = TypeVar("T")

# Together with the rest of a call, 5 s.
TIMEOUT_S = 4.0
# Faster responses are normal operation and do not count, however many there are.
PROMPT_S = 0.5


class StoreTimeout(StoreError):
    """A store that made calls wait too long; a search may still read from it."""


_lock = threading.Lock()
_waited_s: dict[str, float] = {}


def has_given_up(location: str) -> bool:
    """Whether calls of this process no longer use the store because of its delays."""
    return _waited_s.get(location, 0.0) >= TIMEOUT_S


def call_with_timeout(location: str, query: Callable[[], T]) -> T:
    """Returns or raises the result of `query`, with a timeout for the store.

    `query` runs in another thread, because drivers block uninterruptibly, for example in name resolution or in a
    file system. After a timeout, the thread is abandoned; it ends with the store's own timeouts.

    Raises:
      StoreTimeout: this request, or all requests in total, took too long.
    """
    left_s = TIMEOUT_S - _waited_s.get(location, 0.0)
    if left_s <= 0:
        raise _timeout_error(location)
    request = _StoreRequest(query)
    in_time, waited_s = request.ended_within(left_s)
    if waited_s > PROMPT_S or not in_time:
        with _lock:
            _waited_s[location] = _waited_s.get(location, 0.0) + (waited_s if in_time else math.inf)
    if not in_time:
        raise _timeout_error(location)
    return request.answer()


class _StoreRequest(Generic[T]):
    """A request to a store, and the thread that runs it."""

    def __init__(self, query: Callable[[], T]) -> None:
        self._query = query
        self._answer: tuple[T | None, BaseException | None] = (None, None)
        self._ended = threading.Event()
        self._worked_s = 0.0
        self._began_s = time.monotonic()
        self._thread = threading.Thread(target=self._run, name="scheduler-store", daemon=True)
        self._thread.start()

    def ended_within(self, most_s: float) -> tuple[bool, float]:
        """Returns whether the request ended within `most_s` of waiting, and the waiting time in seconds."""
        waited_s = 0.0
        while not (ended := self._ended.wait(most_s - waited_s)):
            if (waited_s := self._waited_s()) >= most_s:
                break
        return ended, self._waited_s()

    def answer(self) -> T:
        found, error = self._answer
        if error is not None:
            raise error
        return found  # type: ignore[return-value]

    def _run(self) -> None:
        try:
            self._answer = self._query(), None
        except BaseException as error:
            self._answer = None, error
        self._worked_s = max(time.thread_time(), _worked_s(threading.get_native_id()))
        self._ended.set()

    def _waited_s(self) -> float:
        worked_s = self._worked_s if self._ended.is_set() else _worked_s(self._thread.native_id)
        return max(0.0, time.monotonic() - self._began_s - worked_s)


def _worked_s(thread: int | None) -> float:
    """Returns the time that a thread computed or waited for a free core, in seconds; 0 if the system does not report
    it.

    Source: Linux, Documentation/scheduler/sched-stats: two times in nanoseconds, and the number of runs.
    """
    try:
        computed, ready, _ = Path(f"/proc/self/task/{thread}/schedstat").read_text().split()
        return (int(computed) + int(ready)) * 1e-9
    except (OSError, ValueError):
        return 0.0


def reset_timeouts(location: str | None = None) -> None:
    """Resets the waiting time of a store, or of all stores."""
    with _lock, contextlib.suppress(KeyError):
        _waited_s.clear() if location is None else _waited_s.pop(location)


def _timeout_error(location: str) -> StoreTimeout:
    return StoreTimeout(
        f"{location} did not respond within {TIMEOUT_S:g} s; calls of this process no longer use it: check which "
        "process locks it, or whether its server responds"
    )


class Cache:
    """The user's store combined with the shipped one. It supports searches as a `Store` does (`trials.TrialStore`).

    Records that were put here are also kept in memory, so that a read-only store does not cause a second search.
    """

    def __init__(self) -> None:
        self._guard = threading.Lock()
        self._user: Store | None = None
        self._shipped: Store | None = None
        self._opened = False
        self._unleased: set[Key] = set()  # problems of which the lease could not be written
        self._put: dict[Key, Record] = {}

    def find(self, key: Key, *, shared_only: bool) -> Iterator[tuple[str, Record]]:
        """Yields records of `key` with their source, the user's before the shipped; `shared_only`: only the shipped."""
        self._open()
        if not shared_only:
            if (record := self._put.get(key)) is not None:
                yield "this process", record
            elif (record := self._try_with_timeout(lambda store: store.get(key))) is not None:
                yield "the user's cache", record
        if (record := self._try(lambda store: store.get(key), self._shipped)) is not None:
            yield "the shipped cache.db", record

    def ask(self, query: Callable[[Store], T], *, shared_only: bool = False) -> list[T]:
        """Returns the result of each store, the user's before the shipped; an unreadable store is skipped."""
        self._open()
        own = None if shared_only else self._try_with_timeout(query)
        return [answer for answer in (own, self._try(query, self._shipped)) if answer is not None]

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

    # A search repeats failed writes, so the next three raise a StoreError. If the lease failed, the user knows already
    # that the store cannot be written: trials are left out, each of which could wait for a lock.
    def put(self, record: Record) -> None:
        self._open()
        self.remember(record)
        self._end(record.key, lambda store: store.put(record))

    def finish(self, key: Key) -> None:
        self._end(key, lambda store: store.finish(key))

    def save_trials(
        self, key: Key, trials: Sequence[Trial], environment: Environment, parameters: Described | None = None
    ) -> None:
        if self._user is not None and key not in self._unleased:
            self._user.save_trials(key, trials, environment, parameters)

    def _end(self, key: Key, write: Callable[[Store], None]) -> None:
        if key in self._unleased:
            self._write(write)
        elif self._user is not None:
            write(self._user)

    def get(self, key: Key) -> Record | None:
        self._open()
        return self._try(lambda store: store.get(key), self._user) or self._put.get(key)

    def lease(self, key: Key, owner: str, seconds: float, *, expired: Lease | None = None) -> Lease:
        self._open()
        held = self._write(lambda store: store.lease(key, owner, seconds, expired=expired))
        (self._unleased.add if held is None else self._unleased.discard)(key)
        return held or Lease(owner, 0.0)

    def release(self, key: Key, owner: str) -> None:
        self._write(lambda store: store.release(key, owner))

    def prepare_trials(self) -> None:
        if self._user is not None:
            self._user.prepare_trials()

    def trials(self, key: Key, environment: Environment, *, unfinished: bool) -> list[Trial]:
        self._open()
        return self._try(lambda store: store.trials(key, environment, unfinished=unfinished), self._user) or []

    def decision(self, key: str) -> str | None:
        """Returns a stored decision of `optimize`."""
        self._open()
        return self._try_with_timeout(lambda store: store.decision(key))

    def put_decision(self, key: str, decision: str) -> None:
        """Stores a decision of `optimize`; a failure is a warning."""
        self._open()
        self._write(lambda store: store.put_decision(key, decision))

    def note(self, miss: Miss) -> None:
        """Queues a miss for the user's store; if the store rejects it, it is lost silently."""
        self._open()
        if self._user is not None and not has_given_up(self._user.location):
            from scheduler.store import misses  # imports SQLAlchemy, which calls need only once a store is open

            misses.queue_misses(self._user, miss)

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
                    warn_once(f"{error} (calls continue without it)")
            self._opened = True

    def _write(self, use: Callable[[Store], T]) -> T | None:
        """Writes to the user's store; a failure is a warning, once per message."""
        if self._user is None:
            return None
        try:
            return use(self._user)
        except StoreError as error:
            warn_once(f"{error} (calls continue without it)")
            return None

    def _try_with_timeout(self, use: Callable[[Store], T]) -> T | None:
        """Returns the result of the user's store for a call, with a timeout."""
        if self._user is None or has_given_up(self._user.location):
            return None
        return self._try(lambda store: call_with_timeout(store.location, lambda: use(store)), self._user)

    def _try(self, use: Callable[[Store], T], store: Store | None) -> T | None:
        if store is None:
            return None
        try:
            return use(store)
        except StoreError as error:
            # One warning and no retry at each call. A single malformed record, however, leaves the others readable.
            if store is self._user and not isinstance(error, MalformedRecord | StoreTimeout):
                self._user = None
            warn_once(f"{error} (calls continue without it)")
            return None
