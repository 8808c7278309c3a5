"""The queue of a job: selects the next problem for each of several executors (places)."""

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

# Delay before retrying a problem that another process is tuning.
AGAIN_S = 1.0
# While other places are still starting, a place takes only one problem, even if it has several lanes. This lasts at
# most so long.
STARTING_S = 60.0
# Time of a trial without its device time, and the number of trials of a search with the library alone.
TRIAL_S = 0.25
LIBRARY_TRIALS = 3


@dataclasses.dataclass(eq=False)
class Queued:
    """A problem that is waiting or running.

    Attributes:
      expected_s: expected duration of the search.
      held: the stored record, or the reason why there is no valid one.
      lost_on: the place that was lost while it ran this search; None if there is none.
      busy: how often another process was found tuning the problem.
      not_before_s: earliest time of the next attempt, by `time.monotonic`.
    """

    task: Task
    expected_s: float
    held: Record | str
    lost_on: Place | None = None
    busy: int = 0
    not_before_s: float = 0.0


class Queue:
    """The waiting problems of a job, shared by threads of several places.

    The queue balances the load: a place that runs several problems leaves the last ones to places that run fewer. Call
    `opened` for a place before taking problems for it.

    Args:
      places: number of places.
    """

    def __init__(self, places: int) -> None:
        self._changed = threading.Condition()
        self._places = places
        self._waiting: list[Queued] = []
        self._at: dict[int, _At] = {}  # keyed by the id of an opened place
        self._began = time.monotonic()
        self._ended = False

    def put(self, searches: Iterable[Queued]) -> None:
        """Appends searches, in this order."""
        with self._changed:
            self._waiting += searches
            self._changed.notify_all()

    def opened(self, place: Place) -> None:
        """Marks `place` as available, for the first time or again."""
        with self._changed:
            self._at.setdefault(id(place), _At(place)).lost = False

    def take(self, place: Place) -> Queued | None:
        """Returns the next search for `place`, or None when all have ended or the place is lost. Blocks.

        It blocks while no search can start at this place. Call `done`, `put_aside` or `lose` afterwards.
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
        """Marks a search that ran at `place` as finished."""
        self._give_back(place)

    def put_aside(self, search: Queued, place: Place) -> None:
        """Requeues a search that another process is running. It is retried after all others have started."""
        search.busy += 1
        search.not_before_s = time.monotonic() + AGAIN_S
        self._give_back(place, search, -1)

    def lose(self, search: Queued, place: Place) -> None:
        """Requeues a search that was running when `place` was lost.

        Another place takes it next, or the same place after it is `opened` again.
        """
        with self._changed:
            search.lost_on, self._at[id(place)].lost = place, True
            self._give_back(place, search, 0)

    def leave(self, place: Place) -> list[Queued]:
        """Removes a place for good. Returns the waiting searches if it was the last place."""
        with self._changed:
            self._at.pop(id(place), None)
            self._places -= 1
            self._changed.notify_all()
            if self._places:
                return []
            left, self._waiting = self._waiting, []
            return left

    def end(self) -> None:
        """Stops starting searches."""
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
        """Returns how many problems to leave to places that run fewer, before this place takes one more."""
        others = [each for each in self._at.values() if each is not at]
        starting = self._places - 1 - len(others)
        if starting > 0 and time.monotonic() - self._began < STARTING_S:
            return math.inf
        return sum(max(0, min(at.under_way, each.place.searches) - each.under_way) for each in others)


@dataclasses.dataclass(eq=False)
class _At:
    """A place, the number of searches running there, and whether it takes none until it is opened again."""

    place: Place
    under_way: int = 0
    lost: bool = False


def expected_s(task: Task, hardware: Hardware) -> float:
    """Returns the expected duration of a search in seconds, for ordering.

    Each trial takes a fixed overhead and its device time: the library's predicted time, for every repetition.
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
