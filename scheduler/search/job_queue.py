"""Which problem of a job is searched next, where several places ask."""

from __future__ import annotations

import dataclasses
import math
import threading
import time
from collections.abc import Iterable

from scheduler.core.hardware import Hardware
from scheduler.core.interrupts import WAKE_S
from scheduler.core.records import Record
from scheduler.model.constants import model_of
from scheduler.search.places import Place
from scheduler.search.task import Task

# A problem that another process is at is asked for again after so long.
AGAIN_S = 1.0
# A place takes one problem and not several at once, as it may have lanes for, while others are still starting; for so
# long.
STARTING_S = 60.0
# What a search takes beside its device: so long a trial, and one of the library alone some trials.
TRIAL_S = 0.25
LIBRARY_TRIALS = 3


@dataclasses.dataclass(eq=False)
class Queued:
    """A problem that waits for its search, or is under way.

    Attributes:
      expected_s: what the search is expected to take.
      held: the record that the store has of it, or why that is none that holds.
      lost_on: the place that was lost with its search; None where that did not happen.
      busy: how often another process was at it.
      not_before_s: by `time.monotonic`.
    """

    task: Task
    expected_s: float
    held: Record | str
    lost_on: Place | None = None
    busy: int = 0
    not_before_s: float = 0.0


class Queue:
    """What waits, for threads of several places.

    The problems are dealt out: a place with several under way leaves the last ones to places that have fewer. A place
    has `opened` before anything is taken for it.

    Args:
      places: how many there are.
    """

    def __init__(self, places: int) -> None:
        self._changed = threading.Condition()
        self._places = places
        self._waiting: list[Queued] = []
        self._at: dict[int, _At] = {}  # by the identity of a place that has opened
        self._began = time.monotonic()
        self._ended = False

    def put(self, searches: Iterable[Queued]) -> None:
        """What is to be searched, in this order."""
        with self._changed:
            self._waiting += searches
            self._changed.notify_all()

    def opened(self, place: Place) -> None:
        """`place` is there, for the first time or again."""
        with self._changed:
            self._at.setdefault(id(place), _At(place)).lost = False

    def take(self, place: Place) -> Queued | None:
        """The next one for `place`, or None once all have ended, or it is lost. Waits where nothing can be begun now.

        It is to be followed by `done`, `put_aside` or `lose`.
        """
        with self._changed:
            at = self._at[id(place)]
            while (
                not self._ended and not at.lost and (self._waiting or any(each.under_way for each in self._at.values()))
            ):
                if (found := self._next(at)) is not None:
                    self._waiting.remove(found)
                    at.under_way += 1
                    return found
                self._changed.wait(WAKE_S)
        return None

    def done(self, place: Place) -> None:
        """What was under way at `place` has ended."""
        self._give_back(place)

    def put_aside(self, search: Queued, place: Place) -> None:
        """Another process is at it: it is asked for again, after all others have begun."""
        search.busy += 1
        search.not_before_s = time.monotonic() + AGAIN_S
        self._give_back(place, search, -1)

    def lose(self, search: Queued, place: Place) -> None:
        """`place` was lost while it was under way there: it is the next one for another, or for this one once that has
        `opened` again.
        """
        with self._changed:
            search.lost_on, self._at[id(place)].lost = place, True
            self._give_back(place, search, 0)

    def leave(self, place: Place) -> list[Queued]:
        """A place is used no more; what waits still, where it was the last."""
        with self._changed:
            self._at.pop(id(place), None)
            self._places -= 1
            self._changed.notify_all()
            if self._places:
                return []
            left, self._waiting = self._waiting, []
            return left

    def end(self) -> None:
        """Nothing more is begun."""
        with self._changed:
            self._ended = True
            self._changed.notify_all()

    def _give_back(self, place: Place, search: Queued | None = None, at: int = 0) -> None:
        with self._changed:
            self._at[id(place)].under_way -= 1
            if search is not None:
                self._waiting.insert(at if at >= 0 else len(self._waiting), search)
            self._changed.notify_all()

    def _next(self, at: _At) -> Queued | None:
        fitting = [search for search in self._waiting if search.lost_on is not at.place or self._places == 1]
        if at.under_way and len(fitting) <= self._left_to_others(at):
            return None
        if free := [search for search in fitting if not search.busy]:
            return free[0]
        now = time.monotonic()
        return next((search for search in fitting if search.not_before_s <= now), None)

    def _left_to_others(self, at: _At) -> float:
        """How many problems places with fewer under way take, before this one is to have one more."""
        others = [each for each in self._at.values() if each is not at]
        starting = self._places - 1 - len(others)
        if starting > 0 and time.monotonic() - self._began < STARTING_S:
            return math.inf
        return sum(max(0, min(at.under_way, each.place.searches) - each.under_way) for each in others)


@dataclasses.dataclass(eq=False)
class _At:
    """A place, how many problems are under way there, and whether it takes none until it has opened again."""

    place: Place
    under_way: int = 0
    lost: bool = False


def expected_s(task: Task, hardware: Hardware) -> float:
    """What a search is expected to take, in seconds, to compare it with others: trials, and the device's time in each.

    The device's is the library's as the model sees it, for every repetition of a trial.
    """
    operation, problem = task.operation, task.problem
    library = operation.library
    beside = any(
        (task.backends is None or kernel.backend in task.backends) and kernel.supports(problem, hardware.target) is None
        for kernel in operation.kernels
        if kernel is not library
    )
    trials = task.budget if beside else min(task.budget, LIBRARY_TRIALS)
    run_s = model_of(operation, library, hardware).library_seconds(problem)
    search_s = trials * (TRIAL_S + hardware.abilities.repetitions[0] * run_s)
    return search_s if task.seconds is None else min(search_s, task.seconds)
