"""Similarity of problems by their canonical text: numbers are coordinates, which a database index can search.

A store does not know the meaning of a problem. Two problems can be similar only if they differ in positive integers
alone, so that their texts are equal except for these numbers.
"""

from __future__ import annotations

import dataclasses
import hashlib
import heapq
import math
import re
from collections.abc import Callable, Iterable, Iterator, Sequence

# A problem may have any number of sizes, but a table has this number of columns for them.
SUMS = 4
# Positive integer fields, positive integers written as text, and the extents of an array, as in "float32[200,256]".
_SIZE = re.compile(
    r'(?<=:)[1-9]\d{0,18}(?=[,}])|(?<=:")[1-9]\d{0,18}(?="[,}])|(?<=\[)[1-9]\d{0,18}(?=[,\]])'
    r"|(?<=\d,)[1-9]\d{0,18}(?=[,\]])"
)
# Bound on the rounding error of a sum of logarithms.
_ROUNDING = 1e-9
# Fractions of the requested distance, searched in order, because a large store has enough records nearby.
_STAGES = (1 / 16, 1 / 8, 1 / 4, 1 / 2, 1)


@dataclasses.dataclass(frozen=True)
class Coordinates:
    """Coordinates of a problem among those with the same pattern.

    Attributes:
      pattern: a digest of the text without its sizes.
      sums: sums of the binary logarithms of the sizes; size i is part of sum i modulo `SUMS`.
    """

    pattern: str
    sums: tuple[float, ...]

    @property
    def size(self) -> float:
        """The binary logarithm of the product of all sizes."""
        return math.fsum(self.sums)


def place_of(problem: str) -> Coordinates:
    """Returns the coordinates of a problem, given as canonical text; defined for any text."""
    sizes = [math.log2(int(size)) for size in _SIZE.findall(problem)]
    pattern = hashlib.sha256(_SIZE.sub("#", problem).encode(errors="surrogatepass")).hexdigest()[:16]
    return Coordinates(pattern, tuple(math.fsum(sizes[start::SUMS]) for start in range(SUMS)))


@dataclasses.dataclass(frozen=True)
class Near:
    """A query for the records of the problems that are most similar to a given problem.

    Attributes:
      operation, hardware: of the records.
      spellings: variants of the problem's text, with fields at their defaults included or omitted, as the texts of
        similar problems may have them; each with its distance to the problem in doublings.
      distance: returns the distance from the problem to a canonical text in doublings; infinite if it is not similar.
      within: maximum distance in doublings; the problem itself is excluded.
      most: maximum number of records.
    """

    operation: str
    hardware: str
    spellings: Sequence[tuple[str, float]]
    distance: Callable[[str], float]
    within: float
    most: int

    def places(self, within: float) -> list[tuple[Coordinates, float]]:
        """Returns places and radii to search; together they contain all similar problems within `within`."""
        return [(place_of(text), within - apart + _ROUNDING) for text, apart in self.spellings if apart <= within]

    @property
    def stages(self) -> tuple[float, ...]:
        """The distances to search in order, until enough records are found."""
        return tuple(self.within * share for share in _STAGES)

    def in_order(self, found: Iterable[tuple[float, str]], within: float) -> Iterator[str]:
        """Yields the texts of similar problems, nearest first.

        Args:
          found: pairs of a lower bound on a problem's distance and its text.
          within: maximum distance.
        """
        waiting: list[tuple[float, str]] = []
        for least, text in sorted(set(found)):
            while waiting and waiting[0][0] < least - _ROUNDING:
                yield heapq.heappop(waiting)[1]
            if 0 < (doublings := self.distance(text)) <= within:
                heapq.heappush(waiting, (doublings, text))
        while waiting:
            yield heapq.heappop(waiting)[1]
