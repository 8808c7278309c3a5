"""The public functions of operations on rows, and `rows`, which tunes any function of one row."""

from __future__ import annotations

import dataclasses
import functools
import inspect
import operator
from collections.abc import Callable, Mapping
from typing import Any, Literal, Unpack, overload

import jax
import jax.numpy as jnp

from scheduler.api import tune, tuned
from scheduler.core.arguments import MOST, checked_integer_or_none
from scheduler.dispatch import calls
from scheduler.tuned_calls import SHARED, Selection, public, selected
from search_spaces.bindings import bindings_of
from search_spaces.operation import Params
from search_spaces.rows import formulas
from search_spaces.rows.calls import RowFunction, inner_of
from search_spaces.rows.channels import GROUP_NORM
from search_spaces.rows.formulas import EPS, softmax_along
from search_spaces.rows.operation import ROWS, ROWS_ALONG

# ------------------------------------------------------------------------------
# Norms.


@overload
def tuned_rms_norm(
    x: Any, weight: Any, *, eps: float = EPS, residual: None = None, **selection: Unpack[Selection]
) -> jax.Array: ...
@overload
def tuned_rms_norm(
    x: Any, weight: Any, *, eps: float = EPS, residual: Any, **selection: Unpack[Selection]
) -> tuple[jax.Array, jax.Array]: ...
@public(formulas.RMS_NORM)
def tuned_rms_norm(
    x: Any, weight: Any, *, eps: float = EPS, residual: Any = None, **selection: Unpack[Selection]
) -> jax.Array | tuple[jax.Array, jax.Array]:
    """Computes ``x / sqrt(mean(x^2) + eps) * weight`` along the last axis with the best known schedule.

    The computation is in float32 and the result is rounded once. With a residual, the function normalizes
    ``total = x + residual`` and also returns `total`, as vLLM's ``fused_add_rms_norm`` does. The sum is rounded to the
    dtype of `x` before it is normalized; XLA may skip that rounding if it fuses both steps.

    Works wherever `tuned_matmul` works. The gradient is a tuned call, too ("rms_norm_backward"). The call falls back to
    XLA for a weight of a dtype other than float32 or that of `x`, for a residual of a dtype other than that of `x`, for
    arrays of a dtype other than float32, bfloat16 or float16, and for empty arrays.

    Args:
      x: ``[..., columns]``.
      weight: ``[columns]``, of the dtype of `x` or float32.
      eps: a number, not an array; keeps rows of zeros finite.
      residual: of the shape and dtype of `x`. This is a separate operation, "add_rms_norm", which is tuned separately.
      on_miss, backends, schedule: as in `tuned_matmul`.

    Returns:
      An array of the shape and dtype of `x`. With a residual, a pair of that array and the sum, of the same shape and
      dtype.

    Raises:
      ValueError: the length of `weight` is not that of a row, or `residual` does not have the shape of `x`.
      CacheMiss, NoCandidate, IllegalSchedule, TypeError: as in `tuned_matmul`.
    """
    call_options = (*selected(tuned_rms_norm, selection), calls.number("eps", eps))
    if residual is None:
        return calls.answer(_RMS_NORM, call_options, x, weight)
    return calls.answer(_ADD_RMS_NORM, call_options, x, residual, weight)


_RMS_NORM, _ADD_RMS_NORM = (
    calls.Signature(formulas.RMS_NORM, ("eps",)),
    calls.Signature(formulas.ADD_RMS_NORM, ("eps",)),
)


@public(formulas.LAYER_NORM)
def tuned_layer_norm(x: Any, weight: Any, bias: Any, *, eps: float = EPS, **selection: Unpack[Selection]) -> jax.Array:
    """Computes ``(x - mean(x)) / sqrt(var(x) + eps) * weight + bias`` along the last axis with the best known schedule.

    The computation is in float32 and the result is rounded once (Ba, Kiros, Hinton, arXiv:1607.06450).

    Works wherever `tuned_matmul` works. The gradient is a tuned call, too ("layer_norm_backward"). The call falls back
    to XLA as `tuned_rms_norm` does, and if `weight` and `bias` have different dtypes.

    Args:
      x: ``[..., columns]``.
      weight, bias: ``[columns]``, of the dtype of `x` or float32.
      eps: a number, not an array; keeps rows of equal elements finite.
      on_miss, backends, schedule: as in `tuned_matmul`.

    Returns:
      An array of the shape and dtype of `x`.

    Raises:
      ValueError: the length of `weight` or `bias` is not that of a row.
      CacheMiss, NoCandidate, IllegalSchedule, TypeError: as in `tuned_matmul`.
    """
    call_options = (*selected(tuned_layer_norm, selection), calls.number("eps", eps))
    return calls.answer(_LAYER_NORM, call_options, x, weight, bias)


_LAYER_NORM = calls.Signature(formulas.LAYER_NORM, ("eps",))


@public(GROUP_NORM)
def tuned_group_norm(
    x: Any, weight: Any, bias: Any, *, groups: int, eps: float = EPS, **selection: Unpack[Selection]
) -> jax.Array:
    """Computes a group norm of arrays with channels last, with the best known schedule.

    The channels are divided into groups of adjacent ones. Mean and variance are those of a group at all positions of a
    sample. The computation is in float32 and the result is rounded once (Wu, He, arXiv:1803.08494).

    Works wherever `tuned_matmul` works. Derivatives are computed by XLA, and devices may divide the samples. The call
    falls back to XLA for dtypes other than float32, bfloat16 or float16, for empty arrays, and if `weight` and `bias`
    have different dtypes.

    Args:
      x: ``[samples, ..., channels]``.
      weight, bias: ``[channels]``, of the dtype of `x` or float32.
      groups: number of groups, which divides the channels.
      eps: a number, not an array; keeps groups of equal elements finite.
      on_miss, backends, schedule: as in `tuned_matmul`.

    Returns:
      An array of the shape and dtype of `x`.

    Raises:
      ValueError: `weight` or `bias` do not have one element for each channel, or `groups` does not divide the channels.
      CacheMiss, NoCandidate, IllegalSchedule, TypeError: as in `tuned_matmul`.
    """
    options = (*selected(tuned_group_norm, selection), groups, calls.number("eps", eps))
    return calls.answer(_GROUP_NORM, options, x, weight, bias)


_GROUP_NORM = calls.Signature(GROUP_NORM, ("groups", "eps"))


# ------------------------------------------------------------------------------
# Softmax and losses.


@overload
def tuned_softmax(
    x: Any, axis: int = -1, *, return_lse: Literal[False] = False, **selection: Unpack[Selection]
) -> jax.Array: ...
@overload
def tuned_softmax(
    x: Any, axis: int = -1, *, return_lse: Literal[True], **selection: Unpack[Selection]
) -> tuple[jax.Array, jax.Array]: ...
@public(formulas.SOFTMAX)
def tuned_softmax(
    x: Any, axis: int = -1, *, return_lse: bool = False, **selection: Unpack[Selection]
) -> jax.Array | tuple[jax.Array, jax.Array]:
    """Computes ``jax.nn.softmax(x, axis)`` with the best known schedule for its shape on this chip.

    The computation is in float32 and the result is rounded once. For bfloat16 and float16, an XLA program that computes
    in the dtype of `x`, as `jax.nn.softmax` does, is used if it was measured to be the fastest.
    ``schedule={"program": "float32"}`` or ``backends="pallas"`` excludes that program. Integers are converted to
    float32 first, so that unsigned integers do not wrap.

    Works wherever `tuned_matmul` works. The gradient is a tuned call, too ("softmax_backward"), and the backward pass
    saves the result alone. Along an axis that is not the last the call is one of "rows_along". The call falls back to
    XLA (`jax.nn.softmax`) for several axes, for dtypes other than float32, bfloat16 or float16, and for empty arrays.
    With `return_lse` it also falls back to XLA on a mesh outside of manual axes.

    Args:
      x: an array.
      axis: the axis along which the results sum to 1: an integer, a tuple of integers, or None for all axes.
      return_lse: also return ``jax.nn.logsumexp(x, axis)`` in float32. This is a separate operation,
        "softmax_with_lse", which is tuned separately and always computes in float32.
      on_miss, backends, schedule: as in `tuned_matmul`.

    Returns:
      An array of the shape and dtype of `x`. With `return_lse`, a pair of that array and the log-sum-exp, of the shape
      of `x` without `axis`.

    Raises:
      CacheMiss, NoCandidate, IllegalSchedule, TypeError, ValueError: as `tuned_matmul`.
    """
    options, axis, with_lse = selected(tuned_softmax, selection), calls.axes(axis), calls.flag("return_lse", return_lse)
    if softmax_along(x, axis):
        return calls.answer(
            _ALONG, (*options, formulas.SOFTMAX_WITH_LSE_ROW if with_lse else formulas.SOFTMAX_ROW, axis), x
        )
    return calls.answer(_SOFTMAX_WITH_LSE if with_lse else _SOFTMAX, (*options, axis), x)


_ALONG = calls.Signature(ROWS_ALONG, ("function", "axis"))
_SOFTMAX, _SOFTMAX_WITH_LSE = (
    calls.Signature(formulas.SOFTMAX, ("axis",)),
    calls.Signature(formulas.SOFTMAX_WITH_LSE, ("axis",)),
)


@public(formulas.LOG_SOFTMAX)
def tuned_log_softmax(x: Any, axis: int = -1, **selection: Unpack[Selection]) -> jax.Array:
    """Computes ``jax.nn.log_softmax(x, axis)`` with the best known schedule for its shape on this chip.

    Rounding, XLA's program in the dtype of `x`, and fallbacks are those of `tuned_softmax`. The gradient is a tuned
    call, too ("log_softmax_backward").

    Args:
      x: an array.
      axis: as in `tuned_softmax`.
      on_miss, backends, schedule: as in `tuned_matmul`.

    Returns:
      An array of the shape and dtype of `x`.

    Raises:
      CacheMiss, NoCandidate, IllegalSchedule, TypeError, ValueError: as `tuned_matmul`.
    """
    options, axis = selected(tuned_log_softmax, selection), calls.axes(axis)
    if softmax_along(x, axis):
        return calls.answer(_ALONG, (*options, formulas.LOG_SOFTMAX_ROW, axis), x)
    return calls.answer(_LOG_SOFTMAX, (*options, axis), x)


@public(formulas.CROSS_ENTROPY)
def tuned_cross_entropy(
    logits: Any, labels: Any, *, ignore_index: int | None = None, **selection: Unpack[Selection]
) -> jax.Array:
    """Computes ``log(sum(exp(logits))) - logits[label]`` of each row, in float32, with the best known schedule.

    No copy of the logits in float32 is written, and the backward pass ("cross_entropy_backward", a tuned call) reads
    the logits once. The call falls back to XLA for logits of a dtype other than float32, bfloat16 or float16, and for
    empty arrays. Works wherever `tuned_matmul` works.

    Args:
      logits: ``[..., columns]``.
      labels: integers ``[...]``; the loss of another label that is no column is NaN.
      ignore_index: rows with this label, such as -100, have a loss of zero, and a gradient of zero if their logits are
        finite. A mean over the rows counts them: divide the sum by ``(labels != ignore_index).sum()``. None ignores no
        row.
      on_miss, backends, schedule: as in `tuned_matmul`.

    Returns:
      A float32 array ``[...]``, the loss of each row.

    Raises:
      TypeError: labels or an `ignore_index` that are not integers.
      ValueError: labels of another shape than ``logits.shape[:-1]``, or an `ignore_index` of more than 32 bits.
      CacheMiss, NoCandidate, IllegalSchedule: as in `tuned_matmul`.
    """
    ignored = checked_integer_or_none("ignore_index", ignore_index, least=-MOST - 1)
    return calls.answer(_CROSS_ENTROPY, (*selected(tuned_cross_entropy, selection), ignored), logits, labels)


_LOG_SOFTMAX = calls.Signature(formulas.LOG_SOFTMAX, ("axis",))
_CROSS_ENTROPY = calls.Signature(formulas.CROSS_ENTROPY, ("ignore_index",))


# ------------------------------------------------------------------------------
# Gates and quantization.


@public(formulas.SILU_AND_MUL)
def tuned_silu_and_mul(x: Any, **selection: Unpack[Selection]) -> jax.Array:
    """Computes ``silu(x[..., :d]) * x[..., d:]``, where ``silu(g) = g / (1 + exp(-g))``, with the best known schedule.

    The computation is in float32 and the result is rounded once. For bfloat16 and float16, an XLA program that computes
    ``jax.nn.silu(gate) * up`` in the dtype of `x` is used if it was measured to be the fastest.
    ``schedule={"program": "float32"}`` or ``backends="pallas"`` excludes that program.

    Works wherever `tuned_matmul` works. The gradient is a tuned call, too ("silu_and_mul_backward"). The call falls
    back to XLA for dtypes other than float32, bfloat16 or float16, and for empty arrays.

    Args:
      x: ``[..., 2 * d]``; the first half of the last axis is the gate.
      on_miss, backends, schedule: as in `tuned_matmul`.

    Returns:
      An array ``[..., d]`` of the dtype of `x`.

    Raises:
      ValueError: the length of the last axis is not even.
      TypeError: `x` holds integers or booleans, as in `jax.nn.silu`.
      CacheMiss, NoCandidate, IllegalSchedule: as `tuned_matmul`.
    """
    return calls.answer(_SILU_AND_MUL, selected(tuned_silu_and_mul, selection), x)


@public(formulas.QUANTIZE_ROWS)
def tuned_quantize_rows(
    x: Any, dtype: Any = jnp.float8_e4m3fn, *, block: int | None = None, **selection: Unpack[Selection]
) -> tuple[jax.Array, jax.Array]:
    """Quantizes rows to 8 bits: ``scale = max(abs(row)) / largest``, and ``row / scale`` rounded to `dtype`.

    `largest` is the largest number of `dtype`; the scale of zeros is 1. `tuned_scaled_matmul` takes results and scales.
    The call falls back to XLA for `x` of a dtype other than float32, bfloat16 or float16, and for empty arrays. Works
    wherever `tuned_matmul` works.

    Args:
      x: ``[..., columns]``.
      dtype: float8_e4m3fn, float8_e5m2 or int8.
      block: number of consecutive elements that share a scale; None means a whole row.
      on_miss, backends, schedule: as in `tuned_matmul`. A `schedule` applies to blocks as rows.

    Returns:
      An array of the shape of `x`, and float32 scales ``[...]``, or ``[..., columns / block]``.

    Raises:
      ValueError: an unsupported `dtype`, or a `block` that does not divide the columns.
      TypeError: `x` holds no real floating-point numbers.
      CacheMiss, NoCandidate, IllegalSchedule: as in `tuned_matmul`.
    """
    call_options = (*selected(tuned_quantize_rows, selection), str(jnp.dtype(dtype)), block)
    return calls.answer(_QUANTIZE_ROWS, call_options, x)


_SILU_AND_MUL, _QUANTIZE_ROWS = (
    calls.Signature(formulas.SILU_AND_MUL),
    calls.Signature(formulas.QUANTIZE_ROWS, ("result_dtype", "block")),
)


# ------------------------------------------------------------------------------
# Any function of one row.


@overload
def rows(function: Callable[..., Any], /, *, scalars: tuple[str, ...] = (), axis: int = -1) -> Callable[..., Any]: ...
@overload
def rows(
    function: None = None, /, *, scalars: tuple[str, ...] = (), axis: int = -1
) -> Callable[[Callable[..., Any]], Callable[..., Any]]: ...
def rows(
    function: Callable[..., Any] | None = None, /, *, scalars: tuple[str, ...] = (), axis: int = -1
) -> Callable[..., Any]:
    """Decorates a function of one row: kernels for all rows, and kernels of its gradient, are derived from it.

    ::

        @scheduler.rows
        def scaled_tanh(x, weight, *, limit=30.0):
            y = x.astype(jnp.float32) * weight
            return (limit * jnp.tanh(y / limit)).astype(x.dtype)

        scaled_tanh(x, weight)  # x is [..., columns], weight is [columns]

    The decorated function is ``f(*arrays, on_miss=None, backends=None, schedule=None, **statics)``. The first array has
    the leading axes, ``[..., columns]``. Arrays with as many axes are rows, too, and the function takes one row of
    each. Arrays that `scalars` names have one element per row, ``[...]``, of which the function takes a scalar. So have
    random keys: ``jax.random.split(key, x.shape[:-1])``. All rows share other arrays, such as weights. Keyword-only
    parameters are static and hashable. With `axis`, rows lie along that axis of the first array, as do rows of the
    results.

    The function may use elementwise functions, sums, maxima and minima over the whole row, `argmax`, an element at an
    index, equal parts of a row (slices, `jnp.split`, `jnp.concatenate`) and reshapes of a row to equal segments. Of a
    key it may use `jax.random.bits`, `uniform`, `bernoulli`, `split` and `fold_in`: the bits are those of `jax.vmap`,
    and the backward pass draws them again. Keys of the implementation `threefry13` draw at less cost. The function
    returns rows, scalars, or a pytree of both. Kernels compute in float32, and round where the function does.

    Works wherever `tuned_matmul` works. The gradient is derived from that of the function, and is a tuned call, too.
    The call falls back to XLA (`jax.vmap` of the function) for functions that kernels do not compute, such as sorts and
    cumulative sums. The logger `scheduler` reports the reason at level DEBUG.

    ``f.problem(*arrays, **statics)`` returns the problem of a call, and raises a ValueError with the reason if no
    kernel computes it. ``f.tune(*arrays, **statics, budget=64)`` searches for its schedule. ``f.operation`` is "rows",
    or "rows_along" for an `axis` other than -1.
    Schedules are stored by the equations of the function, so a change of the function needs no version. A search
    verifies kernels against the function itself. The function may capture traced values, which all rows share. The next
    call notices a global or closure that was bound anew; the next trace, or a call after `scheduler.reload()`, a change
    in place.

    Args:
      function: takes arrays without the leading axes as positional parameters.
      scalars: names of parameters with one element per row.
      axis: an axis of the first array, negative or not.

    Raises:
      TypeError: a parameter that takes any number of arguments, no array, or names in `scalars` that are no parameters
        or are the first; in calls also an argument that is no array, or a static argument that is not hashable.
      ValueError: in calls, a shape that does not fit the leading axes, such as a random key for all rows.
      NotImplementedError: a second derivative, if the function has rules for the first that may not be those of its
        equations (`stop_gradient`, `jax.custom_jvp`). Those of `jax.nn` are: a softmax, `relu`.
      CacheMiss, NoCandidate, IllegalSchedule: as in `tuned_matmul`.
    """
    if function is None:
        return functools.partial(rows, scalars=scalars, axis=axis)
    row, axis = _row_function(function, scalars), operator.index(axis)
    bindings = bindings_of(function)
    signature = inspect.signature(function)
    defaults = {x.name: x.default for x in signature.parameters.values() if x.kind is x.KEYWORD_ONLY}
    needs_names = inspect.Parameter.empty in defaults.values()
    last, along = tuned(ROWS), tuned(ROWS_ALONG)

    def answer(first: Any) -> Any:
        return along if inner_of(first, axis) > 1 else last

    def bound(given: tuple[Any, ...], named: Mapping[str, Any]) -> tuple[list[Any], dict[str, Any]]:
        """Returns the arrays of a call, and its static arguments as an option of the operation."""
        nonlocal row
        if (now := bindings.generation()) != row.generation:
            row = dataclasses.replace(row, generation=now)
        if named or needs_names or len(given) != len(row.names):
            found = signature.bind(*given, **named)
            found.apply_defaults()
            given = tuple(found.arguments[name] for name in row.names)
            statics = {name: x for name, x in found.arguments.items() if name not in row.names}
        else:  # as above, in a tenth of the time
            statics = defaults
        arrays = [_required_array(row.name, name, x) for name, x in zip(row.names, given, strict=True)]
        return arrays, {"function": row, "statics": _hashable(row.name, statics), "axis": axis}

    @functools.wraps(function)
    def call(*given: Any, on_miss: Any = None, backends: Any = None, schedule: Any = None, **named: Any) -> Any:
        arrays, options = bound(given, named)
        return answer(arrays[0])(*arrays, on_miss=on_miss, backends=backends, schedule=schedule, **options)

    def problem(*given: Any, **named: Any) -> Any:
        """Returns the problem of a call with these arrays or `jax.ShapeDtypeStruct`s."""
        arrays, options = bound(given, named)
        return answer(arrays[0]).problem(*arrays, **options)

    call.__signature__ = signature.replace(parameters=[*signature.parameters.values(), *SHARED])  # type: ignore[attr-defined]
    call.operation, call.problem = ROWS if axis == -1 else ROWS_ALONG, problem  # type: ignore[attr-defined]
    call.operations = ROWS, ROWS_ALONG  # type: ignore[attr-defined]
    call.tune = functools.partial(tune, call)  # type: ignore[attr-defined]
    return call


def _row_function(function: Callable[..., Any], scalars: tuple[str, ...]) -> RowFunction:
    """Returns the function and the names of its arrays; raises a TypeError as `rows` does."""
    name = getattr(function, "__name__", repr(function))
    if not callable(function):
        raise TypeError(f"scheduler.rows decorates a function of one row, not {name}")
    parameters = inspect.signature(function).parameters.values()
    for each in parameters:
        if each.kind in (each.VAR_POSITIONAL, each.VAR_KEYWORD):
            raise TypeError(f"{each} of {name} takes any number of arguments: name each array")
        if each.name in Selection.__optional_keys__:
            raise TypeError(f"{each.name} of {name} is an argument of every tuned call: give it another name")
    names = tuple(each.name for each in parameters if each.kind is not each.KEYWORD_ONLY)
    if not names:
        raise TypeError(f"{name} has no positional parameter, which would be a row")
    listed = (scalars,) if isinstance(scalars, str) else tuple(scalars)
    for scalar in listed:
        if scalar not in names[1:]:
            raise TypeError(f"scalars={listed} of {name}: {scalar!r} is none of {names[1:]}")
    return RowFunction(function, names, listed)


def _required_array(function: str, name: str, x: Any) -> Any:
    """Returns `x` if it is an array or a number; raises a TypeError otherwise."""
    if hasattr(x, "dtype") or isinstance(x, bool | int | float | complex):
        return x
    raise TypeError(f"{name} of {function} must be an array, not {type(x).__name__}")


def _hashable(function: str, statics: Mapping[str, Any]) -> Params:
    """Returns static arguments; raises a TypeError for arrays."""
    for name, x in statics.items():
        try:
            hash(x)
        except TypeError:
            kind = type(x).__name__
            raise TypeError(
                f"{name} of {function} is keyword-only, and so part of the compiled program: {kind} is not "
                f"hashable; pass an array by position"
            ) from None
        if isinstance(x, jax.Array):
            raise TypeError(f"{name} of {function} is a traced array: pass an array by position")
    return Params(sorted(statics.items()))
