"""The keys of a block that the queries of a warpgroup see, as a mask in the layout of wgmma's accumulators."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from search_spaces.jax_compat import plgpu

# The initial maximum, instead of minus infinity, so that the difference of two maxima is a number.
LEAST = -1e30


def visible(
    shape: tuple[int, int], row: Any, column: Any, *, left: int | None, right: int | None, columns: Any
) -> jax.Array | None:
    """Returns whether the query of each row sees the key of each column; None if no mask is needed.

    Column indices are compared with a limit per row, which takes fewer registers than row and column indices per
    element.

    Args:
      shape: of the block, rows and columns.
      row, column: indices of its first query and key.
      left, right: query i sees keys from ``i - left`` to ``i + right``; None means no bound.
      columns: number of keys; None if no block extends beyond them.
    """
    layout = plgpu.Layout.WGMMA
    number = plgpu.broadcasted_iota(jnp.int32, shape, 1, layout=layout)

    def limit(shift: Any) -> jax.Array:
        rows = plgpu.broadcasted_iota(jnp.int32, shape[:1], 0, layout=layout.reduce(1))
        return lax.broadcast_in_dim(rows + shift, shape, [0])

    seen = [] if right is None else [number <= limit(row + right - column)]
    if columns is not None:
        seen.append(number < columns - column)
    if left is not None:
        seen.append(number >= limit(row - left - column))
    both = None
    for one in seen:
        both = one if both is None else both & one
    return both
