"""Scales of a matmul's operands: per block of k, applied in each step of k, or per row, applied in the epilogue.

``c[i, j] = sum over blocks of k (a_scale[i, block] * b_scale[j / 128, block] * sum within it a[i, k] * b[j, k])``. The
wgmma accumulators of one block are multiplied by its scales and added to float32 sums in registers (two sets of
accumulators), as in DeepSeek-V3 (arXiv:2412.19437, 3.3.2): wgmma keeps about 14 bits of 8-bit products, in sums of 128.
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
    """The granularity of a launch's scales.

    Attributes:
      a: "blocks", an array ``[blocks of k, m]``; or "rows", ``[m]``. Both are padded to the end of the last tile.
      b: "blocks", ``[blocks of n, blocks of k]``; or "rows", ``[n]``, padded to the end of the last tile.
      block: number of elements of k, and of columns of the result, that share a scale.
    """

    a: Scale
    b: Scale
    block: int

    @property
    def by_steps(self) -> bool:
        """Whether each step of k has its own scales."""
        return "blocks" in (self.a, self.b)


class Scales(NamedTuple):
    """The scales of a launch, in device memory."""

    scaling: Scaling
    a: Any
    b: Any

    def of_step(self, row: Any, rows: int, column: Any, step: Any) -> list[jax.Array]:
        """Returns the scales of one block of k; the product of them scales the step's accumulators ``[rows, columns]``.

        A vector ``[rows]`` if `a` has blocks, and a scalar if `b` has: the columns from `column` on lie in one block.
        """
        found = []
        if self.scaling.a == "blocks":
            found.append(_by_row(self.a.at[step, pl.ds(row, rows)]))
        if self.scaling.b == "blocks":
            found.append(self.b[lax.div(column, self.scaling.block), step])
        return found

    def apply(self, acc: jax.Array, row: Any, column: Any) -> jax.Array:
        """Multiplies the sums ``[rows, columns]`` of all steps by the per-row scales of `a` and of `b`."""
        rows, columns = acc.shape
        if self.scaling.a == "rows":
            acc = times(acc, _by_row(self.a.at[pl.ds(row, rows)]), 0)
        if self.scaling.b == "rows":
            by_column = load(self.b.at[pl.ds(column, columns)], plgpu.Layout.WGMMA.reduce(0))
            acc = times(acc, by_column, 1)
        return acc


def times(acc: jax.Array, scale: jax.Array, axis: int) -> jax.Array:
    """Multiplies each row (axis 0) or column (axis 1) by its scale, or all elements by a scalar."""
    if scale.ndim:
        scale = lax.broadcast_in_dim(scale, acc.shape, (axis,))
    return acc * scale


def _by_row(ref: Any) -> jax.Array:
    return load(ref, plgpu.Layout.WGMMA.reduce(1))
