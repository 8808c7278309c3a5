"""Programs that fill the buffers of a bench: copies of its operands, and results in which nothing is right."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from search_spaces.problem import Problem
from search_spaces.reference_programs import program

Fill = Callable[[], tuple[jax.Array, ...]]


def copying(arrays: Sequence[jax.Array]) -> Fill:
    """Makes copies of these, compiled where processes share programs: then a call of it does nothing but copy."""
    each = [(program(_copied, x), x) for x in arrays]
    return lambda: tuple(copy(x) for copy, x in each)


def poisoning(problem: Problem) -> Fill:
    """Makes results in which nothing is right, as `copying` makes copies: NaN, or the least number of a dtype."""
    each = [program(_poisoned, shape=s.shape, dtype=s.dtype) for s in problem.results()]
    return lambda: jax.block_until_ready(tuple(poison() for poison in each))


@jax.jit
def _copied(x: jax.Array) -> jax.Array:
    return jnp.copy(x)


@functools.partial(jax.jit, static_argnames=("shape", "dtype"))
def _poisoned(*, shape: tuple[int, ...], dtype: Any) -> jax.Array:
    if jnp.issubdtype(dtype, jnp.inexact):
        return jnp.full(shape, jnp.nan, dtype)
    return jnp.full(shape, False if jnp.issubdtype(dtype, jnp.bool_) else jnp.iinfo(dtype).min, dtype)
