"""JAX's equation of the gradients of cuDNN's attention as a problem."""

from __future__ import annotations

from typing import Any

from search_spaces.attention import from_cudnn
from search_spaces.flash_attention_backward.problem import FlashAttentionBackwardProblem
from search_spaces.operation import Posed


def posed(q: Any, k: Any, v: Any, *rest: Any, **params: Any) -> Posed[FlashAttentionBackwardProblem] | str:
    """The gradients that an equation is, or why they are cuDNN's. Its log-sum-exp is the same as the kernels'.

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
