"""How far a search or a job of them is, and how long the rest of it takes."""

from __future__ import annotations

import dataclasses
import math
import statistics
import time
from collections.abc import Callable, Hashable
from typing import TypeVar

from scheduler.core.records import Trial

R = TypeVar("R")

# Trials before the time left is estimated.
FEWEST_TO_TELL = 3
# Of a whole search; the rest is its final comparison: 7.2 of 14.5 s on an H200 (benchmarks/results/tuning_time-*.json).
TRIALS_SHARE = 0.5


@dataclasses.dataclass(frozen=True)
class Progress:
    """How far a search is.

    Attributes:
      done, budget: trials that ended, and that may be spent.
      best: the fastest trial so far, or None.
      last: the trial that ended just now; None before one has.
      elapsed_s: since the first trial was started.
      eta_s: the time left at the pace of this run's trials, None while they are too few to tell.
      resumed: trials among `done` that an earlier run of this search made before it was cut short.
    """

    done: int
    budget: int
    best: Trial | None
    last: Trial | None
    elapsed_s: float
    eta_s: float | None
    resumed: int = 0


class Pace:
    """How long trials take of which so many run at once."""

    def __init__(self, slots: int) -> None:
        self._slots = slots
        self._seconds: list[float] = []

    def timed(self, call: Callable[[], R]) -> R:
        """What `call` returns; a trial that ended."""
        started = time.perf_counter()
        result = call()
        self._seconds.append(time.perf_counter() - started)
        return result

    def left_s(self, trials: int) -> float | None:
        """The time that so many more take, in seconds; None where too few ended to tell.

        By the median: the first trial of a process pays for what it imports and prepares, and one that hangs for its
        limit. And of trials beside each other the quickest end first.
        """
        if trials == 0:
            return 0.0
        if len(self._seconds) < max(FEWEST_TO_TELL, self._slots):
            return None
        return statistics.median(self._seconds) * math.ceil(trials / self._slots)


@dataclasses.dataclass(frozen=True)
class JobProgress:
    """How far a job is.

    Attributes:
      done, total: problems that ended, and all.
      elapsed_s: since the job began.
      eta_s: the time left, None while there is too little to tell from.
    """

    done: int
    total: int
    elapsed_s: float
    eta_s: float | None


class JobPace:
    """How long a job takes of which several searches may be under way at once.

    The time left is the work that is left, expected beforehand in any unit, at the rate at which searches did such work
    so far; but no less than what the longest of those under way needs alone.

    Args:
      total: problems, those included that need no search.
    """

    def __init__(self, total: int) -> None:
        self._total, self._ended = total, 0
        self._likely: dict[Hashable, tuple[int, float]] = {}
        self._started = time.perf_counter()
        self._waiting: dict[Hashable, float] = {}
        self._begun: dict[Hashable, tuple[float, float, float]] = {}  # its work, when it began, and the share done
        self._work, self._seconds = 0.0, 0.0  # of searches that ended
        self._tells = False
        self.lanes = 0  # searches that may be under way at once

    def expect(self, which: Hashable, work: float) -> None:
        """A search that is to be made."""
        self._waiting[which] = work

    def more(self, problems: int) -> None:
        """So many more than were known of."""
        self._total += problems

    def likely(self, which: Hashable, problems: int, work: float) -> None:
        """How many more `which` is likely to bring, and their work in all; in place of what was said before."""
        self._likely[which] = problems, work

    def begin(self, which: Hashable) -> None:
        """It is under way from now on."""
        self._begun[which] = self._waiting.pop(which), time.perf_counter(), 0.0

    def step(self, which: Hashable, progress: Progress) -> None:
        """How far it is."""
        work, since, _ = self._begun[which]
        self._begun[which] = work, since, TRIALS_SHARE * min(1.0, progress.done / progress.budget)
        self._tells |= progress.eta_s is not None

    def put_back(self, which: Hashable) -> None:
        """It was lost, or another process is at it: it is to be made again."""
        self._waiting[which] = self._begun.pop(which)[0]

    def end(self, which: Hashable, *, searched: bool) -> None:
        """Its problem has ended, by a search here or without one."""
        self._ended += 1
        self._waiting.pop(which, None)
        work, since, _ = self._begun.pop(which, (0.0, 0.0, 0.0))
        if searched and work:
            self._work += work
            self._seconds += time.perf_counter() - since
            self._tells = True

    def now(self) -> JobProgress:
        """How far it is now."""
        total = self._total + sum(problems for problems, _ in self._likely.values())
        return JobProgress(self._ended, total, time.perf_counter() - self._started, self._left_s())

    def _left_s(self) -> float | None:
        under_way = [work * (1 - share) for work, _, share in self._begun.values()]
        left = sum(self._waiting.values()) + sum(under_way) + sum(work for _, work in self._likely.values())
        if not left:
            return 0.0
        work = self._work + sum(work * share for work, _, share in self._begun.values())
        seconds = self._seconds + sum(time.perf_counter() - since for _, since, _ in self._begun.values())
        if not self._tells or not work:
            return None
        return seconds / work * max(left / max(1, self.lanes, len(under_way)), *under_way, 0.0)
