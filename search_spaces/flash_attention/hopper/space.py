"""The schedules of flash attention forward on Hopper that are worth considering, and why the others are not."""

from __future__ import annotations

from typing import Any

import numpy as np

from search_spaces.flash_attention.hopper.schedule import FlashAttentionSchedule
from search_spaces.flash_attention.hopper.tiling import Tiling
from search_spaces.flash_attention.problem import FlashAttentionProblem
from search_spaces.hopper.limits import WGMMA_ROWS
from search_spaces.space import Space

BLOCKS = (128, 64, 176, 80, 160, 112, 96, 144, 192, 48)
# Registers of a thread for logits, probabilities in float32 and 16 bits, and the result: with more, ptxas spills or
# serializes products (found by compiling head sizes from 64 to 256 with blocks from 48 to 256; ptxas 13.0).
MOST_REGISTERS = {1: 208, 2: 208, 3: 132}
MOST_SECTION = 32


def accumulator_registers(p: FlashAttentionProblem, s: Any) -> Any:
    """Of a thread: logits of the next block, half of them twice, and the result."""
    return 3 * s.block_kv // 4 + p.value_dim // 2


def space(p: FlashAttentionProblem, cores: int) -> Space[FlashAttentionSchedule]:
    """The schedules for `p` on a chip of so many cores: some hundreds."""
    blocks = tuple(size for size in BLOCKS if size == min(BLOCKS) or size < 2 * p.kv_len)
    heads = p.batch * p.heads
    sections = tuple(n for n in (1, 2, 4, 8, 16, MOST_SECTION) if heads % n == 0)

    def tiles(s: Any) -> Any:
        return Tiling(p, s).tiles

    def staged(s: Any) -> Any:
        return np.logical_not(Tiling(p, s).out_in_q)

    return Space(
        FlashAttentionSchedule,
        choices={
            "consumers": (2, 3, 1),
            "block_kv": blocks,
            "stages": (2, 3, 4),
            "ping_pong": (True, False),
            "persistent": (True, False),
            "order": ("snake", "longest_first", "plain") if p.causal else ("plain",),
            "section": sections if p.causal else (1,),
            "epi_tile_n": tuple(dict.fromkeys((p.value_dim, *((64,) if p.value_dim % 64 == 0 else ())))),
        },
        rules={
            "logits, probabilities and the result fit a consumer's registers": lambda s: (
                accumulator_registers(p, s) <= np.where(s.consumers == 3, MOST_REGISTERS[3], MOST_REGISTERS[2])
            ),
            "tiles have queries for each consumer": lambda s: (s.consumers - 1) * WGMMA_ROWS < p.q_len,
            "turns are for several consumers": lambda s: np.logical_not(s.ping_pong) | (s.consumers > 1),
            "more stages than blocks of keys stay empty": lambda s: (
                (s.stages == 2) | (s.stages <= Tiling(p, s).kv_blocks) | (s.persistent & (tiles(s) > cores))
            ),
            "persistent CTAs compute several tiles": lambda s: np.logical_not(s.persistent) | (tiles(s) > cores),
            "where all tiles run at once, one order is enough": lambda s: (s.order == "plain") | (tiles(s) > cores),
            "tiles of causal attention in their order leave the longest to the end": lambda s: (
                (s.order != "plain") | (not p.causal) | (p.window_left >= 0) | (tiles(s) <= cores)
            ),
            "dealing back and forth is for persistent CTAs": lambda s: (s.order != "snake") | s.persistent,
            "sections are for orders that have them": lambda s: (s.order != "plain") | (s.section == 1),
            "a result that takes the place of q is staged whole": lambda s: staged(s) | (s.epi_tile_n == p.value_dim),
        },
    )
