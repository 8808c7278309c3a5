"""The matmul of narrow operands and their scales: ``SCALED_MATMUL``, its problem and its kernels."""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from search_spaces.front_end import in_front, lead, unsupported_reason, weakly_typed
from search_spaces.operation import BoundCall, KernelName, Kernels, Operation, Unsupported
from search_spaces.scaled_matmul.problem import BLOCK, DTYPES, RESULTS, ScaledMatmulProblem, dequantized
from search_spaces.scaled_matmul.xla import XlaScaledMatmul
from search_spaces.sharding import Sharding
from search_spaces.space import cdiv

# ------------------------------------------------------------------------------
# The user-facing scaled matmul call: leading axes become m; unsupported calls go to XLA.


def bind(
    a: Any, b: Any, a_scale: Any, b_scale: Any, *, transpose_b: bool = False, out_dtype: Any = "bfloat16"
) -> BoundCall[ScaledMatmulProblem] | Unsupported:
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
        return Unsupported(reason, answer)
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
    return BoundCall(problem, operands, lambda out: out.reshape(*leading, n))


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
    if reason := unsupported_reason({"a": a, "b": b, "a_scale": a_scale, "b_scale": b_scale}):
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


# ------------------------------------------------------------------------------
# The batching and sharding rules of a scaled matmul; its derivative is that of XLA's program.


def batch(call: Callable[..., Any], p: ScaledMatmulProblem, args: Any, dims: Any) -> tuple[jax.Array, int] | None:
    """Merges batched rows into m, with batched or shared scales; returns None if `b` or its scales are batched."""
    a_dim, b_dim, a_scale_dim, b_scale_dim = dims
    if a_dim is None or b_dim is not None or b_scale_dim is not None:
        return None
    a, b, a_scale, b_scale = args
    size = a.shape[a_dim]
    many = dataclasses.replace(p, m=size * p.m)
    return call(many, in_front(a, a_dim, size), b, in_front(a_scale, a_scale_dim, size), b_scale), 0


def shard(p: ScaledMatmulProblem) -> Sharding[ScaledMatmulProblem]:
    """Returns the sharding rule: rows, and columns of `b` with scales by rows; blocks of 128 stay on one device."""
    b = "n k" if p.transpose_b else "k n"
    blocks = "blocks_n blocks_k" if p.transpose_b else "blocks_k blocks_n"
    a_scale = "m blocks_k" if p.a_scales == "blocks" else "m"
    by_rows = p.b_scales == "rows"
    return Sharding(
        f"m k, {b}, {a_scale}, {'n' if by_rows else blocks} -> m n", divided=("m", "n") if by_rows else ("m",)
    )


SCALED_MATMUL = Operation[ScaledMatmulProblem](
    name="scaled_matmul",
    problem=ScaledMatmulProblem,
    kernels=Kernels(
        KernelName("mosaic_gpu", "cuda", "search_spaces.scaled_matmul.hopper:MosaicGpuScaledMatmul"), XlaScaledMatmul()
    ),
    batch=batch,
    front_end=bind,
    shard=shard,
)

__all__ = ["SCALED_MATMUL", "ScaledMatmulProblem"]
