"""The user-facing scaled matmul call: leading axes become m; unsupported calls go to XLA."""

from __future__ import annotations

import functools
import math
from typing import Any

import jax
import jax.numpy as jnp

from search_spaces.front_end import unposed, weakly_typed
from search_spaces.operation import Bound, Unbound
from search_spaces.scaled_matmul.problem import BLOCK, DTYPES, RESULTS, ScaledMatmulProblem, dequantized
from search_spaces.space import cdiv
from search_spaces.unfolded import lead


def bind(
    a: Any, b: Any, a_scale: Any, b_scale: Any, *, transpose_b: bool = False, out_dtype: Any = "bfloat16"
) -> Bound[ScaledMatmulProblem] | Unbound:
    """Binds a call of `scheduler.tuned_scaled_matmul` to a problem; the arguments are those of the call.

    Raises:
      TypeError, ValueError: for operands that do not multiply or are complex, a scale of an unsupported shape, or a
        dtype of the result that is not in `RESULTS`.
    """
    if jnp.ndim(a) < 1 or jnp.ndim(b) != 2 or jnp.shape(a)[-1] != jnp.shape(b)[1 if transpose_b else 0]:
        raise ValueError(f"a {jnp.shape(a)} and b {jnp.shape(b)} are not [..., k] and [k, n] ({transpose_b=})")
    leading, k = jnp.shape(a)[:-1], jnp.shape(a)[-1]
    n = jnp.shape(b)[0 if transpose_b else 1]
    blocks_k, blocks_n = cdiv(k, BLOCK), cdiv(n, BLOCK)
    blocks = (blocks_n, blocks_k) if transpose_b else (blocks_k, blocks_n)
    column, row = ((n, 1), (n,)) if transpose_b else ((1, n), (n,))
    a_scale = _shaped(
        "a_scale", a_scale, {leading: leading, (*leading, 1): leading, (*leading, blocks_k): (*leading, blocks_k)}
    )
    b_scale = _shaped("b_scale", b_scale, {row: row, column: row, blocks: blocks})
    if str(jnp.dtype(out_dtype)) not in RESULTS:
        raise TypeError(f"out_dtype is {jnp.dtype(out_dtype)}; a result is {', '.join(RESULTS)}")
    for name, x in (("a", a), ("b", b), ("a_scale", a_scale), ("b_scale", b_scale)):
        if jnp.issubdtype(dtype := jnp.result_type(x), jnp.complexfloating):
            raise TypeError(f"{name} is {dtype}; operands and scales are real: multiply complex ones by tuned_matmul")
    if (reason := _unposed(a, b, a_scale, b_scale)) is not None:
        answer = functools.partial(_formula, a, b, a_scale, b_scale, transpose_b=transpose_b, out_dtype=out_dtype)
        return Unbound(reason, answer)
    m, blocks_of_a = math.prod(leading), a_scale.shape[len(leading) :]
    matrices = (
        jax.ShapeDtypeStruct((m, k), a.dtype),
        b,
        jax.ShapeDtypeStruct((m, *blocks_of_a), a_scale.dtype),
        b_scale,
    )
    problem = ScaledMatmulProblem.of(*matrices, transpose_b=bool(transpose_b), out_dtype=out_dtype)
    rows = lead(leading)
    operands = (a.reshape(*rows, k), b, a_scale.reshape(*rows, *blocks_of_a), b_scale)
    return Bound(problem, operands, lambda out: out.reshape(*leading, n))


def _shaped(name: str, scale: Any, shapes: dict[tuple[int, ...], tuple[int, ...]]) -> Any:
    """Reshapes a scale to its shape in a problem; a scalar is repeated for each row."""
    if not jnp.shape(scale):
        return jnp.broadcast_to(scale, next(iter(shapes)))
    if jnp.shape(scale) not in shapes:
        wanted = " or ".join(map(str, dict.fromkeys(shapes)))
        raise ValueError(f"{name} has shape {wanted} (blocks of {BLOCK}), or is one number; not {jnp.shape(scale)}")
    return jnp.reshape(scale, shapes[jnp.shape(scale)])


def _unposed(a: Any, b: Any, a_scale: Any, b_scale: Any) -> str | None:
    """Returns the reason why no problem describes the operands, or None."""
    if reason := unposed({"a": a, "b": b, "a_scale": a_scale, "b_scale": b_scale}):
        return reason
    if reason := weakly_typed(a, b):
        return reason
    if a.dtype != b.dtype or str(a.dtype) not in DTYPES:
        return f"a is {a.dtype} and b is {b.dtype}; kernels take two of {', '.join(DTYPES)}"
    if wrong := next((s.dtype for s in (a_scale, b_scale) if s.dtype != jnp.float32), None):
        return f"a scale is {wrong}; kernels take float32"
    return None


def _formula(a: Any, b: Any, a_scale: Any, b_scale: Any, *, transpose_b: bool, out_dtype: Any) -> jax.Array:
    """Computes the product of the dequantized operands, of any dtypes."""
    left, right = dequantized(*map(jnp.asarray, (a, b, a_scale, b_scale)), transpose_b=transpose_b)
    return jnp.matmul(left, right.T if transpose_b else right).astype(out_dtype)
