"""What was measured of similar problems, and what that tells about one that was not."""

from __future__ import annotations

import dataclasses
import json
import math
from collections.abc import Iterable
from typing import Any

from scheduler.core.records import Entry, Record
from search_spaces.operation import Operation
from search_spaces.problem import Problem

# Doublings of all sizes together up to which a problem's winner is worth a trial...
WORTH_A_TRIAL = 3.0
# ...and up to which it says something of another problem's times without one.
TELLING = 1.0


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


def nearest(
    operation: Operation[Any], problem: Problem, records: Iterable[Record], within: float, most: int = 3
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
    return sorted(found, key=lambda near: (near.doublings, json.dumps(near.record.key.problem)))[:most]
