"""Problems close to each other: ranges of one extent, and similarity by all extents."""

from __future__ import annotations

import bisect
import dataclasses
import hashlib
import heapq
import itertools
import json
import math
import re
from collections.abc import Callable, Iterable, Iterator, Sequence

from scheduler.core.codec import BY_NAME, FORMAT, formatted, line_of, maker, parsed, problem_to_json
from scheduler.core.records import Environment, Schedule
from search_spaces import format_problem

# ------------------------------------------------------------------------------
# A range: records at some values of one extent, which also serve the values between them; its quality and its text.


def with_range(lowest: str, field: str, low: int, high: int) -> str:
    """Formats a problem, ``m=1 n=64``, with a range instead of the value of one field: ``m=1..8192 n=64``."""
    words, ranged = lowest.split(), f"{field}={low}..{high}"
    if (word := f"{field}={low}") not in words:  # fields at their defaults are omitted
        return " ".join([ranged, *words])
    return " ".join(ranged if each == word else each for each in words)


@dataclasses.dataclass(frozen=True)
class HeldOut:
    """A value of the range that is not a point, searched to validate the schedule that the range selects.

    Attributes:
      value: of the extent.
      backend, schedule: the range's selection.
      answered_s, best_s, library_s: times in seconds of that selection, of the fastest schedule in the search, and of
        the library's fastest program (None if it did not run), all from the same measurements.
    """

    value: int
    backend: str
    schedule: Schedule
    answered_s: float
    best_s: float
    library_s: float | None

    @property
    def of_best(self) -> float:
        """The speed of the range's selection as a fraction of the best speed."""
        return self.best_s / self.answered_s


@dataclasses.dataclass(frozen=True)
class Range:
    """Problems that differ in one extent: a problem between two neighbouring points uses the records of these points.

    Attributes:
      operation, hardware: as in `Key`.
      problem: what the problems share: `records.family_of`, the canonical problem without `field`.
      field: the extent's name.
      low, high: the requested lowest and highest value.
      points: the values with records, ascending. If nothing could run near an end, the points stop before that end, and
        the range does not apply beyond them.
      environment: where and when the last point was measured.
      held_out: validation results; empty if there is no value between the points.

    Raises:
      ValueError: fewer than two points, or points that are not ascending or outside of `low` and `high`.
    """

    operation: str
    hardware: str
    problem: str
    field: str
    low: int
    high: int
    points: tuple[int, ...]
    environment: Environment
    held_out: tuple[HeldOut, ...] = ()

    def __post_init__(self) -> None:
        ascending = all(below < above for below, above in itertools.pairwise((self.low - 1, *self.points)))
        if not isinstance(fields := problem_to_json(self.problem), dict) or self.field in fields:
            raise ValueError(f"problem: one without {self.field} is wanted, found {self.problem:.60}")
        if self.low < 1 or len(self.points) < 2 or not ascending or self.points[-1] > self.high:
            ends = f"from {max(self.low, 1)} to {self.high}"
            raise ValueError(f"points: at least two are wanted, ascending {ends}, found {list(self.points)}")

    def __str__(self) -> str:
        fields = json.loads(self.problem) | {self.field: self.low}
        lowest = format_problem(self.operation, json.dumps(fields, sort_keys=True, separators=(",", ":")))
        return f"{self.operation} {with_range(lowest, self.field, self.low, self.high)}"

    def around(self, value: int) -> tuple[int, int] | None:
        """Returns the two neighbouring points of a value between them; None for a point or a value outside of all."""
        place = bisect.bisect_left(self.points, value)
        if place in (0, len(self.points)) or self.points[place] == value:
            return None
        return self.points[place - 1], self.points[place]

    @property
    def worst(self) -> HeldOut | None:
        """The held-out value with the selection farthest from the best."""
        return min(self.held_out, key=lambda held: held.of_best, default=None)

    @property
    def of_best(self) -> float | None:
        """The geometric mean of `HeldOut.of_best`, or None without held-out values."""
        return _geomean([held.of_best for held in self.held_out])

    @property
    def of_library(self) -> float | None:
        """The geometric mean of the selections' speedups over the library, or None."""
        return _geomean([held.library_s / held.answered_s for held in self.held_out if held.library_s is not None])


def _geomean(ratios: list[float]) -> float | None:
    return math.exp(sum(map(math.log, ratios)) / len(ratios)) if ratios else None


def range_to_text(of: Range) -> str:
    """Returns one line of JSON, deterministic for the same range; raises as `codec.record_to_text` does."""
    fields = {
        "format": FORMAT,
        **vars(of),
        "problem": problem_to_json(of.problem),
        "environment": vars(of.environment),
        "held_out": [vars(held) | {"schedule": dict(sorted(held.schedule.items()))} for held in of.held_out],
    }
    return line_of(fields, _range)


def range_from_text(line: str) -> Range:
    """Parses the result of `range_to_text`; raises as `codec.record_from_text` does."""
    return _range(parsed(line))


def ranges_from_text(text: str) -> tuple[Range, ...]:
    """Parses a JSON list of ranges; raises as `codec.record_from_text` does."""
    found = parsed(text)
    if not isinstance(found, list):
        raise ValueError(f"a list of ranges is wanted, found {type(found).__name__}")
    return tuple(range_from_text(json.dumps(item)) for item in found)


def is_range(line: str) -> bool:
    """Whether a line of exported text is a range rather than a record."""
    fields = parsed(line)
    return isinstance(fields, dict) and "points" in fields


_RANGE = maker(Range, BY_NAME, optional=("held_out",))


def _range(value: object) -> Range:
    return _RANGE(formatted(value))


# ------------------------------------------------------------------------------
# Similarity of problems by their canonical text: numbers are coordinates, which a database index can search.
#
# A store does not know the meaning of a problem. Two problems can be similar only if they differ in positive integers
# alone, so that their texts are equal except for these numbers.

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
class Place:
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


def place_of(problem: str) -> Place:
    """Returns the coordinates of a problem, given as canonical text; defined for any text."""
    sizes = [math.log2(int(size)) for size in _SIZE.findall(problem)]
    pattern = hashlib.sha256(_SIZE.sub("#", problem).encode(errors="surrogatepass")).hexdigest()[:16]
    return Place(pattern, tuple(math.fsum(sizes[start::SUMS]) for start in range(SUMS)))


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

    def places(self, within: float) -> list[tuple[Place, float]]:
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
