"""One process at a time tunes a problem: who comes second waits for the record of the first."""

from __future__ import annotations

import contextlib
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

LEASE_S = 60.0  # a holder that says nothing for so long has lost it
RENEW_S = 15.0
POLL_S = 0.25

_log = logging.getLogger("scheduler")


class Leases(Protocol):
    """What keeps leases and the records that they are about."""

    def lease(self, key: Key, owner: str, seconds: float) -> str: ...
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
    owner = f"{socket.gethostname()}/{os.getpid()}/{uuid.uuid4().hex}"
    waited = False
    while (holder := store.lease(key, owner, LEASE_S)) != owner:
        host, pid, _ = holder.rsplit("/", 2)
        if host == socket.gethostname() and _gone(int(pid)):
            store.release(key, holder)
            continue
        if not waited:
            _log.warning("%s is being tuned by process %s on %s; waiting for its record", key, pid, host)
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
        with contextlib.suppress(StoreError):  # it expires by itself
            store.release(key, owner)


def _renew(store: Leases, key: Key, owner: str, ended: threading.Event) -> None:
    while not ended.wait(RENEW_S):
        with contextlib.suppress(StoreError):  # the next time may do
            store.lease(key, owner, LEASE_S)


def _gone(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return True
    except PermissionError:
        pass
    return False
