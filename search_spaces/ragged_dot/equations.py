"""Converts equations of `jax.lax.ragged_dot_general` to grouped products."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from search_spaces import jax_compat
from search_spaces.operation import MatchedEquation
from search_spaces.ragged_dot.problem import GroupedProblem, RaggedDotProblem, RaggedDotWeightsProblem

Axes = tuple[int, ...]
Matched = MatchedEquation[Any] | str
# Axes of an array of three axes in memory order, the last two swapped.
SWAPPED = (0, 2, 1)


def boundaries_of_sizes(sizes: jax.Array, rows: int) -> jax.Array:
    """Returns the boundaries of groups of these sizes, of which the first starts at row 0 and none ends after `rows`.

    Negative sizes count as 0. XLA computes these sums in one kernel; a cumulative sum would be several, in sequence.
    """
    wide = sizes.astype(jnp.int32) if sizes.dtype.itemsize < 4 else sizes
    counted = jnp.clip(wide, 0, rows).astype(jnp.int32)
    shape = (sizes.shape[0] + 1, sizes.shape[0])
    before = lax.broadcasted_iota(jnp.int32, shape, 1) < lax.broadcasted_iota(jnp.int32, shape, 0)
    return jnp.minimum(jnp.sum(jnp.where(before, counted, 0), axis=1, dtype=jnp.int32), rows)


def equation_of(problem: type[GroupedProblem]) -> Callable[..., Matched]:
    """Returns the function of `Operation.equations` for one type of problem.

    Equations are of one primitive for both types. An equation of the other type returns a reason that no report shows,
    because the other operation replaces that equation.
    """

    def posed(*inputs: Any, **params: Any) -> Matched:
        matched = problem_of_ragged_dot(*inputs, **params)
        if isinstance(matched, str) or isinstance(matched.problem, problem):
            return matched
        return f"its problem is not a {problem.__name__}"

    return posed


def problem_of_ragged_dot(
    lhs: Any,
    rhs: Any,
    group_sizes: Any,
    *,
    ragged_dot_dimension_numbers: lax.RaggedDotDimensionNumbers,
    precision: Any = None,
    preferred_element_type: Any = None,
    group_offset: Any = None,
    out_sharding: Any = None,
    stored: Sequence[Axes | None] = (None, None, None, None),
) -> Matched:
    """Returns the grouped product that a `ragged_dot_general` equation computes, or the reason why XLA computes it.

    Rows lie along the first axis of both matrices. `jax.lax.ragged_dot` and its gradients are such equations.

    Args:
      lhs, rhs, group_sizes: objects with a shape and a dtype. The keyword arguments up to `out_sharding` are the
        equation's parameters.
      stored: for each operand and the result, its axes in memory order; None means the array's own order. A transpose
        of the matrices before the product, or of the result after it, then cancels the one made here.
    """
    if reason := _unposed(lhs, rhs, group_sizes, precision, group_offset, out_sharding):
        return reason
    (contracted, (lhs_batch, _)) = ragged_dot_dimension_numbers.dot_dimension_numbers
    ragged, groups = (
        ragged_dot_dimension_numbers.lhs_ragged_dimensions,
        ragged_dot_dimension_numbers.rhs_group_dimensions,
    )
    if lhs_batch:
        return "it has batch axes: each batch has its own groups"
    out_dtype = lhs.dtype if preferred_element_type is None else preferred_element_type
    boundaries = jax.ShapeDtypeStruct((group_sizes.shape[0] + 1,), jnp.int32)
    try:
        if (contracted, ragged, groups) == (((0,), (0,)), (0,), ()):
            return _weights(lhs, rhs, boundaries, out_dtype, stored[3])
        if (ragged, groups, contracted[0]) == ((0,), (0,), (1,)) and contracted[1] in ((1,), (2,)):
            return _rows(lhs, rhs, boundaries, out_dtype, contracted[1] == (2,), stored[1])
    except (TypeError, ValueError) as error:
        return str(error)
    return f"the axes of {ragged_dot_dimension_numbers} are not those of jax.lax.ragged_dot or of its gradients"


def _unposed(lhs: Any, rhs: Any, sizes: Any, precision: Any, group_offset: Any, out_sharding: Any) -> str | None:
    if jax_compat.names_sharding(out_sharding):
        return "it says how its result is sharded"
    if group_offset is not None:
        return "JAX does not compute a group_offset"
    if not all(isinstance(extent, int) for extent in (*lhs.shape, *rhs.shape, *sizes.shape)):
        return f"extents are symbols: {lhs.shape} and {rhs.shape}"
    if not all((*lhs.shape, *rhs.shape, *sizes.shape)):
        return f"an operand is empty: {lhs.shape}, {rhs.shape} and {sizes.shape}"
    if len(sizes.shape) != 1 or len(lhs.shape) != 2:
        return f"lhs {lhs.shape} and group_sizes {sizes.shape} are not [rows, k] and [groups]"
    both = precision if isinstance(precision, tuple | list) else (precision, precision)
    if lhs.dtype == jnp.float32 and any(each not in (None, lax.Precision.DEFAULT) for each in both):
        return f"precision={precision} is not the default one"
    return None


def _rows(lhs: Any, rhs: Any, boundaries: Any, out_dtype: Any, transposed: bool, stored: Axes | None) -> Matched:
    swapped = stored == SWAPPED
    matrices = jax.ShapeDtypeStruct(tuple(rhs.shape[axis] for axis in SWAPPED), rhs.dtype) if swapped else rhs
    problem = RaggedDotProblem.of(
        lhs, matrices, boundaries, transpose_rhs=transposed != swapped, out_dtype=str(jnp.dtype(out_dtype))
    )

    def operands(lhs: jax.Array, rhs: jax.Array, sizes: jax.Array) -> tuple[jax.Array, ...]:
        rhs = lax.transpose(rhs, SWAPPED) if swapped else rhs
        return lhs, rhs, boundaries_of_sizes(sizes, problem.rows)

    return MatchedEquation(problem, operands, lambda out: (out,))


def _weights(lhs: Any, rhs: Any, boundaries: Any, out_dtype: Any, stored: Axes | None) -> Matched:
    swapped = stored == SWAPPED
    both = (rhs, lhs) if swapped else (lhs, rhs)
    problem = RaggedDotWeightsProblem.of(*both, boundaries, out_dtype=str(jnp.dtype(out_dtype)))

    def operands(lhs: jax.Array, rhs: jax.Array, sizes: jax.Array) -> tuple[jax.Array, ...]:
        both = (rhs, lhs) if swapped else (lhs, rhs)
        return *both, boundaries_of_sizes(sizes, problem.rows)

    def restore(out: jax.Array) -> tuple[jax.Array]:
        return (lax.transpose(out, SWAPPED) if swapped else out,)

    return MatchedEquation(problem, operands, restore)
