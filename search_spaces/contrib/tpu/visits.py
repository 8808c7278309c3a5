"""Computes which tiles of rows each group has: the visits of a kernel that walks over the tiles of all groups.

A *visit* is a tile of rows and a group with rows in this tile. Visits are in order of their groups, and so of their
tiles. Tiles with rows of several groups are visited several times in succession.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from search_spaces.space import cdiv


@dataclasses.dataclass(frozen=True)
class Visits:
    """The visits of a launch, in order of their groups.

    Attributes:
      tile, group: of each visit. There are entries for the largest possible number of visits; those beyond `count` may
        be any.
      bounds: ``[groups + 1]``, the rows between which each group lies.
      count: number of visits.
    """

    tile: jax.Array
    group: jax.Array
    bounds: jax.Array
    count: jax.Array

    @property
    def prefetched(self) -> tuple[jax.Array, jax.Array, jax.Array]:
        return self.tile, self.group, self.bounds


def _per_group(bounds: Any, tile_rows: Any, least: int) -> Any:
    """Returns the number of visits of each group, at least `least`, for arrays of JAX or NumPy."""
    first, last = bounds[..., :-1] // tile_rows, (bounds[..., 1:] - 1) // tile_rows
    visits = (last - first + 1) * (bounds[..., 1:] > bounds[..., :-1])
    return visits.clip(least)


def visits_of(bounds: jax.Array, rows: int, tile_rows: int, least: int) -> Visits:
    """Computes the visits for ascending `bounds`.

    Args:
      least: visits of a group without rows, 0 or 1. Its tile is any that contains its bounds, or the last.
    """
    tiles, groups = cdiv(rows, tile_rows), bounds.shape[0] - 1
    each = jnp.arange(groups, dtype=jnp.int32)[:, None]
    counts = _per_group(bounds, tile_rows, least)
    # Sums of selected elements are one fusion each on TPUs. A binary search would be a loop, and `cumsum` copies.
    ends = jnp.sum(jnp.where(each <= each.T, counts[:, None], 0), axis=0, dtype=jnp.int32)
    # Each group adds a visit to the tile where it begins, except the first group of a tile.
    visit = jnp.arange(tiles + groups - 1, dtype=jnp.int32)
    group = jnp.sum(ends[:-1, None] <= visit, axis=0, dtype=jnp.int32)
    first = jnp.minimum(bounds[:-1] // tile_rows, tiles - 1) - (ends - counts)
    tile = jnp.sum(jnp.where(each == group, first[:, None] + visit, 0), axis=0, dtype=jnp.int32)
    return Visits(tile, group, bounds, ends[-1])


def rows_of_visit(tile_ref: Any, group_ref: Any, bounds_ref: Any, visit: Any, tile_rows: int) -> tuple[Any, Any]:
    """Returns the rows of a visit's tile between which its group lies; they may be outside of the tile."""
    group, first = group_ref[visit], tile_ref[visit] * tile_rows
    return bounds_ref[group] - first, bounds_ref[group + 1] - first


def inside(rows: slice, columns: int, begin: Any, end: Any) -> jax.Array:
    """Returns which elements of these rows of a tile, with so many columns, lie between `begin` and `end`."""
    row = rows.start + lax.broadcasted_iota(jnp.int32, (rows.stop - rows.start, columns), 0)
    return (row >= begin) & (row < end)


def mean_visits(bounds: Any, tile_rows: Any, least: int) -> Any:
    """Returns the number of visits for each of `tile_rows`, the mean over ``bounds[draw, group]``."""
    sizes, where = np.unique(np.asarray(tile_rows), return_inverse=True)
    means = np.array([np.mean(np.sum(_per_group(bounds, size, least), axis=-1)) for size in sizes])
    return means[where]
