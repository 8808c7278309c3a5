"""Attention in float32 by plain JAX, one block of queries at a time: no array has q_len x kv_len elements."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from search_spaces.attention import left_out
from search_spaces.attention.problem import SOFTCAP, AttentionProblem, Lengths

# Logits in memory at a time.
MOST_LOGITS = 2**26


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
    (q,), (k, v) = left_out.queries(p, of, q), left_out.keys(p, of, k, v)
    q_block = max(1, min(p.q_len, MOST_LOGITS // (p.group * p.kv_len)))
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
    (out,) = left_out.queries(p, of, out.reshape(p.batch, rows, p.heads, p.value_dim)[:, : p.q_len])
    return out, lse.reshape(p.batch, p.heads, rows)[..., : p.q_len]
