"""The root-mean-square norm with a weight as a problem."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from search_spaces.rowwise.problem import RowProblem, matrix

EPS = 1e-6


@dataclasses.dataclass(frozen=True)
class RmsNormProblem(RowProblem):
    """``out[row] = x[row] / sqrt(mean(x[row]^2) + eps) * weight`` (Zhang, Sennrich, arXiv:1910.07467)."""

    @classmethod
    def of(cls, x: Any, weight: Any) -> RmsNormProblem:  # type: ignore[override]
        """From ``x[rows, columns]`` and ``weight[columns]``."""
        rows, columns = matrix(x)
        if weight.shape != (columns,):
            raise ValueError(f"weight has shape {weight.shape}; rows of {columns} elements need ({columns},)")
        if weight.dtype != x.dtype:
            raise TypeError(f"x is {x.dtype} and weight is {weight.dtype}; one dtype is needed")
        return cls(rows=rows, columns=columns, dtype=str(x.dtype))

    def operands(self) -> tuple[jax.ShapeDtypeStruct, ...]:
        return self.result(), jax.ShapeDtypeStruct((self.columns,), jnp.dtype(self.dtype))

    @staticmethod
    def compute(*args: jax.Array, eps: float = EPS, **params: Any) -> jax.Array:
        x, weight = args
        return x * lax.rsqrt(jnp.mean(x * x, axis=-1, keepdims=True) + eps) * weight

    @property
    def flops(self) -> float:
        return 4.0 * self.rows * self.columns
