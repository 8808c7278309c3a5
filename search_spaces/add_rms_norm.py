"""The root-mean-square norm of a sum, together with the sum: ``ADD_RMS_NORM``, its problem and its kernels."""

from __future__ import annotations

import dataclasses
import functools
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
from jax import lax

from search_spaces.front_end import require_array
from search_spaces.operation import BoundCall, Operation, Unsupported
from search_spaces.problem import Tolerance
from search_spaces.recognise import Node, Recognised, as_of, source, strip
from search_spaces.rms_norm import EPS, RmsNorm, norm, recognised, require_weight, rms_norm
from search_spaces.rowwise import problem
from search_spaces.rowwise import problem as of_rows
from search_spaces.rowwise.hopper.kernel import HopperRows
from search_spaces.rowwise.hopper.space import ElementCosts
from search_spaces.rowwise.problem import WeightedRowProblem
from search_spaces.rowwise.reduction import InterpretedRows, XlaRows
from search_spaces.rowwise.tpu.kernel import TpuRows
from search_spaces.rowwise.tpu.space import TpuElementCosts

# ------------------------------------------------------------------------------
# The root-mean-square norm of a sum as a reduction: the sum is the reduced row, and a result.


class AddRmsNorm(RmsNorm):
    """The norm of ``x + residual``, with the sum rounded to their dtype."""

    def prologue(self, *operands: jax.Array) -> jax.Array:
        x, residual = operands
        return (x.astype(jnp.float32) + residual.astype(jnp.float32)).astype(x.dtype)


# ------------------------------------------------------------------------------
# The sum with a residual and its root-mean-square norm as a problem: two row operands, and two results.


@dataclasses.dataclass(frozen=True)
class AddRmsNormProblem(WeightedRowProblem):
    """``total = x + residual`` and ``out[row] = total[row] / sqrt(mean(total[row]^2) + eps) * weight``.

    Results are `out` and `total`. The sum is rounded to the dtype of `x`, and the norm of the rounded sum is computed
    in float32. Residual streams in JAX and PyTorch are written this way, as is vLLM's ``fused_add_rms_norm``.
    """

    row_operands: ClassVar[tuple[str, ...]] = ("x", "residual")

    def result(self) -> tuple[jax.ShapeDtypeStruct, ...]:  # type: ignore[override]
        rows = jax.ShapeDtypeStruct((self.rows, self.columns), jnp.dtype(self.dtype))
        return rows, rows

    @staticmethod
    def compute(*args: jax.Array, eps: float = EPS, **params: Any) -> tuple[jax.Array, jax.Array]:
        x, residual, weight = args
        total = x + residual
        return rms_norm(total, weight, eps), total

    @classmethod
    def compute_in(cls, dtype: Any, *args: jax.Array, eps: float = EPS, **params: Any) -> tuple[jax.Array, jax.Array]:
        x, residual, weight = args
        total = x.astype(dtype) + residual.astype(dtype)
        if jnp.issubdtype(x.dtype, jnp.floating):
            total = total.astype(x.dtype).astype(dtype)
        return rms_norm(total, weight.astype(dtype), eps), total

    @property
    def flops(self) -> float:
        return 5.0 * self.rows * self.columns

    def tolerance(self) -> tuple[Tolerance, Tolerance]:  # type: ignore[override]
        """Returns one rounding error for the sum; the norm may also be that of the sum before it is rounded.

        XLA omits that rounding if it fuses both (``xla_allow_excess_precision``), in the reference, too. It changes an
        element by half of eps, and the root of the mean by at most as much.
        """
        total = super().tolerance()
        half = float(jnp.finfo(jnp.dtype(self.dtype)).eps) / 2
        rounded_thrice = (1 + half) ** 2 / (1 - half) - 1
        return dataclasses.replace(total, relative=rounded_thrice + total.relative - 2 * half), total


# ------------------------------------------------------------------------------
# The root-mean-square norm of a sum as users call it, along the last axis.


def bind(x: Any, residual: Any, weight: Any, *, eps: float = EPS) -> BoundCall[AddRmsNormProblem] | Unsupported:
    """Binds a call of `scheduler.tuned_rms_norm` with a residual."""
    require_weight(x, weight)
    require_array("residual", residual)
    if jnp.shape(residual) != jnp.shape(x):
        raise ValueError(f"residual has shape {jnp.shape(residual)}; x {jnp.shape(x)} needs one of its own shape")
    if jnp.iscomplexobj(residual) and not jnp.iscomplexobj(x):
        raise TypeError(f"residual is {jnp.result_type(residual)}, which a result of {jnp.result_type(x)} cannot hold")
    jnp.result_type(x, residual)  # raises if `jax.numpy_dtype_promotion` forbids their sum
    return problem.bind_rows(AddRmsNormProblem, x, residual, weight, eps=eps)


# ------------------------------------------------------------------------------
# The root-mean-square norm of a sum on Hopper.


class HopperAddRmsNorm(HopperRows[AddRmsNormProblem]):
    version = 1
    costs = ElementCosts(mufu_ops=(0.0, 0.0), fp32_ops=(7.0, 9.0), widens=False)

    def reduction(self, problem: AddRmsNormProblem, *, eps: float = EPS, **params: Any) -> AddRmsNorm:
        return AddRmsNorm(problem.columns, eps)


# ------------------------------------------------------------------------------
# Recognition of a root-mean-square norm of the sum of two arrays in a jaxpr.


def recognise(node: Node) -> Recognised | None:
    """Recognises a norm of ``x + residual`` if the sum is rounded to the dtype of the result."""
    found = norm(node)
    added = None if found is None else strip(found.x).by("add")
    if found is None or added is None or strip(found.x).dtype != found.result.dtype:
        return None
    for each in added.inputs:
        of = as_of(each, found.result.dtype)
        if of is None or of.shape != found.result.shape or source(of)[0].shape != of.shape:  # one row for all is a bias
            return None
    return recognised(AddRmsNormProblem, found, [*added.inputs, found.weight], node, "tuned_rms_norm(residual=)")


# ------------------------------------------------------------------------------
# Derivative of a norm of a sum: the backward pass saves the sum, and nothing else of that size.


def jvp(call: Any, p: AddRmsNormProblem, primals: Any, tangents: Any) -> tuple[Any, Any]:
    """Returns results and tangents: that of the sum is the sum of tangents; that of the norm is XLA's, at the sum.

    The backward pass saves the sum and the weight, and computes the scales of rows again. It reads those rows anyway,
    while JAX would save two arrays of the same size, in float32.
    """
    *_, weight = primals
    dx, dresidual, dweight = tangents
    out, total = call(p, *primals)
    moving = [tangent for tangent in (dx, dresidual) if tangent is not None]
    dtotal = sum(moving[1:], moving[0]) if moving else None
    dout = functools.partial(_dout, eps=call.params.get("eps", EPS))
    # No earlier computation is the same, so common subexpressions need no protection.
    return (out, total), (jax.checkpoint(dout, prevent_cse=False)(total, weight, dtotal, dweight), dtotal)


def _dout(total: jax.Array, weight: jax.Array, dtotal: Any, dweight: Any, *, eps: float) -> jax.Array:
    """Returns the tangent of the norm.

    Scales are factored out of the sums. After transposition, both sums along a row then only depend on operands, and
    XLA computes them in one pass over the rows. In JAX's own derivative one sum contains scales, which take a pass
    before it.
    """
    wide, w = total.astype(jnp.float32), weight.astype(jnp.float32)
    scale = lax.rsqrt(jnp.mean(wide * wide, axis=-1, keepdims=True) + eps)
    parts = []
    if dtotal is not None:
        moves = dtotal.astype(jnp.float32)
        along = jnp.mean(wide * moves, axis=-1, keepdims=True)
        parts += [moves * w * scale, -(wide * w) * (scale**3 * along)]
    if dweight is not None:
        parts.append(wide * scale * dweight.astype(jnp.float32))
    return sum(parts[1:], parts[0]).astype(total.dtype)


# ------------------------------------------------------------------------------
# The root-mean-square norm of a sum on a TPU.


class TpuAddRmsNorm(TpuRows[AddRmsNormProblem]):
    name = "add_rms_norm_tpu"
    costs = TpuElementCosts(fp32_ops=12.0, mufu_ops=0.0)

    def reduction(self, problem: AddRmsNormProblem, *, eps: float = EPS, **params: Any) -> AddRmsNorm:
        return AddRmsNorm(problem.columns, eps)


# As for an RMS norm alone, users write the formula itself: there is only one program.
ADD_RMS_NORM = Operation[AddRmsNormProblem](
    name="add_rms_norm",
    problem=AddRmsNormProblem,
    kernels=(HopperAddRmsNorm(), TpuAddRmsNorm(), InterpretedRows(), XlaRows()),
    params=("eps",),
    jvp=jvp,
    batch=of_rows.batch,
    front_end=bind,
    recognise=recognise,
    shard=of_rows.shard,
)

__all__ = ["ADD_RMS_NORM", "AddRmsNormProblem"]
