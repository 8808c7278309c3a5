"""The root-mean-square norm on Hopper: the sum of squares in one pass over a row."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax
from jax import lax

from search_spaces.rms_norm.problem import EPS, RmsNormProblem
from search_spaces.rowwise.mosaic_gpu import MosaicGpuRows
from search_spaces.rowwise.reduction import Reduction, Statistics, Together


class RmsNorm(Reduction):
    """The statistic is the sum of squares."""

    outside = 0.0
    start = (0.0,)

    def __init__(self, columns: int, eps: float) -> None:
        self.columns = columns
        self.eps = eps

    def whole(
        self,
        pieces: Sequence[jax.Array],
        counted: Sequence[jax.Array],
        shared: Sequence[jax.Array | None],
        together: Together,
    ) -> list[jax.Array]:
        first, *rest = (piece * piece for piece in counted)
        (scale,) = self.settle((together.total(sum(rest, first)),))
        spread = together.spread(scale)
        return [self.finish(piece, weight, (spread,)) for piece, weight in zip(pieces, shared, strict=True)]

    def absorb(self, statistics: Statistics, pieces: Sequence[jax.Array]) -> Statistics:
        return (sum((piece * piece for piece in pieces), statistics[0]),)

    def join(self, statistics: Statistics, together: Together) -> Statistics:
        return (together.total(statistics[0]),)

    def merge(self, one: Statistics, other: Statistics) -> Statistics:
        return (one[0] + other[0],)

    def settle(self, statistics: Statistics) -> Statistics:
        return (lax.rsqrt(statistics[0] / self.columns + self.eps),)

    def finish(self, piece: jax.Array, shared: jax.Array | None, settled: Statistics) -> jax.Array:
        assert shared is not None, "a norm has a weight"
        return piece * settled[0] * shared


class MosaicGpuRmsNorm(MosaicGpuRows[RmsNormProblem]):
    version = 1
    special_ops = (0.0, 0.0)
    vector_ops = (6.0, 7.0)
    widens = False

    def reduction(self, problem: RmsNormProblem, *, eps: float = EPS, **params: Any) -> RmsNorm:
        return RmsNorm(problem.columns, eps)
