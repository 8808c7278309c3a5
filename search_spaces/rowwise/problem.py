"""Problems on rows: extents, dtype, tolerance and neighbour, independent of the formula."""

from __future__ import annotations

import abc
import dataclasses
from collections.abc import Sequence
from typing import Any, ClassVar, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
import numpy.typing as npt

from search_spaces.problem import Problem, TakeRows, Tolerance

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
