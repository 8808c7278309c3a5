"""Ranks cache misses by their expected gain, and selects those that are worth a search."""

from __future__ import annotations

import dataclasses
import functools
import math
import threading
import time
from collections.abc import Callable, Iterable
from typing import Any

from scheduler.core.errors import NoCandidate
from scheduler.core.hardware import Hardware
from scheduler.core.records import Entry, Key, Miss, Record, preferred
from scheduler.model.constants import model_of
from scheduler.prediction.predict import predict
from scheduler.prediction.transfer import recheck
from scheduler.search.task import Task
from search_spaces import OPERATIONS, load_known
from search_spaces.operation import Operation
from search_spaces.problem import Problem

# Share of the total library time. Smaller expected gains are not worth a search.
MIN_GAIN = 0.005


@dataclasses.dataclass(frozen=True)
class Missed:
    """The current state of a miss.

    Attributes:
      operation, problem: None if they cannot be loaded here.
      covered_by: the schedule that a record has provided since; None if the miss is open.
      library_s: the library's predicted time of one call in seconds; None if it cannot be predicted.
      best_s: the best predicted time of another kernel; `library_s` if there is no such kernel; None if there is one
        without a predicted time.
      reason: why a value is None.
    """

    miss: Miss
    operation: Operation[Any] | None = None
    problem: Problem | None = None
    covered_by: Entry | None = None
    library_s: float | None = None
    best_s: float | None = None
    reason: str = ""

    @property
    def library_total_s(self) -> float:
        """Predicted library time of all lowered calls; 0 if unknown."""
        return self.miss.lowered * (self.library_s or 0.0)

    @property
    def gain_s(self) -> float | None:
        """Expected saving of the best schedule over all lowered calls; None if unknown."""
        if self.library_s is None or self.best_s is None:
            return None
        return self.miss.lowered * max(0.0, self.library_s - self.best_s)


def weigh(
    misses: Iterable[Miss],
    stored: Callable[[Operation[Any], Problem, Hardware], Iterable[Record]],
    chip: Callable[[str], Hardware | None],
) -> list[Missed]:
    """Returns the state of each miss, the largest expected gain first.

    Args:
      stored: returns the stored records for a prediction of a problem, the user's before the shipped.
      chip: returns the hardware of a `Hardware.id`, or None if it is unknown.
    """
    return sorted((_weighed(miss, stored, chip(miss.key.hardware)) for miss in misses), key=_order)


def _order(missed: Missed) -> tuple[float, ...]:
    # Misses with an unknown gain come between those with a gain and those without.
    gain_s = 1e-30 if missed.gain_s is None else missed.gain_s
    return -gain_s, -missed.library_total_s, -missed.miss.lowered


def _weighed(
    miss: Miss, stored: Callable[[Operation[Any], Problem, Hardware], Iterable[Record]], hardware: Hardware | None
) -> Missed:
    key = miss.key
    try:
        operation = load_known(key.operation)
        problem = operation.problem.from_canonical(key.problem)
    except (ValueError, RecursionError) as error:  # a store may contain any text
        return Missed(miss, reason=_unknown(miss, error))
    found = functools.partial(Missed, miss, operation, problem)
    if hardware is None:
        return found(reason="the chip is not in the table of chips")

    # The order of `dispatch.stored`.
    records = sorted(stored(operation, problem, hardware), key=lambda record: record.precedence)
    entries = (recheck(operation, problem, hardware, record) for record in records if record.key == key)
    if (entry := next((entry for entry in entries if isinstance(entry, Entry)), None)) is not None:
        return found(covered_by=entry)
    library_s = model_of(operation, operation.library, hardware).library_seconds(problem)
    kernels = frozenset(operation.backends) - {operation.library.backend}
    try:
        best = predict(operation, problem, hardware, backends=kernels, records=preferred(records).values())
    except NoCandidate as none:
        return found(None, library_s, library_s, str(none))
    if not best.ranked:
        return found(
            None, best.library_s, None, f"{best.backend} declares no footprint, so its time cannot be predicted"
        )
    return found(None, best.library_s, best.predicted_s)


def _unknown(miss: Miss, error: Exception) -> str:
    if miss.key.operation in OPERATIONS:
        return f"the problem is no longer valid for {miss.key.operation}: {error}"
    where = f"--own {miss.place}" if miss.place else "--own file.py:NAME, after saving it in a file"
    return f"{miss.key.operation} is user-defined: give {where} (also to see whether it was tuned since)"


def worth_tuning(missed: Iterable[Missed]) -> tuple[list[Missed], list[Missed]]:
    """Splits the open misses into those worth a search, largest expected gain first, and the others.

    The others are the last ones in the order, with a combined gain below `MIN_GAIN` of the total library time. Misses
    without a predicted gain are always worth a search.
    """
    ordered = sorted((one for one in missed if one.covered_by is None and one.problem is not None), key=_order)
    total_s, left_s, selected = sum(one.library_total_s for one in ordered), 0.0, set[Key]()
    for one in reversed(ordered):
        left_s += one.gain_s or 0.0
        if one.gain_s is None or (left_s >= MIN_GAIN * total_s and one.gain_s > 0):
            selected.add(one.miss.key)
    others = [one for one in ordered if one.miss.key not in selected]
    return [one for one in ordered if one.miss.key in selected], others


class TimeBudget:
    """A time budget, callable as `bound` of `jobs.run`: tasks start while time is left, limited to what remains.

    It can be called from any thread.

    Args:
      seconds: duration, from the start of the first task; None sets no limit.

    Attributes:
      left: number of tasks that were not started in time.
    """

    def __init__(self, seconds: float | None) -> None:
        self.left = 0
        self._lock = threading.Lock()
        self._seconds = math.inf if seconds is None else seconds
        self._until: float | None = None

    def __call__(self, task: Task) -> Task | None:
        with self._lock:
            now = time.monotonic()
            if self._until is None:
                self._until = now + self._seconds
            if (remaining := self._until - now) <= 0:
                self.left += 1
                return None
        seconds = task.options.seconds
        bound = min(remaining, math.inf if seconds is None else seconds)
        bounded = dataclasses.replace(task.options, seconds=None if bound == math.inf else bound)
        return dataclasses.replace(task, options=bounded)
