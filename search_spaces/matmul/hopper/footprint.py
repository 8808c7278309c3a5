"""The footprint of a launch on a Hopper GPU."""

from __future__ import annotations

from typing import Any

import jax.numpy as jnp
import numpy as np

from search_spaces.footprint import Footprint, Operand, Phase
from search_spaces.hopper import ACCUMULATOR_BYTES, BARRIER_BYTES, SMEM_ALIGNMENT, WARP, WARPGROUP, WGMMA_ROWS
from search_spaces.hopper.smem_layout import padded_bytes
from search_spaces.matmul.epilogue import ACTIVATION_OPERATIONS, EXPONENTIALS
from search_spaces.matmul.hopper.kernel import PRODUCER_REGISTERS
from search_spaces.matmul.hopper.schedule import PING_PONG, Tiling
from search_spaces.matmul.problem import MatmulProblem
from search_spaces.space import Columns, cdiv, round_up

# Registers of a consumer thread besides its accumulators. It does not spill with 192 accumulator registers, and does
# with 208 (ptxas). With an activation, or a bias and a residual, it spills one or two registers with 192 and none with
# 160.
OTHER_REGISTERS = 40
# FP32 operations of a lane per 4 bytes that it stores, if TMA cannot address the rows of the result: 1024 x 50257 x 768
# took 40 us longer than with TMA stores, and 65 us longer with subtiles half a warp wide (H200).
STORE_OPERATIONS = 50


def footprint(p: MatmulProblem, s: Columns) -> Footprint:
    """Returns the footprint; a block is a work tile, and copied bytes cover copies and the split-K reduction."""
    t = Tiling(p, s)
    itemsize, result = jnp.dtype(p.dtype).itemsize, p.whole
    blocks_m, blocks_n = t.grid_m * t.cluster_m, t.grid_n * t.cluster_n
    row_bytes = p.k / (t.steps * s.split_k * t.cluster_k) * itemsize
    registers = t.wg_m * t.wg_n // WARPGROUP + OTHER_REGISTERS
    # The epilogue is applied to complete accumulators: in the kernel, or in the split-K reduction.
    whole = s.split_k == 1
    epilogue, epilogue_onchip_bytes = _epilogue(p, s, t)
    epilogue_bytes = sum(array.size * array.dtype.itemsize for array in p.operands()[2:])
    padded = [
        padded_bytes(array.shape, extents, array.dtype.itemsize)
        for array, extents in zip(p.operands(), t.extents, strict=True)
    ]
    before = [*padded[:2], *(whole * copy for copy in padded[2:])]
    elements = np.prod(result.shape, dtype=np.int64)
    # The reduction reads the accumulators of all splits and the epilogue's operands, and writes the results.
    reduced = elements * (s.split_k * ACCUMULATOR_BYTES + result.dtype.itemsize) + epilogue_bytes
    after = [
        np.where(s.split_k > 1, reduced / len(p.columns), padded_bytes(each.shape, extents, each.dtype.itemsize))
        for each, extents in zip(p.results(), t.c_extents, strict=True)
    ]
    exponentials = whole * s.tile_m * s.tile_n * EXPONENTIALS[p.activation] / t.cluster_k
    # A warp stores one row of a subtile at a time, 4 bytes per lane.
    warps_wide = cdiv(np.where(s.swap_ab, WGMMA_ROWS, s.epi_tile_n) * result.dtype.itemsize, 4 * WARP)
    rows_of_subtiles = s.tile_m * s.tile_n / np.where(s.swap_ab, WGMMA_ROWS, s.epi_tile_n)
    stored = np.where(t.stored_by_threads, rows_of_subtiles / t.cluster_k * warps_wide * WARP * STORE_OPERATIONS, 0.0)
    # Extents, and the number of parts along each.
    m, n, k = (p.m, blocks_m), (p.n, blocks_n), (p.k, t.steps * s.split_k * t.cluster_k)
    a_rows, a_tile = (k, (s.tile_k, s.tile_m)) if p.transpose_a else (m, (s.tile_m, s.tile_k))
    b_rows, b_tile = (n, (s.tile_n, s.tile_k)) if p.transpose_b else (k, (s.tile_k, s.tile_n))
    return Footprint(
        arithmetic=p.arithmetic,
        grid=(t.products * t.cluster_k, blocks_m, blocks_n),
        step=Phase(
            loads=(
                Operand(
                    bytes=p.m / blocks_m * row_bytes,
                    axes=(0, 1),
                    name="a",
                    multicast=t.cluster_n,
                    filled_bytes=s.tile_m * s.tile_k * itemsize,
                    tma_row_bytes=t.swizzle,
                    fill_rows=_fill_rows(a_rows, a_tile, t.swizzle // itemsize),
                    start_bytes=_start_bytes(t.extents[0], itemsize),
                ),
                Operand(
                    bytes=p.n / blocks_n * row_bytes,
                    axes=(0, 2),
                    name="b",
                    multicast=t.cluster_m,
                    filled_bytes=s.tile_k * s.tile_n * itemsize,
                    tma_row_bytes=t.swizzle,
                    fill_rows=_fill_rows(b_rows, b_tile, t.swizzle // itemsize),
                    start_bytes=_start_bytes(t.extents[1], itemsize),
                ),
            ),
            flops=2.0 * s.tile_m * s.tile_n * s.tile_k,
            # Each 64-row wgmma reads its rows, and its columns once more.
            onchip_bytes_read=t.cooperating
            * (t.wg_rows + t.wg_rows // WGMMA_ROWS * t.wg_columns)
            * s.tile_k
            * itemsize,
        ),
        tile=Phase(
            loads=epilogue,
            fp32_ops=ACTIVATION_OPERATIONS * exponentials + stored,
            mufu_ops=exponentials,
            bytes_written=(p.m / blocks_m) * (p.n / blocks_n) / t.cluster_k * t.out_itemsize,
        ),
        onchip_bytes=round_up(s.stages * s.tile_m * s.tile_k * itemsize, SMEM_ALIGNMENT)
        + round_up(s.stages * s.tile_k * s.tile_n * itemsize, SMEM_ALIGNMENT)
        + round_up(t.consumers * t.epi_stages * t.epi_m * t.epi_n * t.out_itemsize, SMEM_ALIGNMENT)
        + (1 + t.consumers // t.cooperating) * s.stages * BARRIER_BYTES
        + epilogue_onchip_bytes,
        steps=t.steps,
        minor=np.where(s.grid_minor_dim == "m", 1, 2),
        group=s.grid_tile_width * np.where(s.grid_minor_dim == "m", t.cluster_m, t.cluster_n),
        snake=True,
        axes=("batch", "m", "n"),
        # A stage with a pending wgmma is loaded again one step later, unless ordered consumers keep the pipeline busy.
        stages=s.stages - s.delay_release * (s.consumers != "ordered_ping_pong"),
        consumers=t.cooperating,
        ping_pong=np.isin(s.consumers, PING_PONG),
        accumulators=s.tile_m * s.tile_n / t.cluster_k,
        delay_release=s.delay_release,
        threads=t.consumers * WARPGROUP,
        registers=registers,
        registers_per_block=registers_per_block(t, registers),
        cluster=t.cluster_m * t.cluster_n * t.cluster_k,
        dsmem_bytes=(t.cluster_k > 1) * (s.tile_m * s.tile_n // 2 * ACCUMULATOR_BYTES),
        tail_parts=s.tail_split_k,
        tail_bytes=s.tile_m * s.tile_n * ACCUMULATOR_BYTES,
        persistent=True,
        copied_bytes=sum(before) + sum(after),
        # One launch zeros the semaphores.
        launches=1 + (s.tail_split_k > 1) + sum(copy > 0 for copy in (*before, *after)),
    )


def registers_per_block(t: Tiling, registers: Any) -> Any:
    """Returns the registers of a CTA.

    With one consumer no warpgroup changes its count, so all threads have the same.
    """
    allocated = round_up(registers, 8)
    return WARPGROUP * (t.consumers * allocated + np.where(t.consumers == 1, allocated, PRODUCER_REGISTERS))


def _fill_rows(rows: tuple[int, Any], tile: tuple[Any, Any], width: Any) -> Any:
    """Returns the average number of swizzled rows, `width` elements wide, that a part fills beyond the array's edge.

    A group of eight rows that contains at least one row of the array costs nothing extra: 1 x 4096 x 14336 with tiles
    of 8 rows reaches the memory bandwidth.
    """
    extent, parts = rows
    return (parts * tile[0] - round_up(extent, 8)) / parts * tile[1] / width


def _start_bytes(extents: tuple[Any, Any], itemsize: int) -> Any:
    """Returns the largest power of two that divides the row pitch of an array in device memory, in bytes."""
    pitch = extents[1] * itemsize
    return np.where(extents[0] > 1, pitch & -pitch, 0)


def _epilogue(p: MatmulProblem, s: Columns, t: Tiling) -> tuple[tuple[Operand, ...], Any]:
    """Returns a block's loads of the bias and the residual, and their on-chip bytes.

    Both are zero for split-K: `footprint` counts them with the reduction.
    """
    whole = s.split_k == 1
    columns, rows = p.n / (t.grid_n * t.cluster_n), p.m / (t.grid_m * t.cluster_m)
    loads: list[Operand] = []
    onchip_bytes: Any = 0
    if p.bias:
        itemsize = jnp.dtype(p.bias).itemsize
        loads.append(Operand(bytes=whole * columns * itemsize / t.cluster_k, axes=(0, 2), name="bias"))
        onchip_bytes += round_up(t.consumers * t.bias_width * itemsize, SMEM_ALIGNMENT) + t.consumers * BARRIER_BYTES
    if p.residual:
        itemsize, stages = jnp.dtype(p.residual).itemsize, t.consumers * t.epi_stages
        loads.append(
            Operand(
                bytes=whole * rows * columns * itemsize / t.cluster_k,
                axes=(0, 1, 2),
                name="residual",
                filled_bytes=whole * s.tile_m * s.tile_n * itemsize / t.cluster_k,
                tma_row_bytes=t.residual_swizzle,
                fill_rows=whole
                * _fill_rows((p.m, t.grid_m * t.cluster_m), (s.tile_m, s.tile_n), t.residual_swizzle // itemsize)
                / t.cluster_k,
            )
        )
        onchip_bytes += round_up(stages * t.epi_m * t.epi_n * itemsize, SMEM_ALIGNMENT) + stages * BARRIER_BYTES
    return tuple(loads), whole * onchip_bytes
