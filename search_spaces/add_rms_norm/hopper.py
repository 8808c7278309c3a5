"""The root-mean-square norm of a sum on Hopper: the sum is the row that is reduced, and a result."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp

from search_spaces.add_rms_norm.problem import AddRmsNormProblem
from search_spaces.rms_norm.hopper import RmsNorm
from search_spaces.rms_norm.problem import EPS
from search_spaces.rowwise.hopper.footprint import ElementCosts
from search_spaces.rowwise.hopper.kernel import HopperRows


class AddRmsNorm(RmsNorm):
    """That of ``x + residual``, rounded to their dtype."""

    returns_row = True

    def prologue(self, *operands: jax.Array) -> jax.Array:
        x, residual = operands
        return (x.astype(jnp.float32) + residual.astype(jnp.float32)).astype(x.dtype)


class HopperAddRmsNorm(HopperRows[AddRmsNormProblem]):
    version = 1
    verified_on = frozenset()
    costs = ElementCosts(mufu_ops=(0.0, 0.0), fp32_ops=(7.0, 9.0), widens=False)

    def reduction(self, problem: AddRmsNormProblem, *, eps: float = EPS, **params: Any) -> AddRmsNorm:
        return AddRmsNorm(problem.columns, eps)
