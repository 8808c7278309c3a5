"""The matmul of XLA (cuBLAS on NVIDIA GPUs): the baseline, and a valid choice."""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from search_spaces.kernel import Library, LibraryKernel
from search_spaces.matmul import epilogue
from search_spaces.matmul.problem import MatmulProblem, Operands
from search_spaces.problem import Arrays
from search_spaces.target import Target


class XlaMatmul(LibraryKernel[MatmulProblem]):
    """A matmul with its epilogue in float32, or as users write it, rounded at each step.

    Several results are slices of one matmul. Writing one matmul per result would give the same program: XLA merges them
    and slices the result.
    """

    version = 1

    def programs(self, problem: MatmulProblem) -> tuple[str, ...]:
        return (Library.program, "plain") if problem.fused else (Library.program,)

    def run(self, problem: MatmulProblem, schedule: Library, target: Target, /, *args: Any, **params: Any) -> Arrays:
        return problem.cut(_product(problem.joined, schedule.program, _precision(problem, target), args))


def _precision(problem: MatmulProblem, target: Target) -> lax.PrecisionLike:
    """Requests three bfloat16 products for "high": NVIDIA GPUs would multiply TF32, which is not accurate enough."""
    if problem.arithmetic == "bf16_3x" and target.platform == "cuda" and int(target.architecture[3:]) >= 80:
        return lax.DotAlgorithmPreset.BF16_BF16_F32_X3
    return problem.lax_precision


def _product(
    problem: MatmulProblem, program: str, precision: lax.PrecisionLike, args: Sequence[jax.Array]
) -> jax.Array:
    out = problem.whole.dtype
    if program == "plain":
        return _plain(problem, precision, args).astype(out)
    # Integers are accumulated as integers, for any dtype of the result.
    unrounded = problem.fused or problem.dtype == "int8"
    acc = lax.dot_general(
        args[0],
        args[1],
        problem.dimension_numbers,
        precision=precision,
        preferred_element_type=problem.acc_dtype if unrounded else out,
    )
    return problem.apply_epilogue(acc, args).astype(out)


def _plain(problem: MatmulProblem, precision: lax.PrecisionLike, args: Sequence[jax.Array]) -> jax.Array:
    a, b, bias, residual = problem.named(args)
    result = lax.dot_general(
        a,
        b,
        problem.dimension_numbers,
        precision=precision,
        preferred_element_type=problem.whole.dtype,
    )
    if bias is not None:  # may be wider than the result
        result = result + bias[..., None, :]
    if problem.activation:
        result = getattr(jax.nn, problem.activation)(result)
    return result if residual is None else result + residual


def matmul(
    operands: Operands, *, precision: Any = None, preferred_element_type: Any = None, activation: str | None = None
) -> jax.Array:
    """Computes ``activation(jnp.matmul(a, b) + bias) + residual`` for operands that no problem describes.

    Floating and complex accumulators are in float32 or wider. The epilogue is in the widest dtype of the accumulators,
    the bias and the residual. The result, rounded once, has the dtype of `jnp.matmul`.

    Args:
      operands: `a` and `b` as `jnp.matmul` takes them. The bias is ``[n]``, or ``[]`` if `b` has one axis. The residual
        has the shape of the result.

    Raises:
      TypeError, ValueError: as `jnp.matmul`; also for a wrong activation, bias or residual, with the expected value.
    """
    a, b, bias, residual = operands
    if any(isinstance(x, jax.Array | np.ndarray) and _of_bytes(x.dtype) != x.dtype for x in (a, b)):
        # XLA has products of such operands for few dtypes of the result, if any (CPU and GPU, JAX 0.12).
        out = jax.eval_shape(functools.partial(jnp.matmul, preferred_element_type=preferred_element_type), a, b).dtype
        of_bytes = operands._replace(a=a.astype(_of_bytes(a.dtype)), b=b.astype(_of_bytes(b.dtype)))
        return matmul(
            of_bytes, precision=precision, preferred_element_type=_of_bytes(out), activation=activation
        ).astype(out)
    if bias is None and activation is None and residual is None:
        return jnp.matmul(a, b, precision=precision, preferred_element_type=preferred_element_type)
    product = functools.partial(jnp.matmul, precision=precision)
    out = jax.eval_shape(functools.partial(product, preferred_element_type=preferred_element_type), a, b)
    _check(out, activation, operands.added(out.shape))
    wide = jnp.promote_types(out.dtype, jnp.float32) if jnp.issubdtype(out.dtype, jnp.inexact) else out.dtype
    widest = functools.reduce(jnp.promote_types, [x.dtype for x in (bias, residual) if x is not None], wide)
    acc = product(a, b, preferred_element_type=wide)
    rows = None if bias is None else jnp.broadcast_to(bias, acc.shape)
    value = epilogue.apply(acc.astype(widest), bias=rows, activation=activation or "", residual=residual)
    return value.astype(out.dtype)


def _of_bytes(dtype: Any) -> Any:
    """Returns a dtype of whole bytes that holds the numbers of this one."""
    if not jnp.issubdtype(dtype, jnp.number) or jax.dtypes.itemsize_bits(dtype) >= 8:
        return dtype
    if jnp.issubdtype(dtype, jnp.integer):
        return jnp.int8 if jnp.issubdtype(dtype, jnp.signedinteger) else jnp.uint8
    return jnp.bfloat16


def _check(out: jax.ShapeDtypeStruct, activation: Any, added: Mapping[str, tuple[Any, tuple[int, ...]]]) -> None:
    if activation is not None and activation not in epilogue.ACTIVATIONS:
        raise ValueError(f"activation={activation!r} is not None or one of {', '.join(epilogue.ACTIVATIONS)}")
    if activation is not None and not jnp.issubdtype(out.dtype, jnp.floating):
        raise TypeError(
            f"activation={activation!r} wants a floating result, not {out.dtype}: set preferred_element_type"
        )
    if jnp.issubdtype(out.dtype, jnp.floating) and out.dtype.itemsize == 1:  # JAX does not promote it
        raise TypeError(f"a result of {out.dtype} is too narrow for an epilogue: set preferred_element_type")
    for name, (x, shape) in added.items():
        if not isinstance(x, jax.Array):
            raise TypeError(f"{name} must be an array, not {type(x).__name__}")
        if x.shape != shape:
            raise ValueError(f"{name} has shape {x.shape} where a result of shape {out.shape} wants {shape}")
        if _kind(x.dtype) > _kind(out.dtype):
            raise TypeError(
                f"{name} is {x.dtype}, which a result of {out.dtype} cannot hold: set preferred_element_type"
            )


def _kind(dtype: Any) -> int:
    """Ranks booleans, integers, floating-point and complex numbers; each kind can hold those before it."""
    kinds: tuple[Any, ...] = (jnp.bool_, jnp.integer, jnp.floating, jnp.complexfloating)
    for i, kind in enumerate(kinds):
        if jnp.issubdtype(dtype, kind):
            return i
    raise TypeError(f"{dtype} is no dtype of numbers")
