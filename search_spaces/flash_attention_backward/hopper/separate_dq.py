"""A separate deterministic kernel for dq on Hopper, with three products and no atomic additions.

A CTA owns 128 queries of a head, 64 for each of two consumer warpgroups, and iterates over their keys. A consumer
starts S = q k^T and dP = d_out v^T of the next step while dq += dS k, with dS in registers, is in flight. The consumers
do not synchronize, so that the work of one outside the tensor cores overlaps the products of the other.
"""

from __future__ import annotations

import dataclasses
import functools
import operator
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl

from search_spaces.attention import hopper
from search_spaces.attention.hopper import zero_rows_from
from search_spaces.attention.problem import AttentionProblem, Lengths
from search_spaces.flash_attention_backward.hopper.kernel import (
    CONSUMER_REGISTERS,
    PRODUCER,
    PRODUCER_REGISTERS,
    logits,
    smem,
    zeros,
)
from search_spaces.flash_attention_backward.hopper.plan import CONSUMERS, DqPlan
from search_spaces.hopper import WGMMA_ROWS, synchronization
from search_spaces.jax_compat import load, plgpu


def scratch(plan: DqPlan) -> dict[str, Any]:
    """Returns the arrays and barriers of a CTA, by name."""
    q, d_out = (plan.tile(x, WGMMA_ROWS) for x in ("q", "d_out"))
    k, v = (plan.tile(x, plan.block_kv) for x in ("k", "v"))
    return {
        "q": smem(CONSUMERS, q),
        "d_out": smem(CONSUMERS, d_out),
        "k": smem(plan.stages, k),
        "v": smem(plan.stages, v),
        "lse": plgpu.SMEM((CONSUMERS, WGMMA_ROWS), jnp.float32),
        "delta": plgpu.SMEM((CONSUMERS, WGMMA_ROWS), jnp.float32),
        "rows_full": plgpu.Barrier(num_arrivals=q.copies + d_out.copies + 2, num_barriers=CONSUMERS),
        "k_full": plgpu.Barrier(num_arrivals=k.copies, num_barriers=plan.stages),
        "v_full": plgpu.Barrier(num_arrivals=v.copies, num_barriers=plan.stages),
        **{f"{x}_empty": plgpu.Barrier(num_arrivals=CONSUMERS, num_barriers=plan.stages) for x in ("k", "v")},
    }


def kernel(plan: DqPlan, *, scale: float, softcap: float) -> Callable[..., None]:
    """Returns the kernel body.

    Its arguments in device memory are the lengths of queries and keys, ``[batch]``, if the problem has them, then q, k,
    v, d_out, the base-2 log-sum-exp (infinite for queries without keys), delta and dq.
    """
    p = plan.problem

    def body(*refs: Any) -> None:
        *gmem, smem = refs
        counts = [gmem.pop(0) for _ in p.length_operands()]
        arrays = dict(zip(("q", "k", "v", "d_out", "lse", "delta", "dq"), gmem, strict=True))
        batch, head = (lax.axis_index(name) for name in ("batch", "head"))
        # With a causal mask, the last queries see the most keys: their CTAs start first.
        row = (plan.q_blocks - 1 - lax.axis_index("q_block")) * plan.rows
        counted = p.counted(p.lengths([x[batch] for x in counts]) if counts else Lengths())
        cta = Cta(
            plan, Keys.of(plan, row, jnp.int32(counted.kv)), counted.q, batch, head, row, arrays, smem, scale, softcap
        )
        wg = lax.axis_index("wg")
        pl.when(wg < CONSUMERS)(lambda: cta.consume(wg))
        pl.when(wg == PRODUCER)(cta.produce)

    return body


@dataclasses.dataclass(frozen=True)
class Keys:
    """The blocks of keys that queries of a CTA see; at least one, which may be fully masked.

    Attributes:
      plan: of the launch.
      first, end: index of the first block, and end of the blocks.
      row: index of the first query.
      keys: number of keys of the sequence that a query sees.
    """

    plan: DqPlan
    first: Any
    end: Any
    row: Any
    keys: Any

    @classmethod
    def of(cls, plan: DqPlan, row: Any, keys: Any) -> Keys:
        p, width = plan.problem, jnp.int32(plan.block_kv)
        first, last_key = jnp.int32(0), jnp.minimum(keys, p.kv_len) - 1
        if p.right is not None:
            last_key = jnp.minimum(last_key, row + (plan.rows - 1 + p.right))
        end = lax.div(jnp.maximum(last_key, 0), width) + 1
        if p.left is not None:
            first = jnp.minimum(lax.div(jnp.maximum(row - p.left, 0), width), end - 1)
        return cls(plan, first, end, row, keys)

    def masks(self, block: Any) -> Any:
        """Returns whether a block needs a mask for some query of the CTA; None if no block needs one."""
        p, width = self.plan.problem, self.plan.block_kv
        key, found = block * width, []
        if p.right is not None:
            found.append(key + (width - 1) > self.row + p.right)
        if p.left is not None:
            found.append(key < self.row + (self.plan.rows - 1) - p.left)
        if p.kv_lengths or p.kv_len % width:
            found.append(key + width > self.keys)
        return functools.reduce(operator.or_, found) if found else None

    def visible(self, first_query: Any, block: Any) -> Any:
        """Returns the mask of visible pairs ``[queries, keys]``, in the layout of wgmma."""
        p, layout, shape = self.plan.problem, plgpu.Layout.WGMMA, (WGMMA_ROWS, self.plan.block_kv)
        if p.right is None and p.left is None:
            # Avoids an array of identical rows: Mosaic GPU takes minutes to infer a layout that nothing constrains.
            number = plgpu.broadcasted_iota(jnp.int32, shape, 1, layout=layout)
            return number < self.keys - block * self.plan.block_kv
        query = plgpu.broadcasted_iota(jnp.int32, shape[:1], 0, layout=layout.reduce(1)) + first_query
        key = plgpu.broadcasted_iota(jnp.int32, shape, 1, layout=layout) + block * self.plan.block_kv
        last = jnp.minimum(query + p.right, self.keys - 1) if p.right is not None else query * 0 + (self.keys - 1)
        seen = key <= lax.broadcast_in_dim(last, shape, [0])
        if p.left is not None:
            seen &= key >= lax.broadcast_in_dim(query - p.left, shape, [0])
        return seen


@dataclasses.dataclass(frozen=True)
class Cta:
    """The code of the warpgroups of one CTA.

    Attributes:
      plan: of the launch.
      keys: blocks of keys that the queries of this CTA see.
      queries: number of queries of the sequence that see a key.
      batch, head, row: batch and head of the queries, and index of the first query.
      gmem, smem: arrays by name; `smem` includes the barriers.
      scale, softcap: of logits.
    """

    plan: DqPlan
    keys: Keys
    queries: Any
    batch: Any
    head: Any
    row: Any
    gmem: dict[str, Any]
    smem: dict[str, Any]
    scale: float
    softcap: float

    def produce(self) -> None:
        plgpu.set_max_registers(PRODUCER_REGISTERS, action="decrease")
        stages, smem = jnp.int32(self.plan.stages), self.smem
        kv_head = lax.div(self.head, jnp.int32(self.plan.problem.group))

        @pl.loop(self.keys.first, self.keys.end)
        def _(block: Any) -> None:
            stage = lax.rem(block, stages)
            place = self.batch, block * self.plan.block_kv, kv_head
            for operand in ("k", "v"):

                @pl.when(block >= self.keys.first + stages)
                def _(operand: str = operand) -> None:
                    plgpu.barrier_wait(smem[f"{operand}_empty"].at[stage])

                tile, full = self.plan.tile(operand, self.plan.block_kv), smem[f"{operand}_full"].at[stage]
                hopper.load_head_rows(tile, self.gmem[operand], place, smem[operand].at[stage], full)

        # The CTA must not exit before the consumers have used all loads.
        @pl.loop(jnp.maximum(self.keys.end - stages, self.keys.first), self.keys.end)
        def _(block: Any) -> None:
            for operand in ("k", "v"):
                plgpu.barrier_wait(smem[f"{operand}_empty"].at[lax.rem(block, stages)])

    def consume(self, wg: Any) -> None:
        plgpu.set_max_registers(CONSUMER_REGISTERS, action="increase")
        p, smem, full = self.plan.problem, self.smem, self.smem["rows_full"].at[wg]
        first_query = self.row + wg * WGMMA_ROWS
        queries, place = pl.ds(first_query, WGMMA_ROWS), (self.batch, first_query, self.head)
        for operand in ("q", "d_out"):
            tile = self.plan.tile(operand, WGMMA_ROWS)
            hopper.load_head_rows(tile, self.gmem[operand], place, smem[operand].at[wg], full)
        for operand in ("lse", "delta"):
            plgpu.copy_gmem_to_smem(self.gmem[operand].at[self.batch, self.head, queries], smem[operand].at[wg], full)
        plgpu.barrier_wait(full)

        first, last = self.keys.first, self.keys.end - 1
        carry = (zeros(p.head_dim), *synchronization.wait_wgmma(0, *self._start(wg, first)))
        plgpu.barrier_arrive(smem["v_empty"].at[self._stage(first)])
        dq, s, dp = lax.fori_loop(first, last, lambda i, x: self._step(wg, i, x), carry)
        dq = synchronization.wait_wgmma(0, self._start_dq(dq, self._ds(wg, last, s, dp), last))
        plgpu.barrier_arrive(smem["k_empty"].at[self._stage(last)])
        tile = self.plan.tile("q", WGMMA_ROWS)
        dq = self._there(first_query, dq * self.scale)
        tile.store(smem["q"].at[wg], dq.astype(p.dtype), transposed=False)
        plgpu.commit_smem()
        hopper.store_head_rows(tile, self.gmem["dq"], place, smem["q"].at[wg])
        plgpu.wait_smem_to_gmem(0, wait_read_only=True)

    def _there(self, first_query: Any, dq: jax.Array) -> jax.Array:
        """Zeros dq of queries that see no key."""
        if self.plan.problem.every_query_sees:
            return dq
        query = plgpu.broadcasted_iota(jnp.int32, dq.shape[:1], 0, layout=plgpu.Layout.WGMMA.reduce(1)) + first_query
        return jnp.where(lax.broadcast_in_dim(query, dq.shape, [0]) < self.queries, dq, 0.0)

    def _step(self, wg: Any, block: Any, carry: Any) -> Any:
        """Adds dq of a block, and computes S and dP of the next block."""
        own = hopper.own_index(wg)
        dq, s, dp = carry
        dq = self._start_dq(dq, self._ds(own, block, s, dp), block)
        s, dp = self._start(own, block + 1)
        dq, s, dp = synchronization.wait_wgmma(0, dq, s, dp)
        plgpu.barrier_arrive(self.smem["k_empty"].at[self._stage(block)])
        plgpu.barrier_arrive(self.smem["v_empty"].at[self._stage(block + 1)])
        return dq, s, dp

    def _stage(self, block: Any) -> Any:
        return lax.rem(block, jnp.int32(self.plan.stages))

    def _start(self, own: Any, block: Any) -> tuple[jax.Array, jax.Array]:
        """Waits for the keys and values of a block and starts S and dP."""
        stage, found = self._stage(block), []
        for rows, columns in (("q", "k"), ("d_out", "v")):
            plgpu.barrier_wait(self.smem[f"{columns}_full"].at[stage])
            if self.plan.problem.pads_keys:
                seen = self.keys.keys - block * self.plan.block_kv
                zero_rows_from(seen, self.plan.tile(columns, self.plan.block_kv), self.smem[columns].at[stage])
            product = hopper.start_product(
                None,
                self.smem[rows].at[own],
                self.smem[columns].at[stage],
                columns=self.plan.block_kv,
                transforms=(self.plan.tile(columns, self.plan.block_kv).transforms,) * 2,
                transpose_a=False,
                transpose_b=True,
            )
            found.append(product)
        s, dp = found
        return s, dp

    def _start_dq(self, dq: jax.Array, ds: jax.Array, block: Any) -> jax.Array:
        return hopper.start_product(
            dq,
            ds,
            self.smem["k"].at[self._stage(block)],
            columns=self.plan.problem.head_dim,
            transforms=(None, self.plan.tile("k", self.plan.block_kv).transforms),
            transpose_a=False,
            transpose_b=False,
        )

    def _ds(self, own: Any, block: Any, s: jax.Array, dp: jax.Array) -> jax.Array:
        p: AttentionProblem = self.plan.problem
        lse, delta = (load(self.smem[x].at[own], plgpu.Layout.WGMMA.reduce(1)) for x in ("lse", "delta"))
        exponent, slope = logits(p, s, self.scale, self.softcap)
        exponent = exponent - lax.broadcast_in_dim(lse, s.shape, [0])
        masks = self.keys.masks(block)
        if masks is not None:

            def mask(exponent: jax.Array) -> jax.Array:
                return jnp.where(self.keys.visible(self.row + own * WGMMA_ROWS, block), exponent, -jnp.inf)

            exponent = lax.cond(masks, mask, lambda x: x, exponent)
        ds = jnp.exp2(exponent) * (dp - lax.broadcast_in_dim(delta, dp.shape, [0]))
        return (ds * slope[0] if slope else ds).astype(p.dtype)
