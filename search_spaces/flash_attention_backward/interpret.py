"""Teaching kernels of the attention gradients in plain ``pallas_call``, run by the Pallas interpreter on a CPU."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl

from search_spaces.attention import interpret, left_out
from search_spaces.attention.interpret import InterpretedAttention, dot, logits, one_head, padded, seen
from search_spaces.attention.problem import SOFTCAP
from search_spaces.flash_attention_backward.problem import FlashAttentionBackwardProblem
from search_spaces.footprint import Footprint
from search_spaces.kernel import INDICES_OF_32_BITS, Kernel
from search_spaces.space import Columns, Space
from search_spaces.target import Target


class InterpretedFlashAttentionBackward(Kernel[FlashAttentionBackwardProblem, InterpretedAttention]):
    """Two kernels: one computes dq per block of queries over all keys, the other dk and dv per block of keys."""

    backend = "interpret"
    version = 1
    most_elements = INDICES_OF_32_BITS

    def supports(self, problem: FlashAttentionBackwardProblem, target: Target) -> str | None:
        return interpret.refusal(target)

    def space(self, problem: FlashAttentionBackwardProblem, target: Target) -> Space[InterpretedAttention]:
        return interpret.space(problem)

    def footprint(self, problem: FlashAttentionBackwardProblem, schedules: Columns, target: Target) -> Footprint:
        return interpret.footprint(problem, schedules, products=7)

    def run(
        self,
        problem: FlashAttentionBackwardProblem,
        schedule: InterpretedAttention,
        target: Target,
        /,
        *args: Any,
        scale: float | None = None,
        softcap: float = SOFTCAP,
    ) -> tuple[jax.Array, ...]:
        p, s = problem, schedule
        block = _Block(p, s, p.default_scale() if scale is None else scale, softcap)
        q, k, v, out, lse, d_out, *rest = args
        of = p.lengths(args)
        (q, d_out), (k, v) = left_out.queries(p, of, q, d_out), left_out.keys(p, of, k, v)
        delta = jnp.einsum("btnv,btnv->bnt", out, d_out, preferred_element_type=jnp.float32)
        delta = left_out.statistics(p, of, delta - rest[0] if p.lse_cotangent else delta)
        lse = jnp.where(lse == -jnp.inf, 0.0, lse)
        by_row = [padded(x, 1, s.block_q) for x in (q, d_out)] + [padded(x, 2, s.block_q) for x in (lse, delta)]
        by_column = [padded(x, 1, s.block_kv) for x in (k, v)]
        lengths = rest[p.lse_cotangent :]
        dq = _dq(block, by_row, by_column, lengths)[:, : p.q_len]
        dk, dv = (x[:, : p.kv_len] for x in _dkv(block, by_row, by_column, lengths))
        return *left_out.queries(p, of, dq), *left_out.keys(p, of, dk, dv)


class _Block:
    """The gradients of one block of logits."""

    def __init__(self, p: FlashAttentionBackwardProblem, s: InterpretedAttention, scale: float, softcap: float) -> None:
        self.problem, self.schedule, self.scale, self.softcap = p, s, scale, softcap

    def gradients(self, rows: Any, columns: Any, q_block: Any, kv_block: Any, of: Any) -> tuple[jax.Array, jax.Array]:
        """Returns the probabilities and the cotangents of the products of q and k, in the dtype of the operands."""
        p, (q, d_out, lse, delta), (k, v) = self.problem, rows, columns
        x = logits(p, q, k, self.scale, self.softcap)
        there = seen(p, self.schedule, q_block, kv_block, of)
        probabilities = jnp.exp(jnp.where(there, x - lse[:, None], -jnp.inf))
        d_x = probabilities * (dot(d_out, v, (1, 1)) - delta[:, None])
        if p.softcap:
            d_x *= 1 - (x / self.softcap) ** 2
        return probabilities.astype(q.dtype), (d_x * self.scale).astype(q.dtype)


def _dq(block: _Block, by_row: Any, by_column: Any, lengths: Any) -> jax.Array:
    p, s = block.problem, block.schedule
    q, d_out, *statistics = by_row
    k, v = by_column

    def body(q_ref: Any, d_out_ref: Any, lse_ref: Any, delta_ref: Any, k_ref: Any, v_ref: Any, *refs: Any) -> None:
        *length_refs, dq_ref = refs
        of, i = interpret.lengths(p, length_refs), pl.program_id(2)
        rows = q_ref[0, :, 0], d_out_ref[0, :, 0], lse_ref[0, 0], delta_ref[0, 0]

        def step(j: Any, dq: Any) -> Any:
            columns = pl.ds(j * s.block_kv, s.block_kv)
            k, v = k_ref[0, columns, 0], v_ref[0, columns, 0]
            _, d_x = block.gradients(rows, (k, v), i, j, of)
            return dq + dot(d_x, k, (1, 0))

        start = jnp.zeros((s.block_q, p.head_dim), jnp.float32)
        dq_ref[0, :, 0] = lax.fori_loop(0, k.shape[1] // s.block_kv, step, start).astype(dq_ref.dtype)

    result: jax.Array = pl.pallas_call(
        body,
        grid=(p.batch, p.heads, q.shape[1] // s.block_q),
        in_specs=[
            *(one_head(x, s.block_q, lambda n: n) for x in (q, d_out)),
            *(pl.BlockSpec((1, 1, s.block_q), lambda b, n, i: (b, n, i)) for _ in statistics),
            *(one_head(x, None, lambda n: n // p.group) for x in (k, v)),
            *(pl.BlockSpec((1,), lambda b, n, i: (b,)) for _ in lengths),
        ],
        out_specs=one_head(q, s.block_q, lambda n: n),
        out_shape=jax.ShapeDtypeStruct(q.shape, q.dtype),
        interpret=True,
    )(*by_row, *by_column, *lengths)
    return result


def _dkv(block: _Block, by_row: Any, by_column: Any, lengths: Any) -> tuple[jax.Array, jax.Array]:
    """Computes dk and dv; a grid step iterates over the heads of a group, so that its sums are complete."""
    p, s = block.problem, block.schedule
    q, d_out, *statistics = by_row
    k, v = by_column
    q_blocks = q.shape[1] // s.block_q

    def body(q_ref: Any, d_out_ref: Any, lse_ref: Any, delta_ref: Any, k_ref: Any, v_ref: Any, *refs: Any) -> None:
        *length_refs, dk_ref, dv_ref = refs
        of, j = interpret.lengths(p, length_refs), pl.program_id(2)
        columns = k_ref[0, :, 0], v_ref[0, :, 0]

        def step(n: Any, sums: Any) -> Any:
            head, i = n // q_blocks, n % q_blocks
            some = pl.ds(i * s.block_q, s.block_q)
            q, d_out = q_ref[0, some, head], d_out_ref[0, some, head]
            rows = q, d_out, lse_ref[0, head, some], delta_ref[0, head, some]
            probabilities, d_x = block.gradients(rows, columns, i, j, of)
            return sums[0] + dot(d_x, q, (0, 0)), sums[1] + dot(probabilities, d_out, (0, 0))

        start = tuple(jnp.zeros(x.shape, jnp.float32) for x in columns)
        dk, dv = lax.fori_loop(0, p.group * q_blocks, step, start)
        dk_ref[0, :, 0], dv_ref[0, :, 0] = dk.astype(dk_ref.dtype), dv.astype(dv_ref.dtype)

    def of_group(x: Any) -> pl.BlockSpec:
        return pl.BlockSpec((1, x.shape[1], p.group, x.shape[3]), lambda b, n, j: (b, 0, n, 0))

    gradients = tuple(one_head(x, s.block_kv, lambda n: n) for x in (k, v))
    results: tuple[jax.Array, jax.Array] = pl.pallas_call(
        body,
        grid=(p.batch, p.kv_heads, k.shape[1] // s.block_kv),
        in_specs=[
            *(of_group(x) for x in (q, d_out)),
            *(pl.BlockSpec((1, p.group, x.shape[2]), lambda b, n, j: (b, n, 0)) for x in statistics),
            *gradients,
            *(pl.BlockSpec((1,), lambda b, n, j: (b,)) for _ in lengths),
        ],
        out_specs=gradients,
        out_shape=tuple(jax.ShapeDtypeStruct(x.shape, x.dtype) for x in (k, v)),
        interpret=True,
    )(*by_row, *by_column, *lengths)
    return results
