"""A range: records at some values of one extent, which also serve the values between them; its quality and its text."""

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
      problem: what the problems share: `identity.family_of`, the canonical problem without `field`.
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
        lowest = spelled(self.operation, json.dumps(fields, sort_keys=True, separators=(",", ":")))
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
