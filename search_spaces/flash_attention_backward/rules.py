"""How the gradients of attention batch: more sequences; and divide over devices: by sequences and heads."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

from search_spaces.attention import heads
from search_spaces.flash_attention_backward.problem import FlashAttentionBackwardProblem
from search_spaces.sharding import Sharding
from search_spaces.unfolded import in_front


def batch(call: Callable[..., Any], p: FlashAttentionBackwardProblem, args: Any, dims: Any) -> tuple[Any, int]:
    """What is not mapped is repeated: each element of the batch has gradients of its own."""
    size = next(x.shape[dim] for x, dim in zip(args, dims, strict=True) if dim is not None)
    many = dataclasses.replace(p, batch=size * p.batch)
    return call(many, *(in_front(x, dim, size) for x, dim in zip(args, dims, strict=True))), 0


def shard(p: FlashAttentionBackwardProblem) -> Sharding[FlashAttentionBackwardProblem]:
    """Of a group that is divided, the gradients of keys and values are summed over devices in their own dtype."""
    cotangents = ["out", *["lse"] * p.lse_cotangent, *["lengths"] * len(p.length_operands())]
    return heads.sharding(p, ["q", "k", "v", "out", "lse", *cotangents], ["q", "k", "v"])
