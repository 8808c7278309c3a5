"""SiLU of one half of each row times the other half as a problem."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp

from search_spaces.rowwise.problem import RowProblem, matrix


@dataclasses.dataclass(frozen=True)
class SiluAndMulProblem(RowProblem):
    """``out = silu(x[:, :columns]) * x[:, columns:]``, with ``silu(g) = g / (1 + exp(-g))``.

    The first half is the gate, as in FlashInfer's ``silu_and_mul``.
    """

    @classmethod
    def of(cls, x: Any, **params: Any) -> SiluAndMulProblem:
        """Returns the problem of ``x[rows, 2 * columns]``."""
        rows, columns = matrix(x)
        if columns % 2:
            raise ValueError(f"x has shape {x.shape}; a row is two halves, so its length is even")
        return cls(rows=rows, columns=columns // 2, dtype=str(x.dtype))

    def operands(self) -> tuple[jax.ShapeDtypeStruct, ...]:
        return (jax.ShapeDtypeStruct((self.rows, 2 * self.columns), jnp.dtype(self.dtype)),)

    @staticmethod
    def compute(*args: jax.Array, **params: Any) -> jax.Array:
        (x,) = args
        gate, up = x[..., : x.shape[-1] // 2], x[..., x.shape[-1] // 2 :]
        return jax.nn.silu(gate) * up

    @property
    def flops(self) -> float:
        return 5.0 * self.rows * self.columns
