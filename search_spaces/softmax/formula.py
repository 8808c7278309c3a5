"""Softmax as a reduction: the running maximum and the sum of exponentials, in one pass over a row."""

from __future__ import annotations

import functools
from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np

from search_spaces.rowwise.reduction import Reducer, Reduction, Statistics

# Finite, so that the difference of two of these is 0; an element of minus infinity still contributes nothing.
LEAST = float(np.finfo(np.float32).min)


class Softmax(Reduction):
    """The statistics are the maximum and the sum of exponentials relative to it.

    The sum is rescaled when the maximum grows (Milakov, Gimelshein, arXiv:1805.02867).
    """

    identity = -np.inf
    init = (LEAST, 0.0)

    def whole_row(
        self,
        fragments: Sequence[jax.Array],
        masked: Sequence[jax.Array],
        shared: Sequence[jax.Array | None],
        reducer: Reducer,
    ) -> list[jax.Array]:
        maximum = reducer.broadcast(reducer.max(functools.reduce(jnp.maximum, fragments)))
        results = [jnp.exp(fragment - maximum) for fragment in fragments]
        last = results[-1] if masked[-1] is fragments[-1] else jnp.exp(masked[-1] - maximum)
        scale = reducer.broadcast(1 / reducer.sum(sum(results[:-1], last)))
        return [result * scale for result in results]

    def update(self, statistics: Statistics, fragments: Sequence[jax.Array]) -> Statistics:
        maximum, normalizer = statistics
        new = functools.reduce(jnp.maximum, fragments, maximum)
        return new, sum((jnp.exp(fragment - new) for fragment in fragments), normalizer * jnp.exp(maximum - new))

    def reduce(self, statistics: Statistics, reducer: Reducer) -> Statistics:
        maximum, normalizer = statistics
        of_all = reducer.max(maximum)
        return of_all, reducer.sum(normalizer * jnp.exp(maximum - reducer.broadcast(of_all)))

    def combine(self, one: Statistics, other: Statistics) -> Statistics:
        maximum = jnp.maximum(one[0], other[0])
        first, second = (normalizer * jnp.exp(of_part - maximum) for of_part, normalizer in (one, other))
        return maximum, first + second

    def finalize(self, statistics: Statistics) -> Statistics:
        maximum, normalizer = statistics
        return maximum, 1 / normalizer

    def apply(self, fragment: jax.Array, shared: jax.Array | None, final: Statistics) -> jax.Array:
        maximum, scale = final
        return jnp.exp(fragment - maximum) * scale
