"""Leases: one process at a time tunes a problem; the others wait for its record."""

from __future__ import annotations

import contextlib
import dataclasses
import os
import socket
import threading
import time
import uuid
from collections.abc import Iterator
from typing import Protocol

from scheduler.core.errors import StoreError
from scheduler.core.records import Key, Record
from scheduler.core.text import log

# A waiting process detects a dead holder by missing renewals on its own clock, because the clocks of two hosts may
# differ by a day.
RENEW_S = 1.0
SILENT_S = 5.0
POLL_S = 0.25
# Expiry time for older versions, which compare clocks.
LEASE_S = 60.0


@dataclasses.dataclass(frozen=True)
class Lease:
    """The owner of the right to tune a problem, and the Unix time of expiry in seconds as of the last renewal."""

    owner: str
    expires_s: float

    def __str__(self) -> str:
        host, pid, _ = _parts(self)
        return f"process {pid} on {host}" if pid else repr(self.owner)


class LeaseWatcher:
    """Leases of other owners as observed over successive attempts to take them."""

    def __init__(self) -> None:
        self._seen: dict[Key, tuple[Lease, float]] = {}

    def expired(self, key: Key, held: Lease) -> bool:
        """Whether the holder of `held` is dead, according to the operating system or to missing renewals."""
        before, since = self._seen.get(key, (None, 0.0))
        if held != before:
            since = time.monotonic()
            self._seen[key] = held, since
        return _gone(held) or time.monotonic() - since > SILENT_S


class Leases(Protocol):
    """Storage of leases and of the corresponding records."""

    def lease(self, key: Key, owner: str, seconds: float, *, expired: Lease | None = None) -> Lease: ...
    def release(self, key: Key, owner: str) -> None: ...
    def get(self, key: Key) -> Record | None: ...


@contextlib.contextmanager
def leased(store: Leases, key: Key) -> Iterator[Record | None]:
    """Holds the lease of `key`, so that no other process with the same store tunes `key`.

    Yields:
      the record that another process stored while this one waited for the lease; None if this process did not wait or
      the other one stored no record.

    Raises:
      StoreError: the store cannot be written.
    """
    owner, watcher, waited = _owner(), LeaseWatcher(), False
    while (held := _take(store, key, owner, watcher)) is not None:
        if not waited:
            log.warning("%s is being tuned by %s; waiting for its record", key, held)
        waited = True
        time.sleep(POLL_S)
    with _renewed(store, key, owner):
        yield store.get(key) if waited else None


@contextlib.contextmanager
def leased_if_free(store: Leases, key: Key, watcher: LeaseWatcher) -> Iterator[Lease | None]:
    """Holds the lease of `key` if it is free, as `leased` does, but does not wait.

    Args:
      watcher: observations, kept by the caller between attempts.

    Yields:
      the lease of another process that is tuning `key`; None if the lease is held here.

    Raises:
      StoreError: the store cannot be written.
    """
    owner = _owner()
    if (held := _take(store, key, owner, watcher)) is not None:
        yield held
        return
    with _renewed(store, key, owner):
        yield None


def _take(store: Leases, key: Key, owner: str, watcher: LeaseWatcher) -> Lease | None:
    """Takes the lease, also from a dead owner, and returns None; otherwise returns the other owner's lease."""
    held = store.lease(key, owner, LEASE_S)
    if held.owner != owner and watcher.expired(key, held):
        held = store.lease(key, owner, LEASE_S, expired=held)
    return None if held.owner == owner else held


@contextlib.contextmanager
def _renewed(store: Leases, key: Key, owner: str) -> Iterator[None]:
    """Renews a lease in the background, and releases it at the end."""
    ended = threading.Event()
    renewing = threading.Thread(target=_renew, args=(store, key, owner, ended), name="scheduler-lease", daemon=True)
    renewing.start()
    try:
        yield
    finally:
        ended.set()
        renewing.join()
        with contextlib.suppress(StoreError):  # without renewals it expires
            store.release(key, owner)


def _renew(store: Leases, key: Key, owner: str, ended: threading.Event) -> None:
    while not ended.wait(RENEW_S):
        with contextlib.suppress(StoreError):  # retried at the next interval
            store.lease(key, owner, LEASE_S)


def _parts(held: Lease) -> tuple[str, int, str]:
    """Returns host, process and PID namespace of an owner; empty for any other text, which a store may contain."""
    host, _, rest = str(held.owner).partition("/")
    pid, _, namespace = rest.partition("/")
    return (host, int(pid), namespace.partition(".")[0]) if pid.isdecimal() and len(pid) < 10 else ("", 0, "")


def _owner() -> str:
    return f"{socket.gethostname()}/{os.getpid()}/{_processes()}.{uuid.uuid4().hex}"


def _processes() -> str:
    """Returns the PID namespace: containers with the same host name may each have a process with the same PID."""
    try:
        return os.readlink("/proc/self/ns/pid").strip("pid:[]")
    except OSError:
        return "all"


def _gone(held: Lease) -> bool:
    """Whether the holder is a process in this host and PID namespace that no longer exists."""
    host, pid, namespace = _parts(held)
    if host != socket.gethostname() or namespace != _processes() or not pid:
        return False
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return True
    except PermissionError:
        pass
    return False
