"""How attention of few queries is laid over CTAs: packed rows, splits of the keys, and what leaves the kernel."""

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

# Registers per thread where two CTAs, of 256 threads each, share an SM: ptxas keeps to what the consumer may have.
CONSUMER_REGISTERS = 128
PRODUCER_REGISTERS = 24
# What a consumer's thread holds besides its accumulators (ptxas: 124 of 96, 158 of 128, 190 of 160).
OTHER_REGISTERS = 32


@dataclasses.dataclass(frozen=True)
class DecodePlan:
    """One launch; the fields of the schedule may be `Columns`.

    Attributes:
      p: the problem.
      block_kv: keys of one stage of the pipeline.
      stages: of the pipeline.
      split_kv: CTAs among which the keys of a sequence are divided...
      cluster: ...of which so many are a cluster, and combine their results through DSMEM.
    """

    p: FlashAttentionProblem
    block_kv: Any
    stages: Any
    split_kv: Any
    cluster: Any

    @classmethod
    def of(cls, p: FlashAttentionProblem, s: Any) -> DecodePlan:
        """What a schedule, or `Columns` of them, says."""
        return cls(p, s.block_kv, s.stages, s.split_kv, s.cluster)

    @property
    def dtype(self) -> Any:
        return jnp.dtype(self.p.dtype)

    @property
    def rows(self) -> int:
        """Packed rows of a head of keys: query t of head g of its group is row ``t * group + g``."""
        return self.p.q_len * self.p.group

    @property
    def tiles(self) -> int:
        """Of these rows; each reads all keys."""
        return cdiv(self.rows, WGMMA_ROWS)

    @property
    def q_rows(self) -> int:
        """Rows of the packed array in device memory: tiles of 8 divide it, or it has fewer."""
        return self.rows if self.rows < 8 else round_up(self.rows, 8)

    @property
    def tile_rows(self) -> int:
        """Rows of a tile that leave the kernel, in whole fragments."""
        if self.tiles > 1:
            return WGMMA_ROWS
        return self.rows if self.rows * self.p.value_dim % WARP == 0 else round_up(self.rows, 8)

    @property
    def smem_rows(self) -> int:
        """Rows of a partial result that a CTA leaves in shared memory."""
        return round_up(self.tile_rows, 8)

    @property
    def registers(self) -> Any:
        """Of a consumer's thread: logits and output."""
        return (np.asarray(self.block_kv) + self.p.value_dim) // 2 + OTHER_REGISTERS

    @property
    def two_ctas(self) -> Any:
        """Whether an SM has registers for two CTAs."""
        return self.registers <= CONSUMER_REGISTERS

    @property
    def fragment(self) -> int:
        """Elements of a result that a warpgroup stores at a time: one a thread, or one a lane, by all warps alike."""
        return WARPGROUP if self.tile_rows * self.p.value_dim % WARPGROUP == 0 else WARP

    @property
    def partials(self) -> Any:
        """Results of different keys that leave the kernel, to be combined by another."""
        return self.split_kv // self.cluster

    @property
    def second_launch(self) -> Any:
        """Whether a second kernel combines partial results."""
        return np.asarray(self.partials) > 1

    @property
    def groups(self) -> int:
        """Results, of each of which there are so many partial ones."""
        return self.p.batch * self.p.kv_heads * self.tiles

    @property
    def blocks(self) -> Any:
        """Of keys, of a whole sequence."""
        return cdiv(self.p.kv_len, self.block_kv)

    @property
    def swizzle(self) -> int:
        """Bytes of a swizzled row of q, k and v."""
        return math.gcd(self.p.head_dim * self.dtype.itemsize, self.p.value_dim * self.dtype.itemsize, 128)

    @property
    def layout(self) -> type[SmemTile]:
        """Of tiles of keys and values in shared memory."""
        few = self.p.kv_len < rows_of_heads.ROWS  # Tiles of 8 rows do for those, too.
        return Tiled if few else rows_of_heads.layout(self.p.kv_len)

    @property
    def kv_rows(self) -> int:
        """Keys of the arrays in device memory."""
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
        """A stage."""
        return self.layout(self.block_kv, self.p.head_dim, self.dtype, self.swizzle)

    @property
    def v_tile(self) -> SmemTile:
        return self.layout(self.block_kv, self.p.value_dim, self.dtype, self.swizzle)

    @property
    def ctas(self) -> Any:
        return self.p.batch * self.p.kv_heads * self.tiles * np.asarray(self.split_kv)
