"""A range of an extent as jobs and commands write it: ``m=1..8192``, in a job also ``m = [1, 8192]``."""

from __future__ import annotations

import re
import typing
from collections.abc import Mapping
from typing import Any

from search_spaces.operation import Operation
from search_spaces.problem import Problem

_RANGE = re.compile(r"\s*(-?\d+)\s*\.\.\s*(-?\d+)\s*")


def is_range(text: str) -> bool:
    """Whether a value is written as a range is."""
    return _RANGE.fullmatch(text) is not None


def value_text(name: str, value: Any) -> str:
    """What a job says of one field, as a command line has it.

    Raises:
      ValueError: it is neither a value nor a range.
    """
    if not isinstance(value, list):
        if not isinstance(value, (int, str)):
            raise ValueError(f"{name}={value!r} is no integer, truth value or string")
        return str(value)
    if len(value) != 2 or any(type(end) is not int for end in value):
        raise ValueError(
            f"{name}={value!r} is no range: that is two integers, the lowest and the highest value, [1, 8192]; several "
            "values are a [[problem]] each"
        )
    return f"{value[0]}..{value[1]}"


def ends_of(operation: Operation[Any], texts: Mapping[str, str]) -> tuple[str, Problem, Problem] | None:
    """The field that `texts` give a range, and the problems at its lowest and its highest value; None without a range.

    Raises:
      ValueError: two ranges, one of a field that is no extent, one whose ends are no problems or in another order, or
        what `Problem.parse` raises.
    """
    integers = {name for name, kind in typing.get_type_hints(operation.problem).items() if kind is int}
    named = {name: found for name, text in texts.items() if (found := _RANGE.fullmatch(text))}
    ranged = {name: found for name, found in named.items() if name in integers}
    if not ranged:
        for name in named:
            if name in typing.get_type_hints(operation.problem):
                raise ValueError(f"{name}={texts[name]}: {name} is no extent, and only an extent may be a range")
        return None
    if len(ranged) > 1:
        raise ValueError(
            f"{' and '.join(ranged)} are ranges, and a problem has one at most: write a problem for each value of one "
            "of them"
        )
    ((name, found),) = ranged.items()
    low, high = int(found[1]), int(found[2])
    if low >= high:
        other = f"write {name}={low}" if low == high else f"write {name}={high}..{low}"
        raise ValueError(f"{name}={low}..{high} is no range, which goes from a lowest to a higher value: {other}")
    if low < 1:
        raise ValueError(f"{name}={low}..{high}: an extent is at least 1")
    lowest, highest = (operation.problem.parse({**texts, name: str(value)}) for value in (low, high))
    if _shapes(lowest) == _shapes(highest):
        raise ValueError(
            f"{name}={low}..{high}: {name} is no extent, for no array's shape depends on it, and only an extent may be "
            "a range"
        )
    return name, lowest, highest


def _shapes(problem: Problem) -> list[tuple[int, ...]]:
    return [array.shape for array in (*problem.operands(), *problem.results())]
