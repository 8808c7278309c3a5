"""Caches the benches of the current problems, and rebuilds a bench that a candidate may have damaged."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Collection, Hashable
from typing import Generic, TypeVar

from scheduler.core.records import Failure, Outcome
from scheduler.measure.bench import Bench
from scheduler.measure.protocol import Finding
from search_spaces.configuration import measurements

Key = TypeVar("Key", bound=Hashable)
O = TypeVar("O", bound=Outcome | Finding)  # noqa: E741


@dataclasses.dataclass
class _CachedBench:
    """A bench, and whether any candidate, of any problem, has run since it was made."""

    bench: Bench
    used: bool = False


class BenchCache(Generic[Key]):
    """Caches one bench for each problem that is being searched.

    Args:
      make: creates the bench of a key, which identifies the operation, the problem and the cache state of its operands.
    """

    def __init__(self, make: Callable[[Key], Bench]) -> None:
        self._make = make
        self._benches: dict[Key, _CachedBench] = {}

    @measurements()
    def ask(self, key: Key, question: Callable[[Bench], O], *, others: Collection[Key] = ()) -> O:
        """Calls `question` with the bench of `key` and returns the result.

        A candidate fails verification only if it is wrong with intact operands and an intact reference. An earlier
        candidate may have written out of bounds and damaged them; the bench is then rebuilt and the question is
        repeated.

        Args:
          others: the other problems for which benches are kept.
        """
        # Free the device memory of other benches before this bench is made.
        self._benches = {held: bench for held, bench in self._benches.items() if held == key or held in others}
        answer = question(self._of(key).bench)
        if isinstance(answer, Failure) and answer.stage == "verify":
            cached = self._of(key)
            if cached.used and not cached.bench.intact():
                del cached, self._benches[key]
                answer = question(self._of(key).bench)
        for cached in self._benches.values():
            cached.used = True
        return answer

    def drop(self) -> None:
        """Frees the device memory of all benches."""
        self._benches = {}

    def _of(self, key: Key) -> _CachedBench:
        if key not in self._benches:
            self._benches[key] = _CachedBench(self._make(key))
        return self._benches[key]
