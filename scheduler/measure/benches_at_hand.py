"""The benches of the problems at hand, each made anew where a candidate may have damaged it: no other one pays."""

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
    """A bench, and whether a candidate, of whichever problem, ran since it was made."""

    bench: Bench
    used: bool = False


class BenchesAtHand(Generic[What]):
    """One bench for each problem that is under way.

    Args:
      make: the bench of an operation, a problem and what operands meet, however these are named.
    """

    def __init__(self, make: Callable[[What], Bench]) -> None:
        self._make = make
        self._benches: dict[What, _AtHand] = {}

    @measurements()
    def ask(self, what: What, question: Callable[[Bench], O], *, beside: Collection[What] = ()) -> O:
        """The answer of the bench of `what`.

        A candidate is wrong only if it is so on operands and a reference that nobody damaged: one before it may have
        written where it should not.

        Args:
          beside: of which problems benches are kept.
        """
        # What the others hold of the device is free before this one's bench is made.
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
        """Frees what the benches hold of the device."""
        self._benches = {}

    def _of(self, what: What) -> _AtHand:
        if what not in self._benches:
            self._benches[what] = _AtHand(self._make(what))
        return self._benches[what]
