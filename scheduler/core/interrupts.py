"""Reliable Ctrl-C and SIGTERM: a signal sets a flag, which is polled, and raises KeyboardInterrupt.

The exception alone is not enough. Python runs a signal handler between two bytecodes of the main thread. If that is in
a callback of the garbage collector (JAX has one), in `__del__`, or in a callback of a weakref or of ctypes, Python
drops the exception; C code may clear it as well. Therefore a thread polls the flag, and the handler runs again until
the exception has left the interrupted code.
"""

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
from contextlib import contextmanager
from types import FrameType, TracebackType
from typing import Any, Generic, TypeVar

# The main thread sees a signal that arrives just before it blocks only when it wakes up, because Python runs handlers
# between bytecodes (signal(7)). Therefore no call of the main thread may block for longer than this.
WAKE_S = 0.2

# An exception inside the import of a native module may terminate the process silently (std::terminate), so imports are
# not interrupted. The limit, in multiples of `WAKE_S`, exists because the import of a user's module may compute for
# hours.
MOST_PUT_OFF = 5

_watch: Watch | None = None


class Watch:
    """A context in which signals interrupt the main thread; in other threads it does nothing.

    An interrupt that was swallowed is raised again every `WAKE_S` until it has left the context, at the latest when the
    context ends. It is not raised again while it is being handled (`finally`, `__exit__`).

    A signal is left alone if the program ignores it or has its own handler for it.

    Args:
      command: for a command line: SIGTERM raises as well, and a second signal ends the process immediately.

    Attributes:
      number: the signal that was received, or None.
    """

    def __init__(self, *, command: bool = False) -> None:
        self.number: int | None = None
        self._numbers = (signal.SIGINT, signal.SIGTERM) if command else (signal.SIGINT,)
        self._command = command
        self._raised: list[BaseException] = []
        self._before: dict[int, Any] = {}
        self._hook: Any = None
        self._again = False  # the current signal is a repetition by `_poll`
        self._put_off = 0  # number of delays because of an import
        self._raises = False  # False while handlers are set and restored
        self._closed = threading.Lock()  # acquired permanently when the context ends
        self._came: queue.SimpleQueue[int | None] = queue.SimpleQueue()  # reentrant, because it is implemented in C

    def __enter__(self) -> Watch:
        global _watch
        if _watch is not None or threading.current_thread() is not threading.main_thread():
            return self
        _watch = self
        threading.Thread(target=self._poll, name="scheduler-interrupts", daemon=True).start()
        self._hook, sys.unraisablehook = sys.unraisablehook, self._unraisable
        for number in self._numbers:
            if signal.getsignal(number) in (signal.default_int_handler, signal.SIG_DFL):
                self._before[number] = signal.signal(number, self._handle)
        self._raises = True
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        global _watch
        if _watch is not self:
            return
        self._raises = False
        self._closed.acquire()
        for number, handler in self._before.items():
            signal.signal(number, handler)
        self._came.put(None)
        sys.unraisablehook = self._hook
        _watch = None
        if self.number is not None and not isinstance(error, KeyboardInterrupt):
            raise KeyboardInterrupt from error

    def check(self) -> None:
        """Raises the pending interrupt, unless it is being handled."""
        if self.number is not None and not self._under_way():
            self._raise()

    def _raise(self) -> None:
        self._raised.append(error := KeyboardInterrupt())
        raise error

    def _handle(self, number: int, frame: FrameType | None) -> None:
        again, self._again = self._again, False
        if self.number is None:
            self.number = number
            self._came.put(number)
        elif self._command and not again:
            _end_by(number)
        if not self._raises or (again and self._under_way()):
            return
        if _importing(frame):
            self._put_off += 1
            if self._put_off <= MOST_PUT_OFF:
                return
            if self._command:
                _end_by(number)
        self._raise()

    def _under_way(self) -> bool:
        """Whether the main thread is handling an interrupt that was raised here."""
        error, seen = sys.exception(), 0
        while error is not None and seen < 1000:
            if any(error is raised for raised in self._raised):
                return True
            error, seen = error.__context__, seen + 1
        return False

    def _poll(self) -> None:
        if (number := self._came.get()) is None:
            return
        while True:
            try:
                if self._came.get(timeout=WAKE_S) is None:
                    return
            except queue.Empty:
                if not self._closed.acquire(blocking=False):
                    return
                self._again = True
                signal_main(number)
                self._closed.release()

    def _unraisable(self, dropped: Any) -> None:
        """Handles an unraisable exception as Python's hook does, except for interrupts, which are raised again."""
        if not any(dropped.exc_value is raised for raised in self._raised):
            self._hook(dropped)


def _end_by(number: int) -> None:
    """Ends this process with the default action of the signal; its child processes end with it."""
    signal.signal(number, signal.SIG_DFL)
    os.kill(os.getpid(), number)


def _importing(frame: FrameType | None) -> bool:
    while frame is not None:
        if frame.f_code.co_filename.startswith("<frozen importlib"):
            return True
        frame = frame.f_back
    return False


def signal_main(number: int) -> None:
    """Runs the handler of a signal in the main thread, as if it had been received; interrupts no system call."""
    import _thread

    _thread.interrupt_main(signal.Signals(number))


@contextmanager
def interruptible() -> Iterator[None]:
    """Makes Ctrl-C end a long computation of the main thread with a KeyboardInterrupt, even if the first is swallowed.

    Usable as a context manager and as a decorator.
    """
    with Watch():
        yield


def check() -> None:
    """Raises a pending interrupt in the main thread; for loops that wait."""
    if _watch is not None and threading.current_thread() is threading.main_thread():
        _watch.check()


def reraise(error: BaseException) -> None:
    """Raises KeyboardInterrupt if `error` is, or hides, an interrupt; returns otherwise.

    Python raises for signals only in the main thread, and not for ignored signals, as in a worker.
    """
    if threading.current_thread() is not threading.main_thread():
        return
    if _watch is not None and _watch.number is not None:
        raise KeyboardInterrupt from error
    ignored = signal.getsignal(signal.SIGINT) is signal.SIG_IGN
    if _watch is None and isinstance(error, KeyboardInterrupt) and not ignored:
        raise error


# ------------------------------------------------------------------------------
# Concurrent blocking calls from a thread that Ctrl-C can interrupt at any time.

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
            check()
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


@interruptible()
def in_fresh_thread(function: Callable[[], T]) -> T:
    """Returns the result of `function` from a new thread, because tracing and lowering contexts are thread-local."""
    with Threads[None, T](1, lambda: None) as threads:
        return threads.call(lambda _: function(), None)
