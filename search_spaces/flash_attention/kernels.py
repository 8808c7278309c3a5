"""Flash attention forward by cuDNN, by Pallas's interpreter on a CPU, and by XLA."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl

from search_spaces import jax_compat
from search_spaces.attention import cudnn, interpret, xla
from search_spaces.attention.cudnn import CudnnSchedule
from search_spaces.attention.interpret import InterpretedAttention, logits, one_head, padded, seen
from search_spaces.attention.problem import SOFTCAP, Lengths, fill_statistics, zero_keys, zero_queries
from search_spaces.flash_attention.problem import FlashAttentionProblem
from search_spaces.footprint import Footprint
from search_spaces.kernel import INDICES_OF_32_BITS, Kernel, Library, LibraryKernel
from search_spaces.operation import MatchedEquation
from search_spaces.space import Columns, Space
from search_spaces.target import Target, not_interpreted


class XlaFlashAttention(LibraryKernel[FlashAttentionProblem]):
    """The formula, with float32 statistics, and the program "plain", which is ``jax.nn.dot_product_attention``.

    The formula splits the queries into blocks if the logits need much memory.
    """

    version = 1

    def programs(self, problem: FlashAttentionProblem) -> tuple[str, ...]:
        if problem.return_lse or xla.unwritten(problem) is not None:  # JAX rounds the log-sum-exp to the dtype of keys
            return (Library.program,)
        return (Library.program, "plain")

    def space(self, problem: FlashAttentionProblem, target: Target) -> Space[Library]:
        whole = super().space(problem, target)
        return whole if xla.compiles(problem, target) else Space(Library, {"program": (Library.program,)})

    def run(
        self,
        problem: FlashAttentionProblem,
        schedule: Library,
        target: Target,
        /,
        *args: Any,
        scale: float | None = None,
        softcap: float = SOFTCAP,
    ) -> Any:
        p, (q, k, v), of = problem, args[:3], problem.lengths(args)
        scale = p.default_scale() if scale is None else scale
        if schedule.program == "plain":
            return xla.as_written(p, q, k, v, of, scale=scale)
        out, lse = xla.forward(p, q, k, v, of, scale=scale, softcap=softcap)
        return (out, lse) if p.return_lse else out


# ------------------------------------------------------------------------------
# Attention by cuDNN, the vendor's library: the baseline on NVIDIA GPUs, and a valid choice.


class CudnnFlashAttention(Kernel[FlashAttentionProblem, CudnnSchedule]):
    """Runs the same as ``jax.nn.dot_product_attention(implementation="cudnn")``, with its statistics in float32."""

    backend = "cudnn"
    version = 1
    vendor = "cuDNN"
    verified_on = frozenset({"sm_90"})  # tests/device on an NVIDIA H200

    def supports(self, problem: FlashAttentionProblem, target: Target) -> str | None:
        return cudnn.refusal(problem, target)

    def space(self, problem: FlashAttentionProblem, target: Target) -> Space[CudnnSchedule]:
        return cudnn.space()

    def footprint(self, problem: FlashAttentionProblem, schedules: Columns, target: Target) -> Footprint:
        return cudnn.footprint(problem, schedules, target)

    def verified(self, problem: FlashAttentionProblem, schedules: Columns, target: Target) -> bool:
        return target.architecture in self.verified_on and cudnn.checked(problem)

    def run(
        self,
        problem: FlashAttentionProblem,
        schedule: CudnnSchedule,
        target: Target,
        /,
        *args: Any,
        scale: float | None = None,
        softcap: float = SOFTCAP,
    ) -> Any:
        p, (q, k, v), of = problem, args[:3], problem.lengths(args)
        k, v = zero_keys(p, of, k, v)  # A copy of both, where there are lengths: nothing says what cuDNN multiplies.
        out, lse = jax_compat.cudnn_attention(
            q,
            k,
            v,
            *_lengths(p, of),
            scale=p.default_scale() if scale is None else scale,
            causal=p.causal,
            window=cudnn.window(p),
            with_lse=p.return_lse,
        )
        (out,) = zero_queries(p, of, out)
        return (out, fill_statistics(p, of, lse, -jnp.inf)) if p.return_lse else out


def _lengths(p: FlashAttentionProblem, of: Lengths) -> tuple[Any, ...]:
    """Returns both lengths or none, clipped to 1 and more: cuDNN does not document its behaviour for other lengths."""
    if of.q is None and of.kv is None:
        return ()
    given = (of.q, p.q_len), (of.kv, p.kv_len)
    return tuple(jnp.full(p.batch, n, jnp.int32) if x is None else jnp.clip(x, 1, n) for x, n in given)


# ------------------------------------------------------------------------------
# Converts JAX's equation of cuDNN's forward attention to a problem.


def problem_of_equation(
    q: Any, k: Any, v: Any, *rest: Any, is_training: bool, **params: Any
) -> MatchedEquation[FlashAttentionProblem] | str:
    """Returns the attention of an equation, with the log-sum-exp if a gradient needs it, or why cuDNN keeps it.

    Args:
      q, k, v, rest, params: as in `attention.cudnn`.
    """
    found = cudnn.cudnn_problem(q, k, rest, params)
    if isinstance(found, str):
        return found
    try:
        problem = FlashAttentionProblem.of(q, k, v, *found.lengths, return_lse=is_training, **found.fields)
    except (TypeError, ValueError) as error:
        return str(error)

    def operands(q: Any, k: Any, v: Any, *rest: Any) -> tuple[Any, ...]:
        return q, k, v, *(rest[1:3] if found.lengths else ())

    return MatchedEquation(problem, operands, lambda *results: results, {"scale": found.scale})


# ------------------------------------------------------------------------------
# A teaching kernel of flash attention in plain ``pallas_call``, run by the Pallas interpreter on a CPU.


class InterpretedFlashAttention(Kernel[FlashAttentionProblem, InterpretedAttention]):
    """Computes a block of queries of one head per grid step, over all keys, with a running maximum and sum."""

    backend = "interpret"
    version = 1
    most_elements = INDICES_OF_32_BITS

    def supports(self, problem: FlashAttentionProblem, target: Target) -> str | None:
        return not_interpreted(target)

    def space(self, problem: FlashAttentionProblem, target: Target) -> Space[InterpretedAttention]:
        return interpret.space(problem)

    def footprint(self, problem: FlashAttentionProblem, schedules: Columns, target: Target) -> Footprint:
        return interpret.footprint(problem, schedules, products=2)

    def run(
        self,
        problem: FlashAttentionProblem,
        schedule: InterpretedAttention,
        target: Target,
        /,
        *args: Any,
        **params: Any,
    ) -> Any:
        p, s = problem, schedule
        scale, softcap = _params(p, **params)
        q, k, v, *lengths = args
        (v,) = zero_keys(p, p.lengths(args), v)
        q, k, v = padded(q, 1, s.block_q), padded(k, 1, s.block_kv), padded(v, 1, s.block_kv)
        steps = k.shape[1] // s.block_kv

        def body(q_ref: Any, k_ref: Any, v_ref: Any, *refs: Any) -> None:
            *length_refs, out_ref, lse_ref = refs
            of, q, i = interpret.lengths(p, length_refs), q_ref[0, :, 0], pl.program_id(2)

            def step(j: Any, carry: Any) -> Any:
                most, total, out = carry
                columns = pl.ds(j * s.block_kv, s.block_kv)
                k, v = k_ref[0, columns, 0], v_ref[0, columns, 0]
                x = jnp.where(seen(p, s, i, j, of), logits(p, q, k, scale, softcap), -jnp.inf)
                new = jnp.maximum(most, x.max(axis=1))
                # The maximum is -inf until a key is seen, and -inf - -inf would be NaN.
                least = jnp.where(jnp.isfinite(new), new, 0.0)
                e, rescale = jnp.exp(x - least[:, None]), jnp.exp(most - least)
                product = interpret.dot(e.astype(v.dtype), v, (1, 0))
                return new, total * rescale + e.sum(axis=1), out * rescale[:, None] + product

            start = (
                jnp.full(s.block_q, -jnp.inf),
                jnp.zeros(s.block_q),
                jnp.zeros((s.block_q, p.value_dim)),
            )
            most, total, out = lax.fori_loop(0, steps, step, jax.tree.map(jnp.float32, start))
            sees = total != 0  # true for NaN, so that NaN logits give NaN results
            total = jnp.where(sees, total, 1.0)
            out_ref[0, :, 0] = jnp.where(sees[:, None], out / total[:, None], 0.0).astype(out_ref.dtype)
            lse_ref[0, 0] = jnp.where(sees, most + jnp.log(total), -jnp.inf)

        out = jax.ShapeDtypeStruct((p.batch, q.shape[1], p.heads, p.value_dim), q.dtype)
        lse = jax.ShapeDtypeStruct((p.batch, p.heads, q.shape[1]), jnp.float32)
        results = pl.pallas_call(
            body,
            grid=(p.batch, p.heads, q.shape[1] // s.block_q),
            in_specs=[
                one_head(q, s.block_q, lambda n: n),
                *(one_head(x, None, lambda n: n // p.group) for x in (k, v)),
                *(pl.BlockSpec((1,), lambda b, n, i: (b,)) for _ in lengths),
            ],
            out_specs=(
                one_head(out, s.block_q, lambda n: n),
                pl.BlockSpec((1, 1, s.block_q), lambda b, n, i: (b, n, i)),
            ),
            out_shape=(out, lse),
            interpret=True,
        )(q, k, v, *lengths)
        whole = results[0][:, : p.q_len], results[1][..., : p.q_len]
        return whole if p.return_lse else whole[0]


def _params(p: FlashAttentionProblem, scale: float | None = None, softcap: float = SOFTCAP) -> tuple[float, float]:
    return p.default_scale() if scale is None else scale, softcap
