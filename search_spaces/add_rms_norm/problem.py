"""The sum with a residual and its root-mean-square norm as a problem: two row operands, and two results."""

from __future__ import annotations

import dataclasses
from typing import Any, ClassVar

import jax
import jax.numpy as jnp

from search_spaces.problem import Tolerance
from search_spaces.rms_norm.problem import EPS, rms_norm
from search_spaces.rowwise.weighted import WeightedRowProblem


@dataclasses.dataclass(frozen=True)
class AddRmsNormProblem(WeightedRowProblem):
    """``total = x + residual`` and ``out[row] = total[row] / sqrt(mean(total[row]^2) + eps) * weight``.

    Results are `out` and `total`. The sum is rounded to the dtype of `x`, and the norm of the rounded sum is computed
    in float32. Residual streams in JAX and PyTorch are written this way, as is vLLM's ``fused_add_rms_norm``.
    """

    row_operands: ClassVar[tuple[str, ...]] = ("x", "residual")

    def result(self) -> tuple[jax.ShapeDtypeStruct, ...]:  # type: ignore[override]
        rows = jax.ShapeDtypeStruct((self.rows, self.columns), jnp.dtype(self.dtype))
        return rows, rows

    @staticmethod
    def compute(*args: jax.Array, eps: float = EPS, **params: Any) -> tuple[jax.Array, jax.Array]:
        x, residual, weight = args
        total = x + residual
        return rms_norm(total, weight, eps), total

    @classmethod
    def compute_in(cls, dtype: Any, *args: jax.Array, eps: float = EPS, **params: Any) -> tuple[jax.Array, jax.Array]:
        x, residual, weight = args
        total = x.astype(dtype) + residual.astype(dtype)
        if jnp.issubdtype(x.dtype, jnp.floating):
            total = total.astype(x.dtype).astype(dtype)
        return rms_norm(total, weight.astype(dtype), eps), total

    @property
    def flops(self) -> float:
        return 5.0 * self.rows * self.columns

    def tolerance(self) -> tuple[Tolerance, Tolerance]:  # type: ignore[override]
        """Returns one rounding error for the sum; the norm may also be that of the sum before it is rounded.

        XLA omits that rounding if it fuses both (``xla_allow_excess_precision``), in the reference, too. It changes an
        element by half of eps, and the root of the mean by at most as much.
        """
        total = super().tolerance()
        half = float(jnp.finfo(jnp.dtype(self.dtype)).eps) / 2
        rounded_thrice = (1 + half) ** 2 / (1 - half) - 1
        return dataclasses.replace(total, relative=rounded_thrice + total.relative - 2 * half), total
