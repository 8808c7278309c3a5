"""Similar problems by their canonical text: the numbers in it are coordinates, which a database can search by an index.

A store does not know what a problem means. Two problems are similar only if they differ in positive numbers alone, so
their texts are equal but for those numbers.
"""

from __future__ import annotations

import dataclasses
import hashlib
import heapq
import math
import re
from collections.abc import Callable, Iterable, Iterator, Sequence

# A problem may have any number of sizes, a table has so many columns for them.
SUMS = 4
# A field that is a positive integer, one written as text, and the extents of an array, as in "float32[200,256]".
_SIZE = re.compile(
    r'(?<=:)[1-9]\d{0,18}(?=[,}])|(?<=:")[1-9]\d{0,18}(?="[,}])|(?<=\[)[1-9]\d{0,18}(?=[,\]])'
    r"|(?<=\d,)[1-9]\d{0,18}(?=[,\]])"
)
# What rounding may add to or take from a sum of logarithms.
_ROUNDING = 1e-9
# Of the distance that is asked for: so much is searched, one after the other, because a large store has enough nearby.
_STAGES = (1 / 16, 1 / 8, 1 / 4, 1 / 2, 1)


@dataclasses.dataclass(frozen=True)
class Place:
    """Where a problem lies among those of its pattern.

    Attributes:
      pattern: a digest of the text without its sizes.
      sums: sums of the binary logarithms of the sizes; the i-th size is part of sum i modulo `SUMS`.
    """

    pattern: str
    sums: tuple[float, ...]

    @property
    def size(self) -> float:
        """The binary logarithm of the product of all sizes."""
        return math.fsum(self.sums)


def place_of(problem: str) -> Place:
    """The place of a problem by its canonical text; any text has one."""
    sizes = [math.log2(int(size)) for size in _SIZE.findall(problem)]
    pattern = hashlib.sha256(_SIZE.sub("#", problem).encode(errors="surrogatepass")).hexdigest()[:16]
    return Place(pattern, tuple(math.fsum(sizes[start::SUMS]) for start in range(SUMS)))


@dataclasses.dataclass(frozen=True)
class Near:
    """A question for the records of the problems that are most similar to one.

    Attributes:
      operation, hardware: of all of these records.
      spellings: the problem's text, and likewise with fields at their defaults written out or left out, as similar
        problems have them; beside each, how many doublings lie between it and the problem.
      distance: doublings from the problem to one of a canonical text; infinite where that is not similar.
      within: at most so many doublings away, and never the problem itself.
      most: at most so many records.
    """

    operation: str
    hardware: str
    spellings: Sequence[tuple[str, float]]
    distance: Callable[[str], float]
    within: float
    most: int

    def places(self, within: float) -> list[tuple[Place, float]]:
        """Around which places to search, and how far: no similar problem within `within` lies outside."""
        return [(place_of(text), within - apart + _ROUNDING) for text, apart in self.spellings if apart <= within]

    @property
    def stages(self) -> tuple[float, ...]:
        """How far to search first, and then, unless that was enough."""
        return tuple(self.within * share for share in _STAGES)

    def in_order(self, found: Iterable[tuple[float, str]], within: float) -> Iterator[str]:
        """The texts of similar problems, the nearest first.

        Args:
          found: the least distance that a problem may have, and its text.
          within: drop what lies farther away.
        """
        waiting: list[tuple[float, str]] = []
        for least, text in sorted(set(found)):
            while waiting and waiting[0][0] < least - _ROUNDING:
                yield heapq.heappop(waiting)[1]
            if 0 < (doublings := self.distance(text)) <= within:
                heapq.heappush(waiting, (doublings, text))
        while waiting:
            yield heapq.heappop(waiting)[1]
