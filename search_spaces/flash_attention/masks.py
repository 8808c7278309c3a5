"""Reads masks of logits from a jaxpr: the band of keys that each query sees."""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import numpy as np

from search_spaces.recognise import Node, Unknown, Value, equations_between, evaluate, number, program_text, source

# A constant of at most this value masks a logit, if no scale follows.
MASKED = -1e4
# Masks with more elements are not evaluated.
LARGEST = 2**28
# For ``x op y``: whether x is the larger one, and the least difference.
_COMPARISONS = {"ge": (True, 0), "gt": (True, 1), "le": (False, 0), "lt": (False, 1)}


class Band(NamedTuple):
    """Query i sees keys from ``i - left`` to ``i + right``; None means no bound."""

    left: int | None = None
    right: int | None = None

    def __and__(self, other: Band) -> Band:
        return Band(*(_least(a, b) for a, b in zip(self, other, strict=True)))


def _least(a: int | None, b: int | None) -> int | None:
    return b if a is None else a if b is None else min(a, b)


def band(which: Value, keeps: bool, axes: Sequence[str | None]) -> Band:
    """Returns the band of keys where `which` equals `keeps`.

    Args:
      axes: the meaning of each axis of `which`: "query", "key" or something else.

    Raises:
      Unknown: the mask is no band, or depends on an argument of the program.
    """
    base, where = source(which)
    along = [None if at is None else axes[at] for at in where]
    if (value := number(base)) is not None:
        if bool(value) != keeps:
            raise Unknown("its mask hides all keys")
        return Band()
    if (node := base.by("not")) is not None:
        return band(node.inputs[0], not keeps, along)
    if (node := base.by("and" if keeps else "or")) is not None:
        return band(node.inputs[0], keeps, along) & band(node.inputs[1], keeps, along)
    if (node := base.by("select_n")) is not None and len(node.inputs) == 3:  # as in `jnp.tril`
        no, yes = map(number, node.inputs[1:])
        if no is not None and bool(no) != keeps:
            return band(node.inputs[0], True, along) & band(node.inputs[2], keeps, along)
        if yes is not None and bool(yes) != keeps:
            return band(node.inputs[0], False, along) & band(node.inputs[1], keeps, along)
    found = _compared(base, keeps, along)
    return _evaluated(base, keeps, along) if found is None else found


def bias_band(bias: Value, axes: Sequence[str | None], masked: float) -> Band:
    """Returns the band of keys where an added bias is zero, if all others are at most `masked`.

    Raises:
      Unknown: the bias has other values, or depends on an argument of the program.
    """
    base, where = source(bias)
    along = [None if at is None else axes[at] for at in where]
    if (node := base.by("select_n")) is not None and len(node.inputs) == 3:
        no, yes = map(constant, node.inputs[1:])
        if _is_zero(yes) and _is_masked(no, masked):
            return band(node.inputs[0], True, along)
        if _is_zero(no) and _is_masked(yes, masked):
            return band(node.inputs[0], False, along)
    values = constant(base)
    if values is None:
        raise Unknown("a bias is added to its logits")
    if not np.all((values == 0) | (values <= masked)):
        raise Unknown("a bias with other values than 0 and those of a mask is added to its logits")
    return _band_of(values == 0, along)


def _is_zero(values: Any) -> bool:
    return values is not None and bool(np.all(values == 0))


def _is_masked(values: Any, masked: float) -> bool:
    return values is not None and bool(np.all(values <= masked))


def _compared(base: Value, keeps: bool, axes: Sequence[str | None]) -> Band | None:
    """Returns the band of a comparison of query positions with key positions; None if `base` is no such comparison."""
    if base.node is None or base.node.name not in _COMPARISONS:
        return None
    larger, least = _COMPARISONS[base.node.name]
    found = [_position(each, axes) for each in base.node.inputs]
    if found[0] is None or found[1] is None:
        return None
    high, low = (found[0], found[1]) if larger else (found[1], found[0])
    if not keeps:  # if high - low >= least is false, then low - high >= 1 - least
        high, low, least = low, high, 1 - least
    least += low[1] - high[1]
    if (high[0], low[0]) == ("query", "key"):
        return Band(right=-least) if least <= 0 else None
    if (high[0], low[0]) == ("key", "query"):
        return Band(left=-least) if least <= 0 else None
    return None


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


def _evaluated(base: Value, keeps: bool, axes: Sequence[str | None]) -> Band:
    values = constant(base)
    if values is None:
        raise Unknown("its mask depends on an argument")
    return _band_of(values.astype(bool) == keeps, axes)


def _band_of(seen: np.ndarray[Any, Any], axes: Sequence[str | None]) -> Band:
    for i, axis in reversed(list(enumerate(axes))):
        if axis not in ("query", "key"):
            first = seen.take([0], i)
            if not np.all(seen == first):
                raise Unknown("its mask differs between heads or sequences")
            seen = first.squeeze(i)
    names = [axis for axis in axes if axis in ("query", "key")]
    if names == ["key", "query"]:
        seen = seen.T
    if np.all(seen):
        return Band()
    if len(names) < 2:
        raise Unknown("its mask hides the same keys from all queries")
    rows, columns = np.arange(seen.shape[0])[:, None], np.arange(seen.shape[1])[None, :]
    count, first = seen.sum(1), seen.argmax(1)
    if not np.all(count):
        raise Unknown("its mask hides all keys from a query")
    behind, ahead = (rows[:, 0] - first).max(), (first + count - 1 - rows[:, 0]).max()
    left = int(behind) if np.any(first > 0) else None
    right = int(ahead) if np.any(first + count < seen.shape[1]) else None
    expected = np.ones_like(seen)
    if left is not None:
        expected &= columns >= rows - left
    if right is not None:
        expected &= columns <= rows + right
    if (left is not None and left < 0) or (right is not None and right < 0) or not np.array_equal(expected, seen):
        raise Unknown("its mask is no band along the diagonal")
    return Band(left, right)


def constant(value: Value) -> np.ndarray[Any, Any] | None:
    """Returns the elements of an array that depends on no argument of the program; None for others and large ones."""
    try:
        order = equations_between([value], [])
    except Unknown:
        return None
    if any(math.prod(x.shape) > LARGEST for node in order for x in node.results):
        return None
    return _values(_Program(tuple(order), value, program_text(order, [], [value])))


class _Program:
    """Equations without arguments, compared by their text."""

    def __init__(self, order: tuple[Node, ...], value: Value, text: str) -> None:
        self.order, self.value, self.text = order, value, text

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Program) and other.text == self.text

    def __hash__(self) -> int:
        return hash(self.text)


@functools.lru_cache(maxsize=64)
def _values(program: _Program) -> np.ndarray[Any, Any] | None:
    if program.value.literal is not None:
        return np.asarray(program.value.literal)
    with jax.ensure_compile_time_eval():
        return np.asarray(jax.jit(lambda: evaluate(program.order, {}, [program.value])[0])())
