"""One line on standard error that says what a long computation does, and for how long."""

from __future__ import annotations

import contextlib
import shutil
import sys
import threading
import time
from collections.abc import Iterator

from scheduler.core.text import log, one_line

EVERY_S = 1.0


class StatusLine:
    """A line that is overwritten in a terminal, and erased at the end.

    If standard error is not a terminal, each step goes to the logger once, at level INFO.
    """

    def __init__(self) -> None:
        self._name = self._step = ""
        self._started = 0.0
        self._shown = False
        self._guard = threading.Lock()
        self._ended = threading.Event()

    @contextlib.contextmanager
    def shown(self, name: str) -> Iterator[None]:
        """Shows the steps within the context as those of `name`."""
        self._name, self._started = name, time.monotonic()
        if not (sys.stderr and sys.stderr.isatty()):
            yield
            return
        self._shown = True
        redrawing = threading.Thread(target=self._redraw, name="scheduler-status", daemon=True)
        redrawing.start()
        try:
            yield
        finally:
            self._ended.set()
            redrawing.join()
            self.erase()
            self._shown = False

    def step(self, text: str) -> None:
        """Says what is computed from now on."""
        self._step = text
        if self._shown:
            self._draw()
        elif self._name:
            log.info("%s: %s", self._name, text)

    def erase(self) -> None:
        """Erases the line, for example before a warning is printed."""
        if self._shown:
            self._write("")

    def _redraw(self) -> None:
        while not self._ended.wait(EVERY_S):
            if self._step:
                self._draw()

    def _draw(self) -> None:
        line = one_line(f"{self._name}: {self._step}, {time.monotonic() - self._started:.0f} s")
        self._write(line[: shutil.get_terminal_size().columns - 1])  # a line that wraps could not be overwritten

    def _write(self, line: str) -> None:
        with self._guard, contextlib.suppress(OSError, ValueError):  # closed meanwhile
            sys.stderr.write(f"\r{line}\x1b[K")
            sys.stderr.flush()
