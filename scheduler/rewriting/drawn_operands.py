"""Draws operands of comparisons by compiled programs, one for each kind of operand, which all comparisons share."""

from __future__ import annotations

import concurrent.futures
import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from search_spaces import checking
from search_spaces.checking import VALUE_KINDS

# ``draw(seed, kind, scale)`` returns an operand; `kind` is the index in `VALUE_KINDS`, or -1.
Drawing = Callable[[int, int, float], jax.Array]

_compiled: dict[Any, concurrent.futures.Future[Any]] = {}


def drawings(structs: Sequence[Any], beside: concurrent.futures.Executor, *, special: bool) -> list[Drawing]:
    """Returns functions that draw these operands of a comparison. New programs are compiled by the executor.

    Args:
      special: Whether operands with special values are drawn, too.
    """
    changes = {number: rest for number, *rest in checking.changed(structs, integers=False)} if special else {}
    return [_drawing(x, number, changes.get(number), beside) for number, x in enumerate(structs)]


def _drawing(x: Any, number: int, changes: Sequence[bool] | None, beside: concurrent.futures.Executor) -> Drawing:
    first, in_offset = changes or (False, False)
    kind = x.shape, x.dtype, changes is not None, first
    if kind not in _compiled:
        program = jax.jit(functools.partial(_drawn, x, changes is not None, first))
        _compiled[kind] = beside.submit(program.lower(np.int32(0), np.int32(0), np.uint32(0), np.float32(1)).compile)

    def draw(seed: int, index: int, scale: float) -> jax.Array:
        own = -1 if index == VALUE_KINDS.index("offset") and not in_offset else index
        drawn: jax.Array = _compiled[kind].result()(np.int32(seed), np.int32(own), np.uint32(number), np.float32(scale))
        return drawn

    return draw


def _drawn(
    x: Any, changes: bool, first: bool, seed: jax.Array, kind: jax.Array, number: jax.Array, scale: jax.Array
) -> jax.Array:
    drawn = normal(x, seed)
    if changes:
        drawn = jnp.where(kind >= 0, checking.altered(drawn, kind, number, first=first), drawn)
    return drawn * scale.astype(x.dtype) if jnp.issubdtype(x.dtype, jnp.floating) else drawn


def normal(x: Any, seed: int | jax.Array) -> jax.Array:
    """Draws a standard normal array of the shape of `x`, which is converted to its dtype."""
    return jax.random.normal(jax.random.key(seed), x.shape, jnp.float32).astype(x.dtype)
