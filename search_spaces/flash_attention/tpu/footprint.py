"""The footprint of flash attention forward on TPUs."""

from __future__ import annotations

from typing import Any

import jax.numpy as jnp
import numpy as np

from search_spaces.flash_attention.problem import FlashAttentionProblem
from search_spaces.flash_attention.tpu.rows import Rows
from search_spaces.footprint import Footprint, Operand, Phase
from search_spaces.problem import nbytes
from search_spaces.space import Columns, cdiv, round_up
from search_spaces.tpu.vmem import LANES, limit_bytes, vmem_bytes

# FP32 operations per logit: maximum, difference, scaling, sum, conversion and half a mask.
LOGIT_OPERATIONS = 5.5
# Lower bound of the spilled bytes: this share of the bytes of a product's logits, minus the bytes that registers hold.
LEAST_SPILLED, HELD_BYTES = 0.6, 128 * 2**10


def footprint(p: FlashAttentionProblem, s: Columns) -> Footprint:
    """Returns the footprint; a tile is a block of queries, and a step is one block of keys.

    Sequence lengths are those of the inputs that are measured.
    """
    rows = Rows.of(p, s.heads)
    size = jnp.dtype(p.dtype).itemsize
    q_blocks = cdiv(rows.q_rows, s.block_q)
    seen = _seen(p, s, rows)
    steps = np.maximum(seen / s.block_kv * p.q_share * p.kv_share, 1.0)
    keys = np.minimum(s.block_kv, rows.kv_rows)
    queries = rows.q_rows / q_blocks
    logits = s.block_q * np.minimum(s.block_kv, round_up(rows.kv_rows, s.block_kv_compute))
    products = logits / s.block_kv_compute
    return Footprint(
        arithmetic=p.arithmetic if p.dtype != "float32" else "float32",
        grid=(np.full(len(s), p.batch), rows.kv_heads, rows.heads // rows.kv_heads, q_blocks),
        step=Phase(
            loads=(
                Operand(bytes=keys * p.head_dim * size, axes=(0, 1), name="k"),
                Operand(bytes=keys * p.value_dim * size, axes=(0, 1), name="v"),
            ),
            flops=2.0 * logits * (round_up(p.head_dim, LANES) + round_up(p.value_dim, LANES)),
            fp32_ops=logits * (LOGIT_OPERATIONS + p.softcap) + 2 * products * p.value_dim,
            mufu_ops=logits * (1 + p.softcap) + products,
            onchip_bytes_read=8.0 * logits + 8.0 * products * p.value_dim,
        ),
        tile=Phase(
            loads=(Operand(bytes=queries * p.head_dim * size, axes=(0, 1, 2, 3), name="q"),),
            fp32_ops=s.block_q * p.value_dim * 2.0,
            bytes_written=queries * (p.value_dim * size + 4 * p.return_lse),
        ),
        steps=steps,
        onchip_bytes=onchip_bytes(p, s),
        spill_bytes=spill_bytes(s),
        onchip_limit_bytes=limit_bytes(s.vmem_limit_mib),
        minor=3,
        axes=("sequences", "kv heads", "query heads of each", "queries"),
        stages=2,
        consumers=1,
        # One core computes the blocks in sequence, and the next block loads during the computation.
        persistent=True,
        copied_bytes=_copied_bytes(p, rows),
        launches=1,
    )


def _seen(p: FlashAttentionProblem, s: Columns, rows: Rows) -> Any:
    """Returns the mean number of rows of keys per block of queries, in whole products that any of its queries sees."""
    size = s.block_kv_compute
    most = np.max(cdiv(rows.q_rows, s.block_q))
    i = np.arange(most)[:, None]
    first_query = i * s.block_q // rows.per_query
    last_query = np.minimum(((i + 1) * s.block_q - 1) // rows.per_query, p.q_len - 1)
    first = np.zeros_like(first_query) if p.left is None else np.clip(first_query - p.left, 0, p.kv_len)
    end = np.full_like(first_query, p.kv_len) if p.right is None else np.minimum(last_query + p.right + 1, p.kv_len)
    computed = np.maximum(cdiv(end * rows.per_key, size) * size - first * rows.per_key // size * size, 0)
    there = i < cdiv(rows.q_rows, s.block_q)
    return (computed * there).sum(axis=0) / there.sum(axis=0)


def _copied_bytes(p: FlashAttentionProblem, rows: Rows) -> Any:
    """Returns the bytes of transposed copies: arrays with more than one head are written and read once more."""
    moved = float(sum(map(nbytes, (*p.qkv(), p.out()))))
    return np.where(rows.heads > 1, 2.0 * moved, 0.0)


def onchip_bytes(p: FlashAttentionProblem, s: Any) -> Any:
    """Returns the VMEM of blocks and scratch, exact to the byte.

    A block that the grid never changes has one buffer; other blocks are double-buffered.
    """
    rows = Rows.of(p, s.heads)
    grid = p.batch * rows.heads * cdiv(rows.q_rows, s.block_q)
    kv_blocks = p.batch * rows.kv_heads * cdiv(rows.kv_rows, s.block_kv)
    q = vmem_bytes(s.block_q, p.head_dim, p.dtype) + vmem_bytes(s.block_q, p.value_dim, p.dtype)
    kv = vmem_bytes(s.block_kv, p.head_dim, p.dtype) + vmem_bytes(s.block_kv, p.value_dim, p.dtype)
    row = 4 * s.block_q
    scratch = vmem_bytes(p.value_dim, s.block_q, jnp.float32) + 2 * row
    q_buffers = np.where(grid > 1, 2, 1)
    kv_buffers = np.where(kv_blocks > 1, 2, 1)
    return q_buffers * (q + row * p.return_lse) + kv_buffers * kv + scratch


def spill_bytes(s: Any) -> Any:
    """Returns a lower bound of the VMEM for spilled float32 logits of a product.

    Measured with libtpu 0.0.50: the compiler takes up to 1.8 times the bytes of the logits, and at least 0.7 times from
    2^17 logits on. For few logits it may take none.
    """
    logits = 4.0 * s.block_q * s.block_kv_compute
    return np.maximum(LEAST_SPILLED * logits - HELD_BYTES, 0.0)
