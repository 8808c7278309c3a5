"""Progress of a search or of a job of several searches, with an estimate of the remaining time."""

from __future__ import annotations

import dataclasses
import math
import statistics
import time
from collections.abc import Callable, Hashable
from typing import TypeVar

from scheduler.core.records import Trial

R = TypeVar("R")

# Minimum number of trials for an estimate of the remaining time.
FEWEST_TO_TELL = 3
# Fraction of a search's time spent on trials. The rest is the final comparison: 7.2 of 14.5 s on an H200
# (benchmarks/results/tuning_time-*.json).
TRIALS_SHARE = 0.5


@dataclasses.dataclass(frozen=True)
class Progress:
    """Progress of a search.

    Attributes:
      done, budget: number of completed trials, and the maximum.
      best: the fastest trial so far, or None.
      last: the most recently completed trial, or None.
      elapsed_s: time since the first trial started.
      eta_s: the remaining time at the pace of this run's trials, or None if there are too few trials.
      resumed: number of trials in `done` that an earlier, interrupted run of this search completed.
    """

    done: int
    budget: int
    best: Trial | None
    last: Trial | None
    elapsed_s: float
    eta_s: float | None
    resumed: int = 0


class Pace:
    """Estimates the duration of trials, of which `slots` run concurrently."""

    def __init__(self, slots: int) -> None:
        self._slots = slots
        self._seconds: list[float] = []

    def timed(self, call: Callable[[], R]) -> R:
        """Runs a trial and returns its result."""
        started = time.perf_counter()
        result = call()
        self._seconds.append(time.perf_counter() - started)
        return result

    def left_s(self, trials: int) -> float | None:
        """Returns the estimated time for `trials` more trials, in seconds, or None if too few have completed.

        Uses the median, because the first trial of a process includes imports and preparation, and a hanging trial
        takes its whole timeout. Waits for `slots` trials, because of concurrent trials the fastest complete first.
        """
        if trials == 0:
            return 0.0
        if len(self._seconds) < max(FEWEST_TO_TELL, self._slots):
            return None
        return statistics.median(self._seconds) * math.ceil(trials / self._slots)


@dataclasses.dataclass(frozen=True)
class JobProgress:
    """Progress of a job.

    Attributes:
      done, total: number of completed problems, and of all problems.
      elapsed_s: time since the job started.
      eta_s: the remaining time, or None if there is too little data.
    """

    done: int
    total: int
    elapsed_s: float
    eta_s: float | None


class JobPace:
    """Estimates the duration of a job with concurrent searches.

    The remaining time is the remaining work divided by the rate of the searches so far, and at least the time that the
    longest running search needs alone. Work is the expected cost of a search, in any unit.

    Args:
      total: number of problems, including those that need no search.
    """

    def __init__(self, total: int) -> None:
        self._total, self._ended = total, 0
        self._started = time.perf_counter()
        self._waiting: dict[Hashable, float] = {}
        self._running: dict[Hashable, tuple[float, float, float]] = {}  # work, start time, and completed fraction
        self._work, self._seconds = 0.0, 0.0  # of completed searches
        self._has_rate = False
        self.lanes = 0  # maximum number of concurrent searches

    def expect(self, which: Hashable, work: float) -> None:
        """Adds a pending search."""
        self._waiting[which] = work

    def begin(self, which: Hashable) -> None:
        """Marks a search as running."""
        self._running[which] = self._waiting.pop(which), time.perf_counter(), 0.0

    def step(self, which: Hashable, progress: Progress) -> None:
        """Updates the progress of a running search."""
        work, since, _ = self._running[which]
        self._running[which] = work, since, TRIALS_SHARE * min(1.0, progress.done / max(1, progress.budget))
        self._has_rate |= progress.eta_s is not None

    def put_back(self, which: Hashable) -> None:
        """Marks a search as pending again: it was lost, or another process is running it."""
        self._waiting[which] = self._running.pop(which)[0]

    def end(self, which: Hashable, *, searched: bool) -> None:
        """Marks a problem as completed, with or without a search here."""
        self._ended += 1
        self._waiting.pop(which, None)
        work, since, _ = self._running.pop(which, (0.0, 0.0, 0.0))
        if searched and work:
            self._work += work
            self._seconds += time.perf_counter() - since
            self._has_rate = True

    def now(self) -> JobProgress:
        """Returns the current progress."""
        return JobProgress(self._ended, self._total, time.perf_counter() - self._started, self._left_s())

    def _left_s(self) -> float | None:
        running = [work * (1 - share) for work, _, share in self._running.values()]
        left = sum(self._waiting.values()) + sum(running)
        if not left:
            return 0.0
        work = self._work + sum(work * share for work, _, share in self._running.values())
        seconds = self._seconds + sum(time.perf_counter() - since for _, since, _ in self._running.values())
        if not self._has_rate or not work:
            return None
        return seconds / work * max(left / max(1, self.lanes, len(running)), *running, 0.0)
