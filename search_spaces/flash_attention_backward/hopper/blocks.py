"""The blocks of queries that see a block of keys, their order, and the masks of their pairs."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from search_spaces.attention.problem import Lengths
from search_spaces.flash_attention_backward.hopper.plan import Plan
from search_spaces.hopper.limits import MAX_INDEX
from search_spaces.jax_compat import plgpu


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
