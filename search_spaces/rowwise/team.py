"""How the threads of a warpgroup share rows on an NVIDIA GPU: layouts, accesses and reductions of pieces of rows."""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.mosaic.gpu import fragmented_array

from search_spaces.jax_compat import load, load_run, plgpu, store, store_run

LANES = 32  # threads of a warp
WARPS = 4  # of a warpgroup


@dataclasses.dataclass(frozen=True)
class Team:
    """Warps that share a row; a warpgroup is one team of four, or four teams of one that have a row each.

    A piece is what the threads get by one access each: `columns` elements of each of `rows` rows, next to each other
    in memory, as a float32 array of `shape` in registers. Consecutive threads have consecutive vectors, so that a
    warp's access is one run of bytes.

    Attributes:
      warps: 1 or 4.
      vector: elements of one access of one thread.
    """

    warps: int
    vector: int

    @property
    def rows(self) -> int:
        return WARPS // self.warps

    @property
    def columns(self) -> int:
        return LANES * self.warps * self.vector

    @property
    def shape(self) -> tuple[int, ...]:
        return (self.columns,) if self.warps == WARPS else (self.rows, self.columns)

    @functools.cached_property
    def layout(self) -> Any:
        if self.warps == WARPS:
            return plgpu.Layout.WG_STRIDED(self.shape, vec_size=self.vector)
        return tiled(((WARPS, self.columns), (1, self.columns), (self.vector,)), warps=-5, lanes=-2)

    def read(self, ref: Any, row: Any, column: Any) -> jax.Array:
        """The piece of ``ref[rows, columns]`` that starts there."""
        return load(ref.at[self._place(row, column)], self.layout).astype(jnp.float32)

    def read_run(self, ref: Any, start: Any) -> jax.Array:
        """The piece whose rows follow each other in the flat ``ref``, from `start` on."""
        return self.read_run_narrow(ref, start).astype(jnp.float32)

    def read_run_narrow(self, ref: Any, start: Any) -> jax.Array:
        """The same in the dtype that it has in memory: to be held, until `astype` widens it."""
        return load_run(ref, start, self.shape, self.layout)

    def read_shared(self, ref: Any, column: Any) -> jax.Array:
        """The piece of ``ref[columns]`` that starts there, which is the same for all rows."""
        if self.warps == WARPS:
            return load(ref.at[pl.ds(column, self.columns)], self.layout).astype(jnp.float32)
        # Each warp loads all of it.
        layout = tiled(((self.columns,), (self.vector,)), warps=plgpu.Replicated(WARPS), lanes=-2)
        piece = load(ref.at[pl.ds(column, self.columns)], layout).astype(jnp.float32)
        return lax.broadcast_in_dim(piece, self.shape, (1,))

    def write(self, ref: Any, row: Any, column: Any, piece: jax.Array) -> None:
        store(ref.at[self._place(row, column)], piece.astype(ref.dtype))

    def write_run(self, ref: Any, start: Any, piece: jax.Array) -> None:
        store_run(ref, start, piece.astype(ref.dtype))

    def fill(self, value: float) -> jax.Array:
        """A piece of equal elements."""
        return plgpu.layout_cast(jnp.full(self.shape, value, jnp.float32), self.layout)

    def largest(self, piece: jax.Array) -> jax.Array:
        """The maximum of each row."""
        return jnp.max(piece, axis=-1)

    def total(self, piece: jax.Array) -> jax.Array:
        """The sum of each row."""
        return jnp.sum(piece, axis=-1)

    def spread(self, by_row: jax.Array) -> jax.Array:
        """What each row has one of, in the place of each of its elements."""
        return lax.broadcast_in_dim(by_row, self.shape, tuple(range(by_row.ndim)))

    def index(self, axis: int) -> jax.Array:
        """Of each element along `axis` of the piece."""
        return plgpu.broadcasted_iota(jnp.int32, self.shape, axis, layout=self.layout)

    def _place(self, row: Any, column: Any) -> tuple[Any, Any]:
        return (row if self.warps == WARPS else pl.ds(row, self.rows)), pl.ds(column, self.columns)


@dataclasses.dataclass(frozen=True)
class Run:
    """Elements of a flat array that follow each other, by several accesses of each thread of a warpgroup.

    Each access is like that of a `Team` of one warp to rows that follow each other. Of all at once, an array is built
    and compiled sooner than of one by one; it knows no rows.
    """

    vector: int
    accesses: int

    @functools.cached_property
    def layout(self) -> Any:
        row = LANES * self.vector
        return tiled(((WARPS * row,), (row,), (self.vector,)), warps=-3, lanes=-2)

    def read(self, ref: Any, start: Any) -> jax.Array:
        elements = WARPS * LANES * self.vector * self.accesses
        return load(ref.at[pl.ds(start, elements)], self.layout).astype(jnp.float32)

    def write(self, ref: Any, start: Any, elements: jax.Array) -> None:
        store(ref.at[pl.ds(start, elements.size)], elements.astype(ref.dtype))


def tiled(tiles: tuple[tuple[int, ...], ...], *, warps: Any, lanes: Any) -> Any:
    """The layout of an array cut into nested tiles, whose last axis is one thread's vector.

    `warps` and `lanes` are the axes of the nested tiles, counted from the end, along which these follow each other.
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


@dataclasses.dataclass(frozen=True)
class Everyone:
    """All warps that share a row, each of which left one number on chip: every thread reads and reduces them all.

    Attributes:
      warps: a power of two.
    """

    warps: int

    def read(self, ref: Any) -> jax.Array:
        """All of ``ref[warps]``."""
        each = max(1, self.warps // LANES)
        lanes = (plgpu.Replicated(LANES * each // self.warps), -2)
        return load(ref, tiled(((self.warps,), (each,)), warps=plgpu.Replicated(WARPS), lanes=lanes))

    def largest(self, numbers: jax.Array) -> jax.Array:
        return jnp.max(numbers)

    def total(self, numbers: jax.Array) -> jax.Array:
        return jnp.sum(numbers)

    def spread(self, number: jax.Array) -> jax.Array:
        return number
