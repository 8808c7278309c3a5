"""Attention and its gradients by XLA: the baseline, and the fallback for problems that no kernel supports."""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from search_spaces.attention.problem import SOFTCAP, AttentionProblem, Lengths, fill_statistics, zero_keys, zero_queries
from search_spaces.target import Target

# ------------------------------------------------------------------------------
# Attention in float32 by plain JAX, one block of queries at a time: no array has q_len x kv_len elements.

# Logits in memory at a time.
MOST_FORMULA_LOGITS = 2**26


def visible(p: AttentionProblem, rows: Any, columns: Any, lengths: Lengths) -> Any:
    """Returns whether query ``rows[i]`` sees key ``columns[j]``, as ``[i, j]``; `lengths` are those of one sequence."""
    i, j = rows[:, None], columns[None, :]
    seen = (i < (p.q_len if lengths.q is None else lengths.q)) & (j < (p.kv_len if lengths.kv is None else lengths.kv))
    if p.left is not None:
        seen &= j >= i - p.left
    if p.right is not None:
        seen &= j <= i + p.right
    return seen


def attention(
    p: AttentionProblem, q: Any, k: Any, v: Any, *lengths: Any, scale: float | None = None, softcap: float = SOFTCAP
) -> tuple[jax.Array, jax.Array]:
    """Computes the result and the log-sum-exp ``[batch, heads, q_len]``, both in float32.

    A query has a result of zeros and a log-sum-exp of minus infinity if it sees no key, or if all of its logits are
    minus infinity.
    """
    scale, of = p.default_scale() if scale is None else scale, p.lengths(lengths)
    (q,), (k, v) = zero_queries(p, of, q), zero_keys(p, of, k, v)
    q_block = max(1, min(p.q_len, MOST_FORMULA_LOGITS // (p.group * p.kv_len)))
    blocks = -(-p.q_len // q_block)
    q = jnp.pad(q, ((0, 0), (0, blocks * q_block - p.q_len), (0, 0), (0, 0)))
    # [batch, kv_heads, blocks, group, q_block, head_dim]
    q = q.reshape(p.batch, blocks, q_block, p.kv_heads, p.group, p.head_dim).transpose(0, 3, 1, 4, 2, 5)
    k, v = (x.transpose(0, 2, 1, 3) for x in (k, v))

    def one_block(q: Any, k: Any, v: Any, of: Lengths, block: Any) -> tuple[jax.Array, jax.Array]:
        rows = block * q_block + jnp.arange(q_block)
        seen = visible(p, rows, jnp.arange(p.kv_len), of)
        logits = jnp.einsum("gqd,kd->gqk", q, k, precision=lax.Precision.HIGHEST) * scale
        logits = softcap * jnp.tanh(logits / softcap) if p.softcap else logits
        logits = jnp.where(seen, logits, -jnp.inf)
        most = lax.stop_gradient(jnp.max(logits, axis=-1, keepdims=True))
        e = jnp.where(seen, jnp.exp(logits - jnp.where(jnp.isfinite(most), most, 0.0)), 0.0)
        total = jnp.sum(e, axis=-1, keepdims=True)
        any_seen = total != 0  # NaN among logits stays NaN
        total = jnp.where(any_seen, total, 1.0)
        out = jnp.einsum("gqk,kd->gqd", e / total, v, precision=lax.Precision.HIGHEST)
        lse = jnp.where(any_seen, jnp.where(any_seen, most, 0.0) + jnp.log(total), -jnp.inf)
        return out, lse[..., 0]

    def one_head(operands: Any) -> tuple[jax.Array, jax.Array]:
        *qkv, of = operands
        q, k, v = (x.astype(jnp.float32) for x in qkv)  # cast per head: in float32, all heads would fill a device
        return lax.map(lambda x: jax.checkpoint(one_block)(x[0], k, v, of, x[1]), (q, jnp.arange(blocks)))

    flat = [x.reshape(p.batch * p.kv_heads, *x.shape[2:]) for x in (q, k, v)]
    per_head = jax.tree.map(lambda n: jnp.repeat(n, p.kv_heads), of)
    out, lse = lax.map(one_head, (*flat, per_head))  # [batch * kv_heads, blocks, group, q_block, ...]
    rows = blocks * q_block
    out = out.reshape(p.batch, p.kv_heads, blocks, p.group, q_block, p.value_dim).transpose(0, 2, 4, 1, 3, 5)
    lse = lse.reshape(p.batch, p.kv_heads, blocks, p.group, q_block).transpose(0, 1, 3, 2, 4)
    (out,) = zero_queries(p, of, out.reshape(p.batch, rows, p.heads, p.value_dim)[:, : p.q_len])
    return out, lse.reshape(p.batch, p.heads, rows)[..., : p.q_len]


# Logits in memory at a time, 4 GiB in float32; larger problems are computed some queries at a time.
MOST_LOGITS = 2**30


def forward(
    p: AttentionProblem, q: Any, k: Any, v: Any, of: Lengths, *, scale: float, softcap: float
) -> tuple[jax.Array, jax.Array]:
    """Computes the result in the dtype of `q` and the log-sum-exp in float32, with float32 between the products.

    Under JAX's own derivative, gradients are correct if no key or query that is left out has NaN (see `left_out`).
    """
    (v,) = zero_keys(p, of, v)
    out, lse = _forward(p, q, k, v, of, scale, softcap)
    return *zero_queries(p, of, out), lse


def _forward(
    p: AttentionProblem, q: Any, k: Any, v: Any, of: Lengths, scale: float, softcap: float
) -> tuple[jax.Array, jax.Array]:
    rows = q_rows(p)
    blocks = -(-p.q_len // rows)
    if blocks == 1:
        return _block(p, q, k, v, of, jnp.arange(p.q_len), scale, softcap)

    def one(operands: Any) -> tuple[jax.Array, jax.Array]:
        q, number = operands
        return _block(p, q, k, v, of, number * rows + jnp.arange(rows), scale, softcap)

    out, lse = lax.map(jax.checkpoint(one), (divided(q, rows), jnp.arange(blocks)))
    lse = jnp.moveaxis(lse, 0, 2).reshape(p.batch, p.heads, blocks * rows)[..., : p.q_len]
    return joined(out, p.q_len), lse


def backward(
    p: AttentionProblem, operands: Any, d_lse: Any, of: Lengths, *, scale: float, softcap: float
) -> tuple[jax.Array, ...]:
    """Computes dq, dk and dv of `operands`: q, k, v, the forward results and the cotangent of the first result."""
    q, k, v, out, lse, d_out = operands
    (q, d_out), (k, v) = zero_queries(p, of, q, d_out), zero_keys(p, of, k, v)
    delta = jnp.einsum("btnv,btnv->bnt", out, d_out, preferred_element_type=jnp.float32)
    delta = fill_statistics(p, of, delta if d_lse is None else delta - d_lse)
    dq, dk, dv = _backward(p, (q, k, v, lse, delta, d_out), of, scale, softcap)
    return *zero_queries(p, of, dq), *zero_keys(p, of, dk, dv)


def _backward(p: AttentionProblem, operands: Any, of: Lengths, scale: float, softcap: float) -> tuple[jax.Array, ...]:
    q, k, v, lse, delta, d_out = operands
    rows = q_rows(p)
    blocks = -(-p.q_len // rows)
    gradients = functools.partial(_block_gradients, p, k, v, of, scale=scale, softcap=softcap)
    if blocks == 1:
        return tuple(x.astype(q.dtype) for x in gradients((q, lse, delta, d_out), jnp.arange(p.q_len)))

    def one(sums: Any, block: Any) -> tuple[Any, jax.Array]:
        *operands, number = block
        dq, dk, dv = gradients(operands, number * rows + jnp.arange(rows))
        return (sums[0] + dk, sums[1] + dv), dq

    statistics = (jnp.moveaxis(divided(jnp.moveaxis(x, 2, 1), rows), 2, 3) for x in (lse, delta))
    by_block = (divided(q, rows), *statistics, divided(d_out, rows), jnp.arange(blocks))
    zeros = jnp.zeros(k.shape, jnp.float32), jnp.zeros(v.shape, jnp.float32)
    (dk, dv), dq = lax.scan(one, zeros, by_block)
    return joined(dq, p.q_len).astype(q.dtype), dk.astype(k.dtype), dv.astype(v.dtype)


def as_written(p: AttentionProblem, q: Any, k: Any, v: Any, of: Lengths, *, scale: float) -> jax.Array:
    """Runs `jax.nn.dot_product_attention`, but returns zeros for queries that see no key."""
    bounded = p.left is not None or (p.right is not None and not p.causal)
    left, right = p.q_len if p.left is None else p.left, p.kv_len if p.right is None else p.right
    (v,) = zero_keys(p, of, v)
    out = jax.nn.dot_product_attention(
        q,
        k,
        v,
        scale=scale,
        is_causal=p.causal,
        query_seq_lengths=of.q,
        key_value_seq_lengths=of.kv,
        local_window_size=(left, right) if bounded else None,
    )
    return zero_queries(p, of, out)[0]


def as_written_backward(
    p: AttentionProblem, q: Any, k: Any, v: Any, d_out: Any, of: Lengths, *, scale: float
) -> tuple[jax.Array, ...]:
    """Computes dq, dk and dv of `as_written`; gradients of elements that are left out are zeros."""

    def forward(q: Any, k: Any, v: Any) -> jax.Array:
        (q,), (k, v) = zero_queries(p, of, q), zero_keys(p, of, k, v)
        return as_written(p, q, k, v, of, scale=scale)

    _, vjp = jax.vjp(forward, q, k, v)
    gradients: tuple[jax.Array, ...] = vjp(d_out)
    return gradients


def unwritten(p: AttentionProblem) -> str | None:
    """Returns why `jax.nn.dot_product_attention` cannot express the problem; None if it can."""
    if p.softcap:
        return "jax.nn.dot_product_attention caps no logits"
    return "jax.nn.dot_product_attention takes values as wide as keys" if p.head_dim_v else None


def compiles(p: AttentionProblem, target: Target) -> bool:
    """Returns whether `jax.nn.dot_product_attention` compiles: its products of float16 are only supported on GPUs."""
    return p.dtype != "float16" or target.platform == "cuda"


def q_rows(p: AttentionProblem) -> int:
    """Returns the number of queries in memory at a time: all, if extents are symbolic (`jax.export`)."""
    if not all(isinstance(extent, int) for extent in (p.batch, p.heads, p.q_len, p.kv_len)):
        return p.q_len
    return max(1, min(p.q_len, MOST_LOGITS // (p.batch * p.heads * p.kv_len)))


def divided(x: jax.Array, rows: int) -> jax.Array:
    """Splits ``[batch, q_len, ...]`` into ``[blocks, batch, rows, ...]``; the last block is padded with zeros."""
    blocks = -(-x.shape[1] // rows)
    padded = jnp.pad(x, ((0, 0), (0, blocks * rows - x.shape[1]), *((0, 0),) * (x.ndim - 2)))
    return jnp.moveaxis(padded.reshape(x.shape[0], blocks, rows, *x.shape[2:]), 1, 0)


def joined(x: jax.Array, q_len: int) -> jax.Array:
    """Inverts `divided`."""
    x = jnp.moveaxis(x, 0, 1)
    return x.reshape(x.shape[0], -1, *x.shape[3:])[:, :q_len]


def _seen(p: AttentionProblem, of: Lengths, rows: jax.Array) -> jax.Array:
    """Returns whether a query sees a key, as ``[batch or 1, 1, 1, rows, kv_len]``."""
    columns = jnp.arange(p.kv_len)
    if of.q is None and of.kv is None:
        return visible(p, rows, columns, of)[None, None, None]
    seen: jax.Array = jax.vmap(lambda of: visible(p, rows, columns, of))(of)
    return seen[:, None, None]


def _logits(p: AttentionProblem, q: Any, k: Any, scale: float, softcap: float) -> jax.Array:
    """Computes scaled and capped logits, ``[batch, kv_heads, group, rows, kv_len]``."""
    q = q.reshape(*q.shape[:2], p.kv_heads, p.group, p.head_dim)
    logits: jax.Array = jnp.einsum("btkgh,bskh->bkgts", q, k, preferred_element_type=wide(q)) * scale
    return softcap * jnp.tanh(logits / softcap) if p.softcap else logits


def _block(
    p: AttentionProblem, q: Any, k: Any, v: Any, of: Lengths, rows: jax.Array, scale: float, softcap: float
) -> tuple[jax.Array, jax.Array]:
    seen = _seen(p, of, rows)
    logits = jnp.where(seen, _logits(p, q, k, scale, softcap), -jnp.inf)
    most = lax.stop_gradient(jnp.max(logits, axis=-1, keepdims=True))
    most = jnp.where(jnp.isfinite(most), most, 0.0)
    e = jnp.exp(logits - most)
    total = jnp.sum(e, axis=-1, keepdims=True)
    some = total != 0  # NaN among logits stays NaN; a row of minus infinities sums to 0.
    total = jnp.where(some, total, 1.0)
    out = jnp.einsum("bkgts,bskv->btkgv", (e / total).astype(v.dtype), v, preferred_element_type=wide(q))
    lse = jnp.where(some, most + jnp.log(total), -jnp.inf)
    shape = (p.batch, q.shape[1], p.heads, p.value_dim)
    return out.reshape(shape).astype(q.dtype), lse[..., 0].reshape(p.batch, p.heads, q.shape[1])


def _block_gradients(
    p: AttentionProblem, k: Any, v: Any, of: Lengths, operands: Any, rows: jax.Array, *, scale: float, softcap: float
) -> tuple[jax.Array, ...]:
    """Computes the float32 gradients of some queries; dk and dv are partial sums."""
    q, lse, delta, d_out = operands
    summed, grouped = wide(q), (*q.shape[:2], p.kv_heads, p.group)
    by_row = (p.batch, p.kv_heads, p.group, q.shape[1])
    logits = _logits(p, q, k, scale, softcap)
    lse = jnp.where(lse == -jnp.inf, 0.0, lse).reshape(by_row)[..., None]
    # An invisible logit may be larger than all visible ones: mask it before exp, which could overflow.
    probabilities = jnp.exp(jnp.where(_seen(p, of, rows), logits - lse, -jnp.inf))
    d_out = d_out.reshape(*grouped, p.value_dim)
    d_probabilities = jnp.einsum("btkgv,bskv->bkgts", d_out, v, preferred_element_type=summed)
    d_logits = probabilities * (d_probabilities - delta.reshape(by_row)[..., None])
    if p.softcap:
        d_logits *= 1 - (logits / softcap) ** 2
    d_logits = (d_logits * scale).astype(q.dtype)
    dq = jnp.einsum("bkgts,bskh->btkgh", d_logits, k, preferred_element_type=summed)
    dk = jnp.einsum("bkgts,btkgh->bskh", d_logits, q.reshape(*grouped, p.head_dim), preferred_element_type=summed)
    dv = jnp.einsum("bkgts,btkgv->bskv", probabilities.astype(v.dtype), d_out, preferred_element_type=summed)
    return dq.reshape(q.shape), dk, dv


def wide(x: Any) -> Any:
    return jnp.promote_types(x.dtype, jnp.float32)
