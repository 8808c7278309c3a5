"""The attention gradients of wide heads on Hopper: each of two consumer warpgroups computes half of the columns.

64 rows of dk and dv with 256 columns exceed the registers of one warpgroup. A CTA therefore owns 64 rows of k and v,
and each of two consumers computes half of the columns of dk, dv and dq. S^T = k q^T and dP^T = v d_out^T are sums over
all columns, so each consumer computes them for half of the queries. The consumers exchange P^T and dS^T in 16 bits
through SMEM. TMA adds dq to float32 sums, as for narrow heads.

**Order of a step.** dv and the first part of dq are started. When dv is complete, d_out is released, and its next load
overlaps the other products. With `overlap`, S^T of the next step is started before the remaining parts of dq and dk,
and its exponentials overlap later products. Without `overlap`, S^T is started after dk, which gives its q more time to
arrive, and the exponentials overlap dP^T.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental import pallas as pl

from search_spaces.attention import hopper
from search_spaces.flash_attention_backward.hopper.kernel import (
    CONSUMER_REGISTERS,
    OPERANDS,
    Cta,
    logits,
    smem,
    swizzled,
    zeros,
)
from search_spaces.flash_attention_backward.hopper.plan import CONSUMERS, Plan, masks
from search_spaces.flash_attention_backward.problem import FlashAttentionBackwardProblem
from search_spaces.hopper import ACCUMULATOR_BYTES, BARRIER_BYTES, SMEM_ALIGNMENT, WGMMA_ROWS, synchronization
from search_spaces.hopper.smem_layout import SmemTile
from search_spaces.jax_compat import interprets, load, plgpu
from search_spaces.space import round_up

# ------------------------------------------------------------------------------
# Extents of the backward pass of wide heads, in which two consumers share the columns of dk and dv.

# Maximum columns for which 64 rows of dk and dv fit into the registers of one consumer.
MOST_NARROW = 128
HEAD_DIMS = (64, 128, 192, 256)
BLOCK_KV = WGMMA_ROWS
BLOCK_Q = WGMMA_ROWS  # The rows of dq are the rows of wgmma.
# Maximum columns of dq per product of a consumer. More would leave too few registers for the concurrent products.
MOST_DQ_COLUMNS = 96


def is_wide(p: FlashAttentionBackwardProblem) -> bool:
    return max(p.head_dim, p.value_dim) > MOST_NARROW


def refusal(p: FlashAttentionBackwardProblem) -> str | None:
    """Returns why a problem of wide heads is not supported, or None."""
    if p.deterministic:
        return "adds dq of wide heads up in the order of arrival, which differs from run to run"
    for name, columns in (("head_dim", p.head_dim), ("head_dim_v", p.value_dim)):
        if columns not in HEAD_DIMS:
            return f"halves whole tiles of columns: {name}={columns} is not one of {', '.join(map(str, HEAD_DIMS))}"
    return None


def plan_of(p: FlashAttentionBackwardProblem, schedule: Any) -> Plan:
    return WidePlan(p, schedule) if is_wide(p) else Plan(p, schedule)


@dataclasses.dataclass(frozen=True)
class WidePlan(Plan):
    """Extents for wide heads: a CTA owns 64 rows of k and v.

    A consumer computes S and dP for half of the queries, and half of the columns of the gradients. dq is staged in SMEM
    a few columns at a time.
    """

    @property
    def block_kv(self) -> int:
        return BLOCK_KV

    @property
    def own_queries(self) -> int:
        """Queries per step for which a consumer computes S and dP."""
        return BLOCK_Q // CONSUMERS

    @property
    def own_columns(self) -> tuple[int, int]:
        """Columns of dk and dq, and of dv, that a consumer computes."""
        return self.problem.head_dim // CONSUMERS, self.problem.value_dim // CONSUMERS

    @property
    def dq_columns(self) -> int:
        """Columns of dq per product of a consumer."""
        own, _ = self.own_columns
        return own if own <= MOST_DQ_COLUMNS else own // 2

    @property
    def by_rows(self) -> Any:
        return False

    @property
    def transposed(self) -> Any:
        return False

    @property
    def dq_shape(self) -> tuple[int, int]:
        return BLOCK_Q, self.dq_columns

    @property
    def k_swizzle(self) -> int:
        return int(np.gcd(self.dq_columns * self.itemsize, 128))

    @property
    def v_swizzle(self) -> int:
        return int(np.gcd(self.own_columns[1] * self.itemsize, 128))

    @property
    def ds_swizzle(self) -> int:
        """Bytes of a swizzled row of P^T and dS^T; a consumer writes whole rows."""
        return int(np.gcd(self.own_queries * self.itemsize, 128))

    @property
    def onchip_bytes(self) -> Any:
        p, s, b = self.problem, self.schedule, self.itemsize
        arrays = (
            BLOCK_KV * p.head_dim * b,
            BLOCK_KV * p.value_dim * b,
            s.q_stages * s.block_q * p.head_dim * b,
            s.do_stages * s.block_q * p.value_dim * b,
            s.q_stages * self.statistics_width * ACCUMULATOR_BYTES,
            s.do_stages * self.statistics_width * ACCUMULATOR_BYTES,
            s.ds_stages * BLOCK_KV * s.block_q * b,  # P^T
            s.ds_stages * BLOCK_KV * s.block_q * b,  # dS^T
            CONSUMERS * BLOCK_Q * self.dq_columns * ACCUMULATOR_BYTES,
        )
        barriers = 1 + 2 * s.q_stages + 2 * s.do_stages
        return sum(round_up(size, SMEM_ALIGNMENT) for size in arrays) + barriers * BARRIER_BYTES


def wide_scratch(plan: WidePlan) -> dict[str, Any]:
    """Returns the arrays and barriers of a CTA, by name."""
    s, dtype = plan.schedule, jnp.dtype(plan.problem.dtype)
    k, v, q, d_out = (plan.tile(x, n) for x, n in zip(OPERANDS, (BLOCK_KV,) * 2 + (s.block_q,) * 2, strict=True))
    ds = swizzled(plan.ds_swizzle, dtype.itemsize)
    pairs = (s.ds_stages, BLOCK_KV, s.block_q)
    found = {
        "k": smem(1, k),
        "v": smem(1, v),
        "q": smem(s.q_stages, q),
        "d_out": smem(s.do_stages, d_out),
        "lse": plgpu.SMEM((s.q_stages, plan.statistics_width), jnp.float32),
        "delta": plgpu.SMEM((s.do_stages, plan.statistics_width), jnp.float32),
        "p": plgpu.SMEM(pairs, dtype, transforms=ds),
        "ds": plgpu.SMEM(pairs, dtype, transforms=ds),
        "dq": plgpu.SMEM((CONSUMERS, *plan.dq_shape), jnp.float32, transforms=swizzled(plan.dq_swizzle, 4)),
        "kv_full": plgpu.Barrier(num_arrivals=CONSUMERS * (k.copies + v.copies)),
        "q_full": plgpu.Barrier(num_arrivals=q.copies + 1, num_barriers=s.q_stages),
        "d_out_full": plgpu.Barrier(num_arrivals=d_out.copies + 1, num_barriers=s.do_stages),
        "q_empty": plgpu.Barrier(num_arrivals=CONSUMERS, num_barriers=s.q_stages),
        "d_out_empty": plgpu.Barrier(num_arrivals=CONSUMERS, num_barriers=s.do_stages),
    }
    if interprets():
        found["met"] = plgpu.Barrier(num_arrivals=CONSUMERS)
    return found


@dataclasses.dataclass(frozen=True)
class WideCta(Cta):
    """The code of the warpgroups of one CTA; the producer is the same as for narrow heads."""

    plan: WidePlan

    def consume(self, wg: Any) -> None:
        plgpu.set_max_registers(CONSUMER_REGISTERS, action="increase")
        plan, smem = self.plan, self.smem
        place = self.batch, self.blocks.first_key + wg * (BLOCK_KV // CONSUMERS), self.kv_head
        for operand in ("k", "v"):
            half, rows = self._half(wg, operand)
            hopper.load_head_rows(half, self.gmem[operand], place, rows, smem["kv_full"])
        plgpu.barrier_wait(smem["kv_full"])
        for operand in ("k", "v"):  # Zeros all rows, because each consumer reads all rows.
            self._zero_keys(operand, BLOCK_KV, 0, self.blocks.first_key)

        first, last = self.blocks.start, self.blocks.end - 1
        s, dp = self._start_s(wg, first), self._start_dp(wg, first)
        p_and_slope = self._probabilities(wg, first, synchronization.wait_wgmma(1, s))
        carry = tuple(zeros(columns) for columns in plan.own_columns)
        carry = lax.fori_loop(
            first, last, lambda i, x: self._step(wg, i, x), (*carry, *p_and_slope, synchronization.wait_wgmma(0, dp))
        )
        dk, dv = self._step(wg, last, carry, last=True)

        self._meet()  # From here on, no consumer reads k or v.
        for operand, gradient in (("k", dk * self.scale), ("v", dv)):
            columns = gradient.shape[1]
            value = self.blocks.there(self.blocks.first_key, gradient).astype(plan.problem.dtype)
            tile = plan.tile(operand, BLOCK_KV)
            part = tile.part(smem[operand], 0, slice(None), pl.ds(wg * columns, columns))
            tile.store(part, value, transposed=False)
        self._meet()
        for operand in ("k", "v"):
            half, rows = self._half(wg, operand)
            hopper.store_head_rows(half, self.gmem[f"d{operand}"], place, rows)
        plgpu.wait_smem_to_gmem(0)

    def _half(self, wg: Any, operand: str) -> tuple[SmemTile, Any]:
        """Returns the tile of the rows of k or v that this consumer copies, and these rows in SMEM."""
        count = BLOCK_KV // CONSUMERS
        rows = self.plan.tile(operand, BLOCK_KV).part(self.smem[operand], 0, pl.ds(wg * count, count), slice(None))
        return self.plan.tile(operand, count), rows

    def _step(self, wg: Any, step: Any, carry: Any, *, last: bool = False) -> Any:
        """Advances from P^T and dP^T of a step to those of the next step; the `last` step returns dk and dv."""
        plan, smem, own = self.plan, self.smem, hopper.own_index(wg)
        overlap = plan.schedule.overlap and not last
        q_stage, do_stage, ds_stage = self._stages(step)
        dk, dv, probability, *slope, dp = carry
        self._share(own, step, probability, slope, dp)
        dv = self._start_gradient(own, dv, smem["p"].at[ds_stage], "d_out", do_stage)
        parts = plan.own_columns[0] // plan.dq_columns
        dq = self._start_dq_part(own, ds_stage, 0)
        synchronization.wait_wgmma(1)
        plgpu.barrier_arrive(smem["d_out_empty"].at[do_stage])
        s: Any = self._start_s(own, step + 1) if overlap else None
        for part in range(1, parts):
            dq = synchronization.wait_wgmma(1 if overlap and part == 1 else 0, dq)
            self._store_dq_part(own, step, part - 1, dq)
            dq = self._start_dq_part(own, ds_stage, part)
        dk = self._start_gradient(own, dk, smem["ds"].at[ds_stage], "q", q_stage)
        if overlap and parts > 1:
            p_and_slope = self._probabilities(own, step + 1, synchronization.wait_wgmma(2, s))
            hopper.end_basic_block(own)
        dq = synchronization.wait_wgmma(2 if overlap and parts == 1 else 1, dq)
        self._store_dq_part(own, step, parts - 1, dq)
        if last:
            dk, dv = synchronization.wait_wgmma(0, dk, dv)
            plgpu.barrier_arrive(smem["q_empty"].at[q_stage])
            return dk, dv
        if not overlap:
            s = self._start_s(own, step + 1)
        elif parts == 1:
            p_and_slope = self._probabilities(own, step + 1, synchronization.wait_wgmma(1, s))
            hopper.end_basic_block(own)
        dp = self._start_dp(own, step + 1)
        synchronization.wait_wgmma(1 if overlap else 2)  # for dk
        plgpu.barrier_arrive(smem["q_empty"].at[q_stage])
        if not overlap:
            p_and_slope = self._probabilities(own, step + 1, synchronization.wait_wgmma(1, s))
            hopper.end_basic_block(own)
        dk, dv, dp = synchronization.wait_wgmma(0, dk, dv, dp)
        return dk, dv, *p_and_slope, dp

    def _share(self, own: Any, step: Any, probability: Any, slope: Any, dp: Any) -> None:
        """Writes P^T and dS^T of this consumer's queries to SMEM, and waits for those of the other consumer."""
        plan, smem = self.plan, self.smem
        _, do_stage, ds_stage = self._stages(step)
        queries = pl.ds(own * plan.own_queries, plan.own_queries)
        delta = load(smem["delta"].at[do_stage, queries], plgpu.Layout.WGMMA.reduce(0))
        ds = probability * (dp - lax.broadcast_in_dim(delta, dp.shape, [1]))
        ds = ds * slope[0] if slope else ds
        if plan.schedule.ds_stages == 1:
            self._meet()  # All consumers have used P^T and dS^T of the previous step.
        smem["p"][ds_stage, :, queries] = probability.astype(plan.problem.dtype)
        smem["ds"][ds_stage, :, queries] = ds.astype(plan.problem.dtype)
        self._meet()

    def _zero(self, own: Any) -> Any:
        """Returns index 0 of the array of k or v, in a form that LLVM cannot fold; see `attention.hopper.own_index`."""
        return lax.div(own, jnp.int32(CONSUMERS))

    def _start_logits(self, left: str, right: str, own: Any, stage: Any) -> jax.Array:
        queries = self.plan.own_queries
        return hopper.start_product(
            None,
            self.smem[left].at[self._zero(own)],
            self.plan.tile(right, BLOCK_Q).part(self.smem[right], stage, pl.ds(own * queries, queries), slice(None)),
            columns=queries,
            transforms=(self._transforms(left),) * 2,
            transpose_a=False,
            transpose_b=True,
        )

    def _start_gradient(self, own: Any, acc: jax.Array, a: Any, operand: str, stage: Any) -> jax.Array:
        """Starts the product for this consumer's columns of dk or dv."""
        columns = acc.shape[1]
        return hopper.start_product(
            acc,
            a,
            self._columns(operand, BLOCK_Q, stage, pl.ds(own * columns, columns)),
            columns=columns,
            transforms=(self._transforms("ds"), self._transforms(operand)),
            transpose_a=False,
            transpose_b=False,
        )

    def _columns(self, operand: str, rows: int, number: Any, columns: Any) -> Any:
        return self.plan.tile(operand, rows).columns_of(self.smem[operand].at[number], columns)

    def _dq_columns(self, own: Any, part: int) -> Any:
        return pl.ds(own * self.plan.own_columns[0] + part * self.plan.dq_columns, self.plan.dq_columns)

    def _start_dq_part(self, own: Any, stage: Any, part: int) -> jax.Array:
        return hopper.start_product(
            None,
            self.smem["ds"].at[stage],
            self._columns("k", BLOCK_KV, self._zero(own), self._dq_columns(own, part)),
            columns=self.plan.dq_columns,
            transforms=(self._transforms("ds"), self._transforms("k")),
            transpose_a=True,
            transpose_b=False,
        )

    def _store_dq_part(self, own: Any, step: Any, part: int, dq: jax.Array) -> None:
        """Adds a part of the columns of dq to the sums in device memory."""
        member, row = self.blocks.at(step)
        head = self.kv_head * self.plan.problem.group + member
        rows = pl.ds(row, self.plan.schedule.block_q)
        sums = self.gmem["dq"].at[self.batch, rows, head, self._dq_columns(own, part)]
        hopper.add_product(sums, dq, self.smem["dq"].at[own])

    def _probabilities(self, wg: Any, step: Any, s: jax.Array) -> tuple[jax.Array, ...]:
        """Returns P^T of this consumer's queries in float32, and the derivative of the cap if logits are capped."""
        p, queries = self.plan.problem, self.plan.own_queries
        stage, _, _ = self._stages(step)
        lse = load(self.smem["lse"].at[stage, pl.ds(wg * queries, queries)], plgpu.Layout.WGMMA.reduce(0))
        exponent, slope = logits(p, s, self.scale, self.softcap)
        exponent = exponent - lax.broadcast_in_dim(lse, s.shape, [1])
        if masks(self.plan):

            def mask(exponent: jax.Array) -> jax.Array:
                _, row = self.blocks.at(step)
                seen = self.blocks.visible(self.blocks.first_key, row + wg * queries, (BLOCK_KV, queries))
                return jnp.where(seen, exponent, -jnp.inf)

            exponent = lax.cond(step < self.blocks.end_of_masked, mask, lambda x: x, exponent)
        found: tuple[jax.Array, ...] = lax.optimization_barrier((jnp.exp2(exponent), *slope))
        return found
