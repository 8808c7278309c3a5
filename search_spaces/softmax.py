"""Softmax over the last axis: ``SOFTMAX``, its problem and its kernels."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from search_spaces.operation import BoundCall, Unsupported
from search_spaces.problem import Tolerance
from search_spaces.recognise import (
    Node,
    Recognised,
    Value,
    as_of,
    between,
    constant_along,
    reduced,
    rounded,
    rows_of,
    same,
    strip,
)
from search_spaces.rowwise import Reducer, Reduction, Statistics, XlaRows, problem, row_operation
from search_spaces.rowwise.hopper import HopperRows
from search_spaces.rowwise.hopper.space import ElementCosts
from search_spaces.rowwise.problem import RowProblem
from search_spaces.rowwise.tpu import TpuRows
from search_spaces.rowwise.tpu.space import TpuElementCosts

# ------------------------------------------------------------------------------
# Softmax as a reduction: the running maximum and the sum of exponentials, in one pass over a row.

# Finite, so that the difference of two of these is 0; an element of minus infinity still contributes nothing.
LEAST = float(np.finfo(np.float32).min)


class Softmax(Reduction):
    """The statistics are the maximum and the sum of exponentials relative to it.

    The sum is rescaled when the maximum grows (Milakov, Gimelshein, arXiv:1805.02867).
    """

    identity = -np.inf
    init = (LEAST, 0.0)

    def whole_row(
        self,
        fragments: Sequence[jax.Array],
        masked: Sequence[jax.Array],
        shared: Sequence[jax.Array | None],
        reducer: Reducer,
    ) -> list[jax.Array]:
        maximum = reducer.broadcast(reducer.max(functools.reduce(jnp.maximum, fragments)))
        results = [jnp.exp(fragment - maximum) for fragment in fragments]
        last = results[-1] if masked[-1] is fragments[-1] else jnp.exp(masked[-1] - maximum)
        scale = reducer.broadcast(1 / reducer.sum(sum(results[:-1], last)))
        return [result * scale for result in results]

    def update(self, statistics: Statistics, fragments: Sequence[jax.Array]) -> Statistics:
        maximum, normalizer = statistics
        new = functools.reduce(jnp.maximum, fragments, maximum)
        return new, sum((jnp.exp(fragment - new) for fragment in fragments), normalizer * jnp.exp(maximum - new))

    def reduce(self, statistics: Statistics, reducer: Reducer) -> Statistics:
        maximum, normalizer = statistics
        of_all = reducer.max(maximum)
        return of_all, reducer.sum(normalizer * jnp.exp(maximum - reducer.broadcast(of_all)))

    def combine(self, one: Statistics, other: Statistics) -> Statistics:
        maximum = jnp.maximum(one[0], other[0])
        first, second = (normalizer * jnp.exp(of_part - maximum) for of_part, normalizer in (one, other))
        return maximum, first + second

    def finalize(self, statistics: Statistics) -> Statistics:
        maximum, normalizer = statistics
        return maximum, 1 / normalizer

    def apply(self, fragment: jax.Array, shared: jax.Array | None, final: Statistics) -> jax.Array:
        maximum, scale = final
        return jnp.exp(fragment - maximum) * scale


# ------------------------------------------------------------------------------
# Softmax over the last axis as a problem.


@dataclasses.dataclass(frozen=True)
class SoftmaxProblem(RowProblem):
    """``out[row] = exp(x[row] - max(x[row])) / sum(exp(x[row] - max(x[row])))``."""

    @staticmethod
    def compute(*args: jax.Array, **params: Any) -> jax.Array:
        (x,) = args
        if 0 in x.shape:
            return x
        e = jnp.exp(x - jnp.max(x, axis=-1, keepdims=True))
        return e / jnp.sum(e, axis=-1, keepdims=True)

    @property
    def flops(self) -> float:
        return 5.0 * self.rows * self.columns


# ------------------------------------------------------------------------------
# Softmax over the last axis and the log-sum-exp of each row as a problem: an operation with two results.


@dataclasses.dataclass(frozen=True)
class SoftmaxWithLseProblem(RowProblem):
    """``lse[row] = log(sum(exp(x[row])))`` and ``p[row] = exp(x[row] - lse[row])``.

    `p` is ``[rows, columns]`` of the dtype of `x`, and `lse` is ``[rows]`` in float32, as attention saves it for its
    backward pass (Dao, arXiv:2307.08691, 3.1).
    """

    def operands(self) -> tuple[jax.ShapeDtypeStruct, ...]:
        return (jax.ShapeDtypeStruct((self.rows, self.columns), jnp.dtype(self.dtype)),)

    def result(self) -> tuple[jax.ShapeDtypeStruct, ...]:  # type: ignore[override]
        return (*self.operands(), jax.ShapeDtypeStruct((self.rows,), jnp.dtype(jnp.float32)))

    @property
    def row_axes(self) -> tuple[int, ...]:
        return -2, -1

    @staticmethod
    def compute(*args: jax.Array, **params: Any) -> Any:
        (x,) = args
        if 0 in x.shape:
            return x, jnp.full(x.shape[:-1], -jnp.inf, x.dtype)
        most = jnp.max(x, axis=-1, keepdims=True)
        # Minus infinity minus itself is NaN: the sum of such a row is 0, as in `jax.nn.logsumexp`.
        shift = lax.stop_gradient(jnp.where(jnp.isfinite(most), most, 0.0))
        e = jnp.exp(x - shift)
        total = jnp.sum(e, axis=-1, keepdims=True)
        # `jax.nn.softmax` of a row with an infinity is NaN throughout.
        p = jnp.where(most == jnp.inf, jnp.nan, e / total)
        return p, (shift + jnp.log(total))[..., 0]

    @property
    def flops(self) -> float:
        return 5.0 * self.rows * self.columns

    def tolerance(self) -> tuple[Tolerance, Tolerance]:  # type: ignore[override]
        """Returns the tolerances of `p` and of `lse`.

        That of `p` is the rows' own. `lse` is off by the relative error of its sum, absolutely, and by its rounding.
        """
        rows = super().tolerance()
        return rows, Tolerance(absolute=2.0**-18, relative=2.0**-22)


# ------------------------------------------------------------------------------
# Front end of softmax: rows along the last axis; JAX's own function along another axis.


def bind(x: Any, *, axis: Any = -1) -> BoundCall[SoftmaxProblem] | Unsupported:
    """Binds a call of `scheduler.tuned_softmax`, with the same arguments."""
    along = problem.bind_elsewhere(x, axis, lambda: jax.nn.softmax(x, axis))
    return along or problem.bind_rows(SoftmaxProblem, x)


# ------------------------------------------------------------------------------
# Recognition of a softmax along the last axis in a jaxpr: exponentials over their sum.


def recognise(node: Node) -> Recognised | None:
    """Recognises `jax.nn.softmax`, and the formula with or without the maximum subtracted."""
    if node.name != "div" or (x := argument(node.results[0])) is None:
        return None
    result = rounded(node.results[0])
    read = as_of(x, result.dtype)
    if read is None:  # x never had the dtype that the result is rounded to
        result, read = node.results[0], as_of(x, node.results[0].dtype)
    if read is None or read.shape != result.shape:
        return None
    rows, columns = rows_of(result)
    try:
        problem = SoftmaxProblem(rows=rows, columns=columns, dtype=str(result.dtype))
    except ValueError:
        return None
    return Recognised(problem, between(result, [strip(read)]), (node,))


def argument(value: Value) -> Value | None:
    """Returns the array of which `value` is the softmax along the last axis; None if it is no softmax."""
    if (node := strip(value).by("div")) is None:
        return None
    exponentials, total = node.inputs
    if (found := reduced(total, "reduce_sum")) is None:
        return None
    summed, axis = found
    if not same(summed, exponentials) or axis != len(summed.shape) - 1 or (exp := summed.by("exp")) is None:
        return None
    exponent = exp.inputs[0]
    if (less := strip(exponent).by("sub")) is not None and constant_along(less.inputs[1], axis):
        return less.inputs[0]
    return exponent


# ------------------------------------------------------------------------------
# Front end of softmax with the log-sum-exp: rows along the last axis; XLA along another axis.


def bind_with_lse(x: Any, *, axis: Any = -1) -> BoundCall[SoftmaxWithLseProblem] | Unsupported:
    """Binds a call of `scheduler.tuned_softmax` with ``return_lse=True``, with the same arguments."""

    def answer() -> tuple[jax.Array, jax.Array]:
        wide = x.astype(problem.formula_dtype(x))
        p, lse = jax.nn.softmax(wide, axis), jax.nn.logsumexp(wide, axis)
        return p.astype(x.dtype) if jnp.issubdtype(x.dtype, jnp.inexact) else p, lse

    return problem.bind_elsewhere(x, axis, answer) or problem.bind_rows(SoftmaxWithLseProblem, x)


# Derivatives are the library kernel's: XLA's, of the formula.
SOFTMAX = row_operation(
    "softmax",
    SoftmaxProblem,
    # Exponentials: one for rows in registers; for chunks one for the sum, one for the result, and one correction per
    # chunk.
    HopperRows(Softmax, ElementCosts(mufu_ops=(1.0, 2.25), fp32_ops=(8.0, 13.0), widens=True)),
    TpuRows(Softmax, "softmax_tpu", TpuElementCosts(fp32_ops=11.0, mufu_ops=2.25)),
    library=XlaRows(jax.nn.softmax),
    front_end=bind,
    recognise=recognise,
)


# ------------------------------------------------------------------------------
# Softmax and log-sum-exp over the last axis: ``SOFTMAX_WITH_LSE``, its problem and its kernels.

# Derivatives are the library kernel's: XLA's, of the formula. There is no second program: users of the log-sum-exp of
# narrow rows need it in float32.
SOFTMAX_WITH_LSE = row_operation("softmax_with_lse", SoftmaxWithLseProblem, front_end=bind_with_lse)
