"""One process at a time tunes a problem: who comes second waits for the record of the first."""

from __future__ import annotations

import contextlib
import dataclasses
import logging
import os
import socket
import threading
import time
import uuid
from collections.abc import Iterator
from typing import Protocol

from scheduler.core.errors import StoreError
from scheduler.core.records import Key, Record

# Whether a holder lives is told by its renewals, as whoever waits sees them pass on a clock of its own: clocks of two
# hosts may differ by a day.
RENEW_S = 1.0
SILENT_S = 5.0
POLL_S = 0.25
# What versions before this way of telling go by.
LEASE_S = 60.0

_log = logging.getLogger("scheduler")


@dataclasses.dataclass(frozen=True)
class Lease:
    """Who tunes a problem, and the Unix time, in seconds, until which that counted when it was last renewed."""

    owner: str
    expires_s: float

    def __str__(self) -> str:
        host, pid, _ = _parts(self)
        return f"process {pid} on {host}" if pid else repr(self.owner)


class Others:
    """What was seen of the leases of others, by one attempt to take them after the other."""

    def __init__(self) -> None:
        self._seen: dict[Key, tuple[Lease, float]] = {}

    def silent(self, key: Key, held: Lease) -> bool:
        """Whether who holds it has died, as `held`, what there is now, and what was seen before tell."""
        before, since = self._seen.get(key, (None, 0.0))
        if held != before:
            since = time.monotonic()
            self._seen[key] = held, since
        return _gone(held) or time.monotonic() - since > SILENT_S


class Leases(Protocol):
    """What keeps leases and the records that they are about."""

    def lease(self, key: Key, owner: str, seconds: float, *, silent: Lease | None = None) -> Lease: ...
    def release(self, key: Key, owner: str) -> None: ...
    def get(self, key: Key) -> Record | None: ...


@contextlib.contextmanager
def leased(store: Leases, key: Key) -> Iterator[Record | None]:
    """Within, nobody else who asks `store` tunes `key`.

    Yields:
      the record that another process made while this one waited for its lease; None where it did not wait, or the
      other one made none.

    Raises:
      StoreError: the store cannot be written.
    """
    owner, others, waited = _owner(), Others(), False
    while (held := _take(store, key, owner, others)) is not None:
        if not waited:
            _log.warning("%s is being tuned by %s; waiting for its record", key, held)
        waited = True
        time.sleep(POLL_S)
    with _renewed(store, key, owner):
        yield store.get(key) if waited else None


@contextlib.contextmanager
def leased_if_free(store: Leases, key: Key, others: Others) -> Iterator[Lease | None]:
    """As `leased`, for whoever has something else to do meanwhile.

    Args:
      others: kept by the caller from one attempt to the next.

    Yields:
      the lease of another that tunes `key` now; None where it is held here.

    Raises:
      StoreError: the store cannot be written.
    """
    owner = _owner()
    if (held := _take(store, key, owner, others)) is not None:
        yield held
        return
    with _renewed(store, key, owner):
        yield None


def _take(store: Leases, key: Key, owner: str, others: Others) -> Lease | None:
    """Takes the lease, from the dead as well; or that of another who lives, as far as can be told yet."""
    held = store.lease(key, owner, LEASE_S)
    if held.owner != owner and others.silent(key, held):
        held = store.lease(key, owner, LEASE_S, silent=held)
    return None if held.owner == owner else held


@contextlib.contextmanager
def _renewed(store: Leases, key: Key, owner: str) -> Iterator[None]:
    """Within, a lease that was taken is renewed; then it is given back."""
    ended = threading.Event()
    renewing = threading.Thread(target=_renew, args=(store, key, owner, ended), name="scheduler-lease", daemon=True)
    renewing.start()
    try:
        yield
    finally:
        ended.set()
        renewing.join()
        with contextlib.suppress(StoreError):  # it is silent from now on
            store.release(key, owner)


def _renew(store: Leases, key: Key, owner: str, ended: threading.Event) -> None:
    while not ended.wait(RENEW_S):
        with contextlib.suppress(StoreError):  # the next time may do
            store.lease(key, owner, LEASE_S)


def _parts(held: Lease) -> tuple[str, int, str]:
    """Host, process and what tells processes of containers apart; a store may hold any text, which has none."""
    host, _, rest = str(held.owner).partition("/")
    pid, _, whose = rest.partition("/")
    return (host, int(pid), whose.partition(".")[0]) if pid.isdecimal() and len(pid) < 10 else ("", 0, "")


def _owner() -> str:
    return f"{socket.gethostname()}/{os.getpid()}/{_processes()}.{uuid.uuid4().hex}"


def _processes() -> str:
    """Which processes this one can see: containers of one host name may each have a process of the same number."""
    try:
        return os.readlink("/proc/self/ns/pid").strip("pid:[]")
    except OSError:
        return "all"


def _gone(held: Lease) -> bool:
    """Whether the holder was a process that this one would see, and does not."""
    host, pid, whose = _parts(held)
    if host != socket.gethostname() or whose != _processes() or not pid:
        return False
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return True
    except PermissionError:
        pass
    return False
