"""The gradient of SiLU-and-mul as a problem."""

from __future__ import annotations

import dataclasses
from typing import Any, ClassVar

import jax
import jax.numpy as jnp

from search_spaces.problem import Tolerance
from search_spaces.rowwise.problem import RowProblem, matrix


@dataclasses.dataclass(frozen=True)
class SiluAndMulBackwardProblem(RowProblem):
    """The cotangent of ``x[rows, 2 * columns]``, with the gate as first half, given the result's cotangent `d_out`.

    The halves of the cotangent are ``d_out * up * silu'(gate)`` and ``d_out * silu(gate)``, in the order of `x`.
    """

    row_operands: ClassVar[tuple[str, ...]] = ("x", "d_out")

    @classmethod
    def of(cls, x: Any, d_out: Any, **params: Any) -> SiluAndMulBackwardProblem:  # type: ignore[override]
        """Returns the problem of ``x[rows, 2 * columns]`` and ``d_out[rows, columns]``."""
        rows, columns = matrix(d_out)
        if x.shape != (rows, 2 * columns) or x.dtype != d_out.dtype:
            raise ValueError(f"x {x.dtype}{list(x.shape)} is not two of d_out {d_out.dtype}{list(d_out.shape)}")
        return cls(rows=rows, columns=columns, dtype=str(d_out.dtype))

    def operands(self) -> tuple[jax.ShapeDtypeStruct, ...]:
        return self.result(), jax.ShapeDtypeStruct((self.rows, self.columns), jnp.dtype(self.dtype))

    def result(self) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct((self.rows, 2 * self.columns), jnp.dtype(self.dtype))

    @staticmethod
    def compute(*args: jax.Array, **params: Any) -> jax.Array:
        x, d_out = args
        gate, up = jnp.split(x, 2, axis=-1)
        return jnp.concatenate([d_out * slope for slope in slopes(gate, up, jax.nn.sigmoid(gate))], axis=-1)

    @property
    def library_bytes_moved(self) -> float:
        """Includes XLA's separate writes of both halves, and another read and write to join them."""
        return self.bytes_moved + 2 * 2.0 * self.rows * self.columns * self.itemsize

    @property
    def row_bytes(self) -> int:
        return 3 * self.columns * self.itemsize

    @property
    def flops(self) -> float:
        return 11.0 * self.rows * self.columns

    def tolerance(self) -> Tolerance:
        """Returns a tolerance for the cancellation where ``silu'`` is near zero: 2^-19 relative, times about 6 x 6."""
        exact = super().tolerance()
        return Tolerance(absolute=2.0**-13, relative=exact.relative)


def slopes(gate: jax.Array, up: jax.Array, sigmoid: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Returns the derivatives of ``silu(gate) * up`` in both: ``silu' = s + silu (1 - s)``, with the sigmoid s."""
    active = gate * sigmoid
    return up * (sigmoid + active * (1 - sigmoid)), active
