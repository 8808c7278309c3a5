"""A range of one extent, whose problems its points answer: which values lie in it, how good it is, and it as text."""

from __future__ import annotations

import bisect
import dataclasses
import itertools
import json
import math

from scheduler.core.codec import BY_NAME, FORMAT, formatted, line_of, parsed, problem_to_json
from scheduler.core.decoding import maker
from scheduler.core.records import Environment, Schedule
from search_spaces import spelled


def with_range(lowest: str, field: str, low: int, high: int) -> str:
    """A problem as it is typed, ``m=1 n=64``, with a range in place of its value of one field: ``m=1..8192 n=64``."""
    words, ranged = lowest.split(), f"{field}={low}..{high}"
    if (word := f"{field}={low}") not in words:  # at its default, it is not told
        return " ".join([ranged, *words])
    return " ".join(ranged if each == word else each for each in words)


@dataclasses.dataclass(frozen=True)
class HeldOut:
    """A value within a range that is none of its points, searched to learn how good the range's answer is.

    Attributes:
      value: of the extent.
      backend, schedule: what the range answers there.
      answered_s, best_s, library_s: seconds of that answer, of the fastest that the search found, and of the library's
        fastest program, None where that did not run; all from the same measurements.
    """

    value: int
    backend: str
    schedule: Schedule
    answered_s: float
    best_s: float
    library_s: float | None

    @property
    def of_best(self) -> float:
        """The speed of the range's answer as a share of the best."""
        return self.best_s / self.answered_s


@dataclasses.dataclass(frozen=True)
class Range:
    """Problems that differ in one extent: those between two neighbouring points are answered by the points' records.

    Attributes:
      operation, hardware: as in `Key`.
      problem: what they have in common: `identity.family_of`, the canonical problem without that field.
      field: the extent's name.
      low, high: the lowest and the highest value that were asked for.
      points: the values that have records, ascending. Where there are none at an end, because nothing could run
        there, nothing is answered there either.
      environment: where and when the last of it was measured.
      held_out: what tells how good the answers are; none where the points leave no value between them.

    Raises:
      ValueError: fewer than two points, or some in another order or beyond the ends.
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
        lowest = spelled(self.operation, json.dumps(fields, sort_keys=True, separators=(",", ":")))
        return f"{self.operation} {with_range(lowest, self.field, self.low, self.high)}"

    def around(self, value: int) -> tuple[int, int] | None:
        """The two points next to a value between them; None where it is a point itself, or beyond all of them."""
        place = bisect.bisect_left(self.points, value)
        if place in (0, len(self.points)) or self.points[place] == value:
            return None
        return self.points[place - 1], self.points[place]

    @property
    def worst(self) -> HeldOut | None:
        """The held-out value whose answer is the farthest from the best."""
        return min(self.held_out, key=lambda held: held.of_best, default=None)

    @property
    def of_best(self) -> float | None:
        """The geometric mean of `HeldOut.of_best`; None where nothing was held out."""
        return _geomean([held.of_best for held in self.held_out])

    @property
    def of_library(self) -> float | None:
        """Likewise of the speed of the answers over the library's."""
        return _geomean([held.library_s / held.answered_s for held in self.held_out if held.library_s is not None])


def _geomean(ratios: list[float]) -> float | None:
    return math.exp(sum(map(math.log, ratios)) / len(ratios)) if ratios else None


def range_to_text(of: Range) -> str:
    """One line of JSON, always the same for the same range; raises as `codec.record_to_text` does."""
    fields = {
        "format": FORMAT,
        **vars(of),
        "problem": problem_to_json(of.problem),
        "environment": vars(of.environment),
        "held_out": [vars(held) | {"schedule": dict(sorted(held.schedule.items()))} for held in of.held_out],
    }
    return line_of(fields, _range)


def range_from_text(line: str) -> Range:
    """The inverse of `range_to_text`; raises as `codec.record_from_text` does."""
    return _range(parsed(line))


def ranges_from_text(text: str) -> tuple[Range, ...]:
    """The ranges of a list in JSON; raises as `codec.record_from_text` does."""
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
