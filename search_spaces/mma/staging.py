"""From accumulators to rows: moves a warpgroup's results through shared memory, and loads and stores matching rows.

Threads hold accumulators in the pairs of MMA's layout. Through shared memory, they are rearranged so that each thread
holds a few adjacent elements of a row, and consecutive threads hold consecutive elements. Results are then stored, and
epilogue operands loaded, in whole sectors. A thread's vector of elements lies either entirely inside the array or
entirely outside.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import pallas as pl
from jax.experimental.mosaic import gpu as mgpu
from jaxlib.mlir import ir

from search_spaces.hopper import ACCUMULATOR_BYTES, SECTOR_BYTES, WARP, WARPGROUP
from search_spaces.jax_compat import mosaic_gpu_code, plgpu
from search_spaces.mma import lanes
from search_spaces.mma.fragments import MMA_COLUMNS, MMA_ROWS, WarpTiles

MATRIX_ROWS = 8  # rows of accumulators that a warp's threads hold in one register each


@dataclasses.dataclass(frozen=True)
class Rows:
    """Some rows of a warpgroup's part of a tile, held by its threads row by row: 8 rows of each warp along m.

    In the tile, 8 other rows lie between the rows of two consecutive warps.

    Attributes:
      warps: of the warpgroup.
      vector: adjacent elements of a thread. The elements that a warpgroup holds at a time are a fraction of a row or
        whole rows.
    """

    warps: WarpTiles
    vector: int

    @property
    def rows(self) -> int:
        return self.warps.m_warps * MATRIX_ROWS

    @property
    def firsts(self) -> list[int]:
        """The first rows of all such groups of rows in the warpgroup's part."""
        each = self.warps.m_warps * MMA_ROWS
        return [first + half for first in range(0, self.warps.m, each) for half in range(0, MMA_ROWS, MATRIX_ROWS)]

    @property
    def shape(self) -> tuple[int, int]:
        return self.rows, self.warps.n

    @property
    def layout(self) -> Any:
        return plgpu.Layout.WG_STRIDED(self.shape, vec_size=self.vector)

    @property
    def pitch(self) -> int:
        """Bytes between rows in shared memory; four rows of a warp's pairs then lie in different banks."""
        return staging_pitch(self.warps.n)

    def first(self) -> tuple[Any, Any]:
        """Returns the row (within these rows) and the column of the first element that a thread holds."""
        element = lanes.thread() % WARPGROUP * self.vector
        return element // self.warps.n, element % self.warps.n

    @property
    def others(self) -> list[tuple[int, int]]:
        """Offsets of each of a thread's vectors from the first, as rows and columns.

        They are constants, also as rows of the tile (`in_tile`), because whole rows or parts of one row are held at a
        time.
        """
        at_once, (rows, columns) = WARPGROUP * self.vector, self.shape
        return [divmod(start, columns) for start in range(0, rows * columns, at_once)]

    def in_tile(self, row: Any) -> Any:
        """Converts a row of these rows to a row of the tile; both count from the first row."""
        return row // MATRIX_ROWS * MMA_ROWS + row % MATRIX_ROWS

    def boxes(self, row: Any, column: Any) -> Iterator[tuple[int, tuple[Any, Any]]]:
        """Yields the first of each 8 rows, and their box in an array where all rows begin at `row` and `column`."""
        for warp in range(self.warps.m_warps):
            box = pl.ds(row + warp * MMA_ROWS, MATRIX_ROWS), pl.ds(column, self.warps.n)
            yield warp * MATRIX_ROWS, box

    def fragmented(self, registers: list[Any], signed: bool | None) -> Any:
        held = np.empty(len(registers), dtype=object)
        held[:] = registers
        return mgpu.FragmentedArray(_registers=held, _layout=self.layout.to_mgpu(), _is_signed=signed)


def staging_pitch(n: Any) -> Any:
    return n * ACCUMULATOR_BYTES + SECTOR_BYTES


def exchange(acc: jax.Array, first: int, smem: Any, offset: int, to: Rows) -> jax.Array:
    """Returns the rows of the accumulators that begin with row `first`, in the layout of `to`.

    Args:
      smem: a reference to shared memory that is not in use otherwise.
      offset: bytes of `smem` per warpgroup; a warpgroup's part begins at its index times this.
    """
    warps, dtype = to.warps, to.warps.acc_dtype

    def meaning(acc: jax.Array, smem: Any) -> jax.Array:
        found = [acc[first + row : first + row + MATRIX_ROWS] for row in range(0, warps.m_warps * MMA_ROWS, MMA_ROWS)]
        return jnp.concatenate(found)

    @mosaic_gpu_code(
        meaning,
        arg_types=(warps.layout, plgpu.RefType()),
        return_type=plgpu.ShapeDtypeStruct(to.shape, dtype, layout=to.layout),
    )
    def through_smem(_: Any, acc: Any, smem: Any) -> Any:
        thread = lanes.thread()
        lane, warp = thread % WARP, thread % WARPGROUP // WARP
        base = lanes.smem_address(smem) + thread // WARPGROUP * offset
        row = warp // warps.n_warps * MATRIX_ROWS + lane // 4
        column = warp % warps.n_warps * MMA_COLUMNS + lane % 4 * 2
        own = base + row * to.pitch + column * ACCUMULATOR_BYTES
        # Each warp has groups of 8 columns, of both halves of the 16 rows of an instruction.
        instruction, half = divmod(first, warps.m_warps * MMA_ROWS)
        every = acc.registers.reshape(warps.m // (warps.m_warps * MMA_ROWS), -1, 2)
        mgpu.warpgroup_barrier()  # The previous rows have been read.
        for number, pair in enumerate(every[instruction, :, half // MATRIX_ROWS]):
            lanes.store("shared", own, number * warps.n_warps * MMA_COLUMNS * ACCUMULATOR_BYTES, pair)
        mgpu.warpgroup_barrier()
        element = mgpu.utils.dtype_to_ir_type(dtype)
        row, column = to.first()
        own = base + row * to.pitch + column * ACCUMULATOR_BYTES
        found = [
            lanes.load("shared", own, row * to.pitch + column * ACCUMULATOR_BYTES, element, to.vector)
            for row, column in to.others
        ]
        return to.fragmented(found, True if jnp.issubdtype(dtype, jnp.integer) else None)

    exchanged: jax.Array = through_smem(acc, smem)
    return exchanged


@dataclasses.dataclass(frozen=True)
class Window:
    """The position of a tile's rows in an array in device memory, ``[batch, rows, columns]`` (batch, rows optional).

    Attributes:
      batched: whether it has a batch axis.
      by_row: whether it has rows; otherwise one row serves all.
      clip_rows, clip_columns: whether a tile may extend beyond the array's rows or columns.
    """

    batched: bool
    by_row: bool
    clip_rows: bool
    clip_columns: bool


def load(array: Any, window: Window, corner: tuple[Any, Any, Any], down: int, to: Rows) -> jax.Array:
    """Loads rows of an array as float32, with zeros beyond its edges; the arguments are those of `store`."""
    dtype = array.dtype

    def meaning(array: Any, batch: Any, row: Any, column: Any) -> jax.Array:
        lead = (batch,) if window.batched else ()
        if not window.by_row:
            return jnp.broadcast_to(array[*lead, pl.ds(column, to.shape[1])], to.shape)
        return jnp.concatenate([array[*lead, *box] for _, box in to.boxes(row + down, column)])

    @mosaic_gpu_code(
        meaning,
        arg_types=(plgpu.RefType(), *[plgpu.Layout.WG_SPLAT] * 3),
        return_type=plgpu.ShapeDtypeStruct(to.shape, dtype, layout=to.layout),
    )
    def load_rows(_: Any, array: Any, batch: Any, row: Any, column: Any) -> Any:
        own = _Own.of(array, window, (batch, row, column), to)
        element = mgpu.utils.dtype_to_ir_type(dtype)
        found: dict[tuple[int, int], Any] = {}
        registers = []
        for place in to.others:
            key = place if window.by_row else (0, place[1])  # A row that serves all is loaded once.
            if key not in found:
                offset, inside = own.at(down, *key)
                found[key] = lanes.load("global", own.address, offset, element, to.vector, inside)
            registers.append(found[key])
        return to.fragmented(registers, None)

    loaded: jax.Array = load_rows(array, *(jnp.int32(x) for x in corner))
    return loaded.astype(jnp.float32)


def store(array: Any, window: Window, corner: tuple[Any, Any, Any], down: int, value: jax.Array, of: Rows) -> None:
    """Stores rows to an array, and nothing beyond its edges.

    Args:
      corner: batch element, row and column where the warpgroup's part of a tile begins.
      down: offset of the rows from there; static, so that a thread's addresses differ by constants.
    """

    def meaning(array: Any, batch: Any, row: Any, column: Any, value: jax.Array) -> None:
        for first, box in of.boxes(row + down, column):
            array[(batch, *box) if window.batched else box] = value[first : first + MATRIX_ROWS]

    @mosaic_gpu_code(meaning, arg_types=(plgpu.RefType(), *[plgpu.Layout.WG_SPLAT] * 3, of.layout), return_type=None)
    def store_rows(_: Any, array: Any, batch: Any, row: Any, column: Any, value: Any) -> None:
        own = _Own.of(array, window, (batch, row, column), of)
        for place, held in zip(of.others, value.registers.flat, strict=True):
            offset, inside = own.at(down, *place)
            lanes.store("global", own.address, offset, held, inside)

    store_rows(array, *(jnp.int32(x) for x in corner), value)


@dataclasses.dataclass(frozen=True)
class _Own:
    """A thread's elements of a tile's rows, in an array.

    Attributes:
      address: of its first element, which may lie outside the array.
      row, column: of its first element.
      extents: rows and columns of the array.
      itemsize: bytes of an element.
      window: the position of the rows in the array.
      rows: the rows that the warpgroup holds.
    """

    address: Any
    row: Any
    column: Any
    extents: tuple[int, int]
    itemsize: int
    window: Window
    rows: Rows

    @classmethod
    def of(cls, array: Any, window: Window, corner: tuple[Any, Any, Any], rows: Rows) -> _Own:
        kind = ir.MemRefType(array.type)
        *lead, columns = kind.shape
        extent, itemsize = lead[-1] if window.by_row else 1, mgpu.utils.bytewidth(kind.element_type)
        batch, row, column = (lanes.number(x, signed=True) for x in corner)
        row_of_rows, column_of_rows = rows.first()
        row = row + lanes.as_signed(rows.in_tile(row_of_rows)) if window.by_row else row * 0
        column = column + lanes.as_signed(column_of_rows)
        number = lanes.wide_signed(row)
        if window.batched:
            number = number + lanes.wide_signed(batch) * extent
        element = number * columns + lanes.wide_signed(column)
        address = lanes.gmem_address(array) + lanes.unsigned(element * itemsize)
        return cls(address, row, column, (extent, columns), itemsize, window, rows)

    def at(self, down: int, row: int, column: int) -> tuple[int, Any]:
        """Returns the byte offset of an element, and whether it is inside the array (None if always).

        The element is `down` rows of the tile, then `row` of these rows and `column` columns after the first one.
        """
        (extent, columns), row = self.extents, down + self.rows.in_tile(row)
        inside = None
        if self.window.clip_rows and self.window.by_row:
            inside = self.row < extent - row
        if self.window.clip_columns:
            within = (self.column >= -column) & (self.column < columns - column)
            inside = within if inside is None else inside & within
        return (row * columns + column) * self.itemsize, inside
