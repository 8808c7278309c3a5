"""The footprint of flash decoding on Hopper."""

from __future__ import annotations

import numpy as np

from search_spaces.flash_attention.hopper.decode_plan import CONSUMER_REGISTERS, PRODUCER_REGISTERS, DecodePlan
from search_spaces.flash_attention.problem import FlashAttentionProblem
from search_spaces.footprint import Footprint, Operand, Phase
from search_spaces.hopper.limits import (
    ACCUMULATOR_BYTES,
    BARRIER_BYTES,
    SMEM_ALIGNMENT,
    WARPGROUP,
    WGMMA_ROWS,
)
from search_spaces.space import Columns, cdiv, round_up

# FP32 operations per logit: scale, maximum, difference, sum, conversion.
LOGIT_OPERATIONS = 6
# In a memory-bound launch, only a few CTAs still read at the end, for the longest sequences. Each of them then reads
# faster than when all CTAs read, as if LAST_CTAS CTAs per SM shared the memory (H200, eight schedules, 64 sequences of
# up to 16384 keys).
LAST_CTAS = 0.8


def footprint(p: FlashAttentionProblem, s: Columns, cores: int) -> Footprint:
    """Returns the footprint; a block is a split of the keys of one head.

    The traffic of the second kernel is part of `copied_bytes`.
    """
    plan = DecodePlan.of(p, s)
    itemsize, heads = plan.dtype.itemsize, p.batch * p.kv_heads
    key_bytes, value_bytes = p.head_dim * itemsize, p.value_dim * itemsize
    # Keys that any query of a sequence sees. A left bound does not reduce them, as the first query sees the first key.
    visible = p.kv_share * (p.kv_len if p.right is None else min(p.kv_len, p.q_len + p.right))
    blocks = cdiv(visible, s.block_kv)
    steps = np.maximum(blocks / s.split_kv, 1.0)
    at_once = np.minimum(plan.ctas, np.where(plan.two_ctas, 2, 1) * cores)
    longest = steps * (1 + p.longest_beyond_mean * np.minimum(LAST_CTAS * cores / at_once, 1.0))
    keys = visible / s.split_kv / steps  # per step
    results = p.batch * p.heads * p.q_len
    written = heads * plan.tiles * plan.tile_rows * p.value_dim
    second = plan.second_launch
    # Partial results have one log-sum-exp per element instead.
    lse_bytes = WGMMA_ROWS * ACCUMULATOR_BYTES * p.return_lse * np.logical_not(second)
    out_bytes = plan.tile_rows * p.value_dim * np.where(second, 2 * ACCUMULATOR_BYTES, itemsize)
    padded = p.batch * p.kv_heads * (p.kv_len + plan.kv_rows) * (key_bytes + value_bytes) * (plan.kv_rows > p.kv_len)
    packed = 2 * results * key_bytes * (p.q_len > 1)
    combined = second * (plan.partials * written * 2 * ACCUMULATOR_BYTES + results * value_bytes)
    unpacked = np.logical_not(second) * 2 * results * value_bytes * (p.q_len > 1)
    logits = WGMMA_ROWS * s.block_kv
    copies = [padded, packed, combined, unpacked]
    return Footprint(
        arithmetic=p.arithmetic,
        grid=(np.full(len(s), heads), np.full(len(s), plan.tiles), s.split_kv),
        step=Phase(
            loads=(
                Operand(bytes=keys * key_bytes, axes=(0, 2), filled_bytes=s.block_kv * key_bytes, name="k"),
                Operand(bytes=keys * value_bytes, axes=(0, 2), filled_bytes=s.block_kv * value_bytes, name="v"),
            ),
            flops=2.0 * logits * (p.head_dim + p.value_dim),
            fp32_ops=logits * LOGIT_OPERATIONS + WGMMA_ROWS * p.value_dim,
            mufu_ops=logits * (1 + p.softcap) + WGMMA_ROWS,
            onchip_bytes_read=WGMMA_ROWS * key_bytes + s.block_kv * (key_bytes + value_bytes),
        ),
        tile=Phase(
            loads=(Operand(bytes=plan.rows / plan.tiles * key_bytes, axes=(0, 1), name="q"),),
            bytes_written=(out_bytes + lse_bytes) / s.cluster,
        ),
        steps=steps,
        step_range=(np.ones(len(s)), longest) if p.kv_lengths else None,
        minor=0,
        axes=("kv heads of all sequences", "packed queries", "splits of the keys"),
        stages=s.stages,
        consumers=1,
        onchip_bytes=smem_bytes(plan),
        threads=WARPGROUP,
        registers=plan.registers,
        registers_per_block=WARPGROUP
        * np.where(plan.two_ctas, CONSUMER_REGISTERS + PRODUCER_REGISTERS, 2 * round_up(plan.registers, 8)),
        cluster=s.cluster,
        dsmem_bytes=(s.cluster > 1) * (plan.tile_rows * p.value_dim * ACCUMULATOR_BYTES),
        copied_bytes=sum(copies),
        launches=1 + sum(np.where(np.asarray(copy) > 0, 1, 0) for copy in copies),
    )


def smem_bytes(plan: DecodePlan) -> np.ndarray[tuple[int, ...], np.dtype[np.int64]]:
    """Returns the shared memory of a CTA, exact to the byte."""
    p, itemsize = plan.p, plan.dtype.itemsize
    arrays = (
        WGMMA_ROWS * p.head_dim * itemsize,
        plan.stages * plan.block_kv * p.head_dim * itemsize,
        plan.stages * plan.block_kv * p.value_dim * itemsize,
        plan.smem_rows * p.value_dim * ACCUMULATOR_BYTES,
        2 * WGMMA_ROWS * ACCUMULATOR_BYTES,
    )
    whole = sum(round_up(np.asarray(array), SMEM_ALIGNMENT) for array in arrays)
    total: np.ndarray[tuple[int, ...], np.dtype[np.int64]] = whole + (1 + 4 * plan.stages) * BARRIER_BYTES
    return total
