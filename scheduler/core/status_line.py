"""One line on standard error that says what a long computation does, and for how long."""

from __future__ import annotations

import contextlib
import shutil
import sys
import threading
import time
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING

from scheduler.core.text import log, one_line, seconds_text

if TYPE_CHECKING:
    from scheduler.core.progress import JobProgress, Progress

EVERY_S = 1.0
# Characters of a name that are kept where a line is too long.
_SHORTEST_NAME = 20


class StatusLine:
    """A line that is overwritten in a terminal, and erased at the end.

    Args:
      otherwise: called with each step if standard error is not a terminal; by default the logger, at level INFO.
    """

    def __init__(self, otherwise: Callable[[str], None] = log.info) -> None:
        self._otherwise = otherwise
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

    def step(self, text: str, *, news: bool = True) -> None:
        """Says what is computed from now on.

        Args:
          news: whether it is also said without a terminal.
        """
        self._step = text
        if self._shown:
            self._draw()
        elif self._name and news:
            self._otherwise(one_line(f"{self._name}: {text}"))

    def erase(self) -> None:
        """Erases the line, for example before a warning is printed."""
        if self._shown:
            self._write("")

    def _redraw(self) -> None:
        while not self._ended.wait(EVERY_S):
            if self._step:
                self._draw()

    def _draw(self) -> None:
        most = shutil.get_terminal_size().columns - 1  # a line that wraps could not be overwritten
        step = one_line(f": {self._step}, {time.monotonic() - self._started:.0f} s")
        name = one_line(self._name)
        if len(name) + len(step) > most:
            name = name[: max(_SHORTEST_NAME, most - len(step) - 3)] + "..."
        self._write(f"{name}{step}"[:most])

    def _write(self, line: str) -> None:
        with self._guard, contextlib.suppress(OSError, ValueError):  # closed meanwhile
            sys.stderr.write(f"\r{line}\x1b[K\r")  # what another thread prints then starts at the first column
            sys.stderr.flush()


class SearchStatus(StatusLine):
    """How far a search, or a job of several, is. Without a terminal, each new best time is printed as a line."""

    def __init__(self) -> None:
        super().__init__(_print)
        self._best: dict[str, object] = {}  # by problem

    @contextlib.contextmanager
    def shown(self, name: str) -> Iterator[None]:
        with super().shown(name):
            self.step("starting")
            yield

    def search(self, search: Progress, problem: str = "", job: JobProgress | None = None) -> None:
        """Shows the progress of a search.

        Args:
          problem: the problem of a search in a job, with its executor.
          job: the progress of the job.
        """
        ended = search.done == search.budget
        news = ended or self._best.get(problem, self) != search.best
        self._best[problem] = search.best
        trials, best = f"{search.done}/{search.budget} trials", _best_text(search)
        if job is None:
            left = "comparing the fastest" if ended else _left_text(search.eta_s)
            self.step(", ".join(filter(None, [trials, left, best])), news=news)
        else:
            done = ", ".join(filter(None, [f"{job.done} done", _left_text(job.eta_s)]))
            self.step(f"{done}; {problem}: {trials}, {best}", news=news)


def _print(line: str) -> None:
    with contextlib.suppress(OSError, ValueError, AttributeError):  # standard error is closed, or there is none
        sys.stderr.write(f"{line}\n")
        sys.stderr.flush()


def _best_text(search: Progress) -> str:
    if (best := search.best) is None:
        return "compiling the first candidate" if search.last is None else "no candidate has run yet"
    estimated = "estimated " if getattr(best.outcome, "estimated", False) else ""
    return f"best {estimated}{seconds_text(getattr(best.outcome, 'median_s', float('nan')))} by {best.backend}"


def _left_text(eta_s: float | None) -> str:
    if eta_s is None:
        return ""
    return f"{eta_s:.0f} s left" if eta_s < 180 else f"{eta_s / 60:.0f} min left"
