"""The matrix product: ``MATMUL``, its problem and its kernels."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from search_spaces.front_end import lead, unsupported_reason, weakly_typed
from search_spaces.matmul import problem, rules, xla
from search_spaces.matmul.equations import problem_of_dot_general
from search_spaces.matmul.problem import MatmulProblem, Operands, precision_of, rounding
from search_spaces.matmul.xla import XlaMatmul
from search_spaces.operation import BoundCall, KernelName, Kernels, Operation, Unsupported
from search_spaces.problem import Arrays

# ------------------------------------------------------------------------------
# The user-facing matmul call: leading axes become part of m, n or the batch; unsupported calls go to XLA.


def bind(
    a: Any,
    b: Any,
    *follows: Any,
    transpose_a: bool = False,
    transpose_b: bool = False,
    precision: Any = None,
    preferred_element_type: Any = None,
    out_dtype: Any = None,
    bias: Any = None,
    activation: Any = None,
    residual: Any = None,
    split_sizes: Sequence[int] | str | None = None,
) -> BoundCall[MatmulProblem] | Unsupported:
    """Binds a call of `scheduler.tuned_matmul` to a problem; the arguments are those of the call.

    Args:
      follows: a bias, a residual or both, as `MatmulProblem.of` takes them. All operands then have the axes of the
        problem.
      out_dtype: the problem's name for `preferred_element_type`.
    """
    wanted = out_dtype if preferred_element_type is None else preferred_element_type
    several = "" if split_sizes is None else problem.format_sizes(split_sizes)
    sizes = None if split_sizes is None else problem.split_numbers(several)
    if sizes is not None and residual is not None:
        raise ValueError("residual and split_sizes exclude each other: add it to the results, which are several")
    if follows:
        how = {
            "transpose_a": transpose_a,
            "transpose_b": transpose_b,
            "out_dtype": wanted or "",
            "activation": activation,
            "split_sizes": several,
        }
        p = MatmulProblem.of(a, b, *follows, precision=rounding(precision) or precision, **how)
        return BoundCall(p, (a, b, *follows))
    if wanted is None and isinstance(a, jax.Array) and isinstance(b, jax.Array):
        jnp.result_type(a, b)  # Raises if `jax.numpy_dtype_promotion` forbids the mixture.
    operands = Operands(a, b, bias, residual)
    posed = _problem(operands, transpose_a, transpose_b, precision, wanted, activation, several)
    if isinstance(posed, str):

        def answer() -> Arrays:
            swapped = operands._replace(a=_swapped(a, transpose_a, "a"), b=_swapped(b, transpose_b, "b"))
            c = xla.matmul(swapped, precision=precision, preferred_element_type=wanted, activation=activation)
            return c if sizes is None else _cut(c, sizes, b)

        return Unsupported(posed, answer)
    return _of_leading_axes(posed, operands)


def _cut(c: jax.Array, sizes: tuple[int, ...], b: jax.Array) -> tuple[jax.Array, ...]:
    if b.ndim == 1:
        raise ValueError(f"split_sizes={problem.format_sizes(sizes)} wants columns, which a b of one axis has not")
    problem.check_split(sizes, c.shape[-1])
    return problem.cut_columns(c, sizes)


def _problem(
    operands: Operands,
    transpose_a: bool,
    transpose_b: bool,
    precision: Any,
    out_dtype: Any,
    activation: Any,
    split_sizes: str,
) -> MatmulProblem | str:
    """Returns the problem of one matrix of each operand, or the reason why there is none.

    Calls that `jnp.matmul` rejects also return a reason.
    """
    a, b, bias, residual = operands
    given = {name: x for name, x in operands._asdict().items() if x is not None}
    if reason := unsupported_reason({"a": a, "b": b} | given):
        return reason
    if not (a.ndim and b.ndim) or (transpose_a and a.ndim == 1) or (transpose_b and b.ndim == 1):
        return f"a {a.shape} and b {b.shape} have too few axes"
    if a.dtype != b.dtype:
        return f"a is {a.dtype} and b is {b.dtype}; kernels take two of one dtype"
    if reason := weakly_typed(a, b):
        return reason
    if (asked := rounding(precision)) is None:
        return f"precision={precision_of(precision)!r} is not default, high or highest"
    m, k = (1, *a.shape)[-2:][:: -1 if transpose_a else 1]
    k_of_b, n = (*b.shape, 1) if b.ndim == 1 else b.shape[-2:][:: -1 if transpose_b else 1]
    if k != k_of_b:
        return f"a {a.shape} and b {b.shape} do not multiply"
    try:
        result = _result_shape(a, b, m, n)
        for name, (x, shape) in operands.added(result).items():
            if x.shape != shape:
                return f"{name} has shape {x.shape} where {shape} is wanted"
        return MatmulProblem(
            m=m,
            n=n,
            k=k,
            dtype=str(a.dtype),
            out_dtype=str(a.dtype if out_dtype is None else jnp.dtype(out_dtype)),
            transpose_a=transpose_a,
            transpose_b=transpose_b,
            precision=asked,
            bias="" if bias is None else str(bias.dtype),
            activation=activation or "",
            residual="" if residual is None else str(residual.dtype),
            split_sizes=split_sizes,
        )
    except ValueError as error:
        return str(error)


def _of_leading_axes(p: MatmulProblem, operands: Operands) -> BoundCall[MatmulProblem]:
    """Extends `p`, the problem of one matrix of each operand, to all leading axes."""
    a, b, bias, residual = operands
    shape = _result_shape(a, b, p.m, p.n)
    whole = np.broadcast_shapes(a.shape[:-2], b.shape[:-2])
    sizes = lead(whole)
    matrices = p.named([s.shape for s in p.operands()])
    many_a, many_b = math.prod(a.shape[:-2]) > 1, math.prod(b.shape[:-2]) > 1
    if many_a and many_b:
        a, b = jnp.broadcast_to(a, (*whole, *matrices.a)), jnp.broadcast_to(b, (*whole, *matrices.b))
    many = Operands(many_a, many_b, bias=False, residual=many_a or many_b)
    given = [
        (x.reshape((*sizes, *matrix) if is_many else matrix), is_many)
        for x, matrix, is_many in zip((a, b, bias, residual), matrices, many, strict=True)
        if x is not None
    ]
    args, mapped = zip(*given, strict=True)

    def shaped(*results: jax.Array) -> Arrays:
        if not p.split_sizes:
            return results[0].reshape(shape)
        return tuple(c.reshape(*shape[:-1], n) for c, n in zip(results, p.columns, strict=True))

    if not any(many):
        return BoundCall(p, args, shaped)
    wider = rules.widened(p, args, mapped, sizes)
    places = range(wider.dim, wider.dim + len(sizes))

    def in_front(c: jax.Array) -> jax.Array:
        return jnp.moveaxis(wider.split(c), places, range(len(sizes)))

    return BoundCall(wider.problem, wider.operands, lambda *results: shaped(*map(in_front, results)))


def _result_shape(a: jax.Array, b: jax.Array, m: int, n: int) -> tuple[int, ...]:
    """Returns the shape of ``jnp.matmul(a, b)``; raises ValueError if leading axes do not broadcast."""
    lead = np.broadcast_shapes(a.shape[:-2], b.shape[:-2])
    return *lead, *(() if a.ndim == 1 else (m,)), *(() if b.ndim == 1 else (n,))


def _swapped(x: Any, transpose: bool, name: str) -> Any:
    if not transpose:
        return x
    if jnp.ndim(x) < 2:
        raise ValueError(f"transpose_{name} needs an operand of at least 2 axes, and {name} has shape {jnp.shape(x)}")
    return jnp.swapaxes(x, -1, -2)


MATMUL = Operation(
    name="matmul",
    problem=MatmulProblem,
    kernels=Kernels(
        KernelName("mosaic_gpu", "cuda", "search_spaces.matmul.hopper:MosaicGpuMatmul"),
        KernelName("mosaic_gpu_bf16_3x", "cuda", "search_spaces.matmul.hopper:MosaicGpuBf16x3Matmul"),
        KernelName("mosaic_gpu_mma", "cuda", "search_spaces.matmul.mma:MosaicGpuMmaMatmul"),
        KernelName("jax_blackwell", "cuda", "search_spaces.contrib.jax_blackwell:JaxBlackwellMatmul"),
        KernelName("mosaic_tpu", "tpu", "search_spaces.contrib.tpu.matmul:MosaicTpuMatmul"),
        KernelName("interpret", "cpu", "search_spaces.matmul.interpret:InterpretMatmul"),
        XlaMatmul(),
    ),
    jvp=rules.jvp,
    transpose=rules.transpose,
    batch=rules.batch,
    front_end=bind,
    equations={lax.dot_general_p: problem_of_dot_general},
    shard=rules.shard,
)

__all__ = ["MATMUL", "MatmulProblem"]
