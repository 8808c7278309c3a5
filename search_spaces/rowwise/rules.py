"""Batching and sharding of row-wise operations: a batch axis becomes more rows, and devices divide the rows."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

from search_spaces.rowwise.problem import RowProblem
from search_spaces.sharding import Sharding
from search_spaces.unfolded import in_front

Call = Callable[..., Any]


def batch(call: Call, p: RowProblem, args: Any, dims: Any) -> tuple[Any, int] | None:
    """Folds the batch axis into the rows; None if an operand that all rows share is batched."""
    (by_row, shared), (row_dims, shared_dims) = p.apart(args), p.apart(dims)
    if any(dim is not None for dim in shared_dims):
        return None
    size = next(arg.shape[dim] for arg, dim in zip(args, dims, strict=True) if dim is not None)

    many = dataclasses.replace(p, rows=size * p.rows)
    rows = (in_front(x, dim, size) for x, dim in zip(by_row, row_dims, strict=True))
    return call(many, *rows, *shared), 0


def shard(p: RowProblem) -> Sharding[Any]:
    """Returns a sharding that divides rows; each row, and each operand shared by all rows, is whole on one device."""

    def letters(shape: tuple[int, ...]) -> str:
        return "columns" if shape[-1] == p.columns else "halves"

    by_row, shared = p.apart([letters(s.shape) for s in p.operands()])
    results = [f"rows {letters(s.shape)}" if len(s.shape) > 1 else "rows" for s in p.results()]
    return Sharding(f"{', '.join([*(f'rows {x}' for x in by_row), *shared])} -> {', '.join(results)}", ("rows",))
