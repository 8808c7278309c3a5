"""Converts a plain function, its choices and its reference to an operation."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp

from search_spaces.autotuned.arguments import operand_text
from search_spaces.autotuned.captured import captured
from search_spaces.autotuned.declaration import declared
from search_spaces.autotuned.kernel import FunctionKernel, ReferenceKernel
from search_spaces.autotuned.names import name_of
from search_spaces.autotuned.problem import CallProblem, problem_type
from search_spaces.autotuned.statics import spelled, value_of
from search_spaces.autotuned.trees import named_leaves, require_tree
from search_spaces.front_end import require_array, unposed, weakly_typed
from search_spaces.operation import Bound, Operation, Unbound


def operation_of(
    function: Callable[..., Any], choices: Mapping[str, Any], *, name: str | None = None, **told: Any
) -> Operation[CallProblem]:
    """Returns the operation with `function` and its reference as kernels.

    Args:
      choices: keyword of the function -> the values that it may take.
      name: the name under which schedules are stored; None derives it from the location of the function.
      told: further arguments of `declared`.

    Raises:
      DeclarationError: an argument is invalid; the message says what to write instead.
    """
    known = declared(function, choices, **told)
    choices = known.choices
    posed = problem_type(f"{function.__name__}_problem", known)
    taken = name_of(inspect.unwrap(function), name, captured(function, known.reference, choices))
    return Operation(taken, posed, (FunctionKernel(), ReferenceKernel()), front_end=_front_end(posed))


def _front_end(posed: type[CallProblem]) -> Callable[..., Bound[CallProblem] | Unbound]:
    known, name = posed.declared, posed.declared.function.__name__
    names, optional = known.arguments.arrays, known.arguments.optional

    def front_end(*args: Any, **statics: Any) -> Bound[CallProblem] | Unbound:
        arrays = dict(zip(names, (jnp.asarray(x) if isinstance(x, _NUMBERS) else x for x in args), strict=False))
        missing = [array for array in names if array not in optional and arrays.get(array) is None]
        if missing or len(args) > len(names):
            lacks = f", without {', '.join(missing)}" if missing else ""
            raise TypeError(f"{name} takes the arrays {', '.join(names)}; {len(args)} were given{lacks}")
        texts = {static: spelled(static, value) for static, value in statics.items()}
        if lacking := [
            each for each, default in known.arguments.statics.items() if default is None and each not in texts
        ]:
            raise TypeError(f"{name} lacks {', '.join(f'{static}=' for static in lacking)}")
        given = {array: x for array, x in arrays.items() if x is not None}
        for array, x in given.items():
            require_array(array, x) if isinstance(x, list) else require_tree(array, x)
        flat = dict(each for array, x in given.items() for each in named_leaves(array, x))
        for array, x in flat.items():
            require_array(array, x)
        if (reason := _unposed(flat)) is not None:
            whole = {
                each: value_of(text) for each, text in {**known.arguments.statics, **texts}.items() if text is not None
            }
            return Unbound(reason, lambda: known.answer([arrays.get(array) for array in names], whole))
        typed = {array: operand_text(x) for array, x in given.items()}
        return Bound(posed(**typed, **texts), tuple(flat.values()))

    # The keyword arguments of `Operation.bind`.
    keywords = [inspect.Parameter(static, inspect.Parameter.KEYWORD_ONLY) for static in known.arguments.statics]
    setattr(front_end, "__signature__", inspect.Signature(keywords))  # noqa: B010 (unknown to type checkers)
    return front_end


_NUMBERS = (bool, int, float, complex)


def _unposed(arrays: Mapping[str, Any]) -> str | None:
    """Returns why there is no problem for these arrays, or None."""
    if (reason := unposed(arrays)) is not None:
        return reason
    for array, x in arrays.items():
        if jnp.issubdtype(x.dtype, jax.dtypes.extended):
            return f"{array} is of the dtype {x.dtype}, which no key of a schedule spells"
    return weakly_typed(*arrays.values())
