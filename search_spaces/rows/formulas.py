"""The operations on rows that have names: each is a function of one row, from which its kernels and gradients follow.

A formula computes in float32 and rounds its results. Records of named formulas are keyed by extents and dtypes.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
from jax import lax

from search_spaces.derivative_rules import KNOWN, KnownRule
from search_spaces.front_end import require_array
from search_spaces.operation import BoundCall, Operation, Unsupported
from search_spaces.rows.calls import RowFunction, bind_formula, inner_of
from search_spaces.rows.named import DTYPES, RESULT_DTYPES, Formula, FormulaProblem, Of
from search_spaces.rows.operation import NAMED, row_operation

EPS = 1e-6
WEIGHT = Of("shared", "weight_dtype")


def wide(x: jax.Array) -> jax.Array:
    """Returns x in float32, or unchanged if its dtype is wider."""
    if not jnp.issubdtype(x.dtype, jnp.inexact):
        return x
    # JAX promotes no 8-bit dtypes implicitly.
    return x.astype(jnp.float32 if x.dtype.itemsize < 4 else jnp.promote_types(x.dtype, jnp.float32))


# ------------------------------------------------------------------------------
# Softmax and its relatives.


@jax.custom_jvp
def _row_softmax(x: jax.Array) -> jax.Array:
    e = jnp.exp(x - jnp.max(x, initial=-jnp.inf))
    return e / jnp.sum(e)


@_row_softmax.defjvp
def _softmax_tangent(primals: Any, tangents: Any) -> tuple[jax.Array, jax.Array]:
    """Returns the softmax y and its tangent: the backward pass then needs y alone."""
    y = _row_softmax(*primals)
    (dx,) = tangents
    return y, y * (dx - jnp.sum(y * dx))


def softmax(x: jax.Array) -> jax.Array:
    """``exp(x - max(x)) / sum(exp(x - max(x)))``."""
    return _row_softmax(wide(x)).astype(x.dtype)


@jax.custom_jvp
def _row_softmax_with_lse(y: jax.Array) -> tuple[jax.Array, jax.Array]:
    most = jnp.max(y, initial=-jnp.inf)
    # Minus infinity minus itself is NaN: the sum of such a row is 0, as in `jax.nn.logsumexp`.
    shift = jnp.where(jnp.isfinite(most), most, 0.0)
    e = jnp.exp(y - shift)
    total = jnp.sum(e)
    # `jax.nn.softmax` of a row with an infinity is NaN throughout.
    return jnp.where(most == jnp.inf, jnp.nan, e / total), shift + jnp.log(total)


@_row_softmax_with_lse.defjvp
def _softmax_with_lse_tangent(primals: Any, tangents: Any) -> tuple[Any, Any]:
    """Returns softmax p, log-sum-exp, and their tangents: the backward pass then needs p alone."""
    p, lse = _row_softmax_with_lse(*primals)
    (dy,) = tangents
    moved = jnp.sum(p * dy)
    return (p, lse), (p * (dy - moved), moved)


# p = e^x / sum(e^x), and dp = p (dx - sum(p dx)). lse = log(sum(e^x)), and dlse = sum(e^x dx) / sum(e^x) = sum(p dx).
KNOWN["_row_softmax"] = KnownRule(1, lambda _: [_row_softmax])
KNOWN["_row_softmax_with_lse"] = KnownRule(1, lambda _: [_row_softmax_with_lse])


def softmax_with_lse(x: jax.Array) -> tuple[jax.Array, jax.Array]:
    """``lse = log(sum(exp(x)))`` in float32, and ``p = exp(x - lse)``, as attention saves them.

    Source: Dao, arXiv:2307.08691, 3.1.
    """
    p, lse = _row_softmax_with_lse(wide(x))
    return p.astype(x.dtype), lse


def log_softmax(x: jax.Array) -> jax.Array:
    """``x - log(sum(exp(x)))``."""
    y = wide(x)
    less = y - lax.stop_gradient(jnp.max(y, initial=-jnp.inf))
    return (less - jnp.log(jnp.sum(jnp.exp(less)))).astype(x.dtype)


def cross_entropy(x: jax.Array, label: jax.Array) -> jax.Array:
    """``log(sum(exp(x))) - x[label]`` in float32; NaN if the label is no column."""
    y = wide(x)
    most = lax.stop_gradient(jnp.max(y, initial=-jnp.inf))
    # The maximum is subtracted after the sum, which then needs no stage of its own.
    chosen = jnp.sum(jnp.where(jnp.arange(x.shape[0]) == label, y, 0.0)) - most
    inside = (label >= 0) & (label < x.shape[0])
    return jnp.where(inside, jnp.log(jnp.sum(jnp.exp(y - most))) - chosen, jnp.nan)


def bind_along(operation: Operation[Any], function: Any, x: Any, axis: Any) -> BoundCall[Any] | Unsupported:
    """Binds a call along the last axis with several elements; along another axis, XLA computes `function`.

    `scheduler.tuned_softmax` makes calls along another axis calls of `ROWS_ALONG` where these compute the same.

    Raises:
      TypeError: `x` is no array, or an array of booleans.
    """
    require_array("x", x)
    if jnp.issubdtype(jnp.result_type(x), jnp.bool_):
        raise TypeError("x holds truth values, of which there is no softmax: use .astype")
    shape = jnp.shape(x)
    if shape and axis in (-1, len(shape) - 1):
        return bind_formula(operation.problem, x)
    if isinstance(axis, int) and -len(shape) <= axis < len(shape) and inner_of(x, axis) == 1:
        bound = bind_formula(operation.problem, jnp.reshape(x, shape[: axis % len(shape) + 1]))
        if isinstance(bound, BoundCall):
            return dataclasses.replace(bound, restore=functools.partial(_reshaped, bound.problem, shape, axis))
    return Unsupported(f"{axis=} is not the last one of x {shape}", lambda: function(x, axis))


def _reshaped(problem: FormulaProblem, shape: tuple[int, ...], axis: int, *results: jax.Array) -> Any:
    rest = (*shape[: axis % len(shape)], *shape[axis % len(shape) + 1 :])
    each = zip(results, problem.arrays[1], strict=True)
    return problem.pack([x.reshape(shape if of.kind == "row" else rest) for x, of in each])


def softmax_along(x: Any, axis: Any) -> bool:
    """Returns whether a softmax of x is that of rows along an axis that is not the last, of a dtype of formulas."""
    if not isinstance(axis, int) or str(getattr(x, "dtype", "")) not in DTYPES or not -x.ndim <= axis < x.ndim:
        return False
    return inner_of(x, axis) > 1


SOFTMAX_ROW = RowFunction(softmax, ("x",), ())
SOFTMAX_WITH_LSE_ROW = RowFunction(softmax_with_lse, ("x",), ())
LOG_SOFTMAX_ROW = RowFunction(log_softmax, ("x",), ())


def _bind_softmax(x: Any, *, axis: Any = -1) -> BoundCall[Any] | Unsupported:
    """Binds a call of `scheduler.tuned_softmax`, with the same arguments."""
    return bind_along(SOFTMAX, jax.nn.softmax, x, axis)


def _bind_softmax_with_lse(x: Any, *, axis: Any = -1) -> BoundCall[Any] | Unsupported:
    """Binds a call of `scheduler.tuned_softmax` with ``return_lse=True``, with the same arguments."""

    def along(x: Any, axis: Any) -> tuple[jax.Array, jax.Array]:
        y = wide(jnp.asarray(x)) if jnp.issubdtype(jnp.result_type(x), jnp.inexact) else jnp.asarray(x, float)
        p, lse = jax.nn.softmax(y, axis), jax.nn.logsumexp(y, axis)
        return p.astype(x.dtype) if jnp.issubdtype(x.dtype, jnp.inexact) else p, lse

    return bind_along(SOFTMAX_WITH_LSE, along, x, axis)


def _bind_log_softmax(x: Any, *, axis: Any = -1) -> BoundCall[Any] | Unsupported:
    """Binds a call of `scheduler.tuned_log_softmax`, with the same arguments."""
    return bind_along(LOG_SOFTMAX, jax.nn.log_softmax, x, axis)


def _then(found: BoundCall[Any] | Unsupported, last: Callable[[Any], Any]) -> BoundCall[Any] | Unsupported:
    """Returns the call with `last` applied to its result."""
    if isinstance(found, Unsupported):
        return Unsupported(found.reason, lambda: last(found.answer()))
    assert found.restore is not None
    restore = found.restore
    return dataclasses.replace(found, restore=lambda *results: last(restore(*results)))


def _bind_cross_entropy(logits: Any, labels: Any, *, ignore_index: int | None = None) -> BoundCall[Any] | Unsupported:
    """Binds a call of `scheduler.tuned_cross_entropy`, with the same arguments."""
    require_array("logits", logits)
    require_array("labels", labels)
    if not jnp.issubdtype(dtype := jnp.result_type(labels), jnp.integer):
        raise TypeError(f"labels are {dtype}; integers are needed")
    if jnp.issubdtype(dtype := jnp.result_type(logits), jnp.bool_) or jnp.issubdtype(dtype, jnp.complexfloating):
        raise TypeError(f"logits are {dtype}; real numbers are needed")
    if jnp.ndim(logits) == 0 or jnp.shape(labels) != jnp.shape(logits)[:-1]:
        raise ValueError(f"labels have shape {jnp.shape(labels)}; logits {jnp.shape(logits)} need one for each row")
    labels = jnp.asarray(labels)
    if ignore_index is not None:
        ignored = labels.astype(jnp.int32) == ignore_index
        counted = _bind_cross_entropy(logits, jnp.where(ignored, jnp.zeros_like(labels), labels))
        return _then(counted, lambda loss: jnp.where(ignored, jnp.zeros_like(loss), loss))
    if jnp.iinfo(labels.dtype).max > jnp.iinfo(jnp.int32).max:
        labels = jnp.clip(labels, -1 if jnp.issubdtype(labels.dtype, jnp.signedinteger) else 0, jnp.shape(logits)[-1])
    return bind_formula(CROSS_ENTROPY.problem, logits, labels.astype(jnp.int32))


SOFTMAX = row_operation(
    Formula(softmax, {"x": Of()}, benign=True),
    plain=jax.nn.softmax,
    front_end=_bind_softmax,
)
# There is no second program: users of the log-sum-exp of narrow rows need it in float32.
SOFTMAX_WITH_LSE = row_operation(Formula(softmax_with_lse, {"x": Of()}, benign=True), front_end=_bind_softmax_with_lse)
LOG_SOFTMAX = row_operation(Formula(log_softmax, {"x": Of()}), plain=jax.nn.log_softmax, front_end=_bind_log_softmax)
CROSS_ENTROPY = row_operation(
    Formula(cross_entropy, {"logits": Of(), "labels": Of("scalar", "int32")}),
    front_end=_bind_cross_entropy,
)


# ------------------------------------------------------------------------------
# Norms. Users also write them in float32 and round once, as Flax does (flax.linen.normalization).


def rms_norm(x: jax.Array, weight: jax.Array, *, eps: float = EPS) -> jax.Array:
    """``x / sqrt(mean(x^2) + eps) * weight`` (Zhang, Sennrich, arXiv:1910.07467)."""
    y = wide(x)
    return (y * lax.rsqrt(jnp.mean(y * y) + eps) * wide(weight)).astype(x.dtype)


def add_rms_norm(
    x: jax.Array, residual: jax.Array, weight: jax.Array, *, eps: float = EPS
) -> tuple[jax.Array, jax.Array]:
    """``total = x + residual``, and the root-mean-square norm of the rounded total; returns norm and total.

    Residual streams in JAX and PyTorch are written this way, as is vLLM's ``fused_add_rms_norm``.
    """
    total = (wide(x) + wide(residual)).astype(x.dtype)
    return rms_norm(total, weight, eps=eps), total


def layer_norm(x: jax.Array, weight: jax.Array, bias: jax.Array, *, eps: float = EPS) -> jax.Array:
    """``(x - mean(x)) / sqrt(var(x) + eps) * weight + bias`` (Ba, Kiros, Hinton, arXiv:1607.06450)."""
    y = wide(x)
    centred = y - jnp.mean(y)
    return (centred * lax.rsqrt(jnp.mean(centred * centred) + eps) * wide(weight) + wide(bias)).astype(x.dtype)


def require_like_rows(x: Any, **vectors: Any) -> None:
    """Raises a ValueError if a vector is not as long as the rows of `x`, a TypeError if any is no array."""
    require_array("x", x)
    for name, vector in vectors.items():
        require_array(name, vector)
        if jnp.ndim(x) == 0 or jnp.shape(vector) != jnp.shape(x)[-1:]:
            raise ValueError(
                f"{name} has shape {jnp.shape(vector)}; x {jnp.shape(x)} needs one as long as its last axis"
            )
        _require_real(name, vector, x)


def _require_real(name: str, array: Any, x: Any) -> None:
    if jnp.iscomplexobj(array) and not jnp.iscomplexobj(x):
        raise TypeError(f"{name} is {jnp.result_type(array)}, which a result of {jnp.result_type(x)} cannot hold")


def _bind_rms_norm(x: Any, weight: Any, *, eps: float = EPS) -> BoundCall[Any] | Unsupported:
    """Binds a call of `scheduler.tuned_rms_norm`, with the same arguments."""
    require_like_rows(x, weight=weight)
    return bind_formula(RMS_NORM.problem, x, weight, eps=eps)


def _bind_add_rms_norm(x: Any, residual: Any, weight: Any, *, eps: float = EPS) -> BoundCall[Any] | Unsupported:
    """Binds a call of `scheduler.tuned_rms_norm` with a residual."""
    require_like_rows(x, weight=weight)
    require_array("residual", residual)
    if jnp.shape(residual) != jnp.shape(x):
        raise ValueError(f"residual has shape {jnp.shape(residual)}; x {jnp.shape(x)} needs one of its own shape")
    _require_real("residual", residual, x)
    jnp.result_type(x, residual)  # raises if `jax.numpy_dtype_promotion` forbids their sum
    return bind_formula(ADD_RMS_NORM.problem, x, residual, weight, eps=eps)


def _bind_layer_norm(x: Any, weight: Any, bias: Any, *, eps: float = EPS) -> BoundCall[Any] | Unsupported:
    """Binds a call of `scheduler.tuned_layer_norm`, with the same arguments."""
    require_like_rows(x, weight=weight, bias=bias)
    return bind_formula(LAYER_NORM.problem, x, weight, bias, eps=eps)


RMS_NORM = row_operation(
    Formula(rms_norm, {"x": Of(), "weight": WEIGHT}, benign=True),
    front_end=_bind_rms_norm,
)
ADD_RMS_NORM = row_operation(
    Formula(add_rms_norm, {"x": Of(), "residual": Of(), "weight": WEIGHT}, benign=True),
    front_end=_bind_add_rms_norm,
)
LAYER_NORM = row_operation(
    Formula(layer_norm, {"x": Of(), "weight": WEIGHT, "bias": WEIGHT}),
    front_end=_bind_layer_norm,
)


# ------------------------------------------------------------------------------
# SiLU of one half of each row times the other half.


def silu_and_mul(x: jax.Array) -> jax.Array:
    """``silu(x[:d]) * x[d:]`` with ``silu(g) = g / (1 + exp(-g))``; the first half is the gate, as in FlashInfer."""
    gate, up = jnp.split(wide(x), 2)
    return (gate * (1 / (1 + jnp.exp(-gate))) * up).astype(x.dtype)


def _silu_and_mul_plain(x: jax.Array) -> jax.Array:
    gate, up = x[..., : x.shape[-1] // 2], x[..., x.shape[-1] // 2 :]
    return jax.nn.silu(gate) * up


def _bind_silu_and_mul(x: Any) -> BoundCall[Any] | Unsupported:
    """Binds a call of `scheduler.tuned_silu_and_mul`, with the same argument."""
    require_array("x", x)
    if jnp.ndim(x) == 0 or jnp.shape(x)[-1] % 2:
        raise ValueError(f"x has shape {jnp.shape(x)}; its last axis is two halves, so its length is even")
    if not jnp.issubdtype(dtype := jnp.result_type(x), jnp.inexact):
        raise TypeError(f"x holds {dtype}, of which there is no SiLU: use .astype")
    return bind_formula(SILU_AND_MUL.problem, x)


SILU_AND_MUL = row_operation(
    Formula(silu_and_mul, {"x": Of(parts=2)}, benign=True),
    plain=_silu_and_mul_plain,
    # 4096 x 14336 in bfloat16 on an H200: XLA takes 135 us alone, the same as the kernel; 337 us in a training step of
    # Llama 3 8B, where it joins both halves of the gradient in another pass.
    backward_loses_ties=True,
    front_end=_bind_silu_and_mul,
)


# ------------------------------------------------------------------------------
# Quantization of rows to 8 bits.


def quantize_rows(x: jax.Array, *, result_dtype: str) -> tuple[jax.Array, jax.Array]:
    """``q = x / scale`` rounded to 8 bits, and ``scale = max(abs(x)) / largest``, 1 for a row of zeros."""
    y = wide(x)
    integers = jnp.issubdtype(result_dtype, jnp.integer)
    largest = float(jnp.iinfo(result_dtype).max if integers else jnp.finfo(result_dtype).max)
    most = jnp.max(jnp.abs(y))
    scale = jnp.where(most > 0, most / largest, 1.0)
    q = jnp.clip(y * (1 / scale), -largest, largest)
    return (jnp.round(q) if integers else q).astype(result_dtype), scale


def _bind_quantize_rows(
    x: Any, *, result_dtype: str = RESULT_DTYPES[0], block: int | None = None
) -> BoundCall[Any] | Unsupported:
    """Binds a call of `scheduler.tuned_quantize_rows`; blocks of a row become rows."""
    require_array("x", x)
    if result_dtype not in RESULT_DTYPES:
        raise ValueError(f"dtype={result_dtype!r} is not one of {', '.join(RESULT_DTYPES)}")
    if not jnp.issubdtype(dtype := jnp.result_type(x), jnp.floating) or dtype.itemsize == 1:
        raise TypeError(f"x holds {dtype}; real numbers of 16 bits or more are needed")
    if block is None:
        return bind_formula(QUANTIZE_ROWS.problem, x, result_dtype=result_dtype)
    x = jnp.asarray(x)
    if not isinstance(block, int) or block < 1 or x.ndim == 0 or x.shape[-1] % block:
        raise ValueError(f"block={block!r} does not divide the last axis of x {x.shape}")
    shape = x.shape
    found = bind_formula(
        QUANTIZE_ROWS.problem, x.reshape(*shape[:-1], shape[-1] // block, block), result_dtype=result_dtype
    )
    return _then(found, lambda both: (both[0].reshape(shape), both[1]))


QUANTIZE_ROWS = row_operation(Formula(quantize_rows, {"x": Of()}), front_end=_bind_quantize_rows)

# Other modules import operations, also those of derivatives, and the types of their problems; processes load operations
# by these names.
for _operation in NAMED.values():
    globals()[_operation.name.upper()] = _operation
    globals()[_operation.problem.__name__] = _operation.problem
if TYPE_CHECKING:
    # In a cycle of imports, mypy does not call what `__getattr__` gives.
    LayerNormProblem: Any
    SiluAndMulProblem: Any
    SiluAndMulJvpProblem: Any

    def __getattr__(name: str) -> Any: ...
