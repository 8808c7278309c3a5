"""The search space of flash attention forward on Hopper, with a reason for each rule."""

from __future__ import annotations

from typing import Any

import numpy as np

from search_spaces.flash_attention.hopper import steps
from search_spaces.flash_attention.hopper.schedule import FlashAttentionSchedule
from search_spaces.flash_attention.hopper.tiling import Tiling, round_heads
from search_spaces.flash_attention.problem import FlashAttentionProblem
from search_spaces.hopper.limits import WGMMA_ROWS
from search_spaces.space import Space, cdiv

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
                np.logical_not(s.persistent) | (steps.mean(p, s) <= MOST_STEPS_PERSISTENT)
            ),
            "the start and the end of a short tile are to be hidden": lambda s: (
                s.persistent
                | (steps.mean(p, s) > LEAST_STEPS_ALONE)
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
                (s.order != "snake") | (steps.imbalance(p, s, cores) <= MOST_IMBALANCE)
            ),
            "tiles of several heads are dealt by length where that evens them out": lambda s: (
                (s.order != "snake")
                | by_heads(s)
                | (steps.imbalance(p, s, cores) <= np.minimum(EVEN, steps.imbalance(p, s, cores, 1) - EVENED_OUT))
            ),
            "a result that is staged in parts is waited for": lambda s: (
                (s.epi_tile_n == p.value_dim) | (s.persistent & (p.value_dim > EPI_WHOLE))
            ),
        },
    )
