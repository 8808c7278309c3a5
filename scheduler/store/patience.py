"""Timeouts for stores: calls wait a few seconds for a store in total per process, whatever its state.

Only time that the store takes counts. Time in which this process computes, or waits for a CPU on a busy host, does not.
"""

from __future__ import annotations

import contextlib
import math
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Generic, TypeVar

from scheduler.core.errors import StoreError

T = TypeVar("T")

# Together with the rest of a call, 5 s.
PATIENCE_S = 4.0
# Faster responses are normal operation and do not count, however many there are.
PROMPT_S = 0.5


class TooLong(StoreError):
    """A store that made calls wait too long; a search may still read from it."""


_lock = threading.Lock()
_waited_s: dict[str, float] = {}


def given_up(location: str) -> bool:
    """Whether calls of this process no longer use the store because of its delays."""
    return _waited_s.get(location, 0.0) >= PATIENCE_S


def patiently(location: str, question: Callable[[], T]) -> T:
    """Returns or raises the result of `question`, with a timeout for the store.

    `question` runs in another thread, because drivers block uninterruptibly, for example in name resolution or in a
    file system. After a timeout, the thread is abandoned; it ends with the store's own timeouts.

    Raises:
      TooLong: this request, or all requests in total, took too long.
    """
    left_s = PATIENCE_S - _waited_s.get(location, 0.0)
    if left_s <= 0:
        raise _too_long(location)
    asking = _Asking(question)
    in_time, waited_s = asking.ended_within(left_s)
    if waited_s > PROMPT_S or not in_time:
        with _lock:
            _waited_s[location] = _waited_s.get(location, 0.0) + (waited_s if in_time else math.inf)
    if not in_time:
        raise _too_long(location)
    return asking.answer()


class _Asking(Generic[T]):
    """A request to a store, and the thread that runs it."""

    def __init__(self, question: Callable[[], T]) -> None:
        self._question = question
        self._answer: tuple[T | None, BaseException | None] = (None, None)
        self._ended = threading.Event()
        self._worked_s = 0.0
        self._began_s = time.monotonic()
        self._thread = threading.Thread(target=self._ask, name="scheduler-store", daemon=True)
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

    def _ask(self) -> None:
        try:
            self._answer = self._question(), None
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


def forget(location: str | None = None) -> None:
    """Resets the waiting time of a store, or of all stores."""
    with _lock, contextlib.suppress(KeyError):
        _waited_s.clear() if location is None else _waited_s.pop(location)


def _too_long(location: str) -> TooLong:
    return TooLong(
        f"{location} kept calls waiting for {PATIENCE_S:g} s: see who holds it, or that its server answers; no call of "
        "this process asks it again"
    )
