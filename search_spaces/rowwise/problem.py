"""Problems on rows, independent of the formula: extents, tolerance, neighbour, front end, batching and sharding."""

from __future__ import annotations

import abc
import dataclasses
import math
from collections.abc import Callable, Sequence
from typing import Any, ClassVar, Self, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
import numpy.typing as npt

from search_spaces.front_end import in_front, lead, require_array, unsupported_reason, weakly_typed
from search_spaces.operation import BoundCall, Unsupported
from search_spaces.problem import Problem, TakeRows, Tolerance, as_tuple
from search_spaces.sharding import Sharding

T = TypeVar("T")
DTYPES = ("bfloat16", "float16", "float32")


@dataclasses.dataclass(frozen=True)
class RowProblem(Problem):
    """``out[rows, columns]``, each row computed from the same row of ``x``, in float32.

    Attributes:
      row_operands: names of the operands that are rows, which come first; all rows share the others.
      rows, columns: extents of the result, at least 1.
      dtype: dtype of operands and result.
    """

    row_operands: ClassVar[tuple[str, ...]] = ("x",)

    rows: int
    columns: int
    dtype: str = "bfloat16"

    def __post_init__(self) -> None:
        self._spell_dtypes()
        for name in ("rows", "columns"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name}={getattr(self, name)} must be at least 1")
        self._require("dtype", DTYPES)
        super().__post_init__()

    @staticmethod
    @abc.abstractmethod
    def compute(*args: jax.Array, **params: Any) -> Any:
        """Computes the formula along the last axis, in the dtype of the operands."""

    @classmethod
    def compute_in(cls, dtype: Any, *args: jax.Array, **params: Any) -> Any:
        """Computes the formula in `dtype`, on operands of their own dtypes; results are not rounded yet."""
        return cls.compute(*(x.astype(dtype) for x in args), **params)

    @classmethod
    def takes(cls, *dtypes: str) -> bool:
        """Returns whether there are problems with operands of these dtypes."""
        return len(set(dtypes)) == 1 and set(dtypes) <= set(DTYPES)

    @classmethod
    def of(cls, x: Any, **params: Any) -> RowProblem:
        """Returns the problem of an operand ``[rows, columns]``."""
        rows, columns = matrix(x)
        return cls(rows=rows, columns=columns, dtype=str(x.dtype))

    def operands(self) -> tuple[jax.ShapeDtypeStruct, ...]:
        return (self.result(),)

    def result(self) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct((self.rows, self.columns), jnp.dtype(self.dtype))

    def reference(self, *args: jax.Array) -> Any:
        return self.compute_in(jnp.float32, *args)

    @property
    def itemsize(self) -> int:
        """Bytes of one element."""
        return int(jnp.dtype(self.dtype).itemsize)

    @property
    def row_bytes(self) -> int:
        """Bytes of one row of all operands that are rows."""
        return len(self.row_operands) * self.columns * self.itemsize

    @property
    def arithmetic(self) -> str:
        return "float32"

    def at_rows(self, rows: npt.NDArray[np.int32]) -> tuple[RowProblem, TakeRows]:
        def take(args: Sequence[jax.Array]) -> tuple[jax.Array, ...]:
            by_row, shared = self.apart(args)
            return *(jnp.take(x, rows, axis=0) for x in by_row), *shared

        return dataclasses.replace(self, rows=len(rows)), take

    @classmethod
    def apart(cls, args: Sequence[T]) -> tuple[Sequence[T], Sequence[T]]:
        """Splits values per operand into those of row operands, and those of operands that all rows share."""
        return args[: len(cls.row_operands)], args[len(cls.row_operands) :]

    def neighbour(self) -> RowProblem | None:
        """Returns fewer rows, and columns that still divide into the same vectors but not into the same chunks."""
        rows = (self.rows - 1) // 2 * 2 - 1 if self.rows > 8 else self.rows
        less = next((step for step in (256, 8) if self.columns > 4 * step), 0)
        below = dataclasses.replace(self, rows=rows, columns=self.columns - less)
        return None if below == self else below

    def tolerance(self) -> Tolerance:
        """Returns the rounding error of the result, plus 2^-18 for the float32 steps before it.

        These steps are sums of positive terms in a tree, with an error of about 2^-22, and exponentials by the hardware
        unit. ``ex2.approx`` is off by 2^-22 (PTX ISA). Its argument, with a magnitude below 32 where the result counts,
        is off by 2^-19. Values that the result's dtype cannot hold, or that are subnormal in float32, may become zero.
        """
        info = jnp.finfo(jnp.dtype(self.dtype))
        least = max(float(info.smallest_subnormal), float(np.finfo(np.float32).tiny))
        return Tolerance(absolute=least, relative=float(info.eps) + 2.0**-18)


def matrix(x: Any) -> tuple[int, int]:
    """Returns the two extents of `x`.

    Raises:
      ValueError: `x` has another number of axes.
    """
    if x.ndim != 2:
        raise ValueError(f"x has shape {x.shape}; [rows, columns] is needed: fold the leading axes into one")
    return x.shape[0], x.shape[1]


# ------------------------------------------------------------------------------
# Front end of row-wise operations: leading axes are rows; unsupported calls fall back to the formula.


def bind_elsewhere(x: Any, axis: int, answer: Callable[[], Any]) -> Unsupported | None:
    """Returns the unsupported call along an axis other than the last; None if `axis` is the last.

    Raises:
      TypeError: `x` is no array, or an array of booleans.
    """
    require_array("x", x)
    if jnp.issubdtype(jnp.result_type(x), jnp.bool_):
        raise TypeError("x holds truth values, of which there is no softmax: use .astype")
    if axis in (-1, jnp.ndim(x) - 1):
        return None
    return Unsupported(f"{axis=} is not the last one of x {jnp.shape(x)}", answer)


def bind_rows(problem: type[RowProblem], *arrays: Any, **params: Any) -> BoundCall[Any] | Unsupported:
    """Binds a row-wise operation on ``x[..., columns]``, other row operands of the same shape, and shared operands."""
    posed = _problem(problem, *arrays)
    if isinstance(posed, str):
        return Unsupported(posed, lambda: formula(problem, *arrays, **params))
    by_row, shared = problem.apart(arrays)
    leading, columns = by_row[0].shape[:-1], by_row[0].shape[-1]
    shapes = [(*leading, *s.shape[1:]) for s in posed.results()]

    def restore(*results: jax.Array) -> Any:
        return posed.pack([out.reshape(shape) for out, shape in zip(results, shapes, strict=True)])

    rows = [x.reshape(*lead(leading), columns) for x in by_row]
    return BoundCall(posed, (*rows, *shared), restore, tuple(params.items()))


def formula(problem: type[RowProblem], *arrays: Any, **params: Any) -> Any:
    """Computes the formula in the dtype that `formula_dtype` returns.

    Rows have the dtype of the first array, if that is inexact. A result that is a statistic of each row is not rounded.
    """
    arrays = tuple(jnp.asarray(x) for x in arrays)
    computed = formula_dtype(*arrays)
    out = problem.compute_in(computed, *arrays, **params)
    dtype = arrays[0].dtype if jnp.issubdtype(arrays[0].dtype, jnp.inexact) else computed
    results = [x.astype(dtype) if x.ndim == arrays[0].ndim else x for x in as_tuple(out)]
    return tuple(results) if isinstance(out, tuple) else results[0]


def formula_dtype(*arrays: jax.Array) -> jnp.dtype[Any]:
    """Returns float32, or a wider or complex dtype among the arrays; integers count as JAX's default float."""
    found = jnp.dtype(jnp.float32)
    for x in arrays:
        dtype = x.dtype if jnp.issubdtype(x.dtype, jnp.inexact) else jnp.result_type(float)
        if dtype.itemsize > 1:  # JAX has no implicit promotion of 8-bit dtypes
            found = jnp.promote_types(found, dtype)
    return found


def _problem(problem: type[RowProblem], *arrays: Any) -> RowProblem | str:
    """Returns the problem of all rows, or the reason why there is none."""
    by_row, shared = problem.apart(arrays)
    if reason := unsupported_reason(dict(zip((*problem.row_operands, "weight"), arrays, strict=False))):
        return reason
    x = by_row[0]
    if not x.ndim:
        return "x is a scalar"
    if reason := weakly_typed(*arrays):
        return reason
    try:
        folded = (math.prod(x.shape[:-1]), x.shape[-1])
        return problem.of(*(jax.ShapeDtypeStruct(folded, x.dtype) for x in by_row), *shared)
    except (TypeError, ValueError) as error:
        return str(error)


# ------------------------------------------------------------------------------
# Problems on rows with a shared weight of the rows' dtype or float32, the common base of norms.


@dataclasses.dataclass(frozen=True)
class WeightedRowProblem(RowProblem):
    """Operands are rows of one dtype, and ``weight[columns]``.

    Attributes:
      weight_dtype: "float32", or "" for that of `x`.
    """

    weight_dtype: str = ""

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.weight_dtype not in ("", self.dtype, "float32"):
            raise ValueError(f"weight_dtype={self.weight_dtype!r} is neither {self.dtype}, as x is, nor float32")
        # Two names for one problem would be two cache keys.
        if self.weight_dtype == self.dtype:
            object.__setattr__(self, "weight_dtype", "")

    @classmethod
    def takes(cls, *dtypes: str) -> bool:
        (x, *others), (weight,) = cls.apart(dtypes)
        return x in DTYPES and all(other == x for other in others) and weight in (x, "float32")

    @classmethod
    def of(cls, *arrays: Any) -> Self:  # type: ignore[override]
        """Returns the problem of rows, ``[rows, columns]`` each, and ``weight[columns]``."""
        by_row, (weight,) = cls.apart(arrays)
        x, *others = by_row
        rows, columns = matrix(x)
        for name, other in zip(cls.row_operands[1:], others, strict=True):
            if other.shape != x.shape:
                raise ValueError(f"{name} has shape {other.shape}, and x {x.shape}: they need the same")
        if weight.shape != (columns,):
            raise ValueError(f"weight has shape {weight.shape}; rows of {columns} elements need ({columns},)")
        if not cls.takes(*(str(array.dtype) for array in arrays)):
            found = [f"{name} is {array.dtype}" for name, array in zip(cls.row_operands, by_row, strict=True)]
            others_want = "".join(f"{name} of the same dtype, " for name in cls.row_operands[1:])
            raise TypeError(
                f"{', '.join(found)} and weight is {weight.dtype}; x is one of {', '.join(DTYPES)}, "
                f"{others_want}and the weight of the same dtype or float32"
            )
        return cls(rows=rows, columns=columns, dtype=str(x.dtype), weight_dtype=str(weight.dtype))

    def operands(self) -> tuple[jax.ShapeDtypeStruct, ...]:
        rows = jax.ShapeDtypeStruct((self.rows, self.columns), jnp.dtype(self.dtype))
        weight = jax.ShapeDtypeStruct((self.columns,), jnp.dtype(self.weight_dtype or self.dtype))
        return *(rows for _ in self.row_operands), weight


# ------------------------------------------------------------------------------
# Batching and sharding of row-wise operations: a batch axis becomes more rows, and devices divide the rows.

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
