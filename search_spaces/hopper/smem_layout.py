"""The layout of an array's tile in shared memory: tiled, as in Mosaic GPU, or untiled, for arrays of any extents.

TMA copies boxes of an array, fills elements beyond the array's edges with zeros, and does not write there. Mosaic GPU
copies a tile in ``[8, swizzled row]`` tiling with one copy, but applies the tiling to the whole array in device memory,
so it must divide the array. An untiled tile, ``[boxes, rows, swizzled row]``, takes one copy for each box, with boxes
side by side. It only requires that rows of the array start at multiples of 16 bytes.
"""

from __future__ import annotations

import abc
import dataclasses
import math
from typing import Any

import jax
import numpy as np
from jax import lax
from jax.experimental import pallas as pl

from search_spaces.hopper import TMA_GMEM_ALIGNMENT, untiled_swizzled
from search_spaces.jax_compat import HAS_UNTILED_SWIZZLE, plgpu
from search_spaces.space import round_up


@dataclasses.dataclass(frozen=True)
class SmemTile(abc.ABC):
    """A tile of an array in shared memory: of an operand, of a residual, of the result.

    Attributes:
      rows, columns: its extents, in the array's device memory layout.
      dtype: of its elements.
      swizzle: bytes of a swizzled row; 16 means no swizzle.
    """

    rows: int
    columns: int
    dtype: Any
    swizzle: int

    @property
    @abc.abstractmethod
    def shape(self) -> tuple[int, ...]:
        """Its shape in shared memory."""

    @property
    @abc.abstractmethod
    def transforms(self) -> tuple[Any, ...]:
        """Mosaic GPU's transforms of the shared memory."""

    @property
    def copies(self) -> int:
        """Number of TMA copies that fill the tile."""
        return len(self.boxes(0, 0))

    @abc.abstractmethod
    def boxes(self, row: Any, column: Any) -> list[tuple[tuple[int, ...], tuple[Any, Any]]]:
        """Returns the copies of the tile at `row` and `column`, as indices in shared memory and slices of the array."""

    @abc.abstractmethod
    def part(self, smem: Any, stage: Any, rows: Any, columns: Any) -> Any:
        """Returns some rows or some columns of the tile in a stage; columns must be whole swizzled rows."""

    @abc.abstractmethod
    def columns_of(self, ref: Any, columns: Any) -> Any:
        """Returns some columns of a single tile; they must be whole swizzled rows."""

    @abc.abstractmethod
    def load(self, ref: Any, *, transposed: bool) -> jax.Array:
        """Loads the tile in the layout of wgmma's accumulators, or its transpose in the transposed layout."""

    @abc.abstractmethod
    def store(self, ref: Any, value: jax.Array, *, transposed: bool) -> None:
        """Stores a value in the layout that `load` returns."""


class Tiled(SmemTile):
    """One box, in tiles of 8 swizzled rows; 16 bytes means no swizzle."""

    @property
    def shape(self) -> tuple[int, ...]:
        return self.rows, self.columns

    @property
    def transforms(self) -> tuple[Any, ...]:
        tiling = plgpu.TilingTransform((8, self.swizzle // self.dtype.itemsize))
        return (tiling,) if self.swizzle == 16 else (tiling, plgpu.SwizzleTransform(self.swizzle))

    def boxes(self, row: Any, column: Any) -> list[tuple[tuple[int, ...], tuple[Any, Any]]]:
        return [((), (pl.ds(row, self.rows), pl.ds(column, self.columns)))]

    def part(self, smem: Any, stage: Any, rows: Any, columns: Any) -> Any:
        return smem.at[stage, rows, columns]

    def columns_of(self, ref: Any, columns: Any) -> Any:
        return ref.at[:, columns]

    def load(self, ref: Any, *, transposed: bool) -> jax.Array:
        layout = plgpu.Layout.WGMMA_TRANSPOSED if transposed else plgpu.Layout.WGMMA
        loaded: jax.Array = plgpu.layout_cast((ref.T if transposed else ref)[...], layout)
        return loaded

    def store(self, ref: Any, value: jax.Array, *, transposed: bool) -> None:
        if transposed:
            ref.T[...] = value
        else:
            ref[...] = value


class Untiled(SmemTile):
    """One box for each column of swizzled rows."""

    @property
    def shape(self) -> tuple[int, ...]:
        width = self.swizzle // self.dtype.itemsize
        return self.columns // width, self.rows, width

    @property
    def transforms(self) -> tuple[Any, ...]:
        return (plgpu.SwizzleTransform(self.swizzle),)

    def boxes(self, row: Any, column: Any) -> list[tuple[tuple[int, ...], tuple[Any, Any]]]:
        count, rows, width = self.shape
        return [((box,), (pl.ds(row, rows), pl.ds(column + box * width, width))) for box in range(count)]

    def part(self, smem: Any, stage: Any, rows: Any, columns: Any) -> Any:
        if columns == slice(None):
            return smem.at[stage, :, rows, :]
        return smem.at[stage, self._boxes_of(columns)]

    def columns_of(self, ref: Any, columns: Any) -> Any:
        return ref.at[self._boxes_of(columns)]

    def _boxes_of(self, columns: Any) -> Any:
        width = self.shape[-1]
        return pl.ds(lax.div(columns.start, width), columns.size // width)

    def load(self, ref: Any, *, transposed: bool) -> jax.Array:
        return untiled_swizzled.load(ref, self.swizzle, transposed=transposed)

    def store(self, ref: Any, value: jax.Array, *, transposed: bool) -> None:
        untiled_swizzled.store(ref, value, self.swizzle, transposed=transposed)


def needs_untiled(extents: tuple[int, int], itemsize: int) -> bool:
    """Returns whether an array needs the untiled layout, and JAX supports it.

    An array needs it if tiles of 8 rows, or rows of 128 bytes where its rows are longer, do not divide it. Tiles of 32
    or 64 bytes may divide it, but then TMA's requests to the L2 cache are that narrow: such matmuls took up to 1.8
    times as long.
    """
    rows, row_bytes = extents[0], extents[1] * itemsize
    return HAS_UNTILED_SWIZZLE and ((rows > 8 and rows % 8 > 0) or (row_bytes > 128 and row_bytes % 128 > 0))


def swizzled_bytes(row: Any, itemsize: int, extents: tuple[int, ...] = (), least: Any = 32) -> Any:
    """Returns the bytes of the widest swizzled row that divides `row` elements, and the arrays' `extents` if possible.

    The result is 32, 64 or 128; or 16, which means no swizzle, if `least` allows it.
    """
    widest = np.gcd(row * itemsize, 128)
    for extent in extents:
        dividing = math.gcd(extent * itemsize, 128)
        widest = np.where((extent * itemsize > 128) & (dividing >= least), np.minimum(widest, dividing), widest)
    return widest


def tma_extents(extents: tuple[int, int], swizzle: Any, itemsize: Any, *, untiled: bool) -> tuple[Any, Any]:
    """Returns the least extents that TMA addresses: rows in multiples of 16 bytes; tiled, also 8 whole swizzled rows.

    No edge within them needs a mask. If tiled, an array smaller than one tile, in rows or columns, keeps that extent.
    """
    rows, columns = extents
    aligned = round_up(columns, TMA_GMEM_ALIGNMENT // itemsize)
    if untiled:
        return rows, aligned
    swizzled = swizzle // itemsize
    whole = np.where(columns <= swizzled, aligned, round_up(columns, swizzled))
    return rows if rows <= 8 else round_up(rows, 8), whole


def padded_bytes(shape: tuple[int, ...], extents: tuple[Any, ...], itemsize: int) -> Any:
    """Returns the bytes read and written to convert between an array and its padded copy; 0 if they are the same.

    `extents` are those of the padded array's last axes.
    """
    lead, last = shape[: -len(extents)], shape[-len(extents) :]
    size, padded = math.prod(last), math.prod(extents)
    return np.where(padded > size, size + padded, 0) * math.prod(lead) * itemsize
