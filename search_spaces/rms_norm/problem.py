"""The root-mean-square norm with a weight as a problem."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from search_spaces.rowwise.problem import DTYPES, RowProblem, matrix

EPS = 1e-6


@dataclasses.dataclass(frozen=True)
class RmsNormProblem(RowProblem):
    """``out[row] = x[row] / sqrt(mean(x[row]^2) + eps) * weight`` (Zhang, Sennrich, arXiv:1910.07467).

    Attributes:
      weight_dtype: "float32", or "" for that of `x`.
    """

    weight_dtype: str = ""

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.weight_dtype not in ("", self.dtype, "float32"):
            raise ValueError(f"weight_dtype={self.weight_dtype!r} is neither {self.dtype}, as x is, nor float32")
        # One problem has one spelling, or a cache would hold it twice.
        if self.weight_dtype == self.dtype:
            object.__setattr__(self, "weight_dtype", "")

    @classmethod
    def takes(cls, *dtypes: str) -> bool:
        x, weight = dtypes
        return x in DTYPES and weight in (x, "float32")

    @classmethod
    def of(cls, x: Any, weight: Any) -> RmsNormProblem:  # type: ignore[override]
        """From ``x[rows, columns]`` and ``weight[columns]``."""
        rows, columns = matrix(x)
        if weight.shape != (columns,):
            raise ValueError(f"weight has shape {weight.shape}; rows of {columns} elements need ({columns},)")
        if not cls.takes(str(x.dtype), str(weight.dtype)):
            raise TypeError(
                f"x is {x.dtype} and weight is {weight.dtype}; x is one of {', '.join(DTYPES)}, "
                "and the weight of the same dtype or float32"
            )
        return cls(rows=rows, columns=columns, dtype=str(x.dtype), weight_dtype=str(weight.dtype))

    def operands(self) -> tuple[jax.ShapeDtypeStruct, ...]:
        return self.result(), jax.ShapeDtypeStruct((self.columns,), jnp.dtype(self.weight_dtype or self.dtype))

    @staticmethod
    def compute(*args: jax.Array, eps: float = EPS, **params: Any) -> jax.Array:
        x, weight = args
        return x * lax.rsqrt(jnp.mean(x * x, axis=-1, keepdims=True) + eps) * weight

    @property
    def flops(self) -> float:
        return 4.0 * self.rows * self.columns
