"""Front end of row-wise operations: leading axes are rows; unsupported calls fall back to the formula."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from search_spaces.front_end import require_array, unposed, weakly_typed
from search_spaces.operation import Bound, Unbound
from search_spaces.problem import as_tuple
from search_spaces.rowwise.problem import RowProblem
from search_spaces.unfolded import lead


def elsewhere(x: Any, axis: int, answer: Callable[[], Any]) -> Unbound | None:
    """Returns the unsupported call along an axis other than the last; None if `axis` is the last.

    Raises:
      TypeError: `x` is no array, or an array of booleans.
    """
    require_array("x", x)
    if jnp.issubdtype(jnp.result_type(x), jnp.bool_):
        raise TypeError("x holds truth values, of which there is no softmax: use .astype")
    if axis in (-1, jnp.ndim(x) - 1):
        return None
    return Unbound(f"{axis=} is not the last one of x {jnp.shape(x)}", answer)


def bind(problem: type[RowProblem], *arrays: Any, **params: Any) -> Bound[Any] | Unbound:
    """Binds a row-wise operation on ``x[..., columns]``, other row operands of the same shape, and shared operands."""
    posed = _problem(problem, *arrays)
    if isinstance(posed, str):
        return Unbound(posed, lambda: formula(problem, *arrays, **params))
    by_row, shared = problem.apart(arrays)
    leading, columns = by_row[0].shape[:-1], by_row[0].shape[-1]
    shapes = [(*leading, *s.shape[1:]) for s in posed.results()]

    def restore(*results: jax.Array) -> Any:
        return posed.pack([out.reshape(shape) for out, shape in zip(results, shapes, strict=True)])

    rows = [x.reshape(*lead(leading), columns) for x in by_row]
    return Bound(posed, (*rows, *shared), restore, tuple(params.items()))


def formula(problem: type[RowProblem], *arrays: Any, **params: Any) -> Any:
    """Computes the formula in the dtype that `wide` returns.

    Rows have the dtype of the first array, if that is inexact. A result that is a statistic of each row is not rounded.
    """
    arrays = tuple(jnp.asarray(x) for x in arrays)
    computed = wide(*arrays)
    out = problem.compute_in(computed, *arrays, **params)
    dtype = arrays[0].dtype if jnp.issubdtype(arrays[0].dtype, jnp.inexact) else computed
    results = [x.astype(dtype) if x.ndim == arrays[0].ndim else x for x in as_tuple(out)]
    return tuple(results) if isinstance(out, tuple) else results[0]


def wide(*arrays: jax.Array) -> jnp.dtype[Any]:
    """Returns float32, or a wider or complex dtype among the arrays; integers count as JAX's default float."""
    found = jnp.dtype(jnp.float32)
    for x in arrays:
        dtype = x.dtype if jnp.issubdtype(x.dtype, jnp.inexact) else jnp.result_type(float)
        if dtype.itemsize > 1:  # JAX has no implicit promotion of 8-bit dtypes
            found = jnp.promote_types(found, dtype)
    return found


def _problem(problem: type[RowProblem], *arrays: Any) -> RowProblem | str:
    """Returns the problem of all rows, or the reason why there is none."""
    by_row, shared = problem.apart(arrays)
    if reason := unposed(dict(zip((*problem.row_operands, "weight"), arrays, strict=False))):
        return reason
    x = by_row[0]
    if not x.ndim:
        return "x is a scalar"
    if reason := weakly_typed(*arrays):
        return reason
    try:
        folded = (math.prod(x.shape[:-1]), x.shape[-1])
        return problem.of(*(jax.ShapeDtypeStruct(folded, x.dtype) for x in by_row), *shared)
    except (TypeError, ValueError) as error:
        return str(error)
