"""Attention by cuDNN, the vendor's library: the baseline on NVIDIA GPUs, and a valid choice."""

from __future__ import annotations

from typing import Any

import jax.numpy as jnp

from search_spaces import jax_compat
from search_spaces.attention import cudnn, left_out
from search_spaces.attention.cudnn import CudnnSchedule
from search_spaces.attention.problem import SOFTCAP, Lengths
from search_spaces.flash_attention.problem import FlashAttentionProblem
from search_spaces.footprint import Footprint
from search_spaces.kernel import Kernel
from search_spaces.operation import MatchedEquation
from search_spaces.space import Columns, Space
from search_spaces.target import Target


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
        return cudnn.footprint(problem, schedules, target, products=2)

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
        k, v = left_out.keys(
            p, of, k, v
        )  # A copy of both, where there are lengths: nothing says what cuDNN multiplies.
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
        (out,) = left_out.queries(p, of, out)
        return (out, left_out.statistics(p, of, lse, -jnp.inf)) if p.return_lse else out


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
