"""How far a search is, and how long the rest of it takes."""

from __future__ import annotations

import dataclasses
import math
import statistics
import time
from collections.abc import Callable
from typing import TypeVar

from scheduler.core.records import Trial

R = TypeVar("R")

# Trials before the time left is estimated.
FEWEST_TO_TELL = 3


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
