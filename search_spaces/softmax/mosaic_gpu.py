"""Softmax on Hopper: the largest element and the sum of exponentials, in one pass over a row."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from search_spaces.rowwise.mosaic_gpu import MosaicGpuRows
from search_spaces.rowwise.reduction import Reduction, Statistics, Together
from search_spaces.softmax.problem import SoftmaxProblem

# Finite, so that the difference of two of these is 0; an element of minus infinity still counts as nothing beside it.
LEAST = float(np.finfo(np.float32).min)


class Softmax(Reduction):
    """The statistics are the largest element and the sum of exponentials of what lies below it, corrected as the first
    grows (Milakov, Gimelshein, arXiv:1805.02867).
    """

    outside = -np.inf
    start = (LEAST, 0.0)

    def whole(
        self,
        pieces: Sequence[jax.Array],
        counted: Sequence[jax.Array],
        shared: Sequence[jax.Array | None],
        together: Together,
    ) -> list[jax.Array]:
        most = together.spread(together.largest(functools.reduce(jnp.maximum, pieces)))
        results = [jnp.exp(piece - most) for piece in pieces]
        last = results[-1] if counted[-1] is pieces[-1] else jnp.exp(counted[-1] - most)
        share = together.spread(1 / together.total(sum(results[:-1], last)))
        return [result * share for result in results]

    def absorb(self, statistics: Statistics, pieces: Sequence[jax.Array]) -> Statistics:
        most, total = statistics
        new = functools.reduce(jnp.maximum, pieces, most)
        return new, sum((jnp.exp(piece - new) for piece in pieces), total * jnp.exp(most - new))

    def join(self, statistics: Statistics, together: Together) -> Statistics:
        most, total = statistics
        joint = together.largest(most)
        return joint, together.total(total * jnp.exp(most - together.spread(joint)))

    def merge(self, one: Statistics, other: Statistics) -> Statistics:
        most = jnp.maximum(one[0], other[0])
        first, second = (total * jnp.exp(largest - most) for largest, total in (one, other))
        return most, first + second

    def settle(self, statistics: Statistics) -> Statistics:
        most, total = statistics
        return most, 1 / total

    def finish(self, piece: jax.Array, shared: jax.Array | None, settled: Statistics) -> jax.Array:
        most, share = settled
        return jnp.exp(piece - most) * share


class MosaicGpuSoftmax(MosaicGpuRows[SoftmaxProblem]):
    version = 1
    # Exponentials: in registers one; in chunks one for the sum, one for the result, and a correction a chunk.
    special_ops = (1.0, 2.25)
    vector_ops = (8.0, 13.0)
    widens = True

    def reduction(self, problem: SoftmaxProblem, **params: Any) -> Softmax:
        return Softmax()
