"""How attention is differentiated, by an operation of its own; how it batches and divides: by sequences and heads."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from search_spaces.attention import heads
from search_spaces.attention.batch import as_sequences, sequences_apart
from search_spaces.flash_attention.problem import FlashAttentionProblem
from search_spaces.flash_attention_backward import FLASH_ATTENTION_BACKWARD, FlashAttentionBackwardProblem
from search_spaces.sharding import Sharding

Call = Callable[..., Any]


def vjp_fwd(call: Call, p: FlashAttentionProblem, args: Any) -> tuple[Any, Any]:
    """The pass whose log-sum-exp the backward pass needs: a problem of its own where the caller wants none."""
    q, k, v, *lengths = args
    out, lse = call(dataclasses.replace(p, return_lse=True), *args)
    return (out, lse) if p.return_lse else out, (q, k, v, out, lse, *lengths)


def vjp_bwd(call: Call, p: FlashAttentionProblem, residuals: Any, cotangent: Any) -> tuple[Any, ...]:
    """One call of the backward operation; lengths have no cotangent."""
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
    """A batch of queries on keys, values and lengths that it shares is more heads of a group; else more sequences."""
    size = next(x.shape[dim] for x, dim in zip(args, dims, strict=True) if dim is not None)
    if dims[0] is not None and all(dim is None for dim in dims[1:]):
        return _as_heads(call, p, args, dims[0], size)
    many = dataclasses.replace(p, batch=size * p.batch)
    return sequences_apart(call(many, *as_sequences(args, dims, size)), size), 0


def _as_heads(call: Call, p: FlashAttentionProblem, args: Any, dim: int, size: int) -> tuple[Any, Any]:
    """Query head n uses key head n // group: the new axis goes between the two."""
    q, *shared = args
    q = jnp.moveaxis(q, dim, 0).reshape(size, p.batch, p.q_len, p.kv_heads, p.group, p.head_dim)
    q = jnp.moveaxis(q, 0, 3).reshape(p.batch, p.q_len, size * p.heads, p.head_dim)
    results = call(dataclasses.replace(p, heads=size * p.heads), q, *shared)
    out, *lse = results if p.return_lse else (results,)
    out = jnp.moveaxis(out.reshape(p.batch, p.q_len, p.kv_heads, size, p.group, p.value_dim), 3, 0)
    apart = [out.reshape(size, p.batch, p.q_len, p.heads, p.value_dim)]
    for x in lse:
        x = jnp.moveaxis(x.reshape(p.batch, p.kv_heads, size, p.group, p.q_len), 2, 0)
        apart.append(x.reshape(size, p.batch, p.heads, p.q_len))
    return jax.tree.unflatten(jax.tree.structure(results), apart), 0


def shard(p: FlashAttentionProblem) -> Sharding[FlashAttentionProblem]:
    lengths = ["lengths"] * len(p.length_operands())
    return heads.sharding(p, ["q", "k", "v", *lengths], ["out", "lse"] if p.return_lse else ["out"])
