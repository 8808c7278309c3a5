"""How long calls wait for a store: a few seconds in all, once a process, whatever became of the store.

Waiting is what the store takes. What this process computes meanwhile, or cannot on a busy host, is none.
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
    asking = _Asking(question)
    in_time, waited_s = asking.ended_within(left_s)
    if waited_s > PROMPT_S or not in_time:
        with _lock:
            _waited_s[location] = _waited_s.get(location, 0.0) + (waited_s if in_time else math.inf)
    if not in_time:
        raise _too_long(location)
    return asking.answer()


class _Asking(Generic[T]):
    """A question, and the thread that asks it."""

    def __init__(self, question: Callable[[], T]) -> None:
        self._question = question
        self._answer: tuple[T | None, BaseException | None] = (None, None)
        self._ended = threading.Event()
        self._worked_s = 0.0
        self._began_s = time.monotonic()
        self._thread = threading.Thread(target=self._ask, name="scheduler-store", daemon=True)
        self._thread.start()

    def ended_within(self, most_s: float) -> tuple[bool, float]:
        """Whether it ended before it had waited for so long, and for how long it has waited, seconds."""
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
    """How long a thread has computed, or could not for want of a free core, seconds; 0 where the system tells nothing.

    Linux tells it (Documentation/scheduler/sched-stats): two numbers of nanoseconds, and how often the thread ran.
    """
    try:
        computed, ready, _ = Path(f"/proc/self/task/{thread}/schedstat").read_text().split()
        return (int(computed) + int(ready)) * 1e-9
    except (OSError, ValueError):
        return 0.0


def forget(location: str | None = None) -> None:
    """Waits for that store again, or for all."""
    with _lock, contextlib.suppress(KeyError):
        _waited_s.clear() if location is None else _waited_s.pop(location)


def _too_long(location: str) -> TooLong:
    return TooLong(
        f"{location} kept calls waiting for {PATIENCE_S:g} s: see who holds it, or that its server answers; no call of "
        "this process asks it again"
    )
