"""The search space of flash attention forward on TPUs, with a reason for each rule."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from search_spaces.contrib.tpu.vmem import LANES, SUBLANES, VMEM_LIMITS_MIB, limit_bytes, vmem_bytes
from search_spaces.flash_attention.problem import FlashAttentionProblem
from search_spaces.footprint import Footprint, Operand, Phase
from search_spaces.problem import nbytes
from search_spaces.space import Columns, Space, cdiv, round_up

# ------------------------------------------------------------------------------
# The schedule of flash attention forward on TPUs.


@dataclasses.dataclass(frozen=True)
class TpuFlashAttentionSchedule:
    """How attention is divided into grid steps, and a grid step into products.

    Attributes:
      heads: the query heads packed into the rows of a product. "one": one head. "group": all heads that share a key
        head. "all": all heads, multiplied with the keys of all heads; each row sees only the keys of its own head.
      block_q: rows of queries per grid step.
      block_kv: rows of keys and values per grid step; the next block loads during the computation.
      block_kv_compute: rows of keys and values per product.
      vmem_limit_mib: VMEM limit to request in MiB; 0 means the compiler's default.
    """

    heads: str
    block_q: int
    block_kv: int
    block_kv_compute: int
    vmem_limit_mib: int


# ------------------------------------------------------------------------------
# Layout of queries and keys in the arrays of a launch: rows of one head, of a group of heads, or of all heads.


@dataclasses.dataclass(frozen=True)
class Rows:
    """Arrays ``[batch, heads, rows, columns]``, for one schedule or for columns of schedules.

    Row r of queries is query ``r // per_query`` of one of `per_query` heads. Row c of keys is key ``c // per_key``.
    Attributes are integers, or arrays with one integer per schedule.
    """

    p: FlashAttentionProblem
    heads: Any
    per_query: Any
    per_key: Any

    @classmethod
    def of(cls, p: FlashAttentionProblem, heads: Any) -> Rows:
        """Returns the layout for the field `heads` of a schedule, or for a column of it."""

        def by_heads(one: int, group: int, every: int) -> Any:
            return np.where(np.equal(heads, "one"), one, np.where(np.equal(heads, "group"), group, every))

        return cls(p, by_heads(p.heads, p.kv_heads, 1), by_heads(1, p.group, p.heads), by_heads(1, 1, p.kv_heads))

    def one(self) -> Rows:
        """Returns the layout of one schedule with Python integers."""
        return Rows(self.p, int(self.heads), int(self.per_query), int(self.per_key))

    @property
    def kv_heads(self) -> Any:
        """Number of heads in the arrays of keys and values."""
        return np.minimum(self.heads, self.p.kv_heads)

    @property
    def q_rows(self) -> Any:
        return self.p.q_len * self.per_query

    @property
    def kv_rows(self) -> Any:
        return self.p.kv_len * self.per_key

    def kv_head(self, head: Any) -> Any:
        """Returns the head in the array of keys for `head` in the array of queries."""
        return quotient(head, self.heads // int(self.kv_heads))

    def queries(self, q: jax.Array) -> jax.Array:
        """Converts ``[batch, q_len, heads, head_dim]`` to rows, without a copy if all heads are packed."""
        p = self.p
        apart = q.reshape(p.batch, p.q_len, self.heads, self.per_query, p.head_dim)
        return _at_least_one_tile(apart.transpose(0, 2, 1, 3, 4).reshape(p.batch, self.heads, self.q_rows, p.head_dim))

    def keys(self, x: jax.Array) -> jax.Array:
        """Converts ``[batch, kv_len, kv_heads, columns]`` to rows."""
        p = self.p
        apart = x.reshape(p.batch, p.kv_len, int(self.kv_heads), self.per_key, x.shape[-1])
        there = apart.transpose(0, 2, 1, 3, 4).reshape(p.batch, int(self.kv_heads), self.kv_rows, x.shape[-1])
        return _at_least_one_tile(there)

    def results(self, out: jax.Array) -> jax.Array:
        """Converts rows of the result to ``[batch, q_len, heads, value_dim]``."""
        p = self.p
        there = out[:, :, : self.q_rows]
        apart = there.reshape(p.batch, self.heads, p.q_len, self.per_query, p.value_dim)
        return apart.transpose(0, 2, 1, 3, 4).reshape(p.batch, p.q_len, p.heads, p.value_dim)

    def statistics(self, lse: jax.Array) -> jax.Array:
        """Converts ``[batch, heads, 1, rows]`` to ``[batch, all heads, q_len]``."""
        p = self.p
        apart = lse[..., : self.q_rows].reshape(p.batch, self.heads, p.q_len, self.per_query)
        return apart.transpose(0, 1, 3, 2).reshape(p.batch, p.heads, p.q_len)


def _at_least_one_tile(x: jax.Array) -> jax.Array:
    """Pads to at least eight rows with zeros; the compiler shuffles smaller blocks through additional VMEM."""
    return jnp.pad(x, ((0, 0), (0, 0), (0, max(0, SUBLANES - x.shape[2])), (0, 0)))


def quotient(x: Any, n: int) -> Any:
    """Returns ``x // n`` for non-negative x.

    Pallas lowers floor division with the sign function, and that lowering queries the chip's name. Division by a power
    of two is a shift, because the compiler's cycle estimate evaluates shifts but not divisions.
    """
    return x >> (n.bit_length() - 1) if n & (n - 1) == 0 else lax.div(x, n)


# ------------------------------------------------------------------------------
# The footprint of flash attention forward on TPUs.

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


# Powers of two, so that divisions of grid indices are shifts.
BLOCKS_Q = (1024, 512, 2048, 256, 128)
BLOCKS_KV = (2048, 1024, 4096, 512, 8192, 256, 128)
BLOCKS_KV_COMPUTE = (1024, 512, 2048, 4096, 256, 128)
# Bounds of the logits per product. The compiler unrolls a product; above the maximum, compilation takes minutes.
MOST_LOGITS = 2**20
LEAST_LOGITS = 2**17
# VMEM in bytes that every chip provides without a request.
LEAST_TO_ASK = 8 * 2**20
# Query rows of all heads. With more rows, products with the keys of other heads cost more than a copy of the keys.
MOST_ROWS_OF_ALL = 256


def space(p: FlashAttentionProblem) -> Space[TpuFlashAttentionSchedule]:
    """Returns the search space for `p`, about a hundred schedules."""
    heads = ["one"]
    if p.group > 1:
        heads.insert(0, "group")
    if p.kv_heads > 1 and p.kv_heads & (p.kv_heads - 1) == 0 and p.q_len * p.heads <= MOST_ROWS_OF_ALL:
        heads.insert(0, "all")
    return Space(
        TpuFlashAttentionSchedule,
        choices={
            "heads": tuple(heads),
            "block_q": BLOCKS_Q,
            "block_kv": BLOCKS_KV,
            "block_kv_compute": BLOCKS_KV_COMPUTE,
            "vmem_limit_mib": VMEM_LIMITS_MIB,
        },
        rules={
            "blocks of queries have fewer rows beyond the array than in it": lambda s: (
                (s.block_q == LANES) | (s.block_q < 2 * Rows.of(p, s.heads).q_rows)
            ),
            "blocks of keys have fewer rows beyond the array than in it": lambda s: (
                (s.block_kv == LANES) | (s.block_kv < 2 * Rows.of(p, s.heads).kv_rows)
            ),
            "a product takes a block of keys, or part of it": lambda s: s.block_kv_compute <= s.block_kv,
            "the compiler takes minutes for more logits of a product": lambda s: (
                s.block_q * s.block_kv_compute <= MOST_LOGITS
            ),
            "the compiler's default is enough for small blocks": lambda s: (
                (s.vmem_limit_mib == 0) | (onchip_bytes(p, s) + spill_bytes(s) > LEAST_TO_ASK)
            ),
            "what waits for a product costs as much as small ones": lambda s: (
                (s.block_q * s.block_kv_compute >= LEAST_LOGITS)
                | (s.block_q * 2 > Rows.of(p, s.heads).q_rows)
                | (s.block_kv_compute * 2 > Rows.of(p, s.heads).kv_rows)
            ),
        },
    )
