"""The footprint of flash attention forward on Hopper."""

from __future__ import annotations

from typing import Any

import numpy as np

from search_spaces.flash_attention.hopper import steps
from search_spaces.flash_attention.hopper.space import accumulator_registers
from search_spaces.flash_attention.hopper.tiling import REGISTERS, Tiling
from search_spaces.flash_attention.problem import FlashAttentionProblem
from search_spaces.footprint import Footprint, Operand, Phase
from search_spaces.hopper.limits import ACCUMULATOR_BYTES, BARRIER_BYTES, SMEM_ALIGNMENT, WARPGROUP, WGMMA_ROWS
from search_spaces.hopper.smem_layout import padded_bytes
from search_spaces.space import Columns, round_up

# Registers of a consumer thread besides logits, probabilities and the result (ptxas).
OTHER_REGISTERS = 33
# FP32 operations of a row at each step: per key, and independent of the keys. SASS of a step of 128 keys at head size
# 128 has 70 maxima, 68 multiply-adds, 66 products, 62 sums and 32 conversions per thread; 64 of these rescale the
# result.
OPERATIONS_PER_KEY = 3.5
OPERATIONS_PER_ROW = 40
# Further stages do not hide the waits within a step for products, row maxima and other lanes. Times on an H200 match a
# pipeline of two stages, for all blocks.
STAGES = 2
# Exponentials of a row at each step in addition to one per key. They rescale; each lane of a row computes its own.
EXPONENTIALS_PER_ROW = 2


def footprint(p: FlashAttentionProblem, s: Columns, cores: int) -> Footprint:
    """Returns the footprint; a block is a tile of queries, and a step is one block of keys.

    Sequence lengths are those of the inputs that are measured. The longest tile in `step_range` is the longest of the
    last tiles on `cores` cores, because the time of longer tiles before these is balanced by other cores.
    """
    t = Tiling(p, s)
    size, rows, computed = t.itemsize, t.rows, t.computed_rows
    keys = np.minimum(s.block_kv, p.kv_len)
    consumer, producer = (np.array([REGISTERS[n][i] for n in (1, 2, 3)])[s.consumers - 1] for i in (0, 1))
    # Mean rows per tile that have a query.
    queries = p.q_len / t.q_tiles
    out_bytes = p.value_dim * size + p.return_lse * ACCUMULATOR_BYTES
    before = [padded_bytes(x.shape, (t.kv_rows, *x.shape[2:]), size) for x in p.qkv()[1:]]
    out = (t.q_rows, p.heads, p.value_dim)
    after = [
        padded_bytes(p.qkv()[0].shape, (t.q_rows, p.heads, p.head_dim), size),
        padded_bytes(p.out().shape, out, size),
    ]
    copies = [float(copy) for copy in (*before, *after)]
    capped = 1 + p.softcap
    mean = np.maximum(steps.mean(p, s) * p.q_share * p.kv_share, 1.0)
    sections = (s.order != "plain") & (s.section > 1)
    return Footprint(
        arithmetic=p.arithmetic,
        grid=(np.full(len(s), p.batch * p.kv_heads), np.full(len(s), p.group), t.q_tiles),
        step=Phase(
            loads=(
                Operand(bytes=keys * p.head_dim * size, axes=(0,), tma_row_bytes=t.swizzle(p.head_dim), name="k"),
                Operand(bytes=keys * p.value_dim * size, axes=(0,), tma_row_bytes=t.swizzle(p.value_dim), name="v"),
            ),
            flops=2.0 * computed * s.block_kv * (p.head_dim + p.value_dim),
            mufu_ops=computed * (capped * s.block_kv + EXPONENTIALS_PER_ROW),
            fp32_ops=computed * ((OPERATIONS_PER_KEY + p.softcap) * s.block_kv + p.value_dim + OPERATIONS_PER_ROW),
            # Each consumer reads its queries, and all keys and values.
            onchip_bytes_read=size
            * (computed / WGMMA_ROWS)
            * (WGMMA_ROWS * p.head_dim + s.block_kv * (p.head_dim + p.value_dim)),
        ),
        tile=Phase(
            loads=(
                Operand(
                    bytes=queries * p.head_dim * size,
                    axes=(0, 1, 2),
                    name="q",
                    filled_bytes=rows * p.head_dim * size,
                    tma_row_bytes=t.swizzle(p.head_dim),
                ),
            ),
            fp32_ops=rows * (1.5 * p.value_dim + OPERATIONS_PER_ROW),
            mufu_ops=rows * EXPONENTIALS_PER_ROW,
            bytes_written=queries * out_bytes,
        ),
        onchip_bytes=_onchip_bytes(p, s),
        steps=mean,
        step_range=(np.minimum(steps.shortest(p, s), mean), steps.longest_of_last(p, s, cores)),
        minor=np.where(sections, np.where(s.section > p.group, 0, 1), 2),
        group=np.where(sections, np.where(s.section > p.group, s.section // p.group, s.section), t.q_tiles),
        axes=("kv heads of all sequences", "query heads of each", "queries"),
        stages=np.minimum(s.stages, STAGES),
        consumers=s.consumers,
        ping_pong=s.ping_pong,
        delay_release=1,
        threads=s.consumers * WARPGROUP,
        registers=np.minimum(accumulator_registers(p, s) + OTHER_REGISTERS, consumer),
        registers_per_block=WARPGROUP * (s.consumers * consumer + producer),
        persistent=s.persistent,
        copied_bytes=sum(copies),
        launches=1 + sum(copy > 0 for copy in copies),
    )


def _onchip_bytes(p: FlashAttentionProblem, s: Columns) -> Any:
    """Returns the shared memory of a CTA, exact to the byte."""
    t = Tiling(p, s)
    size, rows = t.itemsize, t.rows
    staged = np.where(t.out_in_q, 0, rows * s.epi_tile_n * size)
    arrays = (
        rows * p.head_dim * size,
        s.stages * s.block_kv * p.head_dim * size,
        s.stages * s.block_kv * p.value_dim * size,
        staged,
        rows * ACCUMULATOR_BYTES * p.return_lse,
    )
    aligned: Any = sum(round_up(array, SMEM_ALIGNMENT) for array in arrays)
    return aligned + BARRIER_BYTES * (s.consumers + 4 * s.stages)
