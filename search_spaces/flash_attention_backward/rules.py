"""Batching and sharding rules of the attention gradients: batched over sequences, sharded over sequences and heads."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

from search_spaces.attention import heads
from search_spaces.flash_attention_backward.problem import FlashAttentionBackwardProblem
from search_spaces.sharding import Sharding
from search_spaces.unfolded import in_front


def batch(call: Callable[..., Any], p: FlashAttentionBackwardProblem, args: Any, dims: Any) -> tuple[Any, int]:
    """Batches a call by adding sequences; operands without a batch axis are repeated, as gradients are per element."""
    size = next(x.shape[dim] for x, dim in zip(args, dims, strict=True) if dim is not None)
    many = dataclasses.replace(p, batch=size * p.batch)
    return call(many, *(in_front(x, dim, size) for x, dim in zip(args, dims, strict=True))), 0


def shard(p: FlashAttentionBackwardProblem) -> Sharding[FlashAttentionBackwardProblem]:
    """Returns the sharding rule.

    If the heads of a group are sharded, gradients of keys and values are summed over devices in their own dtype.
    """
    cotangents = ["out", *["lse"] * p.lse_cotangent, *["lengths"] * len(p.length_operands())]
    return heads.sharding(p, ["q", "k", "v", "out", "lse", *cotangents], ["q", "k", "v"])
