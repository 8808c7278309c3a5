"""Extents of a launch: for one schedule, and for columns of them."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax.numpy as jnp

from search_spaces.flash_attention.problem import FlashAttentionProblem
from search_spaces.hopper.limits import WGMMA_ROWS
from search_spaces.space import cdiv, round_up

# Registers of each thread of a consumer and of the producer, by the number of consumers: FlashAttention-3's
# (hopper/flash_fwd_kernel_sm90.h). A CTA of n + 1 warpgroups starts with 65,536 / (128 n + 128) each, and what the
# producer gives back its consumers share.
REGISTERS = {1: (240, 56), 2: (240, 24), 3: (160, 32)}
# Above this head size the result is rescaled between the issue of Q K^T and that of P V, as in FlashAttention-3.
EARLY_RESCALE_ABOVE = 128
# Mosaic GPU lays tiles of 8 rows over arrays in device memory.
ROWS = 8


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
    def q_rows(self) -> int:
        """Of q and the result in device memory, so that TMA addresses them."""
        return int(round_up(self.p.q_len, ROWS))

    @property
    def kv_rows(self) -> int:
        return int(round_up(self.p.kv_len, ROWS))

    @property
    def early_rescale(self) -> bool:
        return self.p.head_dim > EARLY_RESCALE_ABOVE

    def swizzle(self, columns: int) -> int:
        """Bytes of the widest swizzled row that divides so many columns: 128, 64 or 32."""
        return next(width for width in (128, 64, 32) if columns * self.itemsize % width == 0)
