"""Reliable Ctrl-C and SIGTERM: a signal sets a flag, which is polled, and raises KeyboardInterrupt.

The exception alone is not enough. Python runs a signal handler between two bytecodes of the main thread. If that is in
a callback of the garbage collector (JAX has one), in `__del__`, or in a callback of a weakref or of ctypes, Python
drops the exception; C code may clear it as well. Therefore a thread polls the flag, and the handler runs again until
the exception has left the interrupted code.
"""

from __future__ import annotations

import os
import queue
import signal
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType, TracebackType
from typing import Any

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
