"""What a launch of a schedule demands of a Hopper GPU."""

from __future__ import annotations

from typing import Any

import jax.numpy as jnp
import numpy as np

from search_spaces.kernel import Footprint, Operand
from search_spaces.matmul.epilogue import EXPONENTIALS
from search_spaces.matmul.mosaic_gpu.geometry import (
    ATOM_M,
    SUM_BYTES,
    THREADS,
    Geometry,
    cdiv,
    padded_bytes,
    round_up,
)
from search_spaces.matmul.mosaic_gpu.product import COPY_REGISTERS
from search_spaces.matmul.problem import MatmulProblem
from search_spaces.space import Columns

# What a computing thread holds besides its accumulators. With 192 of these it does not spill, with 208 it does (ptxas);
# where an activation or a bias and a residual follow, with 192 it spills one or two registers, with 160 none.
OTHER_REGISTERS = 40
# Lane operations that come with an exponential of an activation: a GELU makes 1024 x 3072 x 768 take 2.4 us longer, of
# which its exponentials take 0.8 (H200).
LANE_OPERATIONS = 17
# Those of a lane for each 4 bytes that it writes of a result which no copy reaches: 1024 x 50257 x 768 took 40 us
# longer than if it were copied, and 65 us where pieces are half a warp wide (H200).
WRITE_OPERATIONS = 50
LANES = 32
# Mosaic GPU gives each on-chip array whole kibibytes, and each barrier 8 bytes.
ALIGNMENT = 1024
BARRIER_BYTES = 8


def footprint(p: MatmulProblem, s: Columns) -> Footprint:
    """A block is a part of a tile; what precedes or follows the kernel, copies and sums of parts, is copied bytes."""
    g = Geometry(p, s)
    itemsize, result = jnp.dtype(p.dtype).itemsize, p.result()
    blocks_m, blocks_n = g.rows * g.pair_m, g.columns * g.pair_n
    row_bytes = p.k / (g.steps * s.split_k * g.pair_k) * itemsize
    registers = g.wg_m * g.wg_n // THREADS + OTHER_REGISTERS
    allocated = round_up(registers, 8)
    # What follows the sums is read where they are complete: in the kernel, or where its parts are added up.
    whole = s.split_k == 1
    following, following_onchip_bytes = _following(p, s, g)
    following_bytes = sum(array.size * array.dtype.itemsize for array in p.operands()[2:])
    padded = [
        padded_bytes(array.shape, extents, array.dtype.itemsize)
        for array, extents in zip(p.operands(), g.extents, strict=True)
    ]
    before = [*padded[:2], *(whole * copy for copy in padded[2:])]
    elements = np.prod(result.shape, dtype=np.int64)
    # The second launch reads the sums of all parts, and what follows them, and writes the result.
    after = np.where(
        s.split_k > 1,
        elements * (s.split_k * SUM_BYTES + result.dtype.itemsize) + following_bytes,
        padded_bytes(result.shape, g.c_extents, result.dtype.itemsize),
    )
    exponentials = whole * s.tile_m * s.tile_n * EXPONENTIALS[p.activation] / (g.steps * g.pair_k)
    # A warp writes a row of a piece at a time, each lane 4 bytes.
    warps_wide = cdiv(np.where(s.swap_ab, ATOM_M, s.epi_tile_n) * result.dtype.itemsize, 4 * LANES)
    rows_of_pieces = s.tile_m * s.tile_n / np.where(s.swap_ab, ATOM_M, s.epi_tile_n)
    written = np.where(g.written, rows_of_pieces / g.pair_k * warps_wide * LANES * WRITE_OPERATIONS, 0.0)
    # Extents, and into how many they fall.
    m, n, k = (p.m, blocks_m), (p.n, blocks_n), (p.k, g.steps * s.split_k * g.pair_k)
    a_rows, a_tile = (k, (s.tile_k, s.tile_m)) if p.transpose_a else (m, (s.tile_m, s.tile_k))
    b_rows, b_tile = (n, (s.tile_n, s.tile_k)) if p.transpose_b else (k, (s.tile_k, s.tile_n))
    return Footprint(
        arithmetic=p.arithmetic,
        grid=(g.parts * g.pair_k, blocks_m, blocks_n),
        operands=(
            Operand(
                bytes=p.m / blocks_m * row_bytes,
                axes=(0, 1),
                multicast=g.pair_n,
                filled_bytes=s.tile_m * s.tile_k * itemsize,
                row_bytes=(s.tile_m if p.transpose_a else s.tile_k) * itemsize,
                copy_bytes=g.swizzle,
                outside_rows=_outside_rows(a_rows, a_tile, g.swizzle // itemsize),
                start_bytes=_start_bytes(g.extents[0], itemsize),
            ),
            Operand(
                bytes=p.n / blocks_n * row_bytes,
                axes=(0, 2),
                multicast=g.pair_m,
                filled_bytes=s.tile_k * s.tile_n * itemsize,
                row_bytes=(s.tile_k if p.transpose_b else s.tile_n) * itemsize,
                copy_bytes=g.swizzle,
                outside_rows=_outside_rows(b_rows, b_tile, g.swizzle // itemsize),
                start_bytes=_start_bytes(g.extents[1], itemsize),
            ),
            *following,
        ),
        flops=2.0 * s.tile_m * s.tile_n * s.tile_k,
        bytes_written=(p.m / blocks_m) * (p.n / blocks_n) / g.pair_k * g.piece_itemsize,
        onchip_bytes=round_up(s.stages * s.tile_m * s.tile_k * itemsize, ALIGNMENT)
        + round_up(s.stages * s.tile_k * s.tile_n * itemsize, ALIGNMENT)
        + round_up(g.warpgroups * g.slots * g.piece_m * g.piece_n * g.piece_itemsize, ALIGNMENT)
        + (1 + g.warpgroups // g.readers) * s.stages * BARRIER_BYTES
        + following_onchip_bytes,
        steps=g.steps,
        minor=np.where(s.grid_minor_dim == "m", 1, 2),
        group=s.grid_tile_width * np.where(s.grid_minor_dim == "m", g.pair_m, g.pair_n),
        # A slot whose product still runs is loaded again one step later.
        stages=s.stages - s.delay_release,
        multipliers=g.readers,
        alternating=np.equal(s.consumers, "ping_pong"),
        ahead=s.delay_release,
        threads=g.warpgroups * THREADS,
        registers=registers,
        # With one computing warpgroup nobody gives registers back, and all threads have as many.
        registers_per_block=THREADS
        * (g.warpgroups * allocated + np.where(g.warpgroups == 1, allocated, COPY_REGISTERS)),
        # Each multiplication of 64 rows reads these, and its columns once more.
        onchip_bytes_read=g.readers * (g.wg_rows + g.wg_rows // ATOM_M * g.wg_columns) * s.tile_k * itemsize,
        special_ops=exponentials,
        vector_ops=LANE_OPERATIONS * exponentials + written / g.steps,
        cluster=g.pair_m * g.pair_n * g.pair_k,
        exchanged_bytes=(g.pair_k > 1) * (s.tile_m * s.tile_n // 2 * SUM_BYTES),
        persistent=True,
        copied_bytes=sum(before) + after,
        launches=1 + sum(copy > 0 for copy in (*before, after)),
    )


def _outside_rows(rows: tuple[int, Any], tile: tuple[Any, Any], width: Any) -> Any:
    """Swizzled rows, `width` elements wide, that a part of an array of so many rows fills beyond its edge, on average.

    A group of eight in which the array has a row costs nothing extra: 1 x 4096 x 14336 with tiles of 8 rows comes to
    what memory delivers.
    """
    extent, parts = rows
    return (parts * tile[0] - round_up(extent, 8)) / parts * tile[1] / width


def _start_bytes(extents: tuple[Any, Any], itemsize: int) -> Any:
    """Of the rows of an array in device memory: the largest power of two that divides their pitch."""
    pitch = extents[1] * itemsize
    return np.where(extents[0] > 1, pitch & -pitch, 0)


def _following(p: MatmulProblem, s: Columns, g: Geometry) -> tuple[list[Operand], Any]:
    """What a block loads of the bias and the residual, spread over its steps, and what they take on chip, in bytes.

    Nothing where k is split: `footprint` counts them with the sums of parts.
    """
    whole = s.split_k == 1
    columns, rows = p.n / (g.columns * g.pair_n), p.m / (g.rows * g.pair_m)
    steps = g.steps * g.pair_k  # of all blocks that share a tile
    loads: list[Operand] = []
    onchip_bytes: Any = 0
    if p.bias:
        itemsize = jnp.dtype(p.bias).itemsize
        loads.append(Operand(bytes=whole * columns * itemsize / steps, axes=(0, 2)))
        onchip_bytes += round_up(g.warpgroups * g.bias_width * itemsize, ALIGNMENT) + g.warpgroups * BARRIER_BYTES
    if p.residual:
        itemsize, slots = jnp.dtype(p.residual).itemsize, g.warpgroups * g.slots
        loads.append(
            Operand(
                bytes=whole * rows * columns * itemsize / steps,
                axes=(0, 1, 2),
                filled_bytes=whole * s.tile_m * s.tile_n * itemsize / steps,
                row_bytes=s.tile_n * itemsize,
                copy_bytes=g.residual_swizzle,
                outside_rows=whole
                * _outside_rows((p.m, g.rows * g.pair_m), (s.tile_m, s.tile_n), g.residual_swizzle // itemsize)
                / steps,
            )
        )
        onchip_bytes += round_up(slots * g.piece_m * g.piece_n * itemsize, ALIGNMENT) + slots * BARRIER_BYTES
    return loads, whole * onchip_bytes
