"""The problem that a call poses, or why it poses none, in words: its answer is then the library's formula."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from scheduler.dispatch import dispatch
from search_spaces import jax_compat
from search_spaces.matmul import MatmulProblem
from search_spaces.matmul.problem import Operands
from search_spaces.rowwise.problem import RowProblem

# For whoever asks about a problem, which a call may not pose.
NOT_EVERY_CALL = (
    "Whatever is stored, XLA answers calls on a mesh outside of jax.shard_map, and those that pose no such problem "
    '(other or mixed dtypes, empty arrays, another axis): the logger "scheduler" says why (DEBUG), and '
    'backends="pallas" makes it an error.'
)
_WEAKLY_TYPED = "an array is weakly typed, as Python's numbers are: give it a dtype with .astype"


def matmul(
    operands: Operands,
    *,
    transpose_a: bool,
    transpose_b: bool,
    precision: Any,
    preferred_element_type: Any,
    activation: Any,
) -> MatmulProblem | str:
    """The problem of one matrix of each operand. Of operands that `jnp.matmul` refuses, some words."""
    a, b, bias, residual = operands
    given = {name: x for name, x in operands._asdict().items() if x is not None}
    if reason := _unposed({"a": a, "b": b} | given):
        return reason
    if not (a.ndim and b.ndim) or (transpose_a and a.ndim == 1) or (transpose_b and b.ndim == 1):
        return f"a {a.shape} and b {b.shape} have too few axes"
    if a.dtype != b.dtype:
        return f"a is {a.dtype} and b is {b.dtype}; kernels take two of one dtype"
    if a.weak_type or b.weak_type:
        return _WEAKLY_TYPED
    if (rounding := _rounding(precision)) is None:
        return f"precision={precision!r} is not default, high or highest"
    m, k = (1, *a.shape)[-2:][:: -1 if transpose_a else 1]
    k_of_b, n = (*b.shape, 1) if b.ndim == 1 else b.shape[-2:][:: -1 if transpose_b else 1]
    if k != k_of_b:
        return f"a {a.shape} and b {b.shape} do not multiply"
    try:
        result = result_shape(a, b, m, n)
        for name, (x, shape) in operands.added(result).items():
            if x.shape != shape:
                return f"{name} has shape {x.shape} where {shape} is wanted"
        return MatmulProblem(
            m=m,
            n=n,
            k=k,
            dtype=str(a.dtype),
            out_dtype=str(a.dtype if preferred_element_type is None else jnp.dtype(preferred_element_type)),
            transpose_a=transpose_a,
            transpose_b=transpose_b,
            precision=rounding,
            bias="" if bias is None else str(bias.dtype),
            activation=activation or "",
            residual="" if residual is None else str(residual.dtype),
        )
    except ValueError as error:
        return str(error)


def result_shape(a: jax.Array, b: jax.Array, m: int, n: int) -> tuple[int, ...]:
    """Of ``jnp.matmul(a, b)``; raises ValueError where leading axes do not broadcast."""
    lead = np.broadcast_shapes(a.shape[:-2], b.shape[:-2])
    return *lead, *(() if a.ndim == 1 else (m,)), *(() if b.ndim == 1 else (n,))


def rows(problem: type[RowProblem], arrays: Sequence[Any]) -> RowProblem | str:
    """The problem of ``x[..., columns]``, leading axes folded into rows, and of what all rows share."""
    x, *shared = arrays
    if reason := _unposed(dict(zip(("x", "weight"), arrays, strict=False))):
        return reason
    if not x.ndim:
        return "x is a scalar"
    if any(array.weak_type for array in arrays):
        return _WEAKLY_TYPED
    try:
        return problem.of(jax.ShapeDtypeStruct((math.prod(x.shape[:-1]), x.shape[-1]), x.dtype), *shared)
    except (TypeError, ValueError) as error:
        return str(error)


def _unposed(arrays: Mapping[str, Any]) -> str | None:
    """Why no operation can pose a problem of these arrays, or None."""
    for name, x in arrays.items():
        if not isinstance(x, jax.Array):
            return f"{name} is no array but {type(x).__name__}"
        if not all(isinstance(extent, int) for extent in x.shape):
            return f"{name} has symbols for extents: {x.shape}"
        if not all(x.shape):
            return f"{name} is empty: {x.shape}"
    return dispatch.EXPLICIT_AXES if jax_compat.has_explicit_axes(list(arrays.values())) else None


_ROUNDINGS: dict[lax.Precision, Literal["default", "high", "highest"]] = {
    lax.Precision.DEFAULT: "default",
    lax.Precision.HIGH: "high",
    lax.Precision.HIGHEST: "highest",
}


def _rounding(precision: Any) -> Literal["default", "high", "highest"] | None:
    """The `MatmulProblem.precision` of what `jnp.matmul` accepts, or None for what only XLA can express."""
    if precision is None:
        config: Any = jax.config  # its options are no attributes to a type checker in 0.10
        precision = config.jax_default_matmul_precision or "default"
    if isinstance(precision, tuple | list) and len(precision) == 2 and precision[0] == precision[1]:
        precision = precision[0]
    try:
        return _ROUNDINGS[lax.Precision(precision)]
    except (ValueError, TypeError):
        return None
