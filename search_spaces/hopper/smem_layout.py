"""How a tile of an array lies in shared memory: tiled, as Mosaic GPU has it, or untiled, for arrays of any extents.

TMA copies boxes of an array, fills what lies beyond its edges with zeros, and writes nothing there. Mosaic GPU makes
one copy of a tile that is itself tiled in ``[8, swizzled row]``, but lays these over the whole array in device memory,
so they must divide it. An untiled one, ``[boxes, rows, swizzled row]``, takes a copy for each box, boxes side by side,
and demands only that rows of the array start at multiples of 16 bytes.
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

from search_spaces.hopper import untiled_swizzled
from search_spaces.hopper.limits import TMA_GMEM_ALIGNMENT
from search_spaces.jax_compat import HAS_UNTILED_SWIZZLE, plgpu
from search_spaces.space import round_up


@dataclasses.dataclass(frozen=True)
class SmemTile(abc.ABC):
    """A tile of an array in shared memory: of an operand, of a residual, of the result.

    Attributes:
      rows, columns: its extents, as the array lies in device memory.
      dtype: of its elements.
      swizzle: bytes of a swizzled row; 16 is no swizzle.
    """

    rows: int
    columns: int
    dtype: Any
    swizzle: int

    @property
    @abc.abstractmethod
    def shape(self) -> tuple[int, ...]:
        """In shared memory."""

    @property
    @abc.abstractmethod
    def transforms(self) -> tuple[Any, ...]:
        """What Mosaic GPU has to know of its order there."""

    @property
    def copies(self) -> int:
        """How many TMA copies fill it."""
        return len(self.boxes(0, 0))

    @abc.abstractmethod
    def boxes(self, row: Any, column: Any) -> list[tuple[tuple[int, ...], tuple[Any, Any]]]:
        """The copies of the tile at `row` and `column`: the index in shared memory, and the slices of the array."""

    @abc.abstractmethod
    def part(self, smem: Any, stage: Any, rows: Any, columns: Any) -> Any:
        """Of the tile in one of several stages some rows, or some columns: as many as whole swizzled rows hold."""

    @abc.abstractmethod
    def columns_of(self, ref: Any, columns: Any) -> Any:
        """Of one tile some columns: as many as whole swizzled rows hold."""

    @abc.abstractmethod
    def load(self, ref: Any, *, transposed: bool) -> jax.Array:
        """All of it, in the layout of wgmma's accumulators; or its transpose, in the transposed layout."""

    @abc.abstractmethod
    def store(self, ref: Any, value: jax.Array, *, transposed: bool) -> None:
        """Stores what `load` would return."""


class Tiled(SmemTile):
    """One box, tiled in 8 rows as wide as a swizzled one, which 16 bytes are not."""

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
    """A box for each column of swizzled rows."""

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
    """Whether tiles of 8 rows, of 128 bytes each where they are longer, do not divide an array; and untiled ones exist.

    Tiles of 32 or 64 bytes may divide it, but what TMA asks of the L2 cache for one is as narrow: such products took up
    to 1.8 times as long.
    """
    rows, row_bytes = extents[0], extents[1] * itemsize
    return HAS_UNTILED_SWIZZLE and ((rows > 8 and rows % 8 > 0) or (row_bytes > 128 and row_bytes % 128 > 0))


def swizzled_bytes(row: Any, itemsize: int, extents: tuple[int, ...] = (), least: Any = 32) -> Any:
    """Bytes of the widest swizzled row that divides `row` elements, and the arrays' `extents` where one does.

    It is 32, 64 or 128; or 16, which is no swizzle, where `least` allows that.
    """
    widest = np.gcd(row * itemsize, 128)
    for extent in extents:
        dividing = math.gcd(extent * itemsize, 128)
        widest = np.where((extent * itemsize > 128) & (dividing >= least), np.minimum(widest, dividing), widest)
    return widest


def tma_extents(extents: tuple[int, int], swizzle: Any, itemsize: Any, *, untiled: bool) -> tuple[Any, Any]:
    """The least extents of an array that TMA addresses: rows of whole 16 bytes; tiled, also 8 whole swizzled rows.

    Within them no edge needs a mask. An array of less than one such tile, in rows or columns, stays as it is there.
    """
    rows, columns = extents
    aligned = round_up(columns, TMA_GMEM_ALIGNMENT // itemsize)
    if untiled:
        return rows, aligned
    swizzled = swizzle // itemsize
    whole = np.where(columns <= swizzled, aligned, round_up(columns, swizzled))
    return rows if rows <= 8 else round_up(rows, 8), whole


def padded_bytes(shape: tuple[int, ...], extents: tuple[Any, ...], itemsize: int) -> Any:
    """Bytes read and written to get from one of an array and its padded twin to the other; 0 where they are alike.

    `extents` are those of the padded array's last axes.
    """
    lead, last = shape[: -len(extents)], shape[-len(extents) :]
    size, padded = math.prod(last), math.prod(extents)
    return np.where(padded > size, size + padded, 0) * math.prod(lead) * itemsize
