"""Ctrl-C and SIGTERM that no code can swallow: a signal sets a flag, which is polled, and raises KeyboardInterrupt.

The exception alone is not enough. A signal handler runs between two bytecodes of the main thread, wherever that is, and
Python drops what is raised in a callback of its garbage collector (JAX has one), in `__del__`, in a callback of a
weakref or of ctypes; C code may clear it as well. So a thread polls the flag, and the handler runs again until the
exception has left the code that is to end.
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

# A signal that comes just before the main thread blocks is seen when it wakes (signal(7); Python's handlers run between
# its bytecodes): no call of the main thread blocks for longer.
WAKE_S = 0.2

# An exception within the import of a native module may end the process without a word (std::terminate), so an import
# is left to its end; not for longer than so many times `WAKE_S`, as a user's module may compute for hours.
MOST_PUT_OFF = 5

_watch: Watch | None = None


class Watch:
    """A context in which signals end what the main thread does; in any other thread it does nothing.

    An interrupt that something swallowed is raised again every `WAKE_S` until it has left the context, at the latest as
    the context ends. While it is handled (`finally`, `__exit__`) it is not raised again.

    A signal is left alone if the program ignores it or has a handler of its own.

    Args:
      command: of a command line: SIGTERM raises as well, and a second signal ends the process at once.

    Attributes:
      number: the signal that came, or None.
    """

    def __init__(self, *, command: bool = False) -> None:
        self.number: int | None = None
        self._numbers = (signal.SIGINT, signal.SIGTERM) if command else (signal.SIGINT,)
        self._command = command
        self._raised: list[BaseException] = []
        self._before: dict[int, Any] = {}
        self._hook: Any = None
        self._again = False  # the signal is one that `_poll` repeats
        self._put_off = 0  # so often, for an import
        self._raises = False  # while handlers are set and restored, none does
        self._closed = threading.Lock()  # taken for good as the context ends
        self._came: queue.SimpleQueue[int | None] = queue.SimpleQueue()  # in C: a handler may interrupt anything

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
        """Raises the interrupt that came, unless it is being handled."""
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
        """Whether what the main thread does now is to handle an interrupt that was raised here."""
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
        """As Python's own hook, but for an interrupt, which is raised again."""
        if not any(dropped.exc_value is raised for raised in self._raised):
            self._hook(dropped)


def _end_by(number: int) -> None:
    """Ends this process at once, as a signal ends any program; the processes that it started end with it."""
    signal.signal(number, signal.SIG_DFL)
    os.kill(os.getpid(), number)


def _importing(frame: FrameType | None) -> bool:
    while frame is not None:
        if frame.f_code.co_filename.startswith("<frozen importlib"):
            return True
        frame = frame.f_back
    return False


def signal_main(number: int) -> None:
    """Runs the handler of a signal in the main thread, as if the signal had come, but interrupts no system call."""
    import _thread

    _thread.interrupt_main(signal.Signals(number))


@contextmanager
def interruptible() -> Iterator[None]:
    """Within, Ctrl-C ends a long computation of the main thread by a KeyboardInterrupt, whatever swallows the first.

    Also a decorator of functions.
    """
    with Watch():
        yield


def check() -> None:
    """Raises the interrupt that came and was swallowed, in the main thread; for loops that wait."""
    if _watch is not None and threading.current_thread() is threading.main_thread():
        _watch.check()


def reraise(error: BaseException) -> None:
    """Raises what `error` is, or hides: Ctrl-C or another signal. Returns if code raised `error` itself.

    Python raises for signals in the main thread alone, and for none that it ignores, as in a worker.
    """
    if threading.current_thread() is not threading.main_thread():
        return
    if _watch is not None and _watch.number is not None:
        raise KeyboardInterrupt from error
    ignored = signal.getsignal(signal.SIGINT) is signal.SIG_IGN
    if _watch is None and isinstance(error, KeyboardInterrupt) and not ignored:
        raise error
