"""Extents of a launch: for one schedule, and for columns of them."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax.numpy as jnp
import numpy as np

from search_spaces.attention.hopper import rows_of_heads
from search_spaces.flash_attention.problem import FlashAttentionProblem
from search_spaces.hopper.limits import WGMMA_ROWS
from search_spaces.hopper.smem_layout import SmemTile, Untiled
from search_spaces.space import cdiv

# Registers of each thread of a consumer and of the producer, by the number of consumers: FlashAttention-3's
# (hopper/flash_fwd_kernel_sm90.h). A CTA of n + 1 warpgroups starts with 65,536 / (128 n + 128) each, and what the
# producer gives back its consumers share.
REGISTERS = {1: (240, 56), 2: (240, 24), 3: (160, 32)}
# Above this head size the result is rescaled between the issue of Q K^T and that of P V, as in FlashAttention-3.
EARLY_RESCALE_ABOVE = 128


def round_heads(ctas: int, q_tiles: Any) -> Any:
    """The fewest heads, each of so many tiles, that give each of so many persistent CTAs equally many."""
    return ctas // np.gcd(ctas, q_tiles)


@dataclasses.dataclass(frozen=True)
class Tiling:
    """Of a problem by a schedule, or by columns of schedules.

    Attributes:
      p, s: the problem and the schedule.
    """

    p: FlashAttentionProblem
    s: Any

    @property
    def itemsize(self) -> int:
        return int(jnp.dtype(self.p.dtype).itemsize)

    @property
    def rows(self) -> Any:
        """Queries of a tile."""
        return self.s.consumers * WGMMA_ROWS

    @property
    def q_tiles(self) -> Any:
        """Tiles of a head."""
        return cdiv(self.p.q_len, self.rows)

    @property
    def computed_rows(self) -> Any:
        """Rows of a tile on average that its consumers compute: of a head's last tile those with queries alone."""
        return cdiv(self.p.q_len, WGMMA_ROWS) * WGMMA_ROWS / self.q_tiles

    @property
    def idles(self) -> bool:
        """Whether a tile may have consumers without a query."""
        return bool(self.p.q_lengths or self.computed_rows < self.rows)

    @property
    def kv_blocks(self) -> Any:
        """Blocks of all keys of a sequence."""
        return cdiv(self.p.kv_len, self.s.block_kv)

    @property
    def heads(self) -> int:
        """Of all sequences."""
        return self.p.batch * self.p.heads

    @property
    def tiles(self) -> Any:
        return self.heads * self.q_tiles

    @property
    def out_in_q(self) -> Any:
        """The result is staged where q was: nothing else needs that place then."""
        return (self.s.persistent == 0) & (self.p.value_dim == self.p.head_dim)

    @property
    def layout(self) -> type[SmemTile]:
        """Of all tiles in shared memory."""
        return rows_of_heads.layout(self.p.q_len, self.p.kv_len)

    @property
    def untiled(self) -> bool:
        return self.layout is Untiled

    @property
    def q_rows(self) -> int:
        """Of q and the result in device memory, so that TMA addresses them."""
        return rows_of_heads.length(self.layout, self.p.q_len)

    @property
    def kv_rows(self) -> int:
        return rows_of_heads.length(self.layout, self.p.kv_len)

    def smem_tile(self, rows: int, columns: int) -> SmemTile:
        return self.layout(rows, columns, jnp.dtype(self.p.dtype), self.swizzle(columns))

    @property
    def q_tile(self) -> SmemTile:
        """Of one consumer."""
        return self.smem_tile(WGMMA_ROWS, self.p.head_dim)

    @property
    def k_tile(self) -> SmemTile:
        """A stage."""
        return self.smem_tile(self.s.block_kv, self.p.head_dim)

    @property
    def v_tile(self) -> SmemTile:
        return self.smem_tile(self.s.block_kv, self.p.value_dim)

    @property
    def out_tile(self) -> SmemTile:
        """What a consumer stages at a time."""
        return self.q_tile if self.out_in_q else self.smem_tile(WGMMA_ROWS, self.s.epi_tile_n)

    @property
    def masks_end(self) -> bool:
        """Whether blocks may reach beyond the last key. (Of tiled arrays also where no query there is sees so far.)"""
        p = self.p
        unseen = self.untiled and p.right is not None and p.q_len + p.right <= p.kv_len
        return p.kv_lengths or (p.kv_len % self.s.block_kv > 0 and not unseen)

    @property
    def early_rescale(self) -> bool:
        return self.p.head_dim > EARLY_RESCALE_ABOVE

    def swizzle(self, columns: int) -> int:
        """Bytes of the widest swizzled row that divides so many columns: 128, 64 or 32."""
        return next(width for width in (128, 64, 32) if columns * self.itemsize % width == 0)
