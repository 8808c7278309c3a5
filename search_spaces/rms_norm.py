"""The root-mean-square norm: ``RMS_NORM``, its problem and its kernels."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from search_spaces.front_end import require_array
from search_spaces.operation import BoundCall, Operation, Unsupported
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
from search_spaces.rowwise import problem
from search_spaces.rowwise.hopper.kernel import HopperRows
from search_spaces.rowwise.hopper.space import ElementCosts
from search_spaces.rowwise.problem import WeightedRowProblem
from search_spaces.rowwise.reduction import InterpretedRows, Reducer, Reduction, Statistics, XlaRows
from search_spaces.rowwise.tpu.kernel import TpuRows
from search_spaces.rowwise.tpu.space import TpuElementCosts

# ------------------------------------------------------------------------------
# The root-mean-square norm as a reduction: the sum of squares in one pass over a row.


class RmsNorm(Reduction):
    """The statistic is the sum of squares."""

    identity = 0.0
    init = (0.0,)

    def __init__(self, columns: int, eps: float) -> None:
        self.columns = columns
        self.eps = eps

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

EPS = 1e-6


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
# The root-mean-square norm on Hopper.


class HopperRmsNorm(HopperRows[RmsNormProblem]):
    version = 1
    costs = ElementCosts(mufu_ops=(0.0, 0.0), fp32_ops=(6.0, 7.0), widens=False)

    def reduction(self, problem: RmsNormProblem, *, eps: float = EPS, **params: Any) -> RmsNorm:
        return RmsNorm(problem.columns, eps)


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


# ------------------------------------------------------------------------------
# The root-mean-square norm on a TPU.


class TpuRmsNorm(TpuRows[RmsNormProblem]):
    name = "rms_norm_tpu"
    costs = TpuElementCosts(fp32_ops=7.0, mufu_ops=0.0)

    def reduction(self, problem: RmsNormProblem, *, eps: float = EPS, **params: Any) -> RmsNorm:
        return RmsNorm(problem.columns, eps)


# Derivatives are the library kernel's: XLA's, of the formula. Users also write it in float32 and round once, as Flax
# does (flax.linen.normalization), so there is only one program.
RMS_NORM = Operation[RmsNormProblem](
    name="rms_norm",
    problem=RmsNormProblem,
    kernels=(HopperRmsNorm(), TpuRmsNorm(), InterpretedRows(), XlaRows()),
    params=("eps",),
    batch=problem.batch,
    front_end=bind,
    recognise=recognise,
    shard=problem.shard,
)

__all__ = ["RMS_NORM", "RmsNormProblem"]
