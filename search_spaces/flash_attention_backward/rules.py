"""How the gradients of attention batch: more sequences."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

from search_spaces.attention.batch import as_sequences, sequences_apart
from search_spaces.flash_attention_backward.problem import FlashAttentionBackwardProblem


def batch(call: Callable[..., Any], p: FlashAttentionBackwardProblem, args: Any, dims: Any) -> tuple[Any, int]:
    """What is not mapped is repeated: each element of the batch has gradients of its own."""
    size = next(x.shape[dim] for x, dim in zip(args, dims, strict=True) if dim is not None)
    many = dataclasses.replace(p, batch=size * p.batch)
    return sequences_apart(call(many, *as_sequences(args, dims, size)), size), 0
