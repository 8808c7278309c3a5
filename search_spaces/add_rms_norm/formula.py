"""The root-mean-square norm of a sum as a reduction: the sum is the reduced row, and a result."""

from __future__ import annotations

import jax
import jax.numpy as jnp

from search_spaces.rms_norm.formula import RmsNorm


class AddRmsNorm(RmsNorm):
    """The norm of ``x + residual``, with the sum rounded to their dtype."""

    def prologue(self, *operands: jax.Array) -> jax.Array:
        x, residual = operands
        return (x.astype(jnp.float32) + residual.astype(jnp.float32)).astype(x.dtype)
