"""Parses ranges of an extent: ``m=1..8192`` on the command line and in jobs, ``m = [1, 8192]`` in jobs."""

from __future__ import annotations

import re
import typing
from collections.abc import Mapping
from typing import Any

from search_spaces.operation import Operation
from search_spaces.problem import Problem

_RANGE = re.compile(r"\s*(-?\d+)\s*\.\.\s*(-?\d+)\s*")


def is_range(text: str) -> bool:
    """Returns whether a value has the form of a range."""
    return _RANGE.fullmatch(text) is not None


def value_text(name: str, value: Any) -> str:
    """Converts the value of a field in a job to its command-line text.

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
    """Returns the ranged field of `texts` and the problems at its lowest and highest value; None without a range.

    Raises:
      ValueError: there are two ranges; the ranged field is not an extent; an end is not a valid problem, or the ends
        are in the wrong order; or `Problem.parse` raised.
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
