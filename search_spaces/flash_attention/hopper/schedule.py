"""One way to compute flash attention forward on Hopper: the fields of a schedule."""

from __future__ import annotations

import dataclasses


@dataclasses.dataclass(frozen=True)
class FlashAttentionSchedule:
    """How attention is laid over CTAs and warpgroups, and over time.

    Attributes:
      consumers: consumer warpgroups of a CTA, each with 64 rows of queries: a tile is ``64 * consumers`` rows of one
        head of one sequence.
      block_kv: keys and values that a pipeline stage holds, and a step of the main loop takes.
      stages: of keys, and of values: loads run so many steps ahead, into the next tile where a CTA has several.
      ping_pong: consumers issue products in turns, so that the softmax of one runs beside the products of another.
      persistent: the grid has a CTA for each core, which computes one tile after another. The products of a tile's end
        are issued with those of the next one's start, and its result is stored beside them.
      order: of tiles. "plain": all of a head, from its first query on. "longest_first": within each section of heads
        from the tiles that see most keys to those that see fewest. "snake": likewise, dealt to persistent CTAs forwards
        and backwards in turn, so that each gets about as much work.
      section: heads, of all sequences, whose tiles are dealt out together; the last section has what is left.
      epi_tile_n: columns of the result that a consumer stages in shared memory at a time.
    """

    consumers: int
    block_kv: int
    stages: int
    ping_pong: bool
    persistent: bool
    order: str
    section: int
    epi_tile_n: int
