"""The entry point of public calls: one jitted function per signature and options."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import inspect
import operator
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from scheduler.dispatch import dispatch, planned, sharded
from scheduler.dispatch.primitive import library, params_of_kernels, tuned_call
from search_spaces import jax_compat, partitioning_compat
from search_spaces.configuration import formulas
from search_spaces.exact import exact
from search_spaces.front_end import EXPLICIT_AXES, allow_explicit_axes
from search_spaces.operation import BoundCall, Operation, Params, Unsupported
from search_spaces.problem import as_tuple
from search_spaces.space import unknown

Backends = str | Sequence[str]
MOST_COMPILED = 1024

# JAX traces and compiles again when the value changes, in functions that a user has jitted, too.
target: Any = jax.make_user_context("")
in_plan = planned.plan
# Signature, options, target and plan -> the jitted function. JAX caches the compiled versions of that function by
# shapes, dtypes, placement and default precision. A repeated call costs one lookup here and a call of `jax.jit`.
_compiled: dict[Any, Callable[..., Any]] = {}


@dataclasses.dataclass(frozen=True, eq=False)
class Signature:
    """The call signature of an operation. Compared and hashed by identity, which is fast.

    Attributes:
      options: names of the static arguments, in the order of their values in a call. They are part of the compiled
        program.
      last: names of the last arrays, which are keyword arguments.
    """

    operation: Operation[Any]
    options: tuple[str, ...] = ()
    last: tuple[str, ...] = ()


@functools.cache
def signature(operation: Operation[Any], options: tuple[str, ...], last: tuple[str, ...] = ()) -> Signature:
    """Returns the signature with static arguments `options`, positional arrays, and then keyword arrays `last`."""
    return Signature(operation, options, last)


def answer(called: Signature, options: tuple[Any, ...], *arrays: Any) -> Any:
    """Runs a call and returns its result.

    Args:
      called: the signature of the call.
      options: `on_miss`, `backends`, `schedule`, and the values of the signature's options.
      arrays: the positional arrays, then the keyword arrays.
    """
    tracer = jax.core.Tracer
    for x in arrays:
        if isinstance(x, tracer):
            return _function(called, options)(*arrays)
    try:
        compiled = _compiled[called, exact(options), target.value, in_plan.value]
    except (KeyError, TypeError):  # TypeError: unhashable arguments, such as a list or a dict
        compiled = None
    try:
        return _first_answer(called, tuple(map(_frozen, options)), arrays) if compiled is None else compiled(*arrays)
    except jax.errors.JaxRuntimeError as error:
        raise partitioning_compat.raised_by(error) from None
    except TypeError:  # JAX's message would name the jitted function instead of the user's
        _require_arrays(called, arrays)
        raise


def unexpected(function: Callable[..., Any], given: Mapping[str, Any]) -> TypeError:
    """Returns the TypeError for keyword arguments that `function` does not have, with the closest known name."""
    parameters = inspect.signature(function).parameters.values()
    known = [each.name for each in parameters if each.kind in (each.KEYWORD_ONLY, each.POSITIONAL_OR_KEYWORD)]
    return TypeError(f"{function.__name__}() got an unexpected keyword argument {unknown(next(iter(given)), known)}")


def forget(operation: Operation[Any] | None = None) -> None:
    """Drops the jitted functions of one operation, or of all if None."""
    for key in [key for key in list(_compiled) if operation is None or key[0].operation is operation]:
        _compiled.pop(key, None)


def _first_answer(called: Signature, options: tuple[Any, ...], arrays: tuple[Any, ...]) -> Any:
    """Runs a call with a newly jitted function, which is dropped if the call fails."""
    key = called, exact(options), target.value, in_plan.value
    compiled = None
    with contextlib.suppress(KeyError, TypeError):  # arguments that are still unhashable are rejected below
        compiled = _compiled[key]
    if compiled is not None:
        return compiled(*arrays)
    function = _function(called, options)
    function.__name__ = function.__qualname__ = f"tuned_{called.operation.name}"
    _require_hashable(called.operation, key)
    if len(_compiled) >= MOST_COMPILED:
        _compiled.clear()
    compiled = _compiled[key] = jax.jit(function)
    try:
        return compiled(*arrays)
    except BaseException:
        _compiled.pop(key, None)
        raise


def _require_arrays(called: Signature, arrays: tuple[Any, ...]) -> None:
    """Raises a TypeError if one of a call's operands is not an array."""
    for index, x in enumerate(arrays):
        for leaf in jax.tree.leaves(x):
            if hasattr(leaf, "dtype") or isinstance(leaf, bool | int | float | complex):
                continue
            from_end = index - (len(arrays) - len(called.last))
            name = called.last[from_end] if from_end >= 0 else f"operand {index + 1}"
            raise TypeError(f"{name} of {called.operation.name} must be an array, not {type(leaf).__name__}") from None


def number(name: str, value: Any) -> float:
    """Converts `value` to a float, for a static argument.

    Raises:
      TypeError: `value` is not a number, or is a traced array.
      ValueError: `value` is an integer too large for a float.
    """
    try:
        if not isinstance(value, str | bytes | bytearray):
            return float(value)
    except OverflowError:
        raise ValueError(f"{name} is an integer too large for a float: give a float") from None
    except (TypeError, ValueError, jax.errors.ConcretizationTypeError):
        pass
    raise TypeError(f"{name} is {_value_text(value)}; it is part of the compiled program, so give a number")


def flag(name: str, value: Any) -> bool:
    """Converts `value` to a bool, for a static argument.

    Raises:
      TypeError: `value` has no truth value: it is an array of several elements, or a traced array.
    """
    if value is True or value is False:
        return value
    try:
        return bool(value)
    except (TypeError, ValueError, jax.errors.ConcretizationTypeError):
        raise TypeError(
            f"{name} is {_value_text(value)}; it is part of the compiled program, so give True or False"
        ) from None


def axes(value: Any) -> Any:
    """Returns an axis as an integer, several axes as a tuple, or None.

    Raises:
      TypeError: `value` has another type. The float 1.0 is rejected, although it equals an integer.
    """
    if type(value) is int or value is None:
        return value
    try:
        if isinstance(value, tuple | list) or (isinstance(value, np.ndarray) and value.ndim):
            return tuple(map(operator.index, value))
        return operator.index(value)
    except (TypeError, jax.errors.ConcretizationTypeError):
        raise TypeError(
            f"axis is {_value_text(value)}; it is part of the compiled program, so give an integer or several"
        ) from None


def _value_text(value: Any) -> str:
    return "a traced array" if isinstance(value, jax.core.Tracer) else repr(value)


def _require_hashable(operation: Operation[Any], values: Any) -> None:
    """Raises a TypeError if `values` cannot be static arguments, for example because one is an array."""
    try:
        hash(values)
    except TypeError as error:
        raise TypeError(f"parameters of {operation.name} are part of the compiled program: {error}") from None


def _frozen(value: Any) -> Any:
    """Returns a hashable equivalent: sorted items for a dict, a tuple for a list or a NumPy array."""
    if isinstance(value, Mapping):
        return tuple(sorted((name, _frozen(item)) for name, item in value.items()))
    if isinstance(value, set):
        return frozenset(value)
    if isinstance(value, np.ndarray):
        value = value.tolist()
    return tuple(map(_frozen, value)) if type(value) in (list, tuple) else value


def _call_tuned(operation: Operation[Any], options: dispatch.Options, bound: BoundCall[Any]) -> Any:
    _require_hashable(operation, bound.params)
    with formulas():
        result = tuned_call(operation, bound.problem, *bound.operands, params=Params(bound.params), options=options)
        return result if bound.restore is None else bound.restore(*as_tuple(result))


def _call_library(operation: Operation[Any], bound: BoundCall[Any]) -> Any:
    params = params_of_kernels(operation, bound.params)
    with formulas():
        results = library(operation, bound.problem, params, *bound.operands)
        return bound.problem.pack(results) if bound.restore is None else bound.restore(*results)


def _call_global(operation: Operation[Any], options: dispatch.Options, bind: Callable[[], Any]) -> Any:
    """Binds and runs the call on global arrays with explicit mesh axes."""
    with allow_explicit_axes():
        bound = bind()
    if isinstance(bound, Unsupported):
        raise sharded.NotShardable(bound.reason)
    return _call_tuned(operation, options, bound)


def _function(called: Signature, options_and_values: tuple[Any, ...]) -> Callable[..., Any]:
    on_miss, backends, schedule, *values = options_and_values
    operation, last = called.operation, called.last
    options = dispatch.options(
        operation, on_miss=on_miss, backends=backends, schedule=schedule, target=target.value, plan=planned.in_force()
    )

    def call(*arrays: Any) -> Any:
        arrays = jax.tree.map(lambda x: jnp.asarray(x) if isinstance(x, np.ndarray) else x, arrays)
        first = len(arrays) - len(last)
        named = dict(zip(called.options, values, strict=True)) | dict(zip(last, arrays[first:], strict=True))
        bind = functools.partial(operation.bind, *arrays[:first], **named)
        bound = bind()
        given = [x for x in jax.tree.leaves(arrays) if isinstance(x, jax.Array)]
        if isinstance(bound, Unsupported):
            plain, reason = bound.answer, bound.reason
        elif jax_compat.has_explicit_axes(given):
            plain, reason = functools.partial(_call_library, operation, bound), EXPLICIT_AXES
        else:
            return _call_tuned(operation, options, bound)
        if reason == EXPLICIT_AXES:
            whole = functools.partial(_call_global, operation, options, bind)
            result = sharded.sharded_or_reason(given, whole, plain)
            if not isinstance(result, str):
                return result
            reason = f"{reason}: {result}"
        with formulas():
            result = plain()  # first, so that invalid arguments raise JAX's own error
        dispatch.leave_to_library(operation, options, reason)
        return result

    return call
