"""What was measured of similar problems, and what that tells about one that was not."""

from __future__ import annotations

import dataclasses
import json
import math
from collections.abc import Iterable
from typing import Any

from scheduler.core.hardware import Hardware
from scheduler.core.records import Entry, Record
from scheduler.core.similar import Near
from search_spaces.operation import Operation
from search_spaces.problem import Problem

# Doublings of all sizes together up to which a problem's winner is worth a trial...
WORTH_A_TRIAL = 3.0
# ...and up to which it says something of another problem's times without one.
TELLING = 1.0
# So many are asked.
MOST = 3
# Each number that may be left out doubles the ways to write a problem.
MOST_SPELLINGS = 32


@dataclasses.dataclass(frozen=True)
class Neighbour:
    """A similar problem with its record.

    Attributes:
      problem: the similar one.
      record: what was measured of it.
      doublings: how far away it is (`distance`).
    """

    problem: Problem
    record: Record
    doublings: float

    @property
    def weight(self) -> float:
        """How much of what the model got wrong there it is expected to get wrong here: half at each doubling."""
        return 0.5**self.doublings

    def best(self, backend: str) -> Entry | None:
        return self.record.best(frozenset({backend}))


def distance(one: Problem, other: Problem) -> float:
    """Doublings between two problems, ``sum |log2(size / size)|`` over the numbers of their `coordinates`.

    Infinite where they differ in anything but numbers, or where a number is not positive and another.
    """
    total = 0.0
    here, there = one.coordinates(), other.coordinates()
    if here.keys() != there.keys():
        return math.inf
    for name, mine in here.items():
        its = there[name]
        if mine == its:
            continue
        if isinstance(mine, bool | str) or isinstance(its, bool | str) or min(mine, its) <= 0:
            return math.inf
        total += abs(math.log2(mine / its))
    return total


def near(operation: Operation[Any], problem: Problem, hardware: Hardware, within: float, most: int = MOST) -> Near:
    """What to ask a store for what `nearest` picks from all records.

    Args:
      within: only those at most so many doublings away.
      most: at most so many.
    """

    def from_here(text: str) -> float:
        try:
            return distance(problem, operation.problem.from_canonical(text))
        except ValueError:  # written by another version of the operation
            return math.inf

    return Near(operation.name, hardware.id, _spellings(problem, within), from_here, within, most)


def _spellings(problem: Problem, within: float) -> list[tuple[str, float]]:
    """The canonical text, and the same with numbers at their defaults written out, or those near these left out.

    Texts leave defaults out: where one of two similar problems has a default, the numbers of their texts do not pair.
    """
    told = problem.told()
    found: list[tuple[dict[str, Any], float]] = [(dict(told), 0.0)]
    for field in dataclasses.fields(problem):
        default, value = _number(field.default), _number(getattr(problem, field.name))
        if default is None or value is None:
            continue
        apart = abs(math.log2(value / default))
        others = [
            (fields | {field.name: field.default}, doublings)
            if apart == 0
            else ({name: fields[name] for name in fields if name != field.name}, doublings + apart)
            for fields, doublings in found
        ]
        found += [other for other in others if other[1] <= within]
        if len(found) > MOST_SPELLINGS:
            break
    return [(json.dumps(fields, sort_keys=True, separators=(",", ":")), doublings) for fields, doublings in found]


def _number(value: Any) -> int | None:
    """A positive integer, itself or as text."""
    if isinstance(value, str) and value.isdecimal():
        value = int(value)
    return value if type(value) is int and value > 0 else None


def nearest(
    operation: Operation[Any], problem: Problem, records: Iterable[Record], within: float, most: int = MOST
) -> list[Neighbour]:
    """The most similar problems among `records` of this operation on one chip, the nearest first; never itself.

    Args:
      within: only those at most so many doublings away.
      most: at most so many.
    """
    found = []
    for record in records:
        try:
            other = operation.problem.from_canonical(record.key.problem)
        except ValueError:  # written by another version of the operation
            continue
        doublings = distance(problem, other)
        if 0 < doublings <= within:
            found.append(Neighbour(other, record, doublings))
    return sorted(found, key=lambda near: (near.doublings, near.record.key.problem))[:most]
