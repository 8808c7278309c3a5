"""The gradients of flash attention by Pallas's interpreter on a CPU, and by XLA."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl

from search_spaces.attention import cudnn, interpret, xla
from search_spaces.attention.interpret import InterpretedAttention, dot, logits, one_head, padded, seen
from search_spaces.attention.problem import SOFTCAP, fill_statistics, zero_keys, zero_queries
from search_spaces.flash_attention_backward.problem import FlashAttentionBackwardProblem
from search_spaces.footprint import Footprint
from search_spaces.kernel import INDICES_OF_32_BITS, Kernel, Library, LibraryKernel
from search_spaces.operation import MatchedEquation
from search_spaces.problem import Tolerance
from search_spaces.space import Columns, Space
from search_spaces.target import Target, not_interpreted


class XlaFlashAttentionBackward(LibraryKernel[FlashAttentionBackwardProblem]):
    """The formula with the log-sum-exp, and the program "plain", the derivative of ``jax.nn.dot_product_attention``.

    The formula splits the queries into blocks if the logits need much memory.
    """

    version = 1

    def programs(self, problem: FlashAttentionBackwardProblem) -> tuple[str, ...]:
        if problem.lse_cotangent or xla.unwritten(problem) is not None:
            return (Library.program,)
        return (Library.program, "plain")

    def space(self, problem: FlashAttentionBackwardProblem, target: Target) -> Space[Library]:
        whole = super().space(problem, target)
        return whole if xla.compiles(problem, target) else Space(Library, {"program": (Library.program,)})

    def tolerance(self, problem: FlashAttentionBackwardProblem, schedule: Library) -> tuple[Tolerance, ...]:
        """Returns 8 times the problem's tolerance for "plain".

        That program rounds cotangents of probabilities before it subtracts their mean.
        """
        exact = problem.tolerance()
        if schedule.program != "plain":
            return exact
        return tuple(Tolerance(absolute=8 * one.absolute, relative=8 * one.relative) for one in exact)

    def run(
        self,
        problem: FlashAttentionBackwardProblem,
        schedule: Library,
        target: Target,
        /,
        *args: Any,
        scale: float | None = None,
        softcap: float = SOFTCAP,
    ) -> tuple[jax.Array, ...]:
        p, of = problem, problem.lengths(args)
        scale = p.default_scale() if scale is None else scale
        if schedule.program == "plain":
            q, k, v, _, _, d_out = args[:6]
            return xla.as_written_backward(p, q, k, v, d_out, of, scale=scale)
        d_lse = args[6] if p.lse_cotangent else None
        return xla.backward(p, args[:6], d_lse, of, scale=scale, softcap=softcap)


# ------------------------------------------------------------------------------
# Converts JAX's equation for the gradients of cuDNN attention to a problem.


def problem_of_equation(
    q: Any, k: Any, v: Any, *rest: Any, **params: Any
) -> MatchedEquation[FlashAttentionBackwardProblem] | str:
    """Returns the problem of an equation and its operands, or the reason why cuDNN must compute it.

    The log-sum-exp of the equation has the same definition as that of the kernels.

    Args:
      q, k, v, rest, params: as in `attention.cudnn`; the last three of `rest` are the log-sum-exp, the result and
        its cotangent.
    """
    *before, lse, out, d_out = rest
    found = cudnn.cudnn_problem(q, k, tuple(before), params)
    if isinstance(found, str):
        return found
    try:
        problem = FlashAttentionBackwardProblem.of(q, k, v, out, lse, d_out, *found.lengths, **found.fields)
    except (TypeError, ValueError) as error:
        return str(error)

    def operands(q: Any, k: Any, v: Any, *rest: Any) -> tuple[Any, ...]:
        lse, out, d_out = rest[-3:]
        return q, k, v, out, lse, d_out, *(rest[1:3] if found.lengths else ())

    return MatchedEquation(problem, operands, lambda *gradients: gradients, {"scale": found.scale})


# ------------------------------------------------------------------------------
# Teaching kernels of the attention gradients in plain ``pallas_call``, run by the Pallas interpreter on a CPU.


class InterpretedFlashAttentionBackward(Kernel[FlashAttentionBackwardProblem, InterpretedAttention]):
    """Two kernels: one computes dq per block of queries over all keys, the other dk and dv per block of keys."""

    backend = "interpret"
    version = 1
    most_elements = INDICES_OF_32_BITS

    def supports(self, problem: FlashAttentionBackwardProblem, target: Target) -> str | None:
        return not_interpreted(target)

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
        block = _LogitsBlock(p, s, p.default_scale() if scale is None else scale, softcap)
        q, k, v, out, lse, d_out, *rest = args
        of = p.lengths(args)
        (q, d_out), (k, v) = zero_queries(p, of, q, d_out), zero_keys(p, of, k, v)
        delta = jnp.einsum("btnv,btnv->bnt", out, d_out, preferred_element_type=jnp.float32)
        delta = fill_statistics(p, of, delta - rest[0] if p.lse_cotangent else delta)
        lse = jnp.where(lse == -jnp.inf, 0.0, lse)
        by_row = [padded(x, 1, s.block_q) for x in (q, d_out)] + [padded(x, 2, s.block_q) for x in (lse, delta)]
        by_column = [padded(x, 1, s.block_kv) for x in (k, v)]
        lengths = rest[p.lse_cotangent :]
        dq = _dq(block, by_row, by_column, lengths)[:, : p.q_len]
        dk, dv = (x[:, : p.kv_len] for x in _dkv(block, by_row, by_column, lengths))
        return *zero_queries(p, of, dq), *zero_keys(p, of, dk, dv)


class _LogitsBlock:
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


def _dq(block: _LogitsBlock, by_row: Any, by_column: Any, lengths: Any) -> jax.Array:
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


def _dkv(block: _LogitsBlock, by_row: Any, by_column: Any, lengths: Any) -> tuple[jax.Array, jax.Array]:
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
