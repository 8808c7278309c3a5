"""Extents of a launch, for one schedule or for columns of schedules."""

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

# Registers per thread of a consumer and of the producer, by the number of consumers. The values are those of
# FlashAttention-3 (hopper/flash_fwd_kernel_sm90.h). Each thread of a CTA of n + 1 warpgroups starts with
# 65,536 / (128 n + 128) registers; the consumers share those that the producer releases.
REGISTERS = {1: (240, 56), 2: (240, 24), 3: (160, 32)}
# Above this head size, the result is rescaled between the issue of Q K^T and of P V, as in FlashAttention-3.
EARLY_RESCALE_ABOVE = 128


def round_heads(ctas: int, q_tiles: Any) -> Any:
    """Returns the fewest heads of `q_tiles` tiles each that give each of `ctas` persistent CTAs equally many tiles."""
    return ctas // np.gcd(ctas, q_tiles)


@dataclasses.dataclass(frozen=True)
class Tiling:
    """The tiling of a problem by a schedule, or by columns of schedules.

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
        """Queries per tile."""
        return self.s.consumers * WGMMA_ROWS

    @property
    def q_tiles(self) -> Any:
        """Tiles per head."""
        return cdiv(self.p.q_len, self.rows)

    @property
    def computed_rows(self) -> Any:
        """Mean rows per tile that consumers compute. In the last tile of a head, consumers without queries are idle."""
        return cdiv(self.p.q_len, WGMMA_ROWS) * WGMMA_ROWS / self.q_tiles

    @property
    def idles(self) -> bool:
        """Whether a tile may have consumers without a query."""
        return bool(self.p.q_lengths or self.computed_rows < self.rows)

    @property
    def kv_blocks(self) -> Any:
        """Blocks of keys per sequence."""
        return cdiv(self.p.kv_len, self.s.block_kv)

    @property
    def heads(self) -> int:
        """Number of heads of all sequences."""
        return self.p.batch * self.p.heads

    @property
    def tiles(self) -> Any:
        return self.heads * self.q_tiles

    @property
    def out_in_q(self) -> Any:
        """Whether the result is staged in the shared memory of q, which is then unused."""
        return (self.s.persistent == 0) & (self.p.value_dim == self.p.head_dim)

    @property
    def layout(self) -> type[SmemTile]:
        """Layout of all tiles in shared memory."""
        return rows_of_heads.layout(self.p.q_len, self.p.kv_len)

    @property
    def untiled(self) -> bool:
        return self.layout is Untiled

    @property
    def q_rows(self) -> int:
        """Rows of q and the result in device memory, padded as TMA requires."""
        return rows_of_heads.length(self.layout, self.p.q_len)

    @property
    def kv_rows(self) -> int:
        return rows_of_heads.length(self.layout, self.p.kv_len)

    def smem_tile(self, rows: int, columns: int) -> SmemTile:
        return self.layout(rows, columns, jnp.dtype(self.p.dtype), self.swizzle(columns))

    @property
    def q_tile(self) -> SmemTile:
        """The queries of one consumer."""
        return self.smem_tile(WGMMA_ROWS, self.p.head_dim)

    @property
    def k_tile(self) -> SmemTile:
        """The keys of one stage."""
        return self.smem_tile(self.s.block_kv, self.p.head_dim)

    @property
    def v_tile(self) -> SmemTile:
        return self.smem_tile(self.s.block_kv, self.p.value_dim)

    @property
    def out_tile(self) -> SmemTile:
        """The part of the result that a consumer stages at a time."""
        return self.q_tile if self.out_in_q else self.smem_tile(WGMMA_ROWS, self.s.epi_tile_n)

    @property
    def masks_end(self) -> bool:
        """Whether to mask keys beyond the last one.

        With tiled layouts this is also true if no query sees beyond the last key.
        """
        p = self.p
        unseen = self.untiled and p.right is not None and p.q_len + p.right <= p.kv_len
        return p.kv_lengths or (p.kv_len % self.s.block_kv > 0 and not unseen)

    @property
    def early_rescale(self) -> bool:
        return self.p.head_dim > EARLY_RESCALE_ABOVE

    def swizzle(self, columns: int) -> int:
        """Returns the bytes of the widest swizzled row that divides `columns` columns: 128, 64 or 32."""
        return next(width for width in (128, 64, 32) if columns * self.itemsize % width == 0)
