"""Converts equations of `jax.lax.dot_general` to matmuls, copying arrays only where XLA copies them too."""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from search_spaces import jax_compat
from search_spaces.matmul.problem import PRECISIONS, MatmulProblem, rounding
from search_spaces.operation import MatchedEquation

Axes = tuple[int, ...]


def problem_of_dot_general(
    a: Any,
    b: Any,
    *,
    dimension_numbers: lax.DotDimensionNumbers,
    precision: Any = None,
    preferred_element_type: Any = None,
    out_sharding: Any = None,
    stored: Sequence[Axes | None] = (None, None, None),
) -> MatchedEquation[MatmulProblem] | str:
    """Returns the matmul that a `jax.lax.dot_general` equation computes, or the reason why XLA computes it.

    Axes of extent 1 may lie anywhere. An array is read (or written) in place if its batch axes come first, followed by
    the free axes and the contracted axes as two contiguous groups. Other arrays are copied transposed where XLA makes a
    copy before calling cuBLAS: where a group is interrupted or in another order, or where the batch comes last. If the
    batch lies between the other two groups, cuBLAS reads the array in place, so XLA computes that product.

    Args:
      a, b: objects with a shape and a dtype. The keyword arguments up to `out_sharding` are the equation's parameters.
      stored: for each of `a`, `b` and the result, its axes in memory order, as a transpose before or after the product
        implies; None means the array's own order. It affects which copies are made, not the correctness of the result.
    """
    if reason := _unposed(a, b, precision, out_sharding):
        return reason
    (contract_a, contract_b), (batch_a, batch_b) = dimension_numbers
    free_a, free_b = _others(a.ndim, contract_a, batch_a), _others(b.ndim, contract_b, batch_b)
    leading = len(batch_a)
    batch_c, rows_c = tuple(range(leading)), tuple(range(leading, leading + len(free_a)))
    columns_c = tuple(range(leading + len(free_a), leading + len(free_a) + len(free_b)))
    result = (*(a.shape[i] for i in (*batch_a, *free_a)), *(b.shape[i] for i in free_b))
    arrays = [
        _StoredArray(shape, tuple(range(len(shape)) if order is None else order))
        for shape, order in zip((a.shape, b.shape, result), stored, strict=True)
    ]
    (of_rows,), (of_columns,) = _orders(arrays[2:], [rows_c]), _orders(arrays[2:], [columns_c])

    def matrices(of_batch: Axes, of_contraction: Axes) -> tuple[_Matrices, ...]:
        m_a, m_c, n_b, n_c = *_each(of_rows, free_a, rows_c), *_each(of_columns, free_b, columns_c)
        k_a, k_b = _each(of_contraction, contract_a, contract_b)
        groups = zip(_each(of_batch, batch_a, batch_b, batch_c), (m_a, k_b, m_c), (k_a, n_b, n_c), strict=True)
        return tuple(_matrices(x, *each) for x, each in zip(arrays, groups, strict=True))

    batches = _orders(arrays, [batch_a, batch_b, batch_c])
    contractions = _orders(arrays[:2], [contract_a, contract_b])
    ways = [matrices(*each) for each in itertools.product(batches, contractions)]
    x, y, z = min(ways, key=lambda way: sum(each.copied for each in way))
    if any(each.copied and each.library_reads for each in (x, y, z)):
        return f"the batch lies between the other axes of {dimension_numbers}, where cuBLAS takes it without a copy"
    return _product(x, y, z, a.dtype, preferred_element_type, _rounding(precision) or "")


class _StoredArray(NamedTuple):
    """The extents of an array, and its axes in memory order."""

    shape: tuple[int, ...]
    order: Axes

    def lying(self, axes: Iterable[int]) -> list[int]:
        """Returns the given axes with more than one element, in memory order."""
        among = set(axes)
        return [axis for axis in self.order if axis in among and self.shape[axis] != 1]

    def wide(self, axes: Iterable[int]) -> list[int]:
        return [axis for axis in axes if self.shape[axis] != 1]


@dataclasses.dataclass(frozen=True)
class _Matrices:
    """An array viewed as a batch of matrices.

    Attributes:
      order: its axes in the required memory order.
      extents: of the batch, of rows and of columns.
      transposed: whether the columns come before the rows in `order`.
      copied: number of elements copied to reach `order`.
      library_reads: whether cuBLAS reads the array in place.
    """

    shape: tuple[int, ...]
    order: Axes
    extents: tuple[int, int, int]
    transposed: bool
    copied: int
    library_reads: bool

    @property
    def stored(self) -> tuple[int, ...]:
        return tuple(self.shape[axis] for axis in self.order)


def _matrices(x: _StoredArray, batch: Axes, rows: Axes, columns: Axes) -> _Matrices:
    lying = x.lying(range(len(x.shape)))
    straight, crossed = (batch, rows, columns), (batch, columns, rows)

    def lies(*groups: Axes) -> bool:
        return x.wide(itertools.chain(*groups)) == lying

    extents = tuple(math.prod(x.shape[axis] for axis in group) for group in straight)
    found = next((way for way in (straight, crossed) if lies(*way)), None)
    # A copy keeps the fastest axis if possible, so that whole lines are moved.
    wanted = found or (crossed if lying[-1] in rows else straight)
    between = lies(rows, batch, columns) or lies(columns, batch, rows)
    return _Matrices(
        shape=x.shape,
        order=x.order if found else tuple(itertools.chain(*wanted)),
        extents=(extents[0], extents[1], extents[2]),
        transposed=wanted is crossed,
        copied=0 if found else math.prod(x.shape),
        library_reads=between,
    )


def _product(
    a: _Matrices, b: _Matrices, c: _Matrices, dtype: Any, out_dtype: Any, precision: str
) -> MatchedEquation[MatmulProblem] | str:
    batch, m, k = a.extents
    n = b.extents[2]
    swapped = c.transposed  # c^T = b^T a^T
    try:
        problem = MatmulProblem(
            m=n if swapped else m,
            n=m if swapped else n,
            k=k,
            batch=batch,
            dtype=str(dtype),
            out_dtype=str(jnp.dtype(dtype if out_dtype is None else out_dtype)),
            transpose_a=not b.transposed if swapped else a.transposed,
            transpose_b=not a.transposed if swapped else b.transposed,
            precision=precision,
        )
    except ValueError as error:
        return str(error)
    back = tuple(int(axis) for axis in np.argsort(c.order))

    def operands(x: jax.Array, y: jax.Array) -> tuple[jax.Array, ...]:
        both = [lax.transpose(each, way.order) for each, way in ((x, a), (y, b))]
        shapes = [s.shape for s in problem.operands()]
        return tuple(each.reshape(shape) for each, shape in zip(both[:: -1 if swapped else 1], shapes, strict=True))

    def restore(result: jax.Array) -> tuple[jax.Array]:
        return (lax.transpose(result.reshape(c.stored), back),)

    return MatchedEquation(problem, operands, restore)


def _unposed(a: Any, b: Any, precision: Any, out_sharding: Any) -> str | None:
    if jax_compat.names_sharding(out_sharding):
        return "it says how its result is sharded"
    if a.dtype != b.dtype:
        return f"a is {a.dtype} and b is {b.dtype}; kernels take two of one dtype"
    if not all(isinstance(extent, int) for extent in (*a.shape, *b.shape)):
        return f"extents are symbols: {a.shape} and {b.shape}"
    if not all((*a.shape, *b.shape)):
        return f"an operand is empty: {a.shape} and {b.shape}"
    return None if _rounding(precision) else f"precision={precision} is not one of {', '.join(PRECISIONS)}"


def _rounding(precision: Any) -> str | None:
    return rounding("default" if precision is None else precision)  # JAX has applied the configured default


def _orders(arrays: Sequence[_StoredArray], sides: Sequence[Sequence[int]]) -> list[Axes]:
    """Returns the distinct memory orders of a group of axes; `sides` names the group's axes in each array."""
    return list(
        dict.fromkeys(
            tuple(sorted(range(len(side)), key=lambda i: x.order.index(side[i])))
            for x, side in zip(arrays, sides, strict=True)
        )
    )


def _each(order: Axes, *sides: Sequence[int]) -> tuple[Axes, ...]:
    return tuple(tuple(side[i] for i in order) for side in sides)


def _others(ndim: int, *taken: Sequence[int]) -> Axes:
    return tuple(axis for axis in range(ndim) if axis not in set(itertools.chain(*taken)))
