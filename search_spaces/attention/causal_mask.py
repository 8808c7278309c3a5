"""Recognises a causal mask in a jaxpr: a comparison of query positions with key positions."""

from __future__ import annotations

from collections.abc import Sequence

from search_spaces.recognise.graph import Value
from search_spaces.recognise.pattern import number, source

# For ``x op y``: whether x is the larger one, and the least difference.
_COMPARISONS = {"ge": (True, 0), "gt": (True, 1), "le": (False, 0), "lt": (False, 1)}


def is_causal(which: Value, keeps: bool, axes: Sequence[str | None]) -> bool:
    """Returns whether `which` equals `keeps` exactly where the key's position is at most the query's.

    Args:
      axes: the meaning of each axis of `which`: "query", "key" or something else.
    """
    base, where = source(which)
    along = [None if at is None else axes[at] for at in where]
    if (node := base.by("not")) is not None:
        return is_causal(node.inputs[0], not keeps, along)
    if (node := base.by("and")) is not None and keeps:
        rest = [each for each in node.inputs if number(each) != 1.0]
        return len(rest) == 1 and is_causal(rest[0], keeps, along)
    if (node := base.by("select_n")) is not None and len(node.inputs) == 3:  # as in `jnp.tril`
        no, yes = map(number, node.inputs[1:])
        return {no, yes} == {0.0, 1.0} and is_causal(node.inputs[0], keeps == (yes == 1.0), along)
    if base.node is None or base.node.name not in _COMPARISONS:
        return False
    larger, least = _COMPARISONS[base.node.name]
    found = [_position(each, along) for each in base.node.inputs]
    if None in found:
        return False
    x, y = (each for each in found if each is not None)
    high, low = (x, y) if larger else (y, x)
    if not keeps:  # if high - low >= least is false, then low - high >= 1 - least
        high, low, least = low, high, 1 - least
    return (high[0], low[0]) == ("query", "key") and least - high[1] + low[1] == 0


def _position(value: Value, axes: Sequence[str | None]) -> tuple[str | None, int] | None:
    """Returns the axis along which the value counts, and its first number."""
    offset = 0.0
    base, where = source(value)
    while (node := base.by("add", "sub")) is not None:
        first, second = map(number, node.inputs)
        if second is not None:
            offset, before = offset + (second if node.name == "add" else -second), node.inputs[0]
        elif first is not None and node.name == "add":
            offset, before = offset + first, node.inputs[1]
        else:
            return None
        base, inner = source(before)
        where = tuple(None if at is None else where[at] for at in inner)
    if (node := base.by("iota")) is None:
        return None
    at = where[node.params["dimension"]]
    return (None if at is None else axes[at]), int(offset)
