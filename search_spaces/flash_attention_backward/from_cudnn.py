"""Converts JAX's equation for the gradients of cuDNN attention to a problem."""

from __future__ import annotations

from typing import Any

from search_spaces.attention import from_cudnn
from search_spaces.flash_attention_backward.problem import FlashAttentionBackwardProblem
from search_spaces.operation import Posed


def posed(q: Any, k: Any, v: Any, *rest: Any, **params: Any) -> Posed[FlashAttentionBackwardProblem] | str:
    """Returns the problem of an equation and its operands, or the reason why cuDNN must compute it.

    The log-sum-exp of the equation has the same definition as that of the kernels.

    Args:
      q, k, v, rest, params: as in `attention.from_cudnn`; the last three of `rest` are the log-sum-exp, the result and
        its cotangent.
    """
    *before, lse, out, d_out = rest
    found = from_cudnn.asked(q, k, tuple(before), params)
    if isinstance(found, str):
        return found
    try:
        problem = FlashAttentionBackwardProblem.of(q, k, v, out, lse, d_out, *found.lengths, **found.fields)
    except (TypeError, ValueError) as error:
        return str(error)

    def operands(q: Any, k: Any, v: Any, *rest: Any) -> tuple[Any, ...]:
        lse, out, d_out = rest[-3:]
        return q, k, v, out, lse, d_out, *(rest[1:3] if found.lengths else ())

    return Posed(problem, operands, lambda *gradients: gradients, {"scale": found.scale})
