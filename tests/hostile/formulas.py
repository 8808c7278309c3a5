"""Every operation once more, in float64 and by nothing of this project: by NumPy, and by jnp for gradients."""

from __future__ import annotations

import math
from typing import Any

import numpy as np


def matmul(xp: Any, a: Any, b: Any, bias: Any = None, residual: Any = None, *, transpose_a: bool = False,
           transpose_b: bool = False, activation: str | None = None,
           split_sizes: tuple[int, int] | None = None) -> Any:  # fmt: skip
    a = xp.swapaxes(a, -1, -2) if transpose_a else a
    b = xp.swapaxes(b, -1, -2) if transpose_b else b
    c = xp.matmul(a, b)
    if bias is not None:
        c = c + (bias if bias.ndim == 1 else bias[..., None, :])
    if activation == "relu":
        c = xp.where(c <= 0, 0.0, c)
    elif activation == "silu":
        c = c / (1 + xp.exp(-c))
    elif activation == "gelu":
        c = c / 2 * (1 + xp.tanh(math.sqrt(2 / math.pi) * (c + 0.044715 * c**3)))
    c = c if residual is None else c + residual
    return c if split_sizes is None else (c[..., : split_sizes[0]], c[..., split_sizes[0] :])


def ragged_dot(xp: Any, lhs: Any, rhs: Any, sizes: Any, *, transpose_rhs: bool) -> Any:
    ends = np.cumsum(np.asarray(sizes))
    parts = np.split(np.arange(lhs.shape[0]), ends)
    matrices = [*(xp.swapaxes(rhs, 1, 2) if transpose_rhs else rhs)]
    products = [lhs[rows] @ matrix for rows, matrix in zip(parts, matrices, strict=False)]
    return xp.concatenate([*products, xp.zeros((len(parts[-1]), matrices[0].shape[1]))])


def softmax(xp: Any, x: Any) -> Any:
    e = xp.exp(x - x.max(-1, keepdims=True, initial=-math.inf))
    return e / e.sum(-1, keepdims=True)


def log_sum_exp(xp: Any, x: Any) -> Any:
    most = x.max(-1, initial=-math.inf)
    finite = xp.where(xp.isinf(most), 0.0, most)
    return finite + xp.log(xp.exp(x - finite[..., None]).sum(-1))


def rms_norm(xp: Any, x: Any, weight: Any, *, eps: float = 1e-6) -> Any:
    return x / xp.sqrt((x * x).mean(-1, keepdims=True) + eps) * weight


def add_rms_norm(xp: Any, x: Any, residual: Any, weight: Any, *, eps: float = 1e-6) -> Any:
    return rms_norm(xp, x + residual, weight, eps=eps), x + residual


def silu_and_mul(xp: Any, x: Any) -> Any:
    gate, up = x[..., : x.shape[-1] // 2], x[..., x.shape[-1] // 2 :]
    return gate / (1 + xp.exp(-gate)) * up


def seen(q_len: int, kv_len: int, *, causal: bool = False, window: tuple[int | None, int | None] = (None, None),
         q_lengths: Any = None, kv_lengths: Any = None) -> Any:  # fmt: skip
    """Which key each query sees, ``[batch or 1, q_len, kv_len]``."""
    i, j = np.arange(q_len)[:, None], np.arange(kv_len)[None]
    left, right = window[0], 0 if causal else window[1]
    found = np.ones((1, q_len, kv_len), bool)
    if left is not None:
        found &= j >= i - left
    if right is not None:
        found &= j <= i + right
    if q_lengths is not None:
        found = found & (i < np.asarray(q_lengths)[:, None, None])
    if kv_lengths is not None:
        found = found & (j < np.asarray(kv_lengths)[:, None, None])
    return found


def _grouped(x: Any, heads: int) -> Any:
    """Keys or values, a copy of them for each query head that shares them."""
    return np.repeat(x, heads // x.shape[2], axis=2)


def attention(q: Any, k: Any, v: Any, visible: Any, *, scale: float, softcap: float | None) -> dict[str, Any]:
    """The result, the log-sum-exp, and what a backward pass needs."""
    k, v = _grouped(k, q.shape[2]), _grouped(v, q.shape[2])
    raw = np.einsum("bqhd,bkhd->bhqk", q, k) * scale
    logits = raw if softcap is None else softcap * np.tanh(raw / softcap)
    logits = np.where(visible[:, None], logits, -np.inf)
    most = logits.max(-1, keepdims=True, initial=-np.inf)
    e = np.where(visible[:, None], np.exp(logits - np.where(np.isneginf(most), 0.0, most)), 0.0)
    total = e.sum(-1, keepdims=True)
    nothing = total == 0
    p = np.where(nothing, 0.0, e / np.where(nothing, 1.0, total))
    lse = np.where(nothing, -np.inf, most + np.log(np.where(nothing, 1.0, total)))[..., 0]
    return {"out": np.einsum("bhqk,bkhd->bqhd", p, v), "lse": lse, "p": p, "raw": raw}


def attention_gradients(q: Any, k: Any, v: Any, visible: Any, d_out: Any, d_lse: Any, *, scale: float,
                        softcap: float | None) -> tuple[Any, ...]:  # fmt: skip
    """Of q, k and v: dS = P (dP - delta + d_lse), through the cap, and summed over the heads of a group."""
    then = attention(q, k, v, visible, scale=scale, softcap=softcap)
    p, heads, kv_heads = then["p"], q.shape[2], k.shape[2]
    wide_k, wide_v = _grouped(k, heads), _grouped(v, heads)
    d_p = np.einsum("bqhd,bkhd->bhqk", d_out, wide_v)
    delta = np.einsum("bqhd,bqhd->bhq", d_out, then["out"])[..., None]
    d_s = p * (d_p - delta + (0.0 if d_lse is None else d_lse[..., None]))
    if softcap is not None:
        d_s = d_s * (1 - np.tanh(then["raw"] / softcap) ** 2)
    d_q = np.einsum("bhqk,bkhd->bqhd", d_s, wide_k) * scale
    d_k, d_v = np.einsum("bhqk,bqhd->bkhd", d_s, q) * scale, np.einsum("bhqk,bqhd->bkhd", p, d_out)
    return d_q, *(x.reshape(*x.shape[:2], kv_heads, heads // kv_heads, -1).sum(3) for x in (d_k, d_v))
