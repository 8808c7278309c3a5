"""Derives smaller problems for tools that execute every step of a grid: estimators and interpreters."""

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
    """Two smaller problems with the same tiles as a whole problem, from which its time is extrapolated linearly.

    Attributes:
      larger, smaller: the second has half the work of the first.
      times: the work of the whole problem divided by that of `larger`.
    """

    larger: Problem
    smaller: Problem
    times: int

    def whole(self, larger: float, smaller: float) -> float:
        """Extrapolates a value of the whole problem from the values of `larger` and `smaller`.

        The value is linear in the work: a fixed part per grid, and a part per tile.
        """
        return larger + (larger - smaller) * 2 * (self.times - 1)


def steps(kernel: Kernel[Any, Any], problem: Problem, schedule: Schedule, hardware: Hardware) -> float | None:
    """Returns the steps of the grid of one launch; None if the schedule is illegal or there is no footprint."""
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
    """Shrinks `problem` to at most `most` work, and to half of that; returns None if that is impossible.

    Axes that may be sharded over devices without a sum (`Operation.shard`) are independent. The longest such axis is
    halved, if a half has exactly half the size, so that tiles stay whole. At least two blocks stay along each axis,
    because a single block may be loaded only once for the whole grid.

    Args:
      size: returns the work of a problem, for example in steps; None if the candidate does not support the problem.
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
    """Returns one of two equal parts of a problem along an axis; None if it cannot be divided."""
    try:
        extents = sharding.extents(problem)
        if extents[letter] % 2:
            return None
        half = sharding.local(problem, extents | {letter: extents[letter] // 2})
        return half if sharding.extents(half)[letter] == extents[letter] // 2 else None
    except (ValueError, KeyError):  # invalid problem, or no such axis
        return None


def smaller(problem: Problem, fits: Callable[[Problem], bool]) -> Problem | None:
    """Halves the largest extent until the problem `fits`, and returns that problem; None if none fits."""
    while True:
        extents = {name: value for name, value in vars(problem).items() if type(value) is int and value > 1}
        if not extents:
            return None
        name = max(extents, key=extents.__getitem__)
        try:
            problem = dataclasses.replace(problem, **{name: extents[name] // 2})
            if fits(problem):
                return problem
        except (TypeError, ValueError):  # not a valid problem
            return None
