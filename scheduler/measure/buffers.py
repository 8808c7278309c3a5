"""Programs that fill the buffers of a bench: copies of its operands, and results with wrong values."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from search_spaces.problem import Problem
from search_spaces.reference_programs import program

Fill = Callable[[], tuple[jax.Array, ...]]
Poison = Callable[..., tuple[jax.Array, ...]]
# Fills floating-point results in which NaN may be correct. Each dtype can represent this number.
OTHER = -96.0


def copying(arrays: Sequence[jax.Array | jax.ShapeDtypeStruct]) -> Fill:
    """Returns a function that copies these arrays.

    If processes share programs, the function is compiled now, so that a call only copies.
    """
    each = [(program(_copied, x), x) for x in arrays]
    return lambda: tuple(copy(x) for copy, x in each)


def poisoning(problem: Problem) -> Poison:
    """Returns a function that creates result buffers in which no element is correct: ``poison(other=False)``.

    The buffers hold NaN, or the least number of a dtype without NaN. With ``other=True`` they hold a finite number, or
    the largest number of the dtype, for results in which the first value may be correct. The function is compiled like
    that of `copying`.
    """
    each = [program(_poisoned, np.bool_(False), shape=s.shape, dtype=s.dtype) for s in problem.results()]
    return lambda other=False: jax.block_until_ready(tuple(poison(np.bool_(other)) for poison in each))


@jax.jit
def _copied(x: jax.Array) -> jax.Array:
    return jnp.copy(x)


@functools.partial(jax.jit, static_argnames=("shape", "dtype"))
def _poisoned(other: jax.Array, *, shape: tuple[int, ...], dtype: Any) -> jax.Array:
    values: tuple[Any, Any] = (jnp.nan, OTHER)
    if jnp.issubdtype(dtype, jnp.bool_):
        values = False, True
    elif not jnp.issubdtype(dtype, jnp.inexact):
        values = jnp.iinfo(dtype).min, jnp.iinfo(dtype).max
    first, second = (jnp.asarray(value, dtype) for value in values)
    return jnp.full(shape, jnp.where(other, second, first), dtype)
