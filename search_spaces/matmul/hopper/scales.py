"""Scales of a product's operands: by blocks of k, which each step of k applies, or by rows, which the epilogue does.

``c[i, j] = sum over blocks of k (a_scale[i, block] * b_scale[j / 128, block] * sum within it a[i, k] * b[j, k])``. What
wgmma has accumulated of one block is multiplied by its scales and added to float32 sums in registers (two sets of
accumulators), as DeepSeek-V3 does (arXiv:2412.19437, 3.3.2): wgmma keeps some 14 bits of 8-bit products, sums of 128.
"""

from __future__ import annotations

import dataclasses
from typing import Any, Literal, NamedTuple

import jax
from jax import lax
from jax.experimental import pallas as pl

from search_spaces.jax_compat import load, plgpu

Scale = Literal["blocks", "rows"]


@dataclasses.dataclass(frozen=True)
class Scaling:
    """What a launch's scales belong to.

    Attributes:
      a: "blocks", an array ``[blocks of k, m]``; or "rows", ``[m]``. Either reaches to the end of the last tile.
      b: "blocks", ``[blocks of n, blocks of k]``; or "rows", ``[n]``, which reaches to the end of the last tile.
      block: elements of k, and columns of the result, that share a scale.
    """

    a: Scale
    b: Scale
    block: int

    @property
    def by_steps(self) -> bool:
        """Whether steps of k have scales of their own."""
        return "blocks" in (self.a, self.b)


class Scales(NamedTuple):
    """Those of a launch, in device memory."""

    scaling: Scaling
    a: Any
    b: Any

    def of_step(self, row: Any, rows: int, column: Any, step: Any) -> list[jax.Array]:
        """The scales of one block of k, whose product multiplies the accumulators ``[rows, columns]`` of that step.

        A vector ``[rows]`` where `a` has blocks, and a scalar where `b` has: the columns from `column` on lie in one.
        """
        found = []
        if self.scaling.a == "blocks":
            found.append(_by_row(self.a.at[step, pl.ds(row, rows)]))
        if self.scaling.b == "blocks":
            found.append(self.b[lax.div(column, self.scaling.block), step])
        return found

    def apply(self, acc: jax.Array, row: Any, column: Any) -> jax.Array:
        """The sums ``[rows, columns]`` of all steps times the scales of rows, of `a` and of `b`."""
        rows, columns = acc.shape
        if self.scaling.a == "rows":
            acc = times(acc, _by_row(self.a.at[pl.ds(row, rows)]), 0)
        if self.scaling.b == "rows":
            by_column = load(self.b.at[pl.ds(column, columns)], plgpu.Layout.WGMMA.reduce(0))
            acc = times(acc, by_column, 1)
        return acc


def times(acc: jax.Array, scale: jax.Array, axis: int) -> jax.Array:
    """Each row (axis 0) or column (axis 1) times its scale; all of them times a scalar."""
    if scale.ndim:
        scale = lax.broadcast_in_dim(scale, acc.shape, (axis,))
    return acc * scale


def _by_row(ref: Any) -> jax.Array:
    return load(ref, plgpu.Layout.WGMMA.reduce(1))
