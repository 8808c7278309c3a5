"""The schedules of flash attention forward on Hopper that are worth considering, and why the others are not."""

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
# Registers of a thread for logits, probabilities in float32 and 16 bits, and the result: with more, ptxas spills or
# serializes products (found by compiling head sizes from 64 to 256 with blocks from 48 to 256; ptxas 13.0), or is
# about to.
MOST_REGISTERS = {1: 200, 2: 200, 3: 132}
# Columns of the result up to which three consumers have registers for blocks as large as two have.
MOST_VALUES_OF_THREE = 64
# Steps of a tile: with more, hiding a tile's start and end gains persistent CTAs no more than their code costs. With
# fewer than the other number it costs little (H200, head size 128: 0.055 us a step against 1.6 us a tile).
MOST_STEPS_PERSISTENT, LEAST_STEPS_ALONE = 24, 8
# Of the busiest CTA, over the mean: what one that takes tiles as they come need not wait for.
MOST_IMBALANCE = 1.05
# Heads whose tiles are dealt out together: few, so that their keys and values stay in the last-level cache, but enough
# for the tiles that start last to be short.
SECTIONS = (1, 2, 3, 4, 8)
# Tiles of several heads are dealt by length where the busiest CTA is then so little above the mean, and so much less
# than if they were dealt by heads: as many heads as give each CTA equally many tiles, or twice as many, whose keys and
# values stay in the last-level cache (H200: those of 256 heads of 512 KiB took 1.11 times as long as by heads).
EVEN, EVENED_OUT, ROUND_HEADS = 1.025, 0.01, (1, 2)
# Keys of a block whose step takes longer than a load from device memory (H200: 1.5 us against 0.7 us), and of the
# largest for which ptxas finds registers beside the limits of a mask, or the end of another tile (on an H200 larger
# ones take 1.04 to 1.6 times as long).
LARGE_BLOCK = 128
# Columns of a result up to which persistent CTAs have room to stage it whole.
EPI_WHOLE = 128


def accumulator_registers(p: FlashAttentionProblem, s: Any) -> Any:
    """Of a thread: logits of the next block, half of them twice, and the result."""
    return 3 * s.block_kv // 4 + p.value_dim // 2


def space(p: FlashAttentionProblem, cores: int) -> Space[FlashAttentionSchedule]:
    """The schedules for `p` on a chip of so many cores: some dozens, of those that H200 sweeps have not ruled out."""
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
        """Half of the largest that registers hold, or shared memory if keys are wider; in a window, what that takes."""
        least = (registers(s) - max(p.head_dim, p.value_dim) // 2) * 4 // 3 // 2
        return least if p.left is None else np.minimum(least, p.left)

    def seen(s: Any) -> Any:
        """Keys that the queries of a tile see together."""
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
