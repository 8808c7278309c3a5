"""A `dot_general` as a matrix product: its arrays read in other axes, and copied only where XLA copies them, too."""

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

from search_spaces.matmul.problem import PRECISIONS, MatmulProblem
from search_spaces.operation import Posed

Axes = tuple[int, ...]


def posed(
    a: Any,
    b: Any,
    *,
    dimension_numbers: lax.DotDimensionNumbers,
    precision: Any = None,
    preferred_element_type: Any = None,
    out_sharding: Any = None,
    stored: Sequence[Axes | None] = (None, None, None),
) -> Posed[MatmulProblem] | str:
    """The product that an equation of `jax.lax.dot_general` is, or why it is XLA's, in words.

    Axes of extent 1 lie anywhere. An array is read (or written) as it lies where those of the batch come first in it,
    and then the free ones and the contracted ones, one of these groups after the other. Of other arrays a transposed
    copy is made where XLA makes one before cuBLAS: where a group is interrupted or in another order, or the batch
    comes last. Where the batch lies between the other two, cuBLAS reads it there: that is left to XLA.

    Args:
      a, b: what has a shape and a dtype; the other arguments are the equation's parameters.
      stored: of `a`, `b` and the result, its axes in the order in which they lie in memory, as a transpose before or
        after the product tells; None is their own. The result of `Posed` is right whatever is said here.
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
        _Stored(shape, tuple(range(len(shape)) if order is None else order))
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


class _Stored(NamedTuple):
    """An array: its extents, and its axes in the order in which they lie in memory."""

    shape: tuple[int, ...]
    order: Axes

    def lying(self, axes: Iterable[int]) -> list[int]:
        """Those of `axes` with more than one element, as they lie in memory."""
        among = set(axes)
        return [axis for axis in self.order if axis in among and self.shape[axis] != 1]

    def wide(self, axes: Iterable[int]) -> list[int]:
        return [axis for axis in axes if self.shape[axis] != 1]


@dataclasses.dataclass(frozen=True)
class _Matrices:
    """An array as a batch of matrices.

    Attributes:
      order: its axes as they are to lie in memory.
      extents: of the batch, of rows and of columns.
      transposed: whether the columns come before the rows there.
      copied: how many elements that moves.
      library_reads: whether cuBLAS takes it where it lies.
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


def _matrices(x: _Stored, batch: Axes, rows: Axes, columns: Axes) -> _Matrices:
    lying = x.lying(range(len(x.shape)))
    straight, crossed = (batch, rows, columns), (batch, columns, rows)

    def lies(*groups: Axes) -> bool:
        return x.wide(itertools.chain(*groups)) == lying

    extents = tuple(math.prod(x.shape[axis] for axis in group) for group in straight)
    found = next((way for way in (straight, crossed) if lies(*way)), None)
    # A copy keeps the fastest axis where it can: whole lines are then moved.
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
) -> Posed[MatmulProblem] | str:
    batch, m, k = a.extents
    n = b.extents[2]
    swapped = c.transposed  # what lies as c^T is b^T a^T
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

    return Posed(problem, operands, restore)


def _unposed(a: Any, b: Any, precision: Any, out_sharding: Any) -> str | None:
    if out_sharding is not None:
        return "it says how its result is sharded"
    if a.dtype != b.dtype:
        return f"a is {a.dtype} and b is {b.dtype}; kernels take two of one dtype"
    if not all(isinstance(extent, int) for extent in (*a.shape, *b.shape)):
        return f"extents are symbols: {a.shape} and {b.shape}"
    if not all((*a.shape, *b.shape)):
        return f"an operand is empty: {a.shape} and {b.shape}"
    return None if _rounding(precision) else f"precision={precision} is not one of {', '.join(PRECISIONS)}"


def _rounding(precision: Any) -> str | None:
    """The `MatmulProblem.precision` of an equation's, in which the user's default has its place already."""
    if precision is None:
        return "default"
    both = precision if isinstance(precision, tuple | list) else (precision, precision)
    known = {lax.Precision(name): name for name in PRECISIONS}
    return known.get(both[0]) if both[0] == both[1] else None


def _orders(arrays: Sequence[_Stored], sides: Sequence[Sequence[int]]) -> list[Axes]:
    """In which orders a group of axes, which each array has as one of `sides`, lies in one of the arrays."""
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
