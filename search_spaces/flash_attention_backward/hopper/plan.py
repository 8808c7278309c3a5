"""Extents of the backward pass in SMEM and device memory, for one schedule or for columns of schedules."""

from __future__ import annotations

import abc
import dataclasses
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from search_spaces.attention import hopper
from search_spaces.attention.problem import Lengths
from search_spaces.flash_attention_backward.problem import FlashAttentionBackwardProblem
from search_spaces.hopper import ACCUMULATOR_BYTES, BARRIER_BYTES, MAX_INDEX, SMEM_ALIGNMENT, WGMMA_ROWS
from search_spaces.hopper.smem_layout import SmemTile, Tiled
from search_spaces.jax_compat import plgpu
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
        return Tiled if self.problem.deterministic else hopper.head_layout(self.problem.q_len, self.problem.kv_len)

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
        return hopper.head_length(self.layout, self.problem.q_len)

    @property
    def kv_rows(self) -> int:
        """Rows of k and v in device memory."""
        return hopper.head_length(self.layout, self.problem.kv_len)

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


# ------------------------------------------------------------------------------
# The schedule of the attention gradients on Hopper.


@dataclasses.dataclass(frozen=True)
class FlashAttentionBackwardSchedule:
    """How the gradients are divided among CTAs, warpgroups and pipeline steps.

    A CTA owns `block_kv` rows of k and v, 64 per consumer warpgroup, and iterates over q and d_out. For heads wider
    than 128, it owns 64 rows, and each consumer computes half of the columns of their gradients.

    Attributes:
      block_q: rows of q and d_out per step.
      q_stages, do_stages: pipeline stages of q and of d_out in SMEM.
      ds_stages: stages of dS in SMEM; with one stage, consumers synchronize twice per step.
      overlap: whether q k^T of a step is issued before dS^T q of the previous step, so that exponentials overlap
        products.
      section: heads of k and v that launch their CTAs together. In a section, the CTAs with the most steps come first.
      rotate: whether each block of keys starts at a different block of queries, and wraps around. Otherwise all CTAs of
        a head load the same blocks and add to the same rows of dq at the same time.
      dq: how dq is summed over CTAs. "reduce_add": TMA adds float32 partial sums in the order of arrival. "separate": a
        second kernel computes dq without a sum over CTAs, so that every run returns the same bits.
    """

    block_q: int
    q_stages: int
    do_stages: int
    ds_stages: int
    overlap: bool
    section: int
    block_kv: int = 128
    dq: str = "reduce_add"
    rotate: bool = False


# ------------------------------------------------------------------------------
# The blocks of queries that see a block of keys, their order, and the masks of their pairs.


def masks(plan: Plan) -> bool:
    """Returns whether any block needs a mask; queries beyond `q_len` need none, because their probabilities are 0."""
    p = plan.problem
    return p.left is not None or p.right is not None or p.kv_lengths or p.kv_len % plan.block_kv > 0


@dataclasses.dataclass(frozen=True)
class Blocks:
    """The steps of one block of keys: masked steps of all heads of the group first, then unmasked steps.

    There is at least one step. If no query sees the block, this step masks all pairs.

    Attributes:
      plan: of the launch.
      first: index of the first block of queries.
      masked, plain: number of masked and of unmasked blocks of queries per head.
      first_key: index of the first key of the block.
      keys: number of keys of the sequence that a query sees.
      queries: number of queries of the sequence that see a key.
      rotation: number of steps by which the start is rotated; None means no rotation.
    """

    plan: Plan
    first: Any
    masked: Any
    plain: Any
    first_key: Any
    keys: Any
    queries: Any
    rotation: Any = None

    @classmethod
    def of(cls, plan: Plan, kv_block: Any, counted: Lengths) -> Blocks:
        blocks = cls._in_order(plan, kv_block, jnp.int32(counted.kv), counted.q)
        if not plan.schedule.rotate:
            return blocks
        steps = blocks.end - blocks.start
        return dataclasses.replace(blocks, rotation=lax.div(kv_block * steps, jnp.int32(plan.kv_blocks)))

    @classmethod
    def _in_order(cls, plan: Plan, kv_block: Any, keys: Any, queries: Any) -> Blocks:
        p, block_q = plan.problem, plan.schedule.block_q
        q_blocks = jnp.int32(plan.q_blocks)
        first_key = kv_block * plan.block_kv
        last_key = first_key + plan.block_kv - 1
        first, end = jnp.int32(0), q_blocks
        if p.q_lengths:
            end = jnp.maximum(lax.div(queries + (block_q - 1), jnp.int32(block_q)), 1)
        if not masks(plan):
            return cls(plan, first, jnp.int32(0), end, first_key, keys, queries)
        masked = jnp.int32(0)
        if p.right is not None:
            first = jnp.minimum(lax.div(jnp.maximum(first_key - p.right, 0), jnp.int32(block_q)), q_blocks - 1)
            masked = lax.div(jnp.maximum(last_key - p.right, 0) + (block_q - 1), jnp.int32(block_q)) - first
        if p.left is not None:
            end = jnp.minimum(lax.div(last_key + p.left, jnp.int32(block_q)) + 1, end)
        end = jnp.maximum(end, first + 1)
        # Keys beyond the last one have zero gradients, which one fully masked step computes.
        end = jnp.where(first_key < keys, end, first + 1)
        all_masked = (last_key >= keys) | (p.left is not None)
        masked = jnp.where(all_masked, end - first, jnp.clip(masked, 0, end - first))
        return cls(plan, first, masked, end - first - masked, first_key, keys, queries)

    @property
    def start(self) -> Any:
        """The first step. With one head, steps are indices of blocks, which saves the register of an offset."""
        return self.first if self.plan.problem.group == 1 else jnp.int32(0)

    @property
    def end_of_masked(self) -> Any:
        return self.start + self.masked * self.plan.problem.group

    @property
    def end(self) -> Any:
        return self.start + (self.masked + self.plain) * self.plan.problem.group

    def at(self, step: Any) -> tuple[Any, Any]:
        """Returns the index of the head in its group, and the first query of a step."""
        block_q = self.plan.schedule.block_q
        if self.rotation is not None:  # Requires that all steps are masked, or none.
            step = step + self.rotation
            step = jnp.where(step < self.end, step, step - (self.end - self.start))
        if self.plan.problem.group == 1:
            return jnp.int32(0), step * block_q
        in_masked = step < self.end_of_masked
        each = jnp.maximum(jnp.where(in_masked, self.masked, self.plain), 1)
        step = step - jnp.where(in_masked, 0, self.end_of_masked)
        first = self.first + jnp.where(in_masked, 0, self.masked)
        return lax.div(step, each), (first + lax.rem(step, each)) * block_q

    def there(self, first_key: Any, gradient: jax.Array) -> jax.Array:
        """Zeros the gradients of keys that no query sees; `gradient` starts at key `first_key`."""
        if self.plan.problem.every_key_is_seen:
            return gradient
        key = plgpu.broadcasted_iota(jnp.int32, gradient.shape[:1], 0, layout=plgpu.Layout.WGMMA.reduce(1)) + first_key
        return jnp.where(lax.broadcast_in_dim(key, gradient.shape, [0]) < self.keys, gradient, 0.0)

    def visible(self, first_key: Any, first_query: Any, shape: tuple[int, int]) -> Any:
        """Returns the mask of visible pairs ``[keys, queries]``, in the layout of wgmma."""
        p, layout = self.plan.problem, plgpu.Layout.WGMMA
        key = plgpu.broadcasted_iota(jnp.int32, shape[:1], 0, layout=layout.reduce(1)) + first_key
        if p.kv_lengths or p.kv_len % self.plan.block_kv:
            key = jnp.where(key < self.keys, key, MAX_INDEX)
        # Offsets are applied to rows, because a thread has 2 rows but 16 columns.
        query = plgpu.broadcasted_iota(jnp.int32, shape, 1, layout=layout)
        if p.right is None:
            seen = lax.broadcast_in_dim(key, shape, [0]) < MAX_INDEX
        else:
            seen = lax.broadcast_in_dim(key - (first_query + p.right), shape, [0]) <= query
        if p.left is not None:
            seen &= lax.broadcast_in_dim(key - (first_query - p.left), shape, [0]) >= query
        return seen
