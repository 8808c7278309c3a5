"""How a mapped axis joins the batch, whatever the operands are: their first axis is of sequences."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp


def as_sequences(args: Sequence[Any], dims: Sequence[int | None], size: int) -> list[jax.Array]:
    """Each ``[size, batch, ...]`` as ``[size * batch, ...]``, what is not mapped repeated."""

    def joined(x: Any, dim: int | None) -> jax.Array:
        many = jnp.broadcast_to(x, (size, *x.shape)) if dim is None else jnp.moveaxis(x, dim, 0)
        return many.reshape(-1, *many.shape[2:])

    return [joined(x, dim) for x, dim in zip(args, dims, strict=True)]


def sequences_apart(results: Any, size: int) -> Any:
    """The inverse, of each result."""
    return jax.tree.map(lambda x: x.reshape(size, -1, *x.shape[1:]), results)
