"""The matrix product: ``MATMUL``, its problem and its kernels."""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections.abc import Iterable, Sequence
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from search_spaces import jax_compat
from search_spaces.front_end import lead, unsupported_reason, weakly_typed
from search_spaces.matmul import problem, rules, xla
from search_spaces.matmul.problem import PRECISIONS, MatmulProblem, Operands
from search_spaces.matmul.xla import XlaMatmul
from search_spaces.operation import BoundCall, KernelName, Kernels, MatchedEquation, Operation, Unsupported
from search_spaces.problem import Arrays

# ------------------------------------------------------------------------------
# The user-facing matmul call: leading axes become part of m, n or the batch; unsupported calls go to XLA.


def bind(
    a: Any,
    b: Any,
    *follows: Any,
    transpose_a: bool = False,
    transpose_b: bool = False,
    precision: Any = None,
    preferred_element_type: Any = None,
    out_dtype: Any = None,
    bias: Any = None,
    activation: Any = None,
    residual: Any = None,
    split_sizes: Sequence[int] | str | None = None,
) -> BoundCall[MatmulProblem] | Unsupported:
    """Binds a call of `scheduler.tuned_matmul` to a problem; the arguments are those of the call.

    Args:
      follows: a bias, a residual or both, as `MatmulProblem.of` takes them. All operands then have the axes of the
        problem.
      out_dtype: the problem's name for `preferred_element_type`.
    """
    wanted = out_dtype if preferred_element_type is None else preferred_element_type
    several = "" if split_sizes is None else problem.format_sizes(split_sizes)
    sizes = None if split_sizes is None else problem.split_numbers(several)
    if sizes is not None and residual is not None:
        raise ValueError("residual and split_sizes exclude each other: add it to the results, which are several")
    if follows:
        how = {
            "transpose_a": transpose_a,
            "transpose_b": transpose_b,
            "out_dtype": wanted or "",
            "activation": activation,
            "split_sizes": several,
        }
        p = MatmulProblem.of(a, b, *follows, precision=rounding(precision) or precision, **how)
        return BoundCall(p, (a, b, *follows))
    if wanted is None and isinstance(a, jax.Array) and isinstance(b, jax.Array):
        jnp.result_type(a, b)  # Raises if `jax.numpy_dtype_promotion` forbids the mixture.
    operands = Operands(a, b, bias, residual)
    posed = _problem(operands, transpose_a, transpose_b, precision, wanted, activation, several)
    if isinstance(posed, str):

        def answer() -> Arrays:
            swapped = operands._replace(a=_swapped(a, transpose_a, "a"), b=_swapped(b, transpose_b, "b"))
            c = xla.matmul(swapped, precision=precision, preferred_element_type=wanted, activation=activation)
            return c if sizes is None else _cut(c, sizes, b)

        return Unsupported(posed, answer)
    return _of_leading_axes(posed, operands)


def _cut(c: jax.Array, sizes: tuple[int, ...], b: jax.Array) -> tuple[jax.Array, ...]:
    if b.ndim == 1:
        raise ValueError(f"split_sizes={problem.format_sizes(sizes)} wants columns, which a b of one axis has not")
    problem.check_split(sizes, c.shape[-1])
    return problem.cut_columns(c, sizes)


def _problem(
    operands: Operands,
    transpose_a: bool,
    transpose_b: bool,
    precision: Any,
    out_dtype: Any,
    activation: Any,
    split_sizes: str,
) -> MatmulProblem | str:
    """Returns the problem of one matrix of each operand, or the reason why there is none.

    Calls that `jnp.matmul` rejects also return a reason.
    """
    a, b, bias, residual = operands
    given = {name: x for name, x in operands._asdict().items() if x is not None}
    if reason := unsupported_reason({"a": a, "b": b} | given):
        return reason
    if not (a.ndim and b.ndim) or (transpose_a and a.ndim == 1) or (transpose_b and b.ndim == 1):
        return f"a {a.shape} and b {b.shape} have too few axes"
    if a.dtype != b.dtype:
        return f"a is {a.dtype} and b is {b.dtype}; kernels take two of one dtype"
    if reason := weakly_typed(a, b):
        return reason
    if (asked := rounding(precision)) is None:
        return f"precision={_asked(precision)!r} is not default, high or highest"
    m, k = (1, *a.shape)[-2:][:: -1 if transpose_a else 1]
    k_of_b, n = (*b.shape, 1) if b.ndim == 1 else b.shape[-2:][:: -1 if transpose_b else 1]
    if k != k_of_b:
        return f"a {a.shape} and b {b.shape} do not multiply"
    try:
        result = _result_shape(a, b, m, n)
        for name, (x, shape) in operands.added(result).items():
            if x.shape != shape:
                return f"{name} has shape {x.shape} where {shape} is wanted"
        return MatmulProblem(
            m=m,
            n=n,
            k=k,
            dtype=str(a.dtype),
            out_dtype=str(a.dtype if out_dtype is None else jnp.dtype(out_dtype)),
            transpose_a=transpose_a,
            transpose_b=transpose_b,
            precision=asked,
            bias="" if bias is None else str(bias.dtype),
            activation=activation or "",
            residual="" if residual is None else str(residual.dtype),
            split_sizes=split_sizes,
        )
    except ValueError as error:
        return str(error)


def _of_leading_axes(p: MatmulProblem, operands: Operands) -> BoundCall[MatmulProblem]:
    """Extends `p`, the problem of one matrix of each operand, to all leading axes."""
    a, b, bias, residual = operands
    shape = _result_shape(a, b, p.m, p.n)
    whole = np.broadcast_shapes(a.shape[:-2], b.shape[:-2])
    sizes = lead(whole)
    matrices = p.named([s.shape for s in p.operands()])
    many_a, many_b = math.prod(a.shape[:-2]) > 1, math.prod(b.shape[:-2]) > 1
    if many_a and many_b:
        a, b = jnp.broadcast_to(a, (*whole, *matrices.a)), jnp.broadcast_to(b, (*whole, *matrices.b))
    many = Operands(many_a, many_b, bias=False, residual=many_a or many_b)
    given = [
        (x.reshape((*sizes, *matrix) if is_many else matrix), is_many)
        for x, matrix, is_many in zip((a, b, bias, residual), matrices, many, strict=True)
        if x is not None
    ]
    args, mapped = zip(*given, strict=True)

    def shaped(*results: jax.Array) -> Arrays:
        if not p.split_sizes:
            return results[0].reshape(shape)
        return tuple(c.reshape(*shape[:-1], n) for c, n in zip(results, p.columns, strict=True))

    if not any(many):
        return BoundCall(p, args, shaped)
    wider = rules.widened(p, args, mapped, sizes)
    places = range(wider.dim, wider.dim + len(sizes))

    def in_front(c: jax.Array) -> jax.Array:
        return jnp.moveaxis(wider.split(c), places, range(len(sizes)))

    return BoundCall(wider.problem, wider.operands, lambda *results: shaped(*map(in_front, results)))


def _result_shape(a: jax.Array, b: jax.Array, m: int, n: int) -> tuple[int, ...]:
    """Returns the shape of ``jnp.matmul(a, b)``; raises ValueError if leading axes do not broadcast."""
    lead = np.broadcast_shapes(a.shape[:-2], b.shape[:-2])
    return *lead, *(() if a.ndim == 1 else (m,)), *(() if b.ndim == 1 else (n,))


def _swapped(x: Any, transpose: bool, name: str) -> Any:
    if not transpose:
        return x
    if jnp.ndim(x) < 2:
        raise ValueError(f"transpose_{name} needs an operand of at least 2 axes, and {name} has shape {jnp.shape(x)}")
    return jnp.swapaxes(x, -1, -2)


_ROUNDINGS: dict[lax.Precision, Literal["default", "high", "highest"]] = {
    lax.Precision.DEFAULT: "default",
    lax.Precision.HIGH: "high",
    lax.Precision.HIGHEST: "highest",
}


def rounding(precision: Any) -> Literal["default", "high", "highest"] | None:
    """Converts a precision of `jnp.matmul` to `MatmulProblem.precision`, or to None if only XLA supports it."""
    precision = _asked(precision)
    if isinstance(precision, tuple | list) and len(precision) == 2 and precision[0] == precision[1]:
        precision = precision[0]
    if not isinstance(precision, str | lax.Precision):
        return None
    try:
        return _ROUNDINGS[lax.Precision(precision)]
    except (ValueError, TypeError):
        return None


def _asked(precision: Any) -> Any:
    """Returns the precision of a call, or JAX's configured default if the call has none."""
    config: Any = jax.config  # these options are not attributes for a type checker in 0.10
    return (config.jax_default_matmul_precision or "default") if precision is None else precision


# ------------------------------------------------------------------------------
# Converts a `dot_general` to a matmul problem, copying arrays only where XLA copies them too.

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
    return _product(x, y, z, a.dtype, preferred_element_type, rounding(precision or "default") or "")


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
    return None if rounding(precision or "default") else f"precision={precision} is not one of {', '.join(PRECISIONS)}"


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


MATMUL = Operation(
    name="matmul",
    problem=MatmulProblem,
    kernels=Kernels(
        KernelName("mosaic_gpu", "cuda", "search_spaces.matmul.hopper:MosaicGpuMatmul"),
        KernelName("mosaic_gpu_bf16_3x", "cuda", "search_spaces.matmul.hopper:MosaicGpuBf16x3Matmul"),
        KernelName("mosaic_gpu_mma", "cuda", "search_spaces.matmul.mma:MosaicGpuMmaMatmul"),
        KernelName("jax_blackwell", "cuda", "search_spaces.contrib.jax_blackwell:JaxBlackwellMatmul"),
        KernelName("mosaic_tpu", "tpu", "search_spaces.contrib.tpu.matmul:MosaicTpuMatmul"),
        KernelName("interpret", "cpu", "search_spaces.matmul.interpret:InterpretMatmul"),
        XlaMatmul(),
    ),
    jvp=rules.jvp,
    transpose=rules.transpose,
    batch=rules.batch,
    front_end=bind,
    equations={lax.dot_general_p: problem_of_dot_general},
    shard=rules.shard,
)

__all__ = ["MATMUL", "MatmulProblem"]
