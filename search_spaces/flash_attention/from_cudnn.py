"""Converts JAX's equation of cuDNN's forward attention to a problem."""

from __future__ import annotations

from typing import Any

from search_spaces.attention import from_cudnn
from search_spaces.flash_attention.problem import FlashAttentionProblem
from search_spaces.operation import Posed


def posed(q: Any, k: Any, v: Any, *rest: Any, is_training: bool, **params: Any) -> Posed[FlashAttentionProblem] | str:
    """Returns the attention of an equation, with the log-sum-exp if a gradient needs it, or why cuDNN keeps it.

    Args:
      q, k, v, rest, params: as in `attention.from_cudnn`.
    """
    found = from_cudnn.asked(q, k, rest, params)
    if isinstance(found, str):
        return found
    try:
        problem = FlashAttentionProblem.of(q, k, v, *found.lengths, return_lse=is_training, **found.fields)
    except (TypeError, ValueError) as error:
        return str(error)

    def operands(q: Any, k: Any, v: Any, *rest: Any) -> tuple[Any, ...]:
        return q, k, v, *(rest[1:3] if found.lengths else ())

    return Posed(problem, operands, lambda *results: results, {"scale": found.scale})
