"""Say how wrong an answer is, or that it is right."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from search_spaces.kernel import Tolerance


def comparison(actual: jax.ShapeDtypeStruct, expected: jax.Array) -> Any:
    """What `mismatch` runs on arrays like these, compiled: for those who have a device to themselves only in turns."""
    return _compare.lower(actual, expected, 0.0, 0.0).compile()


def mismatch(
    actual: jax.Array, expected: jax.Array, tolerance: Tolerance, compare: Callable[..., Any] | None = None
) -> str | None:
    """None where every element of `actual` is within `tolerance` of `expected`, or a sentence about the worst one.

    Args:
      actual: the answer, of any dtype. NaN and infinity are never right where `expected` is finite.
      expected: the reference, of the same shape.
      compare: their `comparison`, where it was compiled before.
    """
    if actual.shape != expected.shape:
        return f"the shape is {actual.shape} instead of {expected.shape}"
    wrong, worst, got, wanted, allowed = (compare or _compare)(actual, expected, tolerance.absolute, tolerance.relative)
    if not int(wrong):
        return None
    index = tuple(int(i) for i in jnp.unravel_index(worst, actual.shape))
    nothing = " (as where nothing was written)" if math.isnan(float(got)) else ""
    return (
        f"{int(wrong)} of {actual.size} elements are off; the worst, at {index}, is {float(got):.6g}{nothing} "
        f"instead of {float(wanted):.6g} (allowed: {float(allowed):.2g})"
    )


@jax.jit
def _compare(
    actual: jax.Array, expected: jax.Array, absolute: float, relative: float
) -> tuple[jax.Array, jax.Array, jax.Array, jax.Array, jax.Array]:
    got, wanted = actual.astype(jnp.float32).ravel(), expected.astype(jnp.float32).ravel()
    allowed = absolute + relative * jnp.abs(wanted)
    # `not <=` rather than `>`: a comparison with NaN is false.
    wrong = ~(jnp.abs(got - wanted) <= allowed)
    excess = jnp.where(wrong, jnp.nan_to_num(jnp.abs(got - wanted) - allowed, nan=jnp.inf), -1.0)
    worst = jnp.argmax(excess)
    return wrong.sum(), worst, got[worst], wanted[worst], allowed[worst]
