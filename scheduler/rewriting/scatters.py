"""Computes a scatter of one number per row elementwise, as in the gradient of `jnp.take_along_axis`."""

from __future__ import annotations

import math
from collections.abc import Callable

import jax
import jax.numpy as jnp
from jax import lax

from search_spaces.recognise import Node, number


def as_selection(node: Node) -> Callable[..., list[jax.Array]] | None:
    """Returns ``f(zeros, indices, updates)``, which computes a scatter as a selection; None for any other equation.

    The scatter adds one number to each row of zeros. XLA runs a scatter as a kernel of its own, which reads and writes
    the whole array. A selection is fused with the equations that read it, so the array is never stored.
    """
    if node.name != "scatter-add" or number(node.inputs[0]) != 0:
        return None
    zeros, indices, _ = node.inputs
    how = node.params["dimension_numbers"]
    if how.update_window_dims or len(how.scatter_dims_to_operand_dims) != 1:
        return None
    (axis,) = how.scatter_dims_to_operand_dims
    row_of = dict(zip(how.operand_batching_dims, how.scatter_indices_batching_dims, strict=True))
    rows = [i for i in range(len(zeros.shape)) if i != axis]
    # Two numbers for one row could have the same index, and would have to be added.
    if sorted(row_of) != rows or math.prod(indices.shape) != math.prod(zeros.shape[i] for i in rows):
        return None
    others = [i for i in range(len(indices.shape) - 1) if i not in row_of.values()]
    order = (*(row_of[i] for i in rows), *others)
    shape = tuple(1 if i == axis else n for i, n in enumerate(zeros.shape))

    def by_row(x: jax.Array) -> jax.Array:
        return lax.broadcast_in_dim(
            lax.reshape(lax.transpose(x, order), shape), zeros.shape, tuple(range(len(zeros.shape)))
        )

    def select(_: jax.Array, indices: jax.Array, updates: jax.Array) -> list[jax.Array]:
        at = lax.squeeze(indices, (indices.ndim - 1,))
        if at.dtype.itemsize < 4:  # the extent may exceed its range
            at = lax.convert_element_type(at, jnp.int32)
        if node.params["mode"] == lax.GatherScatterMode.CLIP:
            at = lax.clamp(jnp.array(0, at.dtype), at, jnp.array(zeros.shape[axis] - 1, at.dtype))
        hit = lax.eq(lax.broadcasted_iota(at.dtype, zeros.shape, axis), by_row(at))
        return [lax.select(hit, by_row(updates), jnp.zeros(zeros.shape, zeros.dtype))]

    return select


def text_of(node: Node) -> str:
    """Describes the scatter of a node for a report."""
    zeros = node.inputs[0]
    return f"scatter of one number per row into {jnp.dtype(zeros.dtype).name}{list(zeros.shape)}, as a selection"
