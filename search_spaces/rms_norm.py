"""The root-mean-square norm: ``RMS_NORM`` of an array, and ``ADD_RMS_NORM`` of a sum, together with the sum."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Iterator, Sequence
from typing import Any, ClassVar, NamedTuple, Self

import jax
import jax.numpy as jnp
from jax import lax

from search_spaces.front_end import require_array
from search_spaces.operation import BoundCall, Unsupported
from search_spaces.problem import Tolerance
from search_spaces.recognise import (
    Node,
    Recognised,
    Value,
    as_of,
    between,
    factors,
    number,
    reduced,
    rounded,
    rows_of,
    same,
    source,
    strip,
)
from search_spaces.rowwise import Reducer, Reduction, Statistics, problem, row_operation
from search_spaces.rowwise.hopper import HopperRows
from search_spaces.rowwise.hopper.space import ElementCosts
from search_spaces.rowwise.problem import WeightedRowProblem
from search_spaces.rowwise.tpu import TpuRows
from search_spaces.rowwise.tpu.space import TpuElementCosts

EPS = 1e-6

# ------------------------------------------------------------------------------
# The root-mean-square norm as a reduction: the sum of squares in one pass over a row.


class RmsNorm(Reduction):
    """The statistic is the sum of squares."""

    identity = 0.0
    init = (0.0,)

    def __init__(self, columns: int, eps: float) -> None:
        self.columns = columns
        self.eps = eps

    @classmethod
    def of(cls, problem: WeightedRowProblem, *, eps: float = EPS, **params: Any) -> Self:
        return cls(problem.columns, eps)

    def whole_row(
        self,
        fragments: Sequence[jax.Array],
        masked: Sequence[jax.Array],
        shared: Sequence[jax.Array | None],
        reducer: Reducer,
    ) -> list[jax.Array]:
        first, *rest = (fragment * fragment for fragment in masked)
        (scale,) = self.finalize((reducer.sum(sum(rest, first)),))
        final = (reducer.broadcast(scale),)
        return [self.apply(fragment, weight, final) for fragment, weight in zip(fragments, shared, strict=True)]

    def update(self, statistics: Statistics, fragments: Sequence[jax.Array]) -> Statistics:
        return (sum((fragment * fragment for fragment in fragments), statistics[0]),)

    def reduce(self, statistics: Statistics, reducer: Reducer) -> Statistics:
        return (reducer.sum(statistics[0]),)

    def combine(self, one: Statistics, other: Statistics) -> Statistics:
        return (one[0] + other[0],)

    def finalize(self, statistics: Statistics) -> Statistics:
        return (lax.rsqrt(statistics[0] / self.columns + self.eps),)

    def apply(self, fragment: jax.Array, shared: jax.Array | None, final: Statistics) -> jax.Array:
        assert shared is not None, "a norm has a weight"
        return fragment * final[0] * shared


# ------------------------------------------------------------------------------
# The root-mean-square norm with a weight as a problem.


@dataclasses.dataclass(frozen=True)
class RmsNormProblem(WeightedRowProblem):
    """``out[row] = x[row] / sqrt(mean(x[row]^2) + eps) * weight`` (Zhang, Sennrich, arXiv:1910.07467)."""

    @staticmethod
    def compute(*args: jax.Array, eps: float = EPS, **params: Any) -> jax.Array:
        x, weight = args
        return rms_norm(x, weight, eps)

    @property
    def flops(self) -> float:
        return 4.0 * self.rows * self.columns


def rms_norm(x: jax.Array, weight: jax.Array, eps: float) -> jax.Array:
    """Computes the formula along the last axis, in the dtype of the operands."""
    return x * lax.rsqrt(jnp.mean(x * x, axis=-1, keepdims=True) + eps) * weight


# ------------------------------------------------------------------------------
# The root-mean-square norm as users call it, along the last axis.


def bind(x: Any, weight: Any, *, eps: float = EPS) -> BoundCall[RmsNormProblem] | Unsupported:
    """Binds a call of `scheduler.tuned_rms_norm`, with the same arguments."""
    require_weight(x, weight)
    return problem.bind_rows(RmsNormProblem, x, weight, eps=eps)


def require_weight(x: Any, weight: Any) -> None:
    """Raises a ValueError if `weight` is not as long as the rows of `x`, a TypeError if either is no array."""
    require_array("x", x)
    require_array("weight", weight)
    if jnp.ndim(x) == 0 or jnp.shape(weight) != jnp.shape(x)[-1:]:
        raise ValueError(f"weight has shape {jnp.shape(weight)}; x {jnp.shape(x)} needs one as long as its last axis")
    if jnp.iscomplexobj(weight) and not jnp.iscomplexobj(x):
        raise TypeError(f"weight is {jnp.result_type(weight)}, which a result of {jnp.result_type(x)} cannot hold")


# ------------------------------------------------------------------------------
# Recognition of a root-mean-square norm with a weight in a jaxpr.


class Norm(NamedTuple):
    """A norm: its rows, in the dtype of the result; its weight; and the result that is used."""

    x: Value
    weight: Value
    weight_dtypes: tuple[str, str]
    result: Value


def recognise(node: Node) -> Recognised | None:
    """Recognises ``x * rsqrt(mean(x^2) + eps) * weight``, with factors in any order, or a square root and a quotient.

    A norm of centred rows is a layer norm, and is not recognised.
    """
    found = norm(node)
    return found and recognised(RmsNormProblem, found, [found.x, found.weight], node)


def recognised(
    of: type[WeightedRowProblem], found: Norm, inputs: list[Value], node: Node, call: str = ""
) -> Recognised | None:
    """Returns a norm as a problem of this type, which replaces the equations between these inputs and the result."""
    rows, columns = rows_of(found.result)
    for dtype in found.weight_dtypes:  # as it is stored, or as it is multiplied
        try:
            problem = of(rows=rows, columns=columns, dtype=str(found.result.dtype), weight_dtype=dtype)
        except ValueError:
            continue
        return Recognised(problem, between(found.result, map(strip, inputs)), (node,), call)
    return None


def norm(node: Node) -> Norm | None:
    """Returns the norm whose last equation is `node`."""
    if node.name not in ("mul", "div") or len(node.results[0].shape) < 1:
        return None
    found = list(_factors(node.results[0]))
    scales = [(value, squared) for value, inverse in found if (squared := _mean_square(value, inverse)) is not None]
    if len(found) != 3 or len(scales) != 1:
        return None
    scale, x = scales[0]
    others = [value for value, inverse in found if value is not scale and not inverse]
    if len(others) != 2 or _is_centred(x):
        return None
    weights = [value for value in others if not same(value, x) and _is_of_columns(value, len(x.shape) - 1)]
    rows = [value for value in others if same(value, x)]
    if len(weights) != 1 or len(rows) != 1:
        return None
    weight, _ = source(weights[0])
    for result in (rounded(node.results[0]), node.results[0]):
        of = as_of(rows[0], result.dtype)
        if of is not None and of.shape == result.shape:
            return Norm(of, weight, (str(weight.dtype), str(weights[0].dtype)), result)
    return None


def _factors(value: Value) -> Iterator[tuple[Value, bool]]:
    """Yields the factors (False) and the divisors (True) of a product."""
    for factor in factors(value):
        node = strip(factor).by("div")
        if node is None or number(node.inputs[0]) == 1.0:
            yield factor, False
        else:
            yield from _factors(node.inputs[0])
            yield node.inputs[1], True


def _mean_square(value: Value, inverse: bool) -> Value | None:
    """Returns the array whose rows have `value` as the inverse root of their mean square (the root, if `inverse`)."""
    base, where = source(value)
    if inverse:
        root = base.by("sqrt")
    elif (root := base.by("rsqrt")) is None and (one := base.by("div")) is not None and number(one.inputs[0]) == 1.0:
        root = source(one.inputs[1])[0].by("sqrt")
    if root is None:
        return None
    mean = root.inputs[0]
    if (plus := strip(mean).by("add")) is not None:
        rest = [each for each in plus.inputs if number(each) is None]
        if len(rest) != 1:
            return None
        (mean,) = rest
    base, _ = source(mean)
    if (node := base.by("div", "mul")) is None:
        return None
    numbers = [number(each) for each in node.inputs]
    over = numbers[1] if node.name == "div" else next((1 / n for n in numbers if n), None)
    total = node.inputs[0] if node.name == "div" or numbers[0] is None else node.inputs[1]
    summed, _ = source(total)
    if (node := summed.by("reduce_sum")) is None or over is None:
        return None
    squares = node.inputs[0]
    last = len(squares.shape) - 1
    if node.params["axes"] != (last,) or abs(over / squares.shape[last] - 1) > 1e-6:
        return None
    if last in where or any(at not in (None, i) for i, at in enumerate(where)):
        return None
    return _squared(strip(squares))


def _squared(value: Value) -> Value | None:
    if (node := value.by("square")) is not None:
        return strip(node.inputs[0])
    if (node := value.by("integer_pow")) is not None and node.params["y"] == 2:
        return strip(node.inputs[0])
    if (node := value.by("mul")) is not None and same(node.inputs[0], node.inputs[1]):
        return strip(node.inputs[0])
    return None


def _is_of_columns(value: Value, last: int) -> bool:
    """Returns whether the value is a single row that all rows share."""
    base, where = source(value)
    return len(base.shape) == 1 and where == (last,)


def _is_centred(x: Value) -> bool:
    """Returns whether the mean of each row was subtracted."""
    if (node := strip(x).by("sub")) is None:
        return False
    base, _ = source(node.inputs[1])
    mean = base.by("div", "mul")
    return mean is not None and any(
        reduced(each, "reduce_sum") or source(each)[0].by("reduce_sum") for each in mean.inputs
    )


# Derivatives are the library kernel's: XLA's, of the formula. Users also write it in float32 and round once, as Flax
# does (flax.linen.normalization), so there is only one program.
RMS_NORM = row_operation(
    "rms_norm",
    RmsNormProblem,
    HopperRows(RmsNorm, ElementCosts(mufu_ops=(0.0, 0.0), fp32_ops=(6.0, 7.0), widens=False)),
    TpuRows(RmsNorm, "rms_norm_tpu", TpuElementCosts(fp32_ops=7.0, mufu_ops=0.0)),
    params=("eps",),
    front_end=bind,
    recognise=recognise,
)


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


def bind_sum(x: Any, residual: Any, weight: Any, *, eps: float = EPS) -> BoundCall[AddRmsNormProblem] | Unsupported:
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
# Recognition of a root-mean-square norm of the sum of two arrays in a jaxpr.


def recognise_sum(node: Node) -> Recognised | None:
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


def jvp_of_sum(call: Any, p: AddRmsNormProblem, primals: Any, tangents: Any) -> tuple[Any, Any]:
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


# As for an RMS norm alone, users write the formula itself: there is only one program.
ADD_RMS_NORM = row_operation(
    "add_rms_norm",
    AddRmsNormProblem,
    HopperRows(AddRmsNorm, ElementCosts(mufu_ops=(0.0, 0.0), fp32_ops=(7.0, 9.0), widens=False)),
    TpuRows(AddRmsNorm, "add_rms_norm_tpu", TpuElementCosts(fp32_ops=12.0, mufu_ops=0.0)),
    params=("eps",),
    jvp=jvp_of_sum,
    front_end=bind_sum,
    recognise=recognise_sum,
)
