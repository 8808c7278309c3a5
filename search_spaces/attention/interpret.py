"""Attention in blocks by Pallas's interpreter on a CPU: parts shared by forward and backward."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental import pallas as pl

from search_spaces.attention.problem import AttentionProblem, Lengths
from search_spaces.attention.xla import visible
from search_spaces.footprint import Footprint, Operand, Phase
from search_spaces.problem import nbytes
from search_spaces.space import Columns, Space


@dataclasses.dataclass(frozen=True)
class InterpretedAttention:
    """Extents of a block of logits.

    Attributes:
      block_q: queries; if this does not divide q_len, the last block is shorter.
      block_kv: keys, likewise.
    """

    block_q: int
    block_kv: int


def space(p: AttentionProblem) -> Space[InterpretedAttention]:
    """Returns the schedules; blocks are large, because an interpreted grid step costs about a millisecond."""

    def extents(length: int) -> tuple[int, ...]:
        few = [n for n in (512, 128, 32, 8) if n < length <= 64 * n]
        return (length, *few) if length <= 1024 else tuple(few or (512,))

    return Space(InterpretedAttention, {"block_q": extents(p.q_len), "block_kv": extents(p.kv_len)})


def footprint(p: AttentionProblem, s: Columns, products: int) -> Footprint:
    """Returns the footprint.

    Args:
      products: matrix products of a block of logits: 2 forward, 7 backward (two kernels).
    """
    blocks = -(-p.q_len // s.block_q)
    steps = -(-p.kv_len // s.block_kv)
    row_bytes = 4 * (p.head_dim + p.value_dim)
    written = float(sum(map(nbytes, p.results())))
    return Footprint(
        arithmetic=p.arithmetic,
        grid=(blocks, np.full(len(s), p.heads), np.full(len(s), p.batch)),
        step=Phase(
            loads=(Operand(bytes=s.block_kv * float(row_bytes), axes=(1, 2)),),
            flops=products * s.block_q * s.block_kv * float(p.head_dim + p.value_dim),
        ),
        tile=Phase(
            loads=(Operand(bytes=s.block_q * float(row_bytes), axes=(0, 1, 2)),),
            bytes_written=written / (blocks * p.heads * p.batch),
        ),
        steps=steps,
        onchip_bytes=(s.block_q + s.block_kv) * row_bytes + 8 * s.block_q * s.block_kv,
    )


def padded(x: jax.Array, axis: int, block: int) -> jax.Array:
    """Pads `x` with zeros to a multiple of `block`: an interpreted load of a block is not clipped at an edge."""
    widths = [(0, 0)] * x.ndim
    widths[axis] = (0, -x.shape[axis] % block)
    return jnp.pad(x, widths)


def one_head(x: Any, rows: int | None, of: Any) -> pl.BlockSpec:
    """Returns the spec for some rows, or all, of head ``of(head)`` in ``[batch, length, heads, columns]``."""
    if rows is None:
        return pl.BlockSpec((1, x.shape[1], 1, x.shape[3]), lambda b, n, i: (b, 0, of(n), 0))
    return pl.BlockSpec((1, rows, 1, x.shape[3]), lambda b, n, i: (b, i, of(n), 0))


def logits(p: AttentionProblem, q: Any, k: Any, scale: float, softcap: float) -> jax.Array:
    """Computes scaled and capped logits of blocks ``[rows, head_dim]`` and ``[columns, head_dim]``."""
    product = dot(q, k, (1, 1)) * scale
    return softcap * jnp.tanh(product / softcap) if p.softcap else product


def seen(p: AttentionProblem, s: InterpretedAttention, q_block: Any, kv_block: Any, of: Lengths) -> jax.Array:
    """Returns whether a query of one block sees a key of another, ``[block_q, block_kv]``; padding is never seen."""
    rows, columns = q_block * s.block_q + jnp.arange(s.block_q), kv_block * s.block_kv + jnp.arange(s.block_kv)
    there = (rows < p.q_len)[:, None] & (columns < p.kv_len)[None]
    both: jax.Array = there & visible(p, rows, columns, of)
    return both


def lengths(p: AttentionProblem, refs: Any) -> Lengths:
    """Returns the lengths of a block's sequence, from references of one element each, the last of `refs`."""
    count = p.q_lengths + p.kv_lengths
    return p.lengths([ref[0] for ref in refs[len(refs) - count :]]) if count else Lengths()


def dot(a: Any, b: Any, contracted: tuple[int, int]) -> jax.Array:
    """Computes a product in float32, contracting these axes."""
    numbers = (((contracted[0],), (contracted[1],)), ((), ()))
    return lax.dot_general(a, b, numbers, preferred_element_type=jnp.float32)
