"""The root-mean-square norm as a reduction: the sum of squares in one pass over a row."""

from __future__ import annotations

from collections.abc import Sequence

import jax
from jax import lax

from search_spaces.rowwise.reduction import Reducer, Reduction, Statistics


class RmsNorm(Reduction):
    """The statistic is the sum of squares."""

    identity = 0.0
    init = (0.0,)

    def __init__(self, columns: int, eps: float) -> None:
        self.columns = columns
        self.eps = eps

    def whole_row(
        self,
        fragments: Sequence[jax.Array],
        masked: Sequence[jax.Array],
        shared: Sequence[jax.Array | None],
        reducer: Reducer,
    ) -> list[jax.Array]:
        first, *rest = (fragment * fragment for fragment in masked)
        (scale,) = self.finalize((reducer.sum(sum(rest, first)),))
        final = (reducer.broadcast(scale),)
        return [self.apply(fragment, weight, final) for fragment, weight in zip(fragments, shared, strict=True)]

    def update(self, statistics: Statistics, fragments: Sequence[jax.Array]) -> Statistics:
        return (sum((fragment * fragment for fragment in fragments), statistics[0]),)

    def reduce(self, statistics: Statistics, reducer: Reducer) -> Statistics:
        return (reducer.sum(statistics[0]),)

    def combine(self, one: Statistics, other: Statistics) -> Statistics:
        return (one[0] + other[0],)

    def finalize(self, statistics: Statistics) -> Statistics:
        return (lax.rsqrt(statistics[0] / self.columns + self.eps),)

    def apply(self, fragment: jax.Array, shared: jax.Array | None, final: Statistics) -> jax.Array:
        assert shared is not None, "a norm has a weight"
        return fragment * final[0] * shared
