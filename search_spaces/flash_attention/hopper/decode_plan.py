"""The plan of a flash decoding launch: packed rows, splits of the keys, and results of the kernel."""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import jax.numpy as jnp
import numpy as np

from search_spaces.attention.hopper import rows_of_heads
from search_spaces.flash_attention.problem import FlashAttentionProblem
from search_spaces.hopper.limits import WARP, WARPGROUP, WGMMA_ROWS
from search_spaces.hopper.smem_layout import SmemTile, Tiled, Untiled
from search_spaces.space import cdiv, round_up

# Registers per thread if two CTAs, of 256 threads each, share an SM. ptxas respects the limit of the consumer.
CONSUMER_REGISTERS = 128
PRODUCER_REGISTERS = 24
# Registers of a consumer thread besides its accumulators (ptxas totals: 124 for 96, 158 for 128, 190 for 160).
OTHER_REGISTERS = 32


@dataclasses.dataclass(frozen=True)
class DecodePlan:
    """One launch, or columns of launches if the fields of the schedule are `Columns`.

    Attributes:
      p: the problem.
      block_kv: keys per pipeline stage.
      stages: stages of each pipeline.
      split_kv: number of CTAs that share the keys of a sequence.
      cluster: CTAs per cluster, which combine their results through DSMEM.
    """

    p: FlashAttentionProblem
    block_kv: Any
    stages: Any
    split_kv: Any
    cluster: Any

    @classmethod
    def of(cls, p: FlashAttentionProblem, s: Any) -> DecodePlan:
        """Returns the plan of a schedule, or of `Columns` of schedules."""
        return cls(p, s.block_kv, s.stages, s.split_kv, s.cluster)

    @property
    def dtype(self) -> Any:
        return jnp.dtype(self.p.dtype)

    @property
    def rows(self) -> int:
        """Packed rows per key head: query t of head g of the group is row ``t * group + g``."""
        return self.p.q_len * self.p.group

    @property
    def tiles(self) -> int:
        """Tiles of packed rows per key head; each tile reads all keys."""
        return cdiv(self.rows, WGMMA_ROWS)

    @property
    def q_rows(self) -> int:
        """Rows of the packed array in device memory: fewer than 8, or a multiple of 8."""
        return self.rows if self.rows < 8 else round_up(self.rows, 8)

    @property
    def tile_rows(self) -> int:
        """Rows of a tile that the kernel stores, rounded up to whole fragments."""
        if self.tiles > 1:
            return WGMMA_ROWS
        return self.rows if self.rows * self.p.value_dim % WARP == 0 else round_up(self.rows, 8)

    @property
    def smem_rows(self) -> int:
        """Rows of a partial result in shared memory."""
        return round_up(self.tile_rows, 8)

    @property
    def registers(self) -> Any:
        """Registers of a consumer thread, including those of logits and output."""
        return (np.asarray(self.block_kv) + self.p.value_dim) // 2 + OTHER_REGISTERS

    @property
    def two_ctas(self) -> Any:
        """Whether an SM has registers for two CTAs."""
        return self.registers <= CONSUMER_REGISTERS

    @property
    def fragment(self) -> int:
        """Elements that a warpgroup stores at a time: one per thread, or one per lane, replicated over warps."""
        return WARPGROUP if self.tile_rows * self.p.value_dim % WARPGROUP == 0 else WARP

    @property
    def partials(self) -> Any:
        """Number of partial results per result that the kernel stores; a second kernel combines several."""
        return self.split_kv // self.cluster

    @property
    def second_launch(self) -> Any:
        """Whether a second kernel combines partial results."""
        return np.asarray(self.partials) > 1

    @property
    def groups(self) -> int:
        """Number of tiles of results; each has `partials` partial results."""
        return self.p.batch * self.p.kv_heads * self.tiles

    @property
    def blocks(self) -> Any:
        """Blocks of keys per sequence."""
        return cdiv(self.p.kv_len, self.block_kv)

    @property
    def swizzle(self) -> int:
        """Bytes of a swizzled row of q, k and v."""
        return math.gcd(self.p.head_dim * self.dtype.itemsize, self.p.value_dim * self.dtype.itemsize, 128)

    @property
    def layout(self) -> type[SmemTile]:
        """Layout of tiles of keys and values in shared memory."""
        few = self.p.kv_len < rows_of_heads.ROWS  # Tiles of 8 rows also work for fewer keys than `ROWS`.
        return Tiled if few else rows_of_heads.layout(self.p.kv_len)

    @property
    def kv_rows(self) -> int:
        """Number of keys of the arrays in device memory."""
        few = self.p.kv_len < rows_of_heads.ROWS
        return self.p.kv_len if few else rows_of_heads.length(self.layout, self.p.kv_len)

    @property
    def untiled(self) -> bool:
        return self.layout is Untiled

    @property
    def q_tile(self) -> SmemTile:
        return Tiled(WGMMA_ROWS, self.p.head_dim, self.dtype, self.swizzle)

    @property
    def k_tile(self) -> SmemTile:
        """The keys of one stage."""
        return self.layout(self.block_kv, self.p.head_dim, self.dtype, self.swizzle)

    @property
    def v_tile(self) -> SmemTile:
        return self.layout(self.block_kv, self.p.value_dim, self.dtype, self.swizzle)

    @property
    def ctas(self) -> Any:
        return self.p.batch * self.p.kv_heads * self.tiles * np.asarray(self.split_kv)
