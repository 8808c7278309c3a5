"""The root-mean-square norm with a weight as a problem."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from search_spaces.rowwise.weighted import WeightedRowProblem

EPS = 1e-6


@dataclasses.dataclass(frozen=True)
class RmsNormProblem(WeightedRowProblem):
    """``out[row] = x[row] / sqrt(mean(x[row]^2) + eps) * weight`` (Zhang, Sennrich, arXiv:1910.07467)."""

    @staticmethod
    def compute(*args: jax.Array, eps: float = EPS, **params: Any) -> jax.Array:
        x, weight = args
        return rms_norm(x, weight, eps)

    @property
    def flops(self) -> float:
        return 4.0 * self.rows * self.columns


def rms_norm(x: jax.Array, weight: jax.Array, eps: float) -> jax.Array:
    """Computes the formula along the last axis, in the dtype of the operands."""
    return x * lax.rsqrt(jnp.mean(x * x, axis=-1, keepdims=True) + eps) * weight
