"""The search space of flash attention forward on Hopper, with a reason for each rule."""

from __future__ import annotations

from typing import Any

import numpy as np

from search_spaces.flash_attention.hopper import schedule
from search_spaces.flash_attention.hopper.schedule import REGISTERS, FlashAttentionSchedule, Tiling, round_heads
from search_spaces.flash_attention.problem import FlashAttentionProblem
from search_spaces.footprint import Footprint, Operand, Phase
from search_spaces.hopper import ACCUMULATOR_BYTES, BARRIER_BYTES, SMEM_ALIGNMENT, WARPGROUP, WGMMA_ROWS
from search_spaces.hopper.smem_layout import padded_bytes
from search_spaces.space import Columns, Space, cdiv, round_up

BLOCKS = (128, 176, 160, 144, 112, 192, 96, 80, 64, 48)
# Maximum registers per thread for logits, probabilities (float32 and 16 bits) and the result, by number of consumers.
# Above or close to the true limit, ptxas spills or serializes products (found by compiling head sizes from 64 to 256
# with blocks from 48 to 256; ptxas 13.0).
MOST_REGISTERS = {1: 200, 2: 200, 3: 132}
# Maximum columns of the result for three consumers. With more, blocks must be smaller than with two consumers.
MOST_VALUES_OF_THREE = 64
# Mean steps per tile. Persistent CTAs hide the start and end of a tile, but their steps take longer (H200, head size
# 128: 0.055 us per step against a gain of 1.6 us per tile). Above the first number the cost exceeds the gain. Up to the
# second number the cost is small.
MOST_STEPS_PERSISTENT, LEAST_STEPS_ALONE = 24, 8
# Maximum steps of the busiest CTA over the mean. CTAs that take tiles dynamically do not have this imbalance.
MOST_IMBALANCE = 1.05
# Heads per section: few, so that their keys and values stay in the last-level cache, but enough that the tiles that
# start last are short.
SECTIONS = (1, 2, 3, 4, 8)
# Tiles of several heads are assigned by length only if the imbalance is then at most EVEN, and lower by EVENED_OUT than
# if tiles are assigned by head. Sections have the number of heads that gives each CTA equally many tiles, times an
# element of ROUND_HEADS: keys and values of these heads stay in the last-level cache (H200: all 256 heads of 512 KiB
# took 1.11 times as long as assignment by head).
EVEN, EVENED_OUT, ROUND_HEADS = 1.025, 0.01, (1, 2)
# A step of this many keys takes longer than a load from device memory (H200: 1.5 us against 0.7 us). This is also the
# largest block for which ptxas finds registers for the bounds of a mask, or for the end of another tile (H200: larger
# blocks take 1.04 to 1.6 times as long).
LARGE_BLOCK = 128
# Maximum columns of a result that persistent CTAs have shared memory to stage whole.
EPI_WHOLE = 128


def accumulator_registers(p: FlashAttentionProblem, s: Any) -> Any:
    """Returns the accumulator registers per thread: logits of the next block (half of them twice), and the result."""
    return 3 * s.block_kv // 4 + p.value_dim // 2


def space(p: FlashAttentionProblem, cores: int) -> Space[FlashAttentionSchedule]:
    """Returns the search space for `p` on a chip with `cores` cores: dozens of schedules, selected by H200 sweeps."""
    blocks = tuple(size for size in BLOCKS if size == min(BLOCKS) or size < 2 * p.kv_len)
    heads = p.batch * p.heads
    few = [n for n in SECTIONS if heads % n == 0][-2:]
    units = [int(round_heads(cores, cdiv(p.q_len, consumers * WGMMA_ROWS))) for consumers in (2, 3, 1)]
    evened = [n * unit for unit in units for n in ROUND_HEADS if n * unit < heads]
    masks = p.left is not None or p.right is not None or p.kv_lengths

    def tiles(s: Any) -> Any:
        return Tiling(p, s).tiles

    def by_heads(s: Any) -> Any:
        return (s.section == 1) | (s.section == heads)

    def by_rounds(s: Any) -> Any:
        unit = round_heads(cores, Tiling(p, s).q_tiles)
        return (s.section % unit == 0) & np.isin(s.section // unit, ROUND_HEADS)

    def registers(s: Any) -> Any:
        return np.where(s.consumers == 3, MOST_REGISTERS[3], MOST_REGISTERS[2])

    def least_block(s: Any) -> Any:
        """Half of the largest block that fits registers, or shared memory if keys are wider; at most the left bound."""
        least = (registers(s) - max(p.head_dim, p.value_dim) // 2) * 4 // 3 // 2
        return least if p.left is None else np.minimum(least, p.left)

    def seen(s: Any) -> Any:
        """Number of keys that any query of a tile sees."""
        return np.inf if p.left is None or p.right is None else Tiling(p, s).rows + p.left + p.right

    return Space(
        FlashAttentionSchedule,
        choices={
            "consumers": (2, 3, 1),
            "block_kv": blocks,
            "stages": (2, 3),
            "ping_pong": (True, False),
            "persistent": (True, False),
            "order": ("longest_first", "snake", "plain") if p.causal else ("plain",),
            "section": tuple(dict.fromkeys((*few, 1, heads, *evened))) if p.causal else (1,),
            "epi_tile_n": tuple(dict.fromkeys((p.value_dim, *((64,) if p.value_dim % 64 == 0 else ())))),
        },
        rules={
            "logits, probabilities and the result fit a consumer's registers": lambda s: (
                accumulator_registers(p, s) <= registers(s)
            ),
            "tiles have queries for each consumer": lambda s: (s.consumers - 1) * WGMMA_ROWS < p.q_len,
            "one consumer has nobody to multiply while it waits": lambda s: (s.consumers > 1) | (p.q_len <= WGMMA_ROWS),
            "three consumers have registers for small results only": lambda s: (
                (s.consumers < 3) | (p.value_dim <= MOST_VALUES_OF_THREE)
            ),
            "a step costs 0.3 us beside its products, so small blocks lose": lambda s: (
                (s.block_kv >= least_block(s)) | (2 * s.block_kv > p.kv_len)
            ),
            "blocks that are wider than a tile's window are masked": lambda s: (
                (s.block_kv <= seen(s)) | (s.block_kv == min(blocks))
            ),
            "steps that mask, and those of two tiles at once, have registers for blocks of 128 keys": lambda s: (
                (s.block_kv <= LARGE_BLOCK) | np.logical_not(s.persistent | masks)
            ),
            "turns are for several consumers": lambda s: np.logical_not(s.ping_pong) | (s.consumers > 1),
            "more stages than blocks of keys stay empty": lambda s: (
                (s.stages == 2) | (s.stages <= Tiling(p, s).kv_blocks) | (s.persistent & (tiles(s) > cores))
            ),
            "steps of large blocks take longer than loads, which a third stage would wait for": lambda s: (
                (s.stages == 2) | (s.block_kv < LARGE_BLOCK)
            ),
            "persistent CTAs compute several tiles": lambda s: np.logical_not(s.persistent) | (tiles(s) > cores),
            "the steps of persistent CTAs take longer, which a short tile alone repays": lambda s: (
                np.logical_not(s.persistent) | (schedule.mean_steps(p, s) <= MOST_STEPS_PERSISTENT)
            ),
            "the start and the end of a short tile are to be hidden": lambda s: (
                s.persistent
                | (schedule.mean_steps(p, s) > LEAST_STEPS_ALONE)
                | (tiles(s) <= cores)
                | (s.order == "longest_first")
            ),
            "where all tiles run at once, one order is enough": lambda s: (s.order == "plain") | (tiles(s) > cores),
            "tiles of causal attention in their order leave the longest to the end": lambda s: (
                (s.order != "plain") | (not p.causal) | (p.window_left >= 0) | (tiles(s) <= cores)
            ),
            "dealing back and forth is for persistent CTAs, which cannot do without": lambda s: (
                (s.order == "plain") | ((s.order == "snake") == s.persistent)
            ),
            "sections are for orders that have them": lambda s: (s.order != "plain") | (s.section == 1),
            "tiles are dealt by heads, or by length those of all heads, or of as many as fill whole rounds": lambda s: (
                (s.order != "snake") | by_heads(s) | by_rounds(s)
            ),
            "sections of many heads are for dealing": lambda s: (
                (s.order == "snake") | ((s.section <= max(SECTIONS)) & (heads % s.section == 0))
            ),
            "dealt tiles are about as much work for each CTA": lambda s: (
                (s.order != "snake") | (schedule.step_imbalance(p, s, cores) <= MOST_IMBALANCE)
            ),
            "tiles of several heads are dealt by length where that evens them out": lambda s: (
                (s.order != "snake")
                | by_heads(s)
                | (
                    schedule.step_imbalance(p, s, cores)
                    <= np.minimum(EVEN, schedule.step_imbalance(p, s, cores, 1) - EVENED_OUT)
                )
            ),
            "a result that is staged in parts is waited for": lambda s: (
                (s.epi_tile_n == p.value_dim) | (s.persistent & (p.value_dim > EPI_WHOLE))
            ),
        },
    )


# ------------------------------------------------------------------------------
# The footprint of flash attention forward on Hopper.

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
    mean = np.maximum(schedule.mean_steps(p, s) * p.q_share * p.kv_share, 1.0)
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
        step_range=(np.minimum(schedule.shortest_steps(p, s), mean), schedule.longest_steps_of_last(p, s, cores)),
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
