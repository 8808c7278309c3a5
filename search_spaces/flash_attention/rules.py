"""Differentiation, batching and sharding rules of attention.

The derivative is a separate operation. Attention is sharded over sequences and heads.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from search_spaces.attention import heads
from search_spaces.flash_attention.problem import FlashAttentionProblem
from search_spaces.flash_attention_backward import FLASH_ATTENTION_BACKWARD, FlashAttentionBackwardProblem
from search_spaces.sharding import Sharding
from search_spaces.unfolded import in_front

Call = Callable[..., Any]


def vjp_fwd(call: Call, p: FlashAttentionProblem, args: Any) -> tuple[Any, Any]:
    """Runs the forward pass with `return_lse`, because the backward pass needs the log-sum-exp.

    Without `return_lse` in `p`, this is a different problem from `p`.
    """
    q, k, v, *lengths = args
    out, lse = call(dataclasses.replace(p, return_lse=True), *args)
    return (out, lse) if p.return_lse else out, (q, k, v, out, lse, *lengths)


def vjp_bwd(call: Call, p: FlashAttentionProblem, residuals: Any, cotangent: Any) -> tuple[Any, ...]:
    """Calls the backward operation once; lengths have no cotangent."""
    q, k, v, out, lse, *lengths = residuals
    d_out, d_lse = cotangent if p.return_lse else (cotangent, None)
    params = dict(call.params)  # type: ignore[attr-defined]
    shared = {field.name: getattr(p, field.name) for field in dataclasses.fields(p) if field.name != "return_lse"}
    posed = FlashAttentionBackwardProblem(
        **shared, lse_cotangent=d_lse is not None, deterministic=params.pop("deterministic", False)
    )
    d_out = jnp.zeros(out.shape, out.dtype) if d_out is None else d_out
    cotangents = (d_out,) if d_lse is None else (d_out, d_lse)
    dqkv = call(FLASH_ATTENTION_BACKWARD, posed, q, k, v, out, lse, *cotangents, *lengths, **params)
    return *dqkv, *(None for _ in lengths)


def batch(call: Call, p: FlashAttentionProblem, args: Any, dims: Any) -> tuple[Any, Any]:
    """Batches a call by adding sequences, or heads if only the queries are batched.

    Queries that share keys, values and lengths become additional query heads of each group.
    """
    size = next(x.shape[dim] for x, dim in zip(args, dims, strict=True) if dim is not None)
    if dims[0] is not None and all(dim is None for dim in dims[1:]):
        return _as_heads(call, p, args, dims[0], size)
    many = dataclasses.replace(p, batch=size * p.batch)
    return call(many, *(in_front(x, each, size) for x, each in zip(args, dims, strict=True))), 0


def _as_heads(call: Call, p: FlashAttentionProblem, args: Any, dim: int, size: int) -> tuple[Any, Any]:
    """Folds the new axis of q into its heads, between key head and group: query head n uses key head n // group."""
    q, *shared = args
    q = jnp.moveaxis(q, dim, 0)
    *sequences, q_len, _, head_dim = q.shape[1:]
    q = q.reshape(size, *sequences, q_len, p.kv_heads, p.group, head_dim)
    q = jnp.moveaxis(q, 0, -3).reshape(*sequences, q_len, size * p.heads, head_dim)
    results = call(dataclasses.replace(p, heads=size * p.heads), q, *shared)

    def apart(x: jax.Array, before: tuple[int, ...]) -> jax.Array:
        x = jnp.moveaxis(x.reshape(*before, p.kv_heads, size, p.group, -1), -3, 0)
        return x.reshape(size, *before, p.heads, -1)

    if not p.return_lse:
        return apart(results, (*sequences, q_len)), 0
    out, lse = results
    return (apart(out, (*sequences, q_len)), apart(lse, tuple(sequences))), 0


def shard(p: FlashAttentionProblem) -> Sharding[FlashAttentionProblem]:
    lengths = ["lengths"] * len(p.length_operands())
    return heads.sharding(p, ["q", "k", "v", *lengths], ["out", "lse"] if p.return_lse else ["out"])
