"""The tangent of SiLU-and-mul as a problem."""

from __future__ import annotations

import dataclasses
from typing import Any, ClassVar

import jax
import jax.numpy as jnp

from search_spaces.rowwise.problem import RowProblem, matrix
from search_spaces.silu_and_mul_backward.problem import slopes


@dataclasses.dataclass(frozen=True)
class SiluAndMulJvpProblem(RowProblem):
    """The tangent of ``silu(gate) * up``: of the halves of ``x[rows, 2 * columns]``, with the tangents in `dx`."""

    row_operands: ClassVar[tuple[str, ...]] = ("x", "dx")

    @classmethod
    def of(cls, x: Any, dx: Any, **params: Any) -> SiluAndMulJvpProblem:  # type: ignore[override]
        """Returns the problem of two arrays ``[rows, 2 * columns]``."""
        rows, columns = matrix(x)
        if columns % 2 or (dx.shape, dx.dtype) != (x.shape, x.dtype):
            raise ValueError(
                f"x {x.dtype}{list(x.shape)} and dx {dx.dtype}{list(dx.shape)} are not alike, of two halves"
            )
        return cls(rows=rows, columns=columns // 2, dtype=str(x.dtype))

    def operands(self) -> tuple[jax.ShapeDtypeStruct, ...]:
        return (jax.ShapeDtypeStruct((self.rows, 2 * self.columns), jnp.dtype(self.dtype)),) * 2

    @staticmethod
    def compute(*args: jax.Array, **params: Any) -> jax.Array:
        (gate, up), (d_gate, d_up) = (jnp.split(x, 2, axis=-1) for x in args)
        of_gate, of_up = slopes(gate, up, jax.nn.sigmoid(gate))
        return d_gate * of_gate + d_up * of_up

    @property
    def flops(self) -> float:
        return 12.0 * self.rows * self.columns
