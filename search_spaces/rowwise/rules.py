"""How a row-wise operation batches: a new axis of rows is more rows; and divides over devices: by rows."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from search_spaces.rowwise.problem import RowProblem
from search_spaces.sharding import Sharding

Call = Callable[..., Any]


def batch(call: Call, p: RowProblem, args: Any, dims: Any) -> tuple[Any, int] | None:
    """Batched rows join the rows; not where an operand that all rows share is batched itself."""
    (by_row, shared), (row_dims, shared_dims) = p.apart(args), p.apart(dims)
    if any(dim is not None for dim in shared_dims):
        return None
    size = next(arg.shape[dim] for arg, dim in zip(args, dims, strict=True) if dim is not None)

    def joined(x: jax.Array, dim: int | None) -> jax.Array:
        each = jnp.broadcast_to(x, (size, *x.shape)) if dim is None else jnp.moveaxis(x, dim, 0)
        return each.reshape(size * p.rows, -1)

    many = dataclasses.replace(p, rows=size * p.rows)
    out = call(many, *map(joined, by_row, row_dims), *shared)
    return jax.tree.map(lambda x: x.reshape(size, p.rows, *x.shape[1:]), out), 0


def shard(p: RowProblem) -> Sharding[Any]:
    """Rows are divided; each is whole on one device, and so is what all share."""

    def letters(shape: tuple[int, ...]) -> str:
        return "columns" if shape[-1] == p.columns else "halves"

    by_row, shared = p.apart([letters(s.shape) for s in p.operands()])
    results = [f"rows {letters(s.shape)}" for s in p.results()]
    return Sharding(f"{', '.join([*(f'rows {x}' for x in by_row), *shared])} -> {', '.join(results)}", ("rows",))
