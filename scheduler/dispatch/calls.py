"""What a call as users write it becomes: one jitted function for each way to ask."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from scheduler.dispatch import dispatch
from scheduler.dispatch.dispatch import OnMiss
from scheduler.dispatch.primitive import tuned_call
from search_spaces.kernel import Operation, Unbound, as_tuple

Backends = str | Sequence[str]
MOST_COMPILED = 1024

# JAX traces and compiles anew where it differs, in the functions that a user has jitted, too.
target: Any = jax.make_user_context("")
# What a caller asked for -> the jitted function that answers it. JAX keeps that function's compiled versions by shapes,
# dtypes, placement and default precision, so that an answer found once costs one look-up here and a call of `jax.jit`.
_compiled: dict[Any, Callable[..., Any]] = {}


def answer(
    operation: Operation[Any],
    names: tuple[str, ...],
    values: tuple[Any, ...],
    on_miss: OnMiss | None,
    backends: Backends | None,
    schedule: Any,
    arrays: tuple[Any, ...],
    last: tuple[str, ...] = (),
) -> Any:
    """The answer to a call with these options, by name; the `last` of the arrays are given by name, too."""
    question = (operation, names, values, on_miss, backends, schedule, last)
    tracer = jax.core.Tracer
    for x in arrays:
        if isinstance(x, tracer):
            return _function(question)(*arrays)
    try:
        compiled = _compiled[question, target.value]
    except (KeyError, TypeError):  # TypeError: a list or a dict among the arguments
        compiled = _compile(question)
    return compiled(*arrays)


def forget() -> None:
    """Drops the functions jitted so far."""
    _compiled.clear()


def _compile(question: tuple[Any, ...]) -> Callable[..., Any]:
    """The jitted function that answers `question`, remembered under it."""
    operation, *asked = question
    key = (operation, *map(_frozen, asked)), target.value
    with contextlib.suppress(KeyError, TypeError):  # what still cannot be a key is for the answer to refuse
        return _compiled[key]
    function = _function(key[0])
    function.__name__ = f"tuned_{operation.name}"
    try:
        hash(key)
    except TypeError as error:
        raise TypeError(f"parameters of {operation.name} are part of the compiled program: {error}") from None
    if len(_compiled) >= MOST_COMPILED:
        _compiled.clear()
    compiled = _compiled[key] = jax.jit(function)
    return compiled


def _frozen(value: Any) -> Any:
    """Hashable, with the same meaning: a schedule's items for a dict, a tuple for a list."""
    if isinstance(value, Mapping):
        return tuple(sorted(value.items()))
    if isinstance(value, set):
        return frozenset(value)
    return tuple(map(_frozen, value)) if isinstance(value, list | tuple) else value


def _function(question: tuple[Any, ...]) -> Callable[..., Any]:
    operation, names, values, on_miss, backends, schedule, last = question
    options = dispatch.options(operation, on_miss=on_miss, backends=backends, schedule=schedule, target=target.value)

    def call(*arrays: Any) -> Any:
        arrays = tuple(jnp.asarray(x) if isinstance(x, np.ndarray) else x for x in arrays)
        first = len(arrays) - len(last)
        named = dict(zip(names, values, strict=True)) | dict(zip(last, arrays[first:], strict=True))
        bound = operation.bind(*arrays[:first], **named)
        if isinstance(bound, Unbound):
            result = bound.answer()  # first: what JAX refuses, it refuses in its own words
            dispatch.leave_to_library(operation, options, bound.reason)
            return result
        result = tuned_call(operation, bound.problem, *bound.operands, params=bound.params, options=options)
        return result if bound.restore is None else bound.restore(*as_tuple(result))

    return call
