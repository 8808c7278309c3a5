"""Say how wrong an answer is, or that it is right."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import numpy.typing as npt

from search_spaces.kernel import Problem, Tolerance

# A result of more elements is compared with the reference of so many of them, 512 MiB of float32, in so many rows.
MOST_COMPARED = 2**27
MOST_ROWS = 2**20

Rows = npt.NDArray[np.int32]


def compared_rows(problem: Problem) -> Rows | None:
    """Which rows of the result are compared with the reference, in ascending order; None for all of them.

    One of each run of rows of equal length, at random: a tile with as many rows as a run has is looked at in each of
    its columns. The first and the last are always among them.
    """
    shape = problem.result().shape
    size = math.prod(shape)
    if size <= MOST_COMPARED or len(shape) < 2:
        return None
    rows = shape[-2]
    count = min(max(2, MOST_COMPARED // (size // rows)), MOST_ROWS)
    if count >= rows:
        return None
    edges = np.linspace(0, rows, count + 1).astype(np.int32)
    drawn = np.random.default_rng(0).integers(edges[:-1], edges[1:]).astype(np.int32)
    drawn[0], drawn[-1] = 0, rows - 1
    return None if problem.at_rows(drawn) is None else drawn


def comparison(actual: jax.ShapeDtypeStruct, expected: jax.Array, rows: Rows | None = None) -> Any:
    """What `mismatch` runs on arrays like these, compiled: for those who have a device to themselves only in turns."""
    return _compare.lower(actual, expected, rows, 0.0, 0.0).compile()


def mismatch(
    actual: jax.Array,
    expected: jax.Array,
    tolerance: Tolerance,
    rows: Rows | None = None,
    compare: Callable[..., Any] | None = None,
) -> str | None:
    """None where every element of `actual` is within `tolerance` of `expected`, or a sentence about the worst one.

    Args:
      actual: the answer, of any dtype. NaN and infinity are never right where `expected` is finite.
      expected: the reference, of the same shape; of those `rows` alone, where they are given: of the others it is only
        asked whether they were written.
      rows: along the last axis but one.
      compare: their `comparison`, where it was compiled before.
    """
    wanted = actual.shape if rows is None else (*actual.shape[:-2], len(rows), actual.shape[-1])
    if wanted != expected.shape:
        return f"the shape is {wanted} instead of {expected.shape}"
    wrong, worst, got, right, allowed, unwritten = (compare or _compare)(
        actual, expected, rows, tolerance.absolute, tolerance.relative
    )
    if int(wrong):
        index = [int(i) for i in np.unravel_index(int(worst), expected.shape)]
        if rows is not None:
            index[-2] = int(rows[index[-2]])
        nothing = " (as where nothing was written)" if math.isnan(float(got)) else ""
        return (
            f"{int(wrong)} of {expected.size} elements are off; the worst, at {tuple(index)}, is {float(got):.6g}"
            f"{nothing} instead of {float(right):.6g} (allowed: {float(allowed):.2g})"
        )
    if int(unwritten):
        return f"{int(unwritten)} of {actual.shape[-2]} rows hold elements that are NaN, as where nothing was written"
    return None


@jax.jit
def _compare(
    actual: jax.Array, expected: jax.Array, rows: jax.Array | None, absolute: float, relative: float
) -> tuple[jax.Array, ...]:
    compared = actual if rows is None else jnp.take(actual, rows, axis=-2)
    got, wanted = compared.astype(jnp.float32).ravel(), expected.astype(jnp.float32).ravel()
    allowed = absolute + relative * jnp.abs(wanted)
    # `not <=` rather than `>`: a comparison with NaN is false.
    wrong = ~(jnp.abs(got - wanted) <= allowed)
    excess = jnp.where(wrong, jnp.nan_to_num(jnp.abs(got - wanted) - allowed, nan=jnp.inf), -1.0)
    worst = jnp.argmax(excess)
    unwritten = jnp.int32(0)
    if rows is not None and jnp.issubdtype(actual.dtype, jnp.inexact):
        axes = tuple(axis for axis in range(actual.ndim) if axis != actual.ndim - 2)
        unwritten = jnp.isnan(actual).any(axis=axes).sum()
    # Of the arrays as they are: what was computed for the sums above need not be kept for one element.
    one, right = compared.ravel()[worst].astype(jnp.float32), expected.ravel()[worst].astype(jnp.float32)
    return wrong.sum(), worst, one, right, absolute + relative * jnp.abs(right), unwritten
