"""How a norm of a sum differentiates: the sum is kept for the backward pass, and nothing else that is as large."""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from search_spaces.add_rms_norm.problem import AddRmsNormProblem
from search_spaces.rms_norm.problem import EPS


def jvp(call: Any, p: AddRmsNormProblem, primals: Any, tangents: Any) -> tuple[Any, Any]:
    """The tangent of the sum is the sum of tangents; that of the norm is by XLA, at the sum.

    A backward pass keeps the sum and the weight, and computes the scales of rows again: it reads those rows anyway, and
    what JAX would keep of the formula is as large, twice over, and in float32.
    """
    *_, weight = primals
    dx, dresidual, dweight = tangents
    out, total = call(p, *primals)
    moving = [tangent for tangent in (dx, dresidual) if tangent is not None]
    dtotal = sum(moving[1:], moving[0]) if moving else None
    dout = functools.partial(_dout, eps=call.params.get("eps", EPS))
    # Nothing before it computes the same, so there is nothing to keep XLA from.
    return (out, total), (jax.checkpoint(dout, prevent_cse=False)(total, weight, dtotal, dweight), dtotal)


def _dout(total: jax.Array, weight: jax.Array, dtotal: Any, dweight: Any, *, eps: float) -> jax.Array:
    """The tangent of the norm.

    Scales are factored out of what is summed: transposed, both sums along a row are then of operands alone, and XLA
    takes them in one pass over the rows. In JAX's own derivative one has scales in it, which then take a pass before.
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
