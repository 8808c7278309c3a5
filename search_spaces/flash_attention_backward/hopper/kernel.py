"""The attention gradients on Hopper: a warp-specialized Mosaic GPU kernel with five products.

A CTA owns 128 rows of k and v, 64 for each of two consumer warpgroups, which keep dk and dv in registers. A producer
warpgroup loads blocks of q and d_out. Each consumer computes its rows of S^T = k q^T and dP^T = v d_out^T. These are
transposed so that P^T can be the A operand of dv += P^T d_out in registers. The consumer writes dS^T to SMEM for
dk += dS^T q and for dq = dS k. dq needs dS^T of both consumers, and each consumer computes half of dq. TMA adds dq to
float32 sums in device memory, in the order of arrival. (FlashAttention-3, arXiv:2407.08608, section 3.)

**Overlap.** FlashAttention-3 waits for all products of a step before it starts the next step. Here nothing is in flight
at the start and end of a loop step. Within the step, S^T of the next step is started before dk of this step, and dP^T
of the next step after dk. The exponentials, the longest work outside the tensor cores, overlap dk and dP^T. The
computation of dS overlaps dv. The store of dq overlaps S^T.

**ptxas.** Values that a loop carries must not be in flight; otherwise ptxas waits for each product (C7514, C7515). P^T
is cast to 16 bits at a point where nothing is in flight (C7513).
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl

from search_spaces.attention import hopper
from search_spaces.attention.hopper import zero_rows_from
from search_spaces.attention.problem import AttentionProblem, Lengths
from search_spaces.flash_attention_backward.hopper.plan import CONSUMERS, Blocks, Plan, masks
from search_spaces.hopper import WARPGROUP, WGMMA_ROWS, synchronization
from search_spaces.hopper.smem_layout import SmemTile
from search_spaces.jax_compat import interprets, load, plgpu

LOG2_E = math.log2(math.e)
CONSUMER_REGISTERS = 240
PRODUCER_REGISTERS = 24
PRODUCER = CONSUMERS  # index of its warpgroup
OPERANDS = ("k", "v", "q", "d_out")


def swizzled(swizzle: int, itemsize: int) -> tuple[Any, ...]:
    return plgpu.TilingTransform((8, swizzle // itemsize)), plgpu.SwizzleTransform(swizzle)


def smem(count: int, tile: SmemTile) -> Any:
    """Returns the SMEM type of `count` tiles."""
    return plgpu.SMEM((count, *tile.shape), tile.dtype, transforms=tile.transforms)


def scratch(plan: Plan) -> dict[str, Any]:
    """Returns the arrays and barriers of a CTA, by name."""
    s, dtype = plan.schedule, jnp.dtype(plan.problem.dtype)
    k, v, q, d_out = (plan.tile(x, n) for x, n in zip(OPERANDS, (WGMMA_ROWS,) * 2 + (s.block_q,) * 2, strict=True))
    found = {
        "k": smem(CONSUMERS, k),
        "v": smem(CONSUMERS, v),
        "q": smem(s.q_stages, q),
        "d_out": smem(s.do_stages, d_out),
        "lse": plgpu.SMEM((s.q_stages, plan.statistics_width), jnp.float32),
        "delta": plgpu.SMEM((s.do_stages, plan.statistics_width), jnp.float32),
        "ds": plgpu.SMEM(
            (s.ds_stages, CONSUMERS, WGMMA_ROWS, s.block_q),
            dtype,
            transforms=swizzled(plan.ds_swizzle, dtype.itemsize),
        ),
        "k_full": plgpu.Barrier(num_arrivals=k.copies, num_barriers=CONSUMERS),
        "v_full": plgpu.Barrier(num_arrivals=v.copies, num_barriers=CONSUMERS),
        "q_full": plgpu.Barrier(num_arrivals=q.copies + 1, num_barriers=s.q_stages),
        "d_out_full": plgpu.Barrier(num_arrivals=d_out.copies + 1, num_barriers=s.do_stages),
        "q_empty": plgpu.Barrier(num_arrivals=CONSUMERS, num_barriers=s.q_stages),
        "d_out_empty": plgpu.Barrier(num_arrivals=CONSUMERS, num_barriers=s.do_stages),
    }
    if not plan.separate_dq:
        found["dq"] = plgpu.SMEM((CONSUMERS, *plan.dq_shape), jnp.float32, transforms=swizzled(plan.dq_swizzle, 4))
    if interprets():
        found["met"] = plgpu.Barrier(num_arrivals=CONSUMERS)
    return found


def kernel(plan: Plan, *, scale: float, softcap: float, of: type[Cta]) -> Callable[..., None]:
    """Returns the kernel body, which runs the CTA class `of`.

    Its arguments in device memory are the lengths of queries and keys, ``[batch]``, if the problem has them, then q, k,
    v, d_out, the base-2 log-sum-exp (infinite for queries without keys), delta, the float32 sums of dq (unless a
    separate kernel computes dq), dk and dv.
    """
    p = plan.problem

    def body(*refs: Any) -> None:
        *gmem, named = refs
        counts = [gmem.pop(0) for _ in p.length_operands()]
        sums = () if plan.separate_dq else ("dq",)
        arrays = dict(zip(("q", "k", "v", "d_out", "lse", "delta", *sums, "dk", "dv"), gmem, strict=True))
        head = lax.axis_index("section") * plan.schedule.section + lax.axis_index("head")
        batch, kv_head = lax.div(head, jnp.int32(p.kv_heads)), lax.rem(head, jnp.int32(p.kv_heads))
        counted = p.counted(p.lengths([x[batch] for x in counts]) if counts else Lengths())
        blocks = Blocks.of(plan, lax.axis_index("kv_block"), counted)
        cta = of(plan, blocks, batch, kv_head, arrays, named, scale, softcap)
        wg = lax.axis_index("wg")
        pl.when(wg < CONSUMERS)(lambda: cta.consume(wg))
        pl.when(wg == PRODUCER)(cta.produce)

    return body


@dataclasses.dataclass(frozen=True)
class Cta:
    """The code of the warpgroups of one CTA.

    Attributes:
      plan: of the launch.
      blocks: steps of the block of keys of this CTA.
      batch, kv_head: of the keys.
      gmem, smem: arrays by name; `smem` includes the barriers.
      scale, softcap: of logits.
    """

    plan: Plan
    blocks: Blocks
    batch: Any
    kv_head: Any
    gmem: dict[str, Any]
    smem: dict[str, Any]
    scale: float
    softcap: float

    def produce(self) -> None:
        plgpu.set_max_registers(PRODUCER_REGISTERS, action="decrease")
        s, gmem, smem = self.plan.schedule, self.gmem, self.smem

        @pl.loop(self.blocks.start, self.blocks.end)
        def _(step: Any) -> None:
            member, row = self.blocks.at(step)
            head = self.kv_head * self.plan.problem.group + member
            rows = pl.ds(row, s.block_q)
            for operand, statistics, stages in (("q", "lse", s.q_stages), ("d_out", "delta", s.do_stages)):
                stage = lax.rem(step, jnp.int32(stages))
                full = smem[f"{operand}_full"].at[stage]

                @pl.when(step >= self.blocks.start + stages)
                def _(operand: str = operand, stage: Any = stage) -> None:
                    plgpu.barrier_wait(smem[f"{operand}_empty"].at[stage])

                tile, place = self.plan.tile(operand, s.block_q), (self.batch, row, head)
                hopper.load_head_rows(tile, gmem[operand], place, smem[operand].at[stage], full)
                plgpu.copy_gmem_to_smem(
                    gmem[statistics].at[self.batch, head, rows], smem[statistics].at[stage, pl.ds(0, s.block_q)], full
                )

        for operand, stages in (("q", s.q_stages), ("d_out", s.do_stages)):
            # The CTA must not exit before the consumers have used all loads.
            @pl.loop(jnp.maximum(self.blocks.end - stages, self.blocks.start), self.blocks.end)
            def _(step: Any, operand: str = operand, stages: int = stages) -> None:
                plgpu.barrier_wait(smem[f"{operand}_empty"].at[lax.rem(step, jnp.int32(stages))])

    def consume(self, wg: Any) -> None:
        plgpu.set_max_registers(CONSUMER_REGISTERS, action="increase")
        p, smem = self.plan.problem, self.smem
        place = self.batch, self.blocks.first_key + wg * WGMMA_ROWS, self.kv_head
        for operand in ("k", "v"):
            tile, full = self.plan.tile(operand, WGMMA_ROWS), smem[f"{operand}_full"].at[wg]
            hopper.load_head_rows(tile, self.gmem[operand], place, smem[operand].at[wg], full)

        first = self.blocks.start
        # Each consumer waits for its own rows of k. dq also needs the other's rows, which have arrived when consumers
        # synchronize for the first dS.
        plgpu.barrier_wait(smem["k_full"].at[wg])
        self._zero_keys("k", WGMMA_ROWS, wg, place[1])
        s = self._start_s(wg, first)
        plgpu.barrier_wait(smem["v_full"].at[wg])
        self._zero_keys("v", WGMMA_ROWS, wg, place[1])
        dp = self._start_dp(wg, first)
        p_and_slope = self._probabilities(wg, first, synchronization.wait_wgmma(1, s))
        carry = (zeros(p.head_dim), zeros(p.value_dim), *p_and_slope, synchronization.wait_wgmma(0, dp))
        last = self.blocks.end - 1
        carry = lax.fori_loop(first, last, lambda i, x: self._step(wg, i, x), carry)
        dk = self._step(wg, last, carry, last=True)
        self._meet()  # From here on, no consumer reads k.
        self._store("k", wg, dk * self.scale)
        plgpu.wait_smem_to_gmem(0, wait_read_only=True)

    def _zero_keys(self, operand: str, rows: int, number: Any, first_key: Any) -> None:
        """Zeros rows of k or v that no query sees.

        These rows may be NaN. Zeros in dS do not cancel NaN of k in dq, and zeros in P do not cancel NaN of v in dS.
        """
        if self.plan.problem.pads_keys:
            tile = self.plan.tile(operand, rows)
            zero_rows_from(self.blocks.keys - first_key, tile, self.smem[operand].at[number])

    def _zero_queries(self, operand: str, step: Any, stage: Any) -> None:
        """Zeros rows of q or d_out of queries that see no key."""
        if self.plan.problem.pads_queries:
            _, row = self.blocks.at(step)
            tile = self.plan.tile(operand, self.plan.schedule.block_q)
            zero_rows_from(self.blocks.queries - row, tile, self.smem[operand].at[stage])

    def _store(self, operand: str, wg: Any, gradient: jax.Array) -> None:
        """Stores this consumer's rows of dk or dv, staged in the SMEM of k or v, which is then unused."""
        place = self.batch, self.blocks.first_key + wg * WGMMA_ROWS, self.kv_head
        tile, staged = self.plan.tile(operand, WGMMA_ROWS), self.smem[operand].at[wg]
        gradient = self.blocks.there(place[1], gradient)
        tile.store(staged, gradient.astype(self.plan.problem.dtype), transposed=False)
        plgpu.commit_smem()
        hopper.store_head_rows(tile, self.gmem[f"d{operand}"], place, staged)

    def _step(self, wg: Any, step: Any, carry: Any, *, last: bool = False) -> Any:
        """Advances from P^T and dP^T of a step to those of the next step; the `last` step returns dk and stores dv."""
        plan, smem, own = self.plan, self.smem, hopper.own_index(wg)
        overlap = plan.schedule.overlap and not last
        q_stage, do_stage, ds_stage = self._stages(step)
        dk, dv, probability, *slope, dp = carry
        dv = hopper.start_product(
            dv,
            probability.astype(plan.problem.dtype),
            smem["d_out"].at[do_stage],
            columns=plan.problem.value_dim,
            transforms=(None, self._transforms("v")),
            transpose_a=False,
            transpose_b=False,
        )
        delta = load(smem["delta"].at[do_stage, pl.ds(0, plan.schedule.block_q)], plgpu.Layout.WGMMA.reduce(0))
        ds = probability * (dp - lax.broadcast_in_dim(delta, dp.shape, [1]))
        ds = (ds * slope[0] if slope else ds).astype(plan.problem.dtype)
        separate = plan.separate_dq
        if plan.schedule.ds_stages == 1 and not separate:
            self._meet()  # All consumers have used dS of the previous step.
        smem["ds"][ds_stage, own] = ds
        if separate:  # No consumer reads dS of the other.
            plgpu.commit_smem()
        else:
            self._meet()
        dq = [] if separate else [self._start_dq(own, ds_stage)]
        s: Any = self._start_s(own, step + 1) if overlap else None
        dk = hopper.start_product(
            dk,
            smem["ds"].at[ds_stage, own],
            smem["q"].at[q_stage],
            columns=plan.problem.head_dim,
            transforms=(self._transforms("ds"), self._transforms("k")),
            transpose_a=False,
            transpose_b=False,
        )
        unfinished = 2 if overlap else 1
        if last or separate:
            dv, *dq = _several(synchronization.wait_wgmma(unfinished, dv, *dq))
        else:
            dq = _several(synchronization.wait_wgmma(unfinished, *dq))
        plgpu.barrier_arrive(smem["d_out_empty"].at[do_stage])
        if not separate:
            self._store_dq(own, step, *dq)
        if last:  # Overlaps the product of dk.
            self._store("v", own, dv)
            dk = synchronization.wait_wgmma(0, dk)
            plgpu.barrier_arrive(smem["q_empty"].at[q_stage])
            return dk
        if not overlap:
            dk, dv = synchronization.wait_wgmma(0, dk, dv)
            plgpu.barrier_arrive(smem["q_empty"].at[q_stage])
            s = self._start_s(own, step + 1)
        dp = self._start_dp(own, step + 1)
        p_and_slope = self._probabilities(own, step + 1, synchronization.wait_wgmma(2 if overlap else 1, s))
        hopper.end_basic_block(own)
        dk, dv, dp = synchronization.wait_wgmma(0, dk, dv, dp)
        if overlap:
            plgpu.barrier_arrive(smem["q_empty"].at[q_stage])
        return dk, dv, *p_and_slope, dp

    def _stages(self, step: Any) -> tuple[Any, Any, Any]:
        s = self.plan.schedule
        q, do, ds = (lax.rem(step, jnp.int32(n)) for n in (s.q_stages, s.do_stages, s.ds_stages))
        return q, do, ds

    def _transforms(self, operand: str) -> tuple[Any, ...]:
        plan = self.plan
        if operand == "ds":
            return swizzled(plan.ds_swizzle, plan.itemsize)
        return plan.tile(operand, WGMMA_ROWS).transforms

    def _start_s(self, own: Any, step: Any) -> jax.Array:
        """Waits for q of a step and starts S^T."""
        stage, _, _ = self._stages(step)
        plgpu.barrier_wait(self.smem["q_full"].at[stage])
        self._zero_queries("q", step, stage)
        return self._start_logits("k", "q", own, stage)

    def _start_dp(self, own: Any, step: Any) -> jax.Array:
        """Waits for d_out of a step and starts dP^T."""
        _, stage, _ = self._stages(step)
        plgpu.barrier_wait(self.smem["d_out_full"].at[stage])
        self._zero_queries("d_out", step, stage)
        return self._start_logits("v", "d_out", own, stage)

    def _start_logits(self, left: str, right: str, own: Any, stage: Any) -> jax.Array:
        return hopper.start_product(
            None,
            self.smem[left].at[own],
            self.smem[right].at[stage],
            columns=self.plan.schedule.block_q,
            transforms=(self._transforms(left),) * 2,
            transpose_a=False,
            transpose_b=True,
        )

    def _start_dq(self, own: Any, stage: Any) -> jax.Array:
        """Starts this consumer's half of dq, over the rows of k of all consumers."""
        plan, dq = self.plan, None
        ds, k = self._transforms("ds"), self._transforms("k")
        rows, columns = plan.dq_shape
        for other in range(CONSUMERS):
            of_ds, of_k = self.smem["ds"].at[stage, other], self._columns_of_k(other)
            if plan.transposed:
                a, b, transforms = of_k(own * rows, rows), of_ds, (k, ds)
            elif plan.by_rows:
                a, b, transforms = of_ds.at[:, pl.ds(own * rows, rows)], self.smem["k"].at[other], (ds, k)
            else:
                a, b, transforms = of_ds, of_k(own * columns, columns), (ds, k)
            dq = hopper.start_product(
                dq, a, b, columns=columns, transforms=transforms, transpose_a=True, transpose_b=False
            )
        assert dq is not None
        return dq

    def _columns_of_k(self, number: Any) -> Callable[[Any, int], Any]:
        """Returns a function that slices columns of the rows of k of consumer `number`."""
        tile, rows = self.plan.tile("k", WGMMA_ROWS), self.smem["k"].at[number]
        return lambda first, count: tile.columns_of(rows, pl.ds(first, count))

    def _store_dq(self, own: Any, step: Any, dq: jax.Array) -> None:
        """Adds this consumer's half of dq to the sums in device memory."""
        plan, smem = self.plan, self.smem["dq"].at[own]
        member, row = self.blocks.at(step)
        head = self.kv_head * plan.problem.group + member
        rows, columns = plan.dq_shape
        box: tuple[Any, ...]
        if plan.transposed:
            box = head, pl.ds(own * rows, rows), pl.ds(row, columns)
        elif plan.by_rows:
            box = pl.ds(row + own * rows, rows), head, pl.ds(0, columns)
        else:
            box = pl.ds(row, rows), head, pl.ds(own * columns, columns)
        hopper.add_product(self.gmem["dq"].at[self.batch, *box], dq, smem)

    def _probabilities(self, wg: Any, step: Any, s: jax.Array) -> tuple[jax.Array, ...]:
        """Returns P^T in float32, and the derivative of the cap if logits are capped."""
        p, block_q = self.plan.problem, self.plan.schedule.block_q
        stage, _, _ = self._stages(step)
        lse = load(self.smem["lse"].at[stage, pl.ds(0, block_q)], plgpu.Layout.WGMMA.reduce(0))
        exponent, slope = logits(p, s, self.scale, self.softcap)
        exponent = exponent - lax.broadcast_in_dim(lse, s.shape, [1])
        if masks(self.plan):

            def mask(exponent: jax.Array) -> jax.Array:
                _, row = self.blocks.at(step)
                seen = self.blocks.visible(self.blocks.first_key + wg * WGMMA_ROWS, row, (WGMMA_ROWS, block_q))
                return jnp.where(seen, exponent, -jnp.inf)

            # A branch in one loop, because each of two loops would keep its own addresses in registers.
            exponent = lax.cond(step < self.blocks.end_of_masked, mask, lambda x: x, exponent)
        found: tuple[jax.Array, ...] = lax.optimization_barrier((jnp.exp2(exponent), *slope))
        return found

    def _meet(self) -> None:
        barrier = self.smem["met"] if interprets() else None
        hopper.meet_warpgroups(barrier, threads=CONSUMERS * WARPGROUP)


def logits(p: AttentionProblem, s: jax.Array, scale: float, softcap: float) -> tuple[jax.Array, tuple[jax.Array, ...]]:
    """Converts products of q and k to base-2 logits; also returns the derivative of the cap if logits are capped."""
    factor = scale * LOG2_E
    if not p.softcap:
        return s * factor, ()
    # tanh(x) by exponentials, because the hardware tanh has an error of 2^-11, relative to the cap.
    s = 1.0 - 2.0 / (jnp.exp2(s * (2.0 * factor / softcap)) + 1.0)
    return s * (softcap * LOG2_E), (1.0 - s * s,)


def _several(found: Any) -> list[jax.Array]:
    return list(found) if isinstance(found, tuple | list) else [found]


def zeros(columns: int) -> jax.Array:
    return plgpu.layout_cast(jnp.zeros((WGMMA_ROWS, columns), jnp.float32), plgpu.Layout.WGMMA)
