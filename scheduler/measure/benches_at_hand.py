"""Caches the benches of the current problems, and rebuilds a bench that a candidate may have damaged."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Collection, Hashable
from typing import Generic, TypeVar

from scheduler.core.records import Failure, Outcome
from scheduler.measure.bench import Bench
from search_spaces.configuration import measurements

What = TypeVar("What", bound=Hashable)
O = TypeVar("O", bound=Outcome | None)  # noqa: E741


@dataclasses.dataclass
class _AtHand:
    """A bench, and whether any candidate, of any problem, has run since it was made."""

    bench: Bench
    used: bool = False


class BenchesAtHand(Generic[What]):
    """Caches one bench for each problem that is being searched.

    Args:
      make: creates the bench of a key, which identifies the operation, the problem and the cache state of its operands.
    """

    def __init__(self, make: Callable[[What], Bench]) -> None:
        self._make = make
        self._benches: dict[What, _AtHand] = {}

    @measurements()
    def ask(self, what: What, question: Callable[[Bench], O], *, beside: Collection[What] = ()) -> O:
        """Calls `question` with the bench of `what` and returns the result.

        A candidate fails verification only if it is wrong with intact operands and an intact reference. An earlier
        candidate may have written out of bounds and damaged them; the bench is then rebuilt and the question is
        repeated.

        Args:
          beside: the other problems for which benches are kept.
        """
        # Free the device memory of other benches before this bench is made.
        self._benches = {held: bench for held, bench in self._benches.items() if held == what or held in beside}
        answer = question(self._of(what).bench)
        if isinstance(answer, Failure) and answer.stage == "verify":
            at_hand = self._of(what)
            if at_hand.used and not at_hand.bench.intact():
                del at_hand, self._benches[what]
                answer = question(self._of(what).bench)
        for at_hand in self._benches.values():
            at_hand.used = True
        return answer

    def drop(self) -> None:
        """Frees the device memory of all benches."""
        self._benches = {}

    def _of(self, what: What) -> _AtHand:
        if what not in self._benches:
            self._benches[what] = _AtHand(self._make(what))
        return self._benches[what]
