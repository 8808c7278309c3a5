"""Extents of the backward pass in SMEM and device memory, for one schedule or for columns of schedules."""

from __future__ import annotations

import abc
import dataclasses
from typing import Any, ClassVar

import jax.numpy as jnp
import numpy as np

from search_spaces.attention.hopper import rows_of_heads
from search_spaces.flash_attention_backward.problem import FlashAttentionBackwardProblem
from search_spaces.hopper.limits import ACCUMULATOR_BYTES, BARRIER_BYTES, SMEM_ALIGNMENT, WGMMA_ROWS
from search_spaces.hopper.smem_layout import SmemTile, Tiled
from search_spaces.space import cdiv, round_up

CONSUMERS = 2
BLOCK_KV = CONSUMERS * WGMMA_ROWS
# In float32 elements: a TMA box, here the statistics of a stage, must start at a multiple of 128 bytes in SMEM.
STATISTICS_STEP = 32


@dataclasses.dataclass(frozen=True)
class Tiles(abc.ABC):
    """Tiles of a kernel's operands in SMEM."""

    problem: FlashAttentionBackwardProblem

    @property
    def itemsize(self) -> int:
        return int(jnp.dtype(self.problem.dtype).itemsize)

    @property
    def layout(self) -> type[SmemTile]:
        """Layout of tiles of q, k, v and d_out in SMEM.

        Deterministic problems are always tiled: with the untiled layout, lowering of the dq kernel did not terminate.
        """
        return Tiled if self.problem.deterministic else rows_of_heads.layout(self.problem.q_len, self.problem.kv_len)

    @property
    @abc.abstractmethod
    def k_swizzle(self) -> int:
        """Bytes of a swizzled row of k and q."""

    @property
    def v_swizzle(self) -> int:
        return int(np.gcd(self.problem.value_dim * self.itemsize, 128))

    def tile(self, operand: str, rows: int) -> SmemTile:
        """Returns the tile of `rows` rows of q, k, v or d_out in SMEM."""
        p, of_k = self.problem, operand in ("q", "k")
        columns, swizzle = (p.head_dim, self.k_swizzle) if of_k else (p.value_dim, self.v_swizzle)
        return self.layout(rows, columns, jnp.dtype(p.dtype), swizzle)


@dataclasses.dataclass(frozen=True)
class Plan(Tiles):
    """Extents of the main kernel.

    Attributes:
      schedule: one schedule, or columns of schedules.
    """

    schedule: Any

    @property
    def block_kv(self) -> int:
        """Rows of k and v per CTA."""
        return BLOCK_KV

    @property
    def q_rows(self) -> int:
        """Rows of q and d_out in device memory."""
        return rows_of_heads.length(self.layout, self.problem.q_len)

    @property
    def kv_rows(self) -> int:
        """Rows of k and v in device memory."""
        return rows_of_heads.length(self.layout, self.problem.kv_len)

    @property
    def q_blocks(self) -> Any:
        return cdiv(self.problem.q_len, self.schedule.block_q)

    @property
    def kv_blocks(self) -> int:
        return int(cdiv(self.problem.kv_len, self.block_kv))

    @property
    def separate_dq(self) -> Any:
        """Whether a separate kernel computes dq."""
        return self.schedule.dq == "separate"

    @property
    def dq_rows(self) -> Any:
        """Rows of the float32 dq, and of the log-sum-exp and delta."""
        return self.q_blocks * self.schedule.block_q

    @property
    def by_rows(self) -> Any:
        """Whether each consumer computes half of the rows of dq in a step; otherwise half of the columns."""
        return self.schedule.block_q % (CONSUMERS * WGMMA_ROWS) == 0

    @property
    def transposed(self) -> Any:
        """Whether dq is computed transposed, because `block_q` is not a multiple of the rows of wgmma."""
        return self.schedule.block_q % WGMMA_ROWS != 0

    @property
    def dq_shape(self) -> tuple[int, int]:
        """Shape of a consumer's part of dq in a step, for one schedule."""
        block_q, columns = int(self.schedule.block_q), self.problem.head_dim
        if self.transposed:
            return columns // CONSUMERS, block_q
        return (block_q // CONSUMERS, columns) if self.by_rows else (block_q, columns // CONSUMERS)

    @property
    def k_swizzle(self) -> int:
        """Bytes of a swizzled row of k, q and dk. A consumer's columns of dq are whole swizzled rows of k."""
        columns = self.problem.head_dim
        return int(np.gcd(columns * self.itemsize // (1 if np.all(self.by_rows) else CONSUMERS), 128))

    @property
    def ds_swizzle(self) -> int:
        return int(np.gcd(self.schedule.block_q * self.itemsize, 128))

    @property
    def dq_swizzle(self) -> int:
        return int(np.gcd(self.dq_shape[1] * ACCUMULATOR_BYTES, 128))

    @property
    def statistics_width(self) -> Any:
        """Float32 elements of the log-sum-exp, or of delta, per stage."""
        return round_up(self.schedule.block_q, STATISTICS_STEP)

    @property
    def onchip_bytes(self) -> Any:
        """SMEM of a CTA, exact to the byte."""
        p, s, b = self.problem, self.schedule, self.itemsize
        arrays = (
            BLOCK_KV * p.head_dim * b,
            BLOCK_KV * p.value_dim * b,
            s.q_stages * s.block_q * p.head_dim * b,
            s.do_stages * s.block_q * p.value_dim * b,
            s.q_stages * self.statistics_width * ACCUMULATOR_BYTES,
            s.do_stages * self.statistics_width * ACCUMULATOR_BYTES,
            s.ds_stages * BLOCK_KV * s.block_q * b,
            np.where(self.separate_dq, 0, s.block_q * p.head_dim * ACCUMULATOR_BYTES),
        )
        barriers = 2 * CONSUMERS + 2 * s.q_stages + 2 * s.do_stages
        return sum(round_up(size, SMEM_ALIGNMENT) for size in arrays) + barriers * BARRIER_BYTES


@dataclasses.dataclass(frozen=True)
class DqPlan(Tiles):
    """Extents of the separate dq kernel."""

    rows: ClassVar[int] = CONSUMERS * WGMMA_ROWS
    stages: ClassVar[int] = 3

    @property
    def block_kv(self) -> int:
        """Keys per step, so that S, dP, dS and dq fit into registers."""
        return 128 if self.problem.head_dim <= 64 else 64

    @property
    def q_blocks(self) -> int:
        return int(cdiv(self.problem.q_len, self.rows))

    @property
    def k_swizzle(self) -> int:
        return int(np.gcd(self.problem.head_dim * self.itemsize, 128))

    @property
    def onchip_bytes(self) -> int:
        """SMEM of a CTA, exact to the byte."""
        p, b = self.problem, self.itemsize
        arrays = [
            rows * columns * b
            for rows in (self.rows, self.stages * self.block_kv)
            for columns in (p.head_dim, p.value_dim)
        ] + [self.rows * ACCUMULATOR_BYTES] * 2
        barriers = CONSUMERS + 4 * self.stages
        return int(sum(round_up(size, SMEM_ALIGNMENT) for size in arrays) + barriers * BARRIER_BYTES)
