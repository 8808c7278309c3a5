"""Pads a product with rows that are not aligned in memory: 50257 columns of a vocabulary become 50304.

XLA's products are slower if rows do not begin at multiples of `ROW_BYTES` (`scheduler/model/library.py`). Only products
that stay with XLA come here. Where our kernel is faster than XLA with unaligned rows, it is also faster than a padded
product: it copies no result (H200: 108 us, and 132 padded, for 512 x 50257 x 768). The rule is fixed, because a rewrite
needs no chip. It agrees with the model on measured shapes (`tests/functions/test_aligned.py`).
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from search_spaces.recognise import Node, Value
from search_spaces.row_alignment import ROW_BYTES, row_alignment

PLATFORMS = frozenset({"cuda"})
# Padded extents: the largest of these multiples that adds at most this share.
MULTIPLES, MOST_ADDED = (128, 64, 32, 16, 8), 0.01
# A product with a smaller extent is limited by memory, and a padded copy of an operand would cost more than it gains.
LEAST_EXTENT = 512


def as_padded(node: Node) -> Callable[..., list[jax.Array]] | None:
    """Returns ``f(lhs, rhs)``, which computes a product with padded extents; None for any other equation."""
    if node.name != "dot_general":
        return None
    lhs, rhs = node.inputs
    (of_lhs, of_rhs), batch = node.params["dimension_numbers"]
    if any(batch) or lhs.dtype != rhs.dtype or jnp.dtype(lhs.dtype).itemsize != 2:
        return None
    (result,) = node.results
    axes = _axes(lhs, of_lhs, "m"), _axes(rhs, of_rhs, "n")
    of_result = [axis for operand in axes for axis in operand if axis[0] != "k"]
    extents: dict[Any, int] = {}
    sizes = {"m": 1, "n": 1, "k": 1}
    for x, named in ((lhs, axes[0]), (rhs, axes[1]), (result, of_result)):
        if not named:
            return None
        if row_alignment(x) < ROW_BYTES:
            extents[named[-1]] = _padded(x.shape[-1])
    for name in sizes:
        x, named = (rhs, axes[1]) if name == "n" else (lhs, axes[0])
        sizes[name] = math.prod(n for n, axis in zip(x.shape, named, strict=True) if axis[0] == name)
    if not extents or 0 in extents.values() or min(sizes.values()) < LEAST_EXTENT:
        return None

    def product(*operands: jax.Array) -> list[jax.Array]:
        wide = [_pad(x, named, extents) for x, named in zip(operands, axes, strict=True)]
        found = node.equation.primitive.bind(*wide, **node.params)
        if found.shape != result.shape:  # without a barrier, XLA would slice the operands instead
            found = lax.slice(lax.optimization_barrier(found), (0,) * found.ndim, result.shape)
        return [found]

    return product


def text_of(node: Node) -> str:
    """Describes the product of a node for a report."""
    shapes = " and ".join(f"{jnp.dtype(x.dtype).name}{list(x.shape)}" for x in node.inputs)
    return f"product of {shapes}, padded to aligned rows"


def _axes(x: Value, contracted: tuple[int, ...], free: str) -> list[tuple[str, int]]:
    """Returns a name for each axis of an operand: of the contracted axes by their order, of others by their place."""
    return [("k", contracted.index(i)) if i in contracted else (free, i) for i in range(len(x.shape))]


def _padded(extent: int) -> int:
    """Returns the padded extent; 0 if each multiple adds too much."""
    rounded = (-(-extent // multiple) * multiple for multiple in MULTIPLES)
    return next((n for n in rounded if n <= (1 + MOST_ADDED) * extent), 0)


def _pad(x: jax.Array, axes: list[tuple[str, int]], extents: dict[Any, int]) -> jax.Array:
    added = [extents.get(axis, n) - n for n, axis in zip(x.shape, axes, strict=True)]
    return lax.pad(x, jnp.zeros((), x.dtype), [(0, n, 0) for n in added]) if any(added) else x
