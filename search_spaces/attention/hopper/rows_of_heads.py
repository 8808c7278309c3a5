"""Copies of a head's rows between ``[batch, length, heads, columns]`` in device memory and a tile in shared memory.

TMA fills rows of a tile beyond the length with zeros, and does not store them.
"""

from __future__ import annotations

from typing import Any

from search_spaces.hopper.smem_layout import SmemTile, Tiled, Untiled
from search_spaces.jax_compat import HAS_UNTILED_SWIZZLE, plgpu
from search_spaces.space import round_up

# Mosaic GPU tiles arrays in device memory by this many rows.
ROWS = 8


def layout(*lengths: int) -> type[SmemTile]:
    """Returns the layout of tiles of arrays of these lengths: untiled, if tiles of 8 rows do not divide all lengths."""
    return Untiled if HAS_UNTILED_SWIZZLE and any(length % ROWS for length in lengths) else Tiled


def length(of: type[SmemTile], rows: int) -> int:
    """Returns the length of an array in device memory, padded as its tiles require."""
    return rows if of is Untiled else round_up(rows, ROWS)


def load(tile: SmemTile, array: Any, place: tuple[Any, Any, Any], smem: Any, full: Any) -> None:
    """Starts the load of the tile at `place` (batch index, first row, head); each copy arrives at `full`."""
    batch, row, head = place
    for index, (rows, columns) in tile.boxes(row, 0):
        plgpu.copy_gmem_to_smem(array.at[batch, rows, head, columns], _box(smem, index), full)


def store(tile: SmemTile, array: Any, place: tuple[Any, Any, Any], smem: Any, *, column: int = 0) -> None:
    """Stores the tile at `place`, from `column` on. All copies form one group to wait for."""
    batch, row, head = place
    boxes = tile.boxes(row, column)
    for number, (index, (rows, columns)) in enumerate(boxes, 1):
        plgpu.copy_smem_to_gmem(
            _box(smem, index),
            array.at[batch, rows, head, columns],
            commit_group=number == len(boxes),
        )


def _box(smem: Any, index: tuple[int, ...]) -> Any:
    return smem.at[index] if index else smem
