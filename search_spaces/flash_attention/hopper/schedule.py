"""The schedule of flash attention forward on Hopper."""

from __future__ import annotations

import dataclasses


@dataclasses.dataclass(frozen=True)
class FlashAttentionSchedule:
    """How attention is divided among CTAs, warpgroups and pipeline steps.

    Attributes:
      consumers: consumer warpgroups per CTA, each with 64 rows of queries. A tile is ``64 * consumers`` rows of one
        head of one sequence.
      block_kv: keys and values per pipeline stage and per step of the main loop.
      stages: stages of the pipeline of keys, and of the pipeline of values. Loads run up to this many steps ahead; in a
        CTA with several tiles they continue into the next tile.
      ping_pong: consumers take turns to issue products, so that the softmax of one overlaps the products of another.
      persistent: the grid has one CTA per core, and each CTA computes a sequence of tiles. The last products of a tile
        are issued with the first products of the next tile, and overlap the store of the result.
      order: order of tiles. "plain": all tiles of a head, starting at its first query. "longest_first": within each
        section of heads, in descending order of visible keys. "snake": the same order, assigned to persistent CTAs
        alternately forwards and backwards, so that each CTA gets about the same work.
      section: number of heads, over all sequences, whose tiles are ordered together. The last section may be smaller.
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
