"""Problems with less to do than another, for whoever goes through each step of a grid: estimators, interpreters."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np

from scheduler.core.hardware import Hardware
from scheduler.core.records import Schedule
from scheduler.model.feasibility import illegal
from search_spaces.kernel import Kernel
from search_spaces.operation import Operation
from search_spaces.problem import Problem
from search_spaces.sharding import Sharding
from search_spaces.space import Columns


@dataclasses.dataclass(frozen=True)
class Reduced:
    """Two problems of the same tiles as a whole one, and fewer of them: its time lies on the line through theirs.

    Attributes:
      larger, smaller: the second has half as much to do as the first.
      times: how many times as much as the larger the whole one has.
    """

    larger: Problem
    smaller: Problem
    times: int

    def whole(self, larger: float, smaller: float) -> float:
        """Of the whole problem, by what the two take: what a grid takes once, and what each of its tiles takes."""
        return larger + (larger - smaller) * 2 * (self.times - 1)


def steps(kernel: Kernel[Any, Any], problem: Problem, schedule: Schedule, hardware: Hardware) -> float | None:
    """Steps of the whole grid of one launch; None where it is not legal, and where no footprint tells."""
    if illegal(kernel, problem, hardware, schedule) is not None:
        return None
    one = Columns.of([kernel.space(problem, hardware.target).decode(schedule)])
    footprint = kernel.footprint(problem, one, hardware.target)
    if footprint is None:
        return None
    return math.prod(float(np.ravel(each)[0]) for each in (*footprint.grid, footprint.steps))


def reduced(
    operation: Operation[Any], problem: Problem, size: Callable[[Problem], float | None], most: float
) -> Reduced | None:
    """`problem` with at most so much to do, and that with half as much; None where there is none.

    What may be divided over devices without a sum (`Operation.shard`) is independent: halves are taken of the longest
    such axis, as long as a half has exactly half the size, so that tiles stay whole; two are left at least along each,
    as blocks of a single one may be loaded once for all.

    Args:
      size: of a problem, in steps, say; None where what is asked about cannot do it.
    """
    sharding, whole_size = operation.sharding(problem), size(problem)
    if sharding is None or whole_size is None:
        return None

    def halves(whole: Problem) -> Iterator[Problem]:
        have, extents = size(whole), sharding.extents(whole)
        for letter in sorted(sharding.divided, key=lambda letter: -extents.get(letter, 0)):
            half = _half(sharding, whole, letter)
            quarter = None if half is None else _half(sharding, half, letter)
            if have is not None and half is not None and quarter is not None:
                left, still = size(half), size(quarter)
                if left is not None and still is not None and have == 2 * left == 4 * still:
                    yield half

    larger, times = problem, 1
    while whole_size / times > most:
        half = next(halves(larger), None)
        if half is None:
            return None
        larger, times = half, 2 * times
    smaller = next(halves(larger), None)
    return None if smaller is None else Reduced(larger, smaller, times)


def _half(sharding: Sharding[Any], problem: Problem, letter: str) -> Problem | None:
    """One of two equal parts along an axis; None where there are none."""
    try:
        extents = sharding.extents(problem)
        if extents[letter] % 2:
            return None
        half = sharding.local(problem, extents | {letter: extents[letter] // 2})
        return half if sharding.extents(half)[letter] == extents[letter] // 2 else None
    except (ValueError, KeyError):  # it is no problem any more, or has no such axis
        return None


def smaller(problem: Problem, fits: Callable[[Problem], bool]) -> Problem | None:
    """A problem that `fits`: this one, its largest extent halved again and again; None where that leads to none."""
    while True:
        extents = {name: value for name, value in vars(problem).items() if type(value) is int and value > 1}
        if not extents:
            return None
        name = max(extents, key=extents.__getitem__)
        try:
            problem = dataclasses.replace(problem, **{name: extents[name] // 2})
            if fits(problem):
                return problem
        except (TypeError, ValueError):  # it is no problem any more
            return None
