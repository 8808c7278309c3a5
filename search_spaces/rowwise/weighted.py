"""Problems on rows with a shared weight of the rows' dtype or float32, the common base of norms."""

from __future__ import annotations

import dataclasses
from typing import Any, Self

import jax
import jax.numpy as jnp

from search_spaces.rowwise.problem import DTYPES, RowProblem, matrix


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
