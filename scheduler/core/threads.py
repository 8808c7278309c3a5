"""Concurrent blocking calls from a thread that Ctrl-C can interrupt at any time."""

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

# After an interrupt, calls that do not stop are abandoned after this time: computations in this process cannot be
# ended.
STOPPED_WITHIN_S = 1.0

_left: list[threading.Thread] = []


def left_behind() -> bool:
    """Whether abandoned calls are still running; the exit of the process would wait for them forever."""
    return any(thread.is_alive() for thread in _left)


def _end_at_once() -> None:
    """Ends an interrupted process by SIGINT, because JAX would abort it while abandoned calls are running."""
    if left_behind() and issubclass(getattr(sys, "last_type", None) or object, KeyboardInterrupt):
        sys.stdout.flush()
        signal.signal(signal.SIGINT, signal.SIG_DFL)
        os.kill(os.getpid(), signal.SIGINT)


atexit.register(_end_at_once)


def in_thread(call: Callable[[], R], name: str) -> Future[R]:
    """Runs `call` in a daemon thread and returns a future of its result or exception."""
    future: Future[R] = Future()

    def run() -> None:
        try:
            future.set_result(call())
        except BaseException as error:
            future.set_exception(error)

    threading.Thread(target=run, name=name, daemon=True).start()
    return future


class Threads(Generic[T, R]):
    """A thread pool that returns results in order of completion.

    It differs from `concurrent.futures` in two ways. The waiting thread can be interrupted anywhere: an executor
    acquires locks in Python code, where Ctrl-C can leave them locked forever, whereas queues are implemented in C. On
    Ctrl-C or another exit of the program, `stop` is called, and threads that do not end in time are abandoned.

    Calls that have not started when an exception leaves the block never start.

    Args:
      count: maximum number of concurrent calls.
      stop: makes running calls return or raise soon, if possible.
    """

    def __init__(self, count: int, stop: Callable[[], None]) -> None:
        self._stop = stop
        self._calls: queue.SimpleQueue[tuple[T, Callable[[], R]] | None] = queue.SimpleQueue()
        self._ended: queue.SimpleQueue[tuple[T, R | None, BaseException | None]] = queue.SimpleQueue()
        self._threads = [threading.Thread(target=self._work, name=f"scheduler-{i}", daemon=True) for i in range(count)]
        self._over = False
        self.running = 0

    def start(self, what: T, call: Callable[[], R]) -> None:
        """Runs `call` in the next free thread; `next` returns `what` with the result."""
        self.running += 1
        self._calls.put((what, call))

    def next(self) -> tuple[T, R]:
        """Blocks until a call ends, and returns its `what` and its result, or raises its exception."""
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
        return what, result  # type: ignore[return-value]  # there is a result because there is no error

    def call(self, call: Callable[[T], R], what: T) -> R:
        """Runs `call` in a thread and returns its result or raises its exception; no other call may be running."""
        self.start(what, lambda: call(what))
        return self.next()[1]

    def map(self, call: Callable[[T], R], of: Iterable[T]) -> Iterator[tuple[T, R]]:
        """Yields each item of `of` with its result, in order of completion."""
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
    """Returns the result of `function` from a new thread, because tracing and lowering contexts are thread-local."""
    with Threads[None, T](1, lambda: None) as threads:
        return threads.call(lambda _: function(), None)
