"""Softmax on Hopper: the running maximum and the sum of exponentials, in one pass over a row."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from search_spaces.rowwise.hopper.footprint import ElementCosts
from search_spaces.rowwise.hopper.kernel import HopperRows
from search_spaces.rowwise.hopper.reduction import Reducer, Reduction, Statistics
from search_spaces.softmax.problem import SoftmaxProblem

# Finite, so that the difference of two of these is 0; an element of minus infinity still counts as nothing beside it.
LEAST = float(np.finfo(np.float32).min)


class Softmax(Reduction):
    """The statistics are the maximum and the sum of exponentials of what lies below it, rescaled as the first grows
    (Milakov, Gimelshein, arXiv:1805.02867).
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
        most = reducer.broadcast(reducer.max(functools.reduce(jnp.maximum, fragments)))
        results = [jnp.exp(fragment - most) for fragment in fragments]
        last = results[-1] if masked[-1] is fragments[-1] else jnp.exp(masked[-1] - most)
        scale = reducer.broadcast(1 / reducer.sum(sum(results[:-1], last)))
        return [result * scale for result in results]

    def update(self, statistics: Statistics, fragments: Sequence[jax.Array]) -> Statistics:
        most, total = statistics
        new = functools.reduce(jnp.maximum, fragments, most)
        return new, sum((jnp.exp(fragment - new) for fragment in fragments), total * jnp.exp(most - new))

    def reduce(self, statistics: Statistics, reducer: Reducer) -> Statistics:
        most, total = statistics
        of_all = reducer.max(most)
        return of_all, reducer.sum(total * jnp.exp(most - reducer.broadcast(of_all)))

    def combine(self, one: Statistics, other: Statistics) -> Statistics:
        most = jnp.maximum(one[0], other[0])
        first, second = (total * jnp.exp(of_part - most) for of_part, total in (one, other))
        return most, first + second

    def finalize(self, statistics: Statistics) -> Statistics:
        most, total = statistics
        return most, 1 / total

    def apply(self, fragment: jax.Array, shared: jax.Array | None, final: Statistics) -> jax.Array:
        most, scale = final
        return jnp.exp(fragment - most) * scale


class HopperSoftmax(HopperRows[SoftmaxProblem]):
    version = 1
    # Exponentials: in registers one; in chunks one for the sum, one for the result, and a correction a chunk.
    costs = ElementCosts(statistics=2, special_ops=(1.0, 2.25), vector_ops=(8.0, 13.0), widens=True)

    def reduction(self, problem: SoftmaxProblem, **params: Any) -> Softmax:
        return Softmax()
