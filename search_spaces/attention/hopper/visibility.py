"""Which keys of a block the queries of a warpgroup see, as a mask in the layout of wgmma's accumulators."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from search_spaces.jax_compat import plgpu

# In place of minus infinity where maxima begin: the difference of two is a number.
LEAST = -1e30


def visible(
    shape: tuple[int, int], row: Any, column: Any, *, left: int | None, right: int | None, columns: Any
) -> jax.Array | None:
    """Whether the query of each row sees the key of each column; None where nothing needs a mask.

    A limit for each row, with which the numbers of columns are compared, takes fewer registers than the numbers of rows
    and columns of each element would.

    Args:
      shape: of the block, rows and columns.
      row, column: numbers of its first query and key.
      left, right: query i sees keys from ``i - left`` to ``i + right``; None is no bound.
      columns: keys there are; None where no block reaches beyond them.
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
