"""Softmax over the last axis and the log-sum-exp of each row as a problem: an operation with two results."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from search_spaces.problem import Tolerance
from search_spaces.rowwise.problem import RowProblem


@dataclasses.dataclass(frozen=True)
class SoftmaxWithLseProblem(RowProblem):
    """``lse[row] = log(sum(exp(x[row])))`` and ``p[row] = exp(x[row] - lse[row])``.

    `p` is ``[rows, columns]`` of the dtype of `x`, and `lse` is ``[rows]`` in float32, as attention saves it for its
    backward pass (Dao, arXiv:2307.08691, 3.1).
    """

    def operands(self) -> tuple[jax.ShapeDtypeStruct, ...]:
        return (jax.ShapeDtypeStruct((self.rows, self.columns), jnp.dtype(self.dtype)),)

    def result(self) -> tuple[jax.ShapeDtypeStruct, ...]:  # type: ignore[override]
        return (*self.operands(), jax.ShapeDtypeStruct((self.rows,), jnp.dtype(jnp.float32)))

    @property
    def row_axes(self) -> tuple[int, ...]:
        return -2, -1

    @staticmethod
    def compute(*args: jax.Array, **params: Any) -> Any:
        (x,) = args
        if 0 in x.shape:
            return x, jnp.full(x.shape[:-1], -jnp.inf, x.dtype)
        most = jnp.max(x, axis=-1, keepdims=True)
        # Minus infinity minus itself is NaN: the sum of such a row is 0, as in `jax.nn.logsumexp`.
        shift = lax.stop_gradient(jnp.where(jnp.isfinite(most), most, 0.0))
        e = jnp.exp(x - shift)
        total = jnp.sum(e, axis=-1, keepdims=True)
        # `jax.nn.softmax` of a row with an infinity is NaN throughout.
        p = jnp.where(most == jnp.inf, jnp.nan, e / total)
        return p, (shift + jnp.log(total))[..., 0]

    @property
    def flops(self) -> float:
        return 5.0 * self.rows * self.columns

    def tolerance(self) -> tuple[Tolerance, Tolerance]:  # type: ignore[override]
        """Returns the tolerances of `p` and of `lse`.

        That of `p` is the rows' own. `lse` is off by the relative error of its sum, absolutely, and by its rounding.
        """
        rows = super().tolerance()
        return rows, Tolerance(absolute=2.0**-18, relative=2.0**-22)
