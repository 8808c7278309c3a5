"""Say how wrong an answer is, or that it is right."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import numpy.typing as npt

from search_spaces import reference_programs
from search_spaces.problem import Problem, Tolerance

# Results of more elements are compared with the reference of so many of them, 512 MiB of float32, in so many rows.
MOST_COMPARED = 2**27
MOST_ROWS = 2**20

Rows = npt.NDArray[np.int32]


def compared_rows(problem: Problem) -> Rows | None:
    """Which rows of the results are compared with the reference, in ascending order; None for all of them.

    One of each run of rows of equal length, at random: a tile with as many rows as a run has is looked at in each of
    its columns. The first and the last are always among them.
    """
    shapes, axes = [s.shape for s in problem.results()], problem.row_axes
    size = sum(map(math.prod, shapes))
    if size <= MOST_COMPARED or any(len(shape) < -axis for shape, axis in zip(shapes, axes, strict=True)):
        return None
    rows = shapes[0][axes[0]]
    count = min(max(2, MOST_COMPARED // (size // rows)), MOST_ROWS)
    if count >= rows:
        return None
    edges = np.linspace(0, rows, count + 1).astype(np.int32)
    drawn = np.random.default_rng(0).integers(edges[:-1], edges[1:]).astype(np.int32)
    drawn[0], drawn[-1] = 0, rows - 1
    return None if problem.at_rows(drawn) is None else drawn


def compared_elements(problem: Problem) -> int:
    """How many elements of the results are compared with the reference."""
    rows = compared_rows(problem)
    count = 0
    for s, axis in zip(problem.results(), problem.row_axes, strict=True):
        size = math.prod(s.shape)
        count += size if rows is None else size // s.shape[axis] * len(rows)
    return count


def comparisons(
    problem: Problem, expected: Sequence[jax.Array | jax.ShapeDtypeStruct], rows: Rows | None = None
) -> tuple[Any, ...]:
    """What `mismatch` runs on each result, compiled where processes share programs, and a device by turns.

    Args:
      expected: of which only shapes and dtypes are asked.
    """
    return tuple(
        reference_programs.program(_compare, actual, right, rows, 0.0, 0.0, axis=axis)
        for actual, right, axis in zip(problem.results(), expected, problem.row_axes, strict=True)
    )


def mismatches(
    problem: Problem,
    actual: Sequence[jax.Array],
    expected: Sequence[jax.Array],
    tolerance: Tolerance | tuple[Tolerance, ...],
    rows: Rows | None = None,
    compare: Sequence[Any] | None = None,
) -> str | None:
    """What `mismatch` says of the first result that is wrong, by its number where there are several; None if none is.

    Args:
      tolerance: one for each result, or one for all.
    """
    allowed = tolerance if isinstance(tolerance, tuple) else (tolerance,) * len(expected)
    compiled = compare or (None,) * len(expected)
    each = zip(actual, expected, allowed, compiled, problem.row_axes, strict=True)
    for number, (got, right, within, run, axis) in enumerate(each):
        if wrong := mismatch(got, right, within, rows, run, axis=axis):
            return wrong if len(expected) == 1 else f"of result {number}, {wrong}"
    return None


def mismatch(
    actual: jax.Array,
    expected: jax.Array,
    tolerance: Tolerance,
    rows: Rows | None = None,
    compare: Callable[..., Any] | None = None,
    *,
    axis: int = -2,
) -> str | None:
    """None where every element of `actual` is within `tolerance` of `expected`, or a sentence about the worst one.

    Args:
      actual: the answer, of any dtype. NaN and infinity are never right where `expected` is finite;
        where it is infinite, only that infinity is.
      expected: the reference, of the same shape; of those `rows` alone, where they are given: of the others it is only
        asked whether they were written.
      rows: along `axis`.
      compare: one of their `comparisons`, where it was compiled before.
      axis: counted from the end.
    """
    extents = list(actual.shape)
    if rows is not None:
        extents[axis] = len(rows)
    if (wanted := tuple(extents)) != expected.shape:
        return f"the shape is {wanted} instead of {expected.shape}"
    run = compare or functools.partial(_compare, axis=axis)
    wrong, worst, got, right, allowed, unwritten = run(actual, expected, rows, tolerance.absolute, tolerance.relative)
    if int(wrong):
        index = [int(i) for i in np.unravel_index(int(worst), expected.shape)]
        if rows is not None:
            index[axis] = int(rows[index[axis]])
        nothing = " (as where nothing was written)" if math.isnan(float(got)) else ""
        return (
            f"{int(wrong)} of {expected.size} elements are off; the worst, at {tuple(index)}, is {float(got):.6g}"
            f"{nothing} instead of {float(right):.6g} (allowed: {float(allowed):.2g})"
        )
    if int(unwritten):
        return f"{int(unwritten)} of {actual.shape[axis]} rows hold elements that are NaN, as where nothing was written"
    return None


@functools.partial(jax.jit, static_argnames="axis")
def _compare(
    actual: jax.Array, expected: jax.Array, rows: jax.Array | None, absolute: float, relative: float, *, axis: int
) -> tuple[jax.Array, ...]:
    compared = actual if rows is None else jnp.take(actual, rows, axis=axis)
    got, wanted = compared.astype(jnp.float32).ravel(), expected.astype(jnp.float32).ravel()
    allowed = absolute + relative * jnp.abs(wanted)
    # `not <=` rather than `>`: a comparison with NaN is false. No finite number is near an infinite one.
    wrong = ~((got == wanted) | (jnp.isfinite(wanted) & (jnp.abs(got - wanted) <= allowed)))
    excess = jnp.where(wrong, jnp.nan_to_num(jnp.abs(got - wanted) - allowed, nan=jnp.inf), -1.0)
    worst = jnp.argmax(excess)
    unwritten = jnp.int32(0)
    if rows is not None and jnp.issubdtype(actual.dtype, jnp.inexact):
        axes = tuple(other for other in range(actual.ndim) if other != actual.ndim + axis)
        unwritten = jnp.isnan(actual).any(axis=axes).sum()
    # Of the arrays as they are: what was computed for the sums above need not be kept for one element.
    one, right = compared.ravel()[worst].astype(jnp.float32), expected.ravel()[worst].astype(jnp.float32)
    return wrong.sum(), worst, one, right, absolute + relative * jnp.abs(right), unwritten
