"""Tiles of a matmul, independent of the kernel: their order, and the reduction of tiles that are split along k."""

from __future__ import annotations

import functools
import operator
from collections.abc import Callable, Sequence
from typing import Any

import jax
import numpy as np
from jax import lax

from search_spaces.matmul.problem import MatmulProblem
from search_spaces.problem import Arrays
from search_spaces.space import Rule

# ------------------------------------------------------------------------------
# The order in which the tiles of a matmul are computed, so that tiles that run concurrently share what they load.
#
# CUTLASS calls it threadblock swizzle; Triton's tutorial calls it grouped ordering (`GROUP_SIZE_M`).


def planar_snake(number: Any, grid: tuple[Any, Any], minor_dim: str, width: int) -> tuple[Any, Any, Any]:
    """Returns the product, row and column of a tile by number, in groups of `width` tiles, every other one reversed.

    This is the order of `plgpu.planar_snake`, which branches between whole groups and the last one. Here a `min` is
    enough, and extents may be known only at run time. The lowering of `plgpu.planar_snake` also differs between
    versions of JAX.
    """
    rows, columns = grid
    minors, majors = grid if minor_dim == "m" else grid[::-1]
    product, number = lax.div(number, rows * columns), lax.rem(number, rows * columns)
    group, number = lax.div(number, width * majors), lax.rem(number, width * majors)
    width_here = width if isinstance(minors, int) and minors % width == 0 else lax.min(width, minors - group * width)
    major, minor = lax.div(number, width_here), group * width + lax.rem(number, width_here)
    major = lax.select(lax.rem(group, 2) == 0, major, majors - 1 - major)
    return (product, minor, major) if minor_dim == "m" else (product, major, minor)


def rules(order_matters: Callable[[Any], Any], grid: Callable[[Any], tuple[Any, Any]]) -> dict[str, Rule]:
    """Returns the rules of a space of schedules with a `grid_minor_dim` and groups of `grid_tile_width` tiles.

    Args:
      order_matters: from a schedule, whether the data loaded depends on the order.
      grid: from a schedule, the number of tiles, or clusters of tiles, along m and along n.
    """

    def minors(s: Any) -> Any:
        return np.where(s.grid_minor_dim == "m", *grid(s))

    return {
        "where rasterization changes nothing, one order is enough": lambda s: (
            order_matters(s) | ((s.grid_minor_dim == "n") & (s.grid_tile_width == 1))
        ),
        "groups one tile wide load more than wider ones": lambda s: (
            (s.grid_tile_width > 1) | np.logical_not(order_matters(s))
        ),
        "groups wider than the grid are as wide as the grid": lambda s: (
            (s.grid_tile_width <= 4) | (s.grid_tile_width < 2 * minors(s))
        ),
    }


# ------------------------------------------------------------------------------
# The reduction of split-K: XLA adds the partial sums that a launch left in device memory, and applies the epilogue.


def reduced(p: MatmulProblem, split_k: int, splits: jax.Array, args: Sequence[jax.Array]) -> Arrays:
    """Reduces the accumulators ``[split_k * batch, m, n]`` of all splits in order, and rounds the results once."""
    acc = added(splits.reshape(split_k, *p.whole.shape))
    return p.cut(p.apply_epilogue(acc, args).astype(p.whole.dtype))


def added(splits: jax.Array) -> jax.Array:
    """Sums ``[split_k, ...]`` over splits, first to last, so that the result is deterministic."""
    return functools.reduce(operator.add, (splits[split] for split in range(splits.shape[0])))
