"""The attention gradients by cuDNN: the vendor's baseline on NVIDIA GPUs, which may also be selected."""

from __future__ import annotations

from typing import Any

import jax

from search_spaces import jax_compat
from search_spaces.attention import cudnn
from search_spaces.attention.cudnn import CudnnSchedule
from search_spaces.attention.problem import SOFTCAP
from search_spaces.flash_attention_backward.problem import FlashAttentionBackwardProblem
from search_spaces.footprint import Footprint
from search_spaces.kernel import Kernel
from search_spaces.operation import MatchedEquation
from search_spaces.space import Columns, Space
from search_spaces.target import Target


class CudnnFlashAttentionBackward(Kernel[FlashAttentionBackwardProblem, CudnnSchedule]):
    """The kernel of the derivative of ``jax.nn.dot_product_attention(implementation="cudnn")``."""

    backend = "cudnn"
    version = 1
    vendor = "cuDNN"
    verified_on = frozenset({"sm_90"})  # tests/device on an NVIDIA H200

    def supports(self, problem: FlashAttentionBackwardProblem, target: Target) -> str | None:
        p = problem
        if p.lse_cotangent:
            return "takes no cotangent of the log-sum-exp"
        if p.deterministic:
            return "sums dq in any order, unless all of XLA is told to be deterministic"
        if p.q_lengths or p.kv_lengths:
            return "its gradients beyond a length have not been checked"
        return cudnn.refusal(p, target)

    def space(self, problem: FlashAttentionBackwardProblem, target: Target) -> Space[CudnnSchedule]:
        return cudnn.space()

    def footprint(self, problem: FlashAttentionBackwardProblem, schedules: Columns, target: Target) -> Footprint:
        return cudnn.footprint(problem, schedules, target, products=5)

    def verified(self, problem: FlashAttentionBackwardProblem, schedules: Columns, target: Target) -> bool:
        return target.architecture in self.verified_on and cudnn.checked(problem)

    def run(
        self,
        problem: FlashAttentionBackwardProblem,
        schedule: CudnnSchedule,
        target: Target,
        /,
        *args: Any,
        scale: float | None = None,
        softcap: float = SOFTCAP,
    ) -> tuple[jax.Array, ...]:
        p = problem
        q, k, v, out, lse, d_out = args
        return jax_compat.cudnn_attention_backward(
            q,
            k,
            v,
            out,
            lse,
            d_out,
            scale=p.default_scale() if scale is None else scale,
            causal=p.causal,
            window=cudnn.window(p),
        )


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
