"""Programs that fill the buffers of a bench: copies of its operands, and results in which nothing is right."""

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
# Of what floating-point results are full where NaN may be right: a number that each dtype has.
OTHER = -96.0


def copying(arrays: Sequence[jax.Array | jax.ShapeDtypeStruct]) -> Fill:
    """Makes copies of these, compiled where processes share programs: then a call of it does nothing but copy."""
    each = [(program(_copied, x), x) for x in arrays]
    return lambda: tuple(copy(x) for copy, x in each)


def poisoning(problem: Problem) -> Poison:
    """Makes results in which nothing is right, as `copying` makes copies: ``poison(other=False)``.

    They are NaN, or the least number of a dtype; or else a finite number, or the largest one, for elements of which the
    first is right.
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
