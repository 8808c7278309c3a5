"""Softmax over the last axis as a problem."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp

from search_spaces.rowwise.problem import RowProblem


@dataclasses.dataclass(frozen=True)
class SoftmaxProblem(RowProblem):
    """``out[row] = exp(x[row] - max(x[row])) / sum(exp(x[row] - max(x[row])))``."""

    @staticmethod
    def compute(*args: jax.Array, **params: Any) -> jax.Array:
        (x,) = args
        if 0 in x.shape:
            return x
        e = jnp.exp(x - jnp.max(x, axis=-1, keepdims=True))
        return e / jnp.sum(e, axis=-1, keepdims=True)

    @property
    def flops(self) -> float:
        return 5.0 * self.rows * self.columns
