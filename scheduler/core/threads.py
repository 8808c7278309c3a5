"""Calls that block, beside each other, for a thread that Ctrl-C can interrupt at any moment."""

from __future__ import annotations

import atexit
import math
import os
import queue
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future
from types import TracebackType
from typing import Generic, TypeVar

from scheduler.core import interrupts
from scheduler.core.interrupts import WAKE_S

T = TypeVar("T")
R = TypeVar("R")

# Who interrupts waits no longer for calls that do not stop: what this process computes itself, nobody can.
STOPPED_WITHIN_S = 1.0

_left: list[threading.Thread] = []


def left_behind() -> bool:
    """Whether calls are under way still that were interrupted: a process that ends would wait for them in vain."""
    return any(thread.is_alive() for thread in _left)


def _end_at_once() -> None:
    """Ends a process that Ctrl-C ends as it would end without JAX, which aborts it over calls left behind."""
    if left_behind() and issubclass(getattr(sys, "last_type", None) or object, KeyboardInterrupt):
        sys.stdout.flush()
        signal.signal(signal.SIGINT, signal.SIG_DFL)
        os.kill(os.getpid(), signal.SIGINT)


atexit.register(_end_at_once)


def in_thread(call: Callable[[], R], name: str) -> Future[R]:
    """Runs `call` in a daemon thread. The future has the result of `call`, or what `call` raised."""
    future: Future[R] = Future()

    def run() -> None:
        try:
            future.set_result(call())
        except BaseException as error:
            future.set_exception(error)

    threading.Thread(target=run, name=name, daemon=True).start()
    return future


class Threads(Generic[T, R]):
    """A few threads that run calls, and hand over each result as it comes.

    What `concurrent.futures` does, but for two things. The thread that waits can be interrupted wherever it is: an
    executor takes its locks in Python code, where Ctrl-C can leave them locked for ever, while queues are C. And on
    Ctrl-C, or another end of the program, `stop` is called, and the threads are not waited for where that ends no call.

    Args:
      count: how many calls may run at once.
      stop: makes calls under way return or raise soon, where it can.

    Calls that have not begun when an exception leaves the block never begin.
    """

    def __init__(self, count: int, stop: Callable[[], None]) -> None:
        self._stop = stop
        self._calls: queue.SimpleQueue[tuple[T, Callable[[], R]] | None] = queue.SimpleQueue()
        self._ended: queue.SimpleQueue[tuple[T, R | None, BaseException | None]] = queue.SimpleQueue()
        self._threads = [threading.Thread(target=self._work, name=f"scheduler-{i}", daemon=True) for i in range(count)]
        self._over = False
        self.running = 0

    def start(self, what: T, call: Callable[[], R]) -> None:
        """Runs `call` in a thread as soon as one is free; `next` says how `what` ended."""
        self.running += 1
        self._calls.put((what, call))

    def next(self) -> tuple[T, R]:
        """What ended, and its result: the first that was not returned yet. Blocks; raises what the call raised."""
        while True:
            interrupts.check()
            try:
                what, result, error = self._ended.get(timeout=WAKE_S)
                break
            except queue.Empty:
                pass
        self.running -= 1
        if error is not None:
            raise error
        return what, result  # type: ignore[return-value]  # no error, so a result

    def call(self, call: Callable[[T], R], what: T) -> R:
        """What `call` of it returns or raises, while nothing else is under way."""
        self.start(what, lambda: call(what))
        return self.next()[1]

    def map(self, call: Callable[[T], R], of: Iterable[T]) -> Iterator[tuple[T, R]]:
        """Each of `of` with its result, as they end."""
        for one in of:
            self.start(one, lambda one=one: call(one))  # type: ignore[misc]
        while self.running:
            yield self.next()

    def _work(self) -> None:
        while (job := self._calls.get()) is not None and not self._over:
            what, call = job
            try:
                self._ended.put((what, call(), None))
            except BaseException as error:
                self._ended.put((what, None, error))

    def __enter__(self) -> Threads[T, R]:
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._over = kind is not None
        patience_s = math.inf
        if kind is not None and issubclass(kind, (KeyboardInterrupt, SystemExit)):
            self._stop()
            patience_s = STOPPED_WITHIN_S
        until = time.monotonic() + patience_s
        for _ in self._threads:
            self._calls.put(None)
        for thread in self._threads:
            while thread.is_alive() and time.monotonic() < until:
                thread.join(WAKE_S)
        _left.extend(thread for thread in self._threads if thread.is_alive())


@interrupts.interruptible()
def in_fresh_thread(function: Callable[[], T]) -> T:
    """What `function` returns or raises. Tracing and lowering are states of a thread: a new one computes for real."""
    with Threads[None, T](1, lambda: None) as threads:
        return threads.call(lambda _: function(), None)
