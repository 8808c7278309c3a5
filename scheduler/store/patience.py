"""How long calls wait for a store: a few seconds in all, once a process, whatever became of the store."""

from __future__ import annotations

import contextlib
import math
import threading
import time
from collections.abc import Callable
from typing import Any, TypeVar

from scheduler.core.errors import StoreError

T = TypeVar("T")

# With what else a call does, 5 s.
PATIENCE_S = 4.0
# What answers within this time is at work, not lost: it costs no patience, however often it is asked.
PROMPT_S = 0.5


class TooLong(StoreError):
    """A store that kept calls waiting; a search may still have what it needs of it."""


_lock = threading.Lock()
_waited_s: dict[str, float] = {}


def given_up(location: str) -> bool:
    """Whether calls of this process wait for that store no more."""
    return _waited_s.get(location, 0.0) >= PATIENCE_S


def patiently(location: str, question: Callable[[], T]) -> T:
    """What `question`, asked of the store there, returns or raises.

    Another thread asks it: a driver waits where nobody can interrupt it, in a name server's answer or a file system's.
    That thread is left behind where it takes too long, and ends when the store's own limits do.

    Raises:
      TooLong: it took too long, this time or in sum.
    """
    left_s = PATIENCE_S - _waited_s.get(location, 0.0)
    if left_s <= 0:
        raise _too_long(location)
    answer: list[Any] = []
    done = threading.Event()

    def ask() -> None:
        try:
            answer.append((question(), None))
        except BaseException as error:
            answer.append((None, error))
        done.set()

    started = time.monotonic()
    threading.Thread(target=ask, name="scheduler-store", daemon=True).start()
    in_time = done.wait(left_s)
    waited_s = time.monotonic() - started
    if waited_s > PROMPT_S or not in_time:
        with _lock:
            _waited_s[location] = _waited_s.get(location, 0.0) + (waited_s if in_time else math.inf)
    if not in_time:
        raise _too_long(location)
    found, error = answer[0]
    if error is not None:
        raise error
    result: T = found
    return result


def forget(location: str | None = None) -> None:
    """Waits for that store again, or for all."""
    with _lock, contextlib.suppress(KeyError):
        _waited_s.clear() if location is None else _waited_s.pop(location)


def _too_long(location: str) -> TooLong:
    return TooLong(
        f"{location} kept calls waiting for {PATIENCE_S:g} s: see who holds it, or that its server answers; no call of "
        "this process asks it again"
    )
