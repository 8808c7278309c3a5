"""What a call as users write it becomes: one jitted function for each way to ask."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import inspect
import math
import operator
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from scheduler.dispatch import dispatch, explicit, planned
from scheduler.dispatch.primitive import library, tuned_call
from search_spaces import jax_compat, partitioning_compat
from search_spaces.configuration import formulas
from search_spaces.front_end import EXPLICIT_AXES, posing_explicit
from search_spaces.operation import Bound, Operation, Unbound
from search_spaces.problem import as_tuple
from search_spaces.space import unknown

Backends = str | Sequence[str]
MOST_COMPILED = 1024

# JAX traces and compiles anew where it differs, in the functions that a user has jitted, too.
target: Any = jax.make_user_context("")
in_plan = planned.plan
# What a caller asked for -> the jitted function that answers it. JAX keeps that function's compiled versions by shapes,
# dtypes, placement and default precision, so that an answer found once costs one look-up here and a call of `jax.jit`.
_compiled: dict[Any, Callable[..., Any]] = {}


@dataclasses.dataclass(frozen=True, eq=False)
class Signature:
    """How users call an operation. Each is one object, told from others by its identity: that is quick to hash.

    Attributes:
      options: names of what is part of the compiled program, in the order in which calls give their values.
      last: names of the last arrays, which are given by name.
    """

    operation: Operation[Any]
    options: tuple[str, ...] = ()
    last: tuple[str, ...] = ()


@functools.cache
def signature(operation: Operation[Any], options: tuple[str, ...], last: tuple[str, ...] = ()) -> Signature:
    """The signature of a call with these options; its arrays are given by place, and then those of these names."""
    return Signature(operation, options, last)


def answer(called: Signature, how: tuple[Any, ...], *arrays: Any) -> Any:
    """The answer to a call.

    Args:
      how: `on_miss`, `backends`, `schedule`, and the values of the signature's options.
    """
    tracer = jax.core.Tracer
    for x in arrays:
        if isinstance(x, tracer):
            return _function(called, how)(*arrays)
    try:
        compiled = _compiled[called, how, target.value, in_plan.value]
    except (KeyError, TypeError):  # TypeError: a list or a dict among the arguments
        compiled = None
    try:
        return _first_answer(called, tuple(map(_frozen, how)), arrays) if compiled is None else compiled(*arrays)
    except jax.errors.JaxRuntimeError as error:
        raise partitioning_compat.raised_by(error) from None
    except TypeError:  # JAX would name the function that it got in place of the one that the user called
        _require_arrays(called, arrays)
        raise


def unexpected(function: Callable[..., Any], given: Mapping[str, Any]) -> TypeError:
    """What is raised of arguments that `function` does not have, with what was meant."""
    parameters = inspect.signature(function).parameters.values()
    known = [each.name for each in parameters if each.kind in (each.KEYWORD_ONLY, each.POSITIONAL_OR_KEYWORD)]
    return TypeError(f"{function.__name__}() got an unexpected keyword argument {unknown(next(iter(given)), known)}")


def forget(operation: Operation[Any] | None = None) -> None:
    """Drops the functions jitted so far, those of one operation or all."""
    for key in [key for key in list(_compiled) if operation is None or key[0].operation is operation]:
        _compiled.pop(key, None)


def _first_answer(called: Signature, how: tuple[Any, ...], arrays: tuple[Any, ...]) -> Any:
    """The answer to such a call by a function that is jitted now, and forgotten where it fails.

    What it refuses, 8.0 columns, may equal what another call means: 8.
    """
    key = called, how, target.value, in_plan.value
    compiled = None
    with contextlib.suppress(KeyError, TypeError):  # what still cannot be a key is for the answer to refuse
        compiled = _compiled[key]
    if compiled is not None:
        return compiled(*arrays)
    function = _function(called, how)
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
    """Raises a TypeError where one of a call's arrays is none."""
    for place, x in enumerate(arrays):
        for leaf in jax.tree.leaves(x):
            if hasattr(leaf, "dtype") or isinstance(leaf, bool | int | float | complex):
                continue
            from_end = place - (len(arrays) - len(called.last))
            name = called.last[from_end] if from_end >= 0 else f"operand {place + 1}"
            raise TypeError(f"{name} of {called.operation.name} must be an array, not {type(leaf).__name__}") from None


def number(name: str, value: Any) -> float:
    """`value` as a float, for an argument that is part of the compiled program.

    Raises:
      TypeError: it is none, or is an array that is traced.
    """
    try:
        if not isinstance(value, str | bytes | bytearray):
            return _itself(float(value))
    except OverflowError:
        raise ValueError(f"{name} is an integer too large for a float: give a float") from None
    except (TypeError, ValueError, jax.errors.ConcretizationTypeError):
        pass
    raise TypeError(f"{name} is {_described(value)}; it is part of the compiled program, so give a number")


def flag(name: str, value: Any) -> bool:
    """`value` as a truth value, for an argument that is part of the compiled program.

    Raises:
      TypeError: it has no truth value: an array of several elements, or one that is traced.
    """
    if value is True or value is False:
        return value
    try:
        return bool(value)
    except (TypeError, ValueError, jax.errors.ConcretizationTypeError):
        raise TypeError(
            f"{name} is {_described(value)}; it is part of the compiled program, so give True or False"
        ) from None


def axes(value: Any) -> Any:
    """An axis, axes as a tuple, or None: integers alone, of which 1.0 is none although it equals one.

    Raises:
      TypeError: it is none of these.
    """
    if type(value) is int or value is None:
        return value
    try:
        if isinstance(value, tuple | list) or (isinstance(value, np.ndarray) and value.ndim):
            return tuple(map(operator.index, value))
        return operator.index(value)
    except (TypeError, jax.errors.ConcretizationTypeError):
        raise TypeError(
            f"axis is {_described(value)}; it is part of the compiled program, so give an integer or several"
        ) from None


def _described(value: Any) -> str:
    return "a traced array" if isinstance(value, jax.core.Tracer) else repr(value)


def _require_hashable(operation: Operation[Any], values: Any) -> None:
    """Raises a TypeError where they hold what cannot be part of a compiled program: an array, for one."""
    try:
        hash(values)
    except TypeError as error:
        raise TypeError(f"parameters of {operation.name} are part of the compiled program: {error}") from None


def _frozen(value: Any) -> Any:
    """Hashable, with the same meaning: a schedule's items for a dict, a tuple for a list or an array of NumPy."""
    if isinstance(value, Mapping):
        return tuple(sorted((name, _frozen(item)) for name, item in value.items()))
    if isinstance(value, set):
        return frozenset(value)
    if isinstance(value, np.ndarray):
        value = value.tolist()
    return tuple(map(_frozen, value)) if isinstance(value, list | tuple) else _itself(value)


def _itself(value: Any) -> Any:
    """The same, but for a NaN that one object which is found among keys: NaN equals nothing, not even itself."""
    return math.nan if isinstance(value, float | np.floating) and value != value else value


def _tuned(operation: Operation[Any], options: dispatch.Options, bound: Bound[Any]) -> Any:
    _require_hashable(operation, bound.params)
    with formulas():
        result = tuned_call(operation, bound.problem, *bound.operands, params=bound.params, options=options)
        return result if bound.restore is None else bound.restore(*as_tuple(result))


def _by_library(operation: Operation[Any], bound: Bound[Any]) -> Any:
    params = tuple(named for named in bound.params if named[0] not in operation.vjp_params)
    with formulas():
        results = library(operation, bound.problem, params, *bound.operands)
        return bound.problem.pack(results) if bound.restore is None else bound.restore(*results)


def _of_whole_arrays(operation: Operation[Any], options: dispatch.Options, bind: Callable[[], Any]) -> Any:
    """The call on arrays with explicit axes."""
    with posing_explicit():
        bound = bind()
    if isinstance(bound, Unbound):
        raise explicit.WholeError(bound.reason)
    return _tuned(operation, options, bound)


def _function(called: Signature, how: tuple[Any, ...]) -> Callable[..., Any]:
    on_miss, backends, schedule, *values = how
    operation, last = called.operation, called.last
    options = dispatch.options(
        operation,
        on_miss=on_miss,
        backends=backends,
        schedule=schedule,
        target=target.value,
        plan=planned.in_force(),
    )

    def call(*arrays: Any) -> Any:
        arrays = jax.tree.map(lambda x: jnp.asarray(x) if isinstance(x, np.ndarray) else x, arrays)
        first = len(arrays) - len(last)
        named = dict(zip(called.options, values, strict=True)) | dict(zip(last, arrays[first:], strict=True))
        bind = functools.partial(operation.bind, *arrays[:first], **named)
        bound = bind()
        given = [x for x in jax.tree.leaves(arrays) if isinstance(x, jax.Array)]
        if isinstance(bound, Unbound):
            plain, reason = bound.answer, bound.reason
        elif jax_compat.has_explicit_axes(given):
            plain, reason = functools.partial(_by_library, operation, bound), EXPLICIT_AXES
        else:
            return _tuned(operation, options, bound)
        if reason == EXPLICIT_AXES:
            whole = functools.partial(_of_whole_arrays, operation, options, bind)
            result = explicit.unless(given, whole, plain)
            if not isinstance(result, str):
                return result
            reason = f"{reason}: {result}"
        with formulas():
            result = plain()  # first: what JAX refuses, it refuses in its own words
        dispatch.leave_to_library(operation, options, reason)
        return result

    return call
