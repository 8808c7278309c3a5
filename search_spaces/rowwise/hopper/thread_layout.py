"""Thread layouts: how the threads of a warpgroup hold fragments of rows, load and store them, and reduce them."""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.mosaic.gpu import fragmented_array

from search_spaces.hopper.limits import WARP, WARPS
from search_spaces.jax_compat import load, load_run, plgpu, store, store_run

REDUCTION_BYTES = 2048  # SMEM that Mosaic GPU takes for reductions across the warps of a CTA


@dataclasses.dataclass(frozen=True)
class ThreadLayout:
    """The assignment of rows to a warpgroup's four warps, which share a row or have a row each.

    A fragment consists of one access per thread: `columns` contiguous elements of each of `rows` rows, as a float32
    array of `shape` in registers. Consecutive threads have consecutive vectors, so that a warp's access is one run of
    bytes.

    Attributes:
      warps: warps that share a row: 1 or 4.
      vector: elements of one access of one thread.
    """

    warps: int
    vector: int

    @property
    def rows(self) -> int:
        return WARPS // self.warps

    @property
    def columns(self) -> int:
        return WARP * self.warps * self.vector

    @property
    def shape(self) -> tuple[int, ...]:
        return (self.columns,) if self.warps == WARPS else (self.rows, self.columns)

    @functools.cached_property
    def layout(self) -> Any:
        """The layout as a Mosaic GPU type."""
        if self.warps == WARPS:
            return plgpu.Layout.WG_STRIDED(self.shape, vec_size=self.vector)
        return tiled(((WARPS, self.columns), (1, self.columns), (self.vector,)), warps=-5, lanes=-2)

    def load(self, ref: Any, row: Any, column: Any) -> jax.Array:
        """Loads the fragment of ``ref[rows, columns]`` that starts at `row` and `column`."""
        return self.load_narrow(ref, row, column).astype(jnp.float32)

    def load_narrow(self, ref: Any, row: Any, column: Any) -> jax.Array:
        """Loads the same fragment in its dtype in memory."""
        return load(ref.at[self._window(row, column)], self.layout)

    def load_flat(self, ref: Any, start: Any) -> jax.Array:
        """Loads a fragment with contiguous rows from the flat ``ref``, starting at `start`."""
        return self.load_flat_narrow(ref, start).astype(jnp.float32)

    def load_flat_narrow(self, ref: Any, start: Any) -> jax.Array:
        """Loads the same fragment in its dtype in memory, to be kept until `astype` widens it."""
        return load_run(ref, start, self.shape, self.layout)

    def load_shared(self, ref: Any, column: Any) -> jax.Array:
        """Loads the fragment of ``ref[columns]`` that starts at `column`, the same for all rows."""
        if self.warps == WARPS:
            return load(ref.at[pl.ds(column, self.columns)], self.layout).astype(jnp.float32)
        # Each warp loads all of it.
        layout = tiled(((self.columns,), (self.vector,)), warps=plgpu.Replicated(WARPS), lanes=-2)
        fragment = load(ref.at[pl.ds(column, self.columns)], layout).astype(jnp.float32)
        return lax.broadcast_in_dim(fragment, self.shape, (1,))

    def store(self, ref: Any, row: Any, column: Any, fragment: jax.Array) -> None:
        store(ref.at[self._window(row, column)], fragment.astype(ref.dtype))

    def store_flat(self, ref: Any, start: Any, fragment: jax.Array) -> None:
        store_run(ref, start, fragment.astype(ref.dtype))

    def full(self, value: float) -> jax.Array:
        """Returns a fragment of equal elements."""
        return plgpu.layout_cast(jnp.full(self.shape, value, jnp.float32), self.layout)

    def max(self, fragment: jax.Array) -> jax.Array:
        """Returns the maximum of each row."""
        return jnp.max(fragment, axis=-1)

    def sum(self, fragment: jax.Array) -> jax.Array:
        """Returns the sum of each row."""
        return jnp.sum(fragment, axis=-1)

    def broadcast(self, by_row: jax.Array) -> jax.Array:
        """Broadcasts one value per row to all elements of the row."""
        return lax.broadcast_in_dim(by_row, self.shape, tuple(range(by_row.ndim)))

    def iota(self, axis: int) -> jax.Array:
        """Returns the index of each element along `axis` of the fragment."""
        return plgpu.broadcasted_iota(jnp.int32, self.shape, axis, layout=self.layout)

    def _window(self, row: Any, column: Any) -> tuple[Any, Any]:
        return (row if self.warps == WARPS else pl.ds(row, self.rows)), pl.ds(column, self.columns)


@dataclasses.dataclass(frozen=True)
class ChunkLayout:
    """A warpgroup's share of a chunk as one array: contiguous elements, several accesses per thread.

    Each access is like that of a `ThreadLayout` of one warp to contiguous rows. One array is traced and compiled faster
    than separate accesses; it has no rows.
    """

    vector: int
    accesses: int

    @functools.cached_property
    def layout(self) -> Any:
        """The layout as a Mosaic GPU type."""
        row = WARP * self.vector
        return tiled(((WARPS * row,), (row,), (self.vector,)), warps=-3, lanes=-2)

    def load(self, ref: Any, start: Any) -> jax.Array:
        return self.load_narrow(ref, start).astype(jnp.float32)

    def load_narrow(self, ref: Any, start: Any) -> jax.Array:
        """Loads the share in its dtype in memory."""
        elements = WARPS * WARP * self.vector * self.accesses
        return load(ref.at[pl.ds(start, elements)], self.layout)

    def store(self, ref: Any, start: Any, elements: jax.Array) -> None:
        store(ref.at[pl.ds(start, elements.size)], elements.astype(ref.dtype))


@dataclasses.dataclass(frozen=True)
class AllWarps:
    """All warps that share a row, with one number each in SMEM, which every thread reads and reduces.

    Attributes:
      warps: a power of two.
    """

    warps: int

    def load(self, ref: Any) -> jax.Array:
        """Loads all of ``ref[warps]``."""
        each = max(1, self.warps // WARP)
        lanes = (plgpu.Replicated(WARP * each // self.warps), -2)
        return load(ref, tiled(((self.warps,), (each,)), warps=plgpu.Replicated(WARPS), lanes=lanes))

    def max(self, numbers: jax.Array) -> jax.Array:
        return jnp.max(numbers)

    def sum(self, numbers: jax.Array) -> jax.Array:
        return jnp.sum(numbers)

    def broadcast(self, number: jax.Array) -> jax.Array:
        return number


def tiled(tiles: tuple[tuple[int, ...], ...], *, warps: Any, lanes: Any) -> Any:
    """Returns the layout of an array cut into nested tiles, whose last axis is one thread's vector.

    `warps` and `lanes` are the axes of the nested tiles, counted from the end, over which these are distributed.
    """
    layout = fragmented_array.TiledLayout(
        fragmented_array.Tiling(tiles),
        warp_dims=(warps,),
        lane_dims=lanes if isinstance(lanes, tuple) else (lanes,),
        vector_dim=-1,
        _check_canonical=False,
    ).canonicalize()
    return plgpu.Layout.TILED(
        layout.tiling, warp_dims=layout.warp_dims, lane_dims=layout.lane_dims, vector_dim=layout.vector_dim
    )
