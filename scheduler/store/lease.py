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
    owner = f"{socket.gethostname()}/{os.getpid()}/{_processes()}.{uuid.uuid4().hex}"
    seen: Lease | None = None
    silent: Lease | None = None
    waited, since = False, 0.0
    while (held := store.lease(key, owner, LEASE_S, silent=silent)).owner != owner:
        if held != seen:
            seen, since = held, time.monotonic()
        silent = held if _gone(held) or time.monotonic() - since > SILENT_S else None
        if silent is not None:
            continue
        if not waited:
            _log.warning("%s is being tuned by %s; waiting for its record", key, _words(held))
        waited = True
        time.sleep(POLL_S)
    ended = threading.Event()
    renewing = threading.Thread(target=_renew, args=(store, key, owner, ended), name="scheduler-lease", daemon=True)
    renewing.start()
    try:
        yield store.get(key) if waited else None
    finally:
        ended.set()
        renewing.join()
        with contextlib.suppress(StoreError):  # it is silent from now on
            store.release(key, owner)


def _renew(store: Leases, key: Key, owner: str, ended: threading.Event) -> None:
    while not ended.wait(RENEW_S):
        with contextlib.suppress(StoreError):  # the next time may do
            store.lease(key, owner, LEASE_S)


def _words(held: Lease) -> str:
    host, pid, _ = _parts(held)
    return f"process {pid} on {host}" if pid else repr(held.owner)


def _parts(held: Lease) -> tuple[str, int, str]:
    """Host, process and what tells processes of containers apart; a store may hold any text, which has none."""
    host, _, rest = str(held.owner).partition("/")
    pid, _, whose = rest.partition("/")
    return (host, int(pid), whose.partition(".")[0]) if pid.isdecimal() and len(pid) < 10 else ("", 0, "")


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
