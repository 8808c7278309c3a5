"""Derivative of a norm of a sum: the backward pass saves the sum, and nothing else of that size."""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from search_spaces.add_rms_norm.problem import AddRmsNormProblem
from search_spaces.rms_norm.problem import EPS


def jvp(call: Any, p: AddRmsNormProblem, primals: Any, tangents: Any) -> tuple[Any, Any]:
    """Returns results and tangents: that of the sum is the sum of tangents; that of the norm is XLA's, at the sum.

    The backward pass saves the sum and the weight, and computes the scales of rows again. It reads those rows anyway,
    while JAX would save two arrays of the same size, in float32.
    """
    *_, weight = primals
    dx, dresidual, dweight = tangents
    out, total = call(p, *primals)
    moving = [tangent for tangent in (dx, dresidual) if tangent is not None]
    dtotal = sum(moving[1:], moving[0]) if moving else None
    dout = functools.partial(_dout, eps=call.params.get("eps", EPS))
    # No earlier computation is the same, so common subexpressions need no protection.
    return (out, total), (jax.checkpoint(dout, prevent_cse=False)(total, weight, dtotal, dweight), dtotal)


def _dout(total: jax.Array, weight: jax.Array, dtotal: Any, dweight: Any, *, eps: float) -> jax.Array:
    """Returns the tangent of the norm.

    Scales are factored out of the sums. After transposition, both sums along a row then only depend on operands, and
    XLA computes them in one pass over the rows. In JAX's own derivative one sum contains scales, which take a pass
    before it.
    """
    wide, w = total.astype(jnp.float32), weight.astype(jnp.float32)
    scale = lax.rsqrt(jnp.mean(wide * wide, axis=-1, keepdims=True) + eps)
    parts = []
    if dtotal is not None:
        moves = dtotal.astype(jnp.float32)
        along = jnp.mean(wide * moves, axis=-1, keepdims=True)
        parts += [moves * w * scale, -(wide * w) * (scale**3 * along)]
    if dweight is not None:
        parts.append(wide * scale * dweight.astype(jnp.float32))
    return sum(parts[1:], parts[0]).astype(total.dtype)
