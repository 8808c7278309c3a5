"""How a part of an array lies on chip: in tiles laid over the whole array, or in groups of rows that any copy reaches.

A copy (TMA) takes boxes of an array, fills with zeros what lies beyond the array's edges, and writes nothing there.
Mosaic GPU makes one copy of a part in tiles of ``[8, swizzled row]``, but cuts the whole array into such tiles, so they
must divide it. A part in groups, ``[groups, rows, swizzled row]``, takes a copy for each group, and these demand only
rows of the array that start at multiples of 16 bytes.
"""

from __future__ import annotations

import abc
import dataclasses
from typing import Any

import jax
from jax import lax
from jax.experimental import pallas as pl

from search_spaces.jax_compat import plgpu
from search_spaces.matmul.mosaic_gpu import groups


@dataclasses.dataclass(frozen=True)
class Part(abc.ABC):
    """A part of an array with room on chip: of an operand, of a residual, of the result.

    Attributes:
      rows, columns: its extents, as the array lies in device memory.
      dtype: of its elements.
      swizzle: bytes of a swizzled row.
    """

    rows: int
    columns: int
    dtype: Any
    swizzle: int

    @property
    @abc.abstractmethod
    def shape(self) -> tuple[int, ...]:
        """On chip."""

    @property
    @abc.abstractmethod
    def transforms(self) -> tuple[Any, ...]:
        """What Mosaic GPU has to know of its order on chip."""

    @property
    def copies(self) -> int:
        """How many copies fill it."""
        return len(self.boxes(0, 0))

    @abc.abstractmethod
    def boxes(self, row: Any, column: Any) -> list[tuple[tuple[int, ...], tuple[Any, Any]]]:
        """The copies of the part from `row` and `column` on: the index on chip, and the slices of the array."""

    @abc.abstractmethod
    def share(self, ring: Any, slot: Any, rows: Any, columns: Any) -> Any:
        """Of the part in a slot of a ring some rows, or some columns: as many as whole swizzled rows hold."""

    @abc.abstractmethod
    def load(self, ref: Any, *, transposed: bool) -> jax.Array:
        """All of it, in the layout of wgmma's accumulators; or its transpose, in the transposed layout."""

    @abc.abstractmethod
    def store(self, ref: Any, value: jax.Array, *, transposed: bool) -> None:
        """Stores what `load` would return."""


class Tiled(Part):
    """One box, in tiles of 8 rows as wide as a swizzled one, which 16 bytes are not."""

    @property
    def shape(self) -> tuple[int, ...]:
        return self.rows, self.columns

    @property
    def transforms(self) -> tuple[Any, ...]:
        tiles = plgpu.TilingTransform((8, self.swizzle // self.dtype.itemsize))
        return (tiles,) if self.swizzle == 16 else (tiles, plgpu.SwizzleTransform(self.swizzle))

    def boxes(self, row: Any, column: Any) -> list[tuple[tuple[int, ...], tuple[Any, Any]]]:
        return [((), (pl.ds(row, self.rows), pl.ds(column, self.columns)))]

    def share(self, ring: Any, slot: Any, rows: Any, columns: Any) -> Any:
        return ring.at[slot, rows, columns]

    def load(self, ref: Any, *, transposed: bool) -> jax.Array:
        layout = plgpu.Layout.WGMMA_TRANSPOSED if transposed else plgpu.Layout.WGMMA
        loaded: jax.Array = plgpu.layout_cast((ref.T if transposed else ref)[...], layout)
        return loaded

    def store(self, ref: Any, value: jax.Array, *, transposed: bool) -> None:
        if transposed:
            ref.T[...] = value
        else:
            ref[...] = value


class Grouped(Part):
    """A box for each group of one swizzled row."""

    @property
    def shape(self) -> tuple[int, ...]:
        width = self.swizzle // self.dtype.itemsize
        return self.columns // width, self.rows, width

    @property
    def transforms(self) -> tuple[Any, ...]:
        return (plgpu.SwizzleTransform(self.swizzle),)

    def boxes(self, row: Any, column: Any) -> list[tuple[tuple[int, ...], tuple[Any, Any]]]:
        count, rows, width = self.shape
        return [((group,), (pl.ds(row, rows), pl.ds(column + group * width, width))) for group in range(count)]

    def share(self, ring: Any, slot: Any, rows: Any, columns: Any) -> Any:
        if columns == slice(None):
            return ring.at[slot, :, rows, :]
        width = self.shape[-1]
        return ring.at[slot, pl.ds(lax.div(columns.start, width), columns.size // width)]

    def load(self, ref: Any, *, transposed: bool) -> jax.Array:
        return groups.load(ref, self.swizzle, transposed=transposed)

    def store(self, ref: Any, value: jax.Array, *, transposed: bool) -> None:
        groups.store(ref, value, self.swizzle, transposed=transposed)
