"""Private JAX APIs for debugging modes, `checkify` and `jet`: how they handle an application of a primitive."""

from __future__ import annotations

import functools
import types
from collections.abc import Callable, Sequence
from typing import Any

import jax
from jax._src import api_util, checkify
from jax.experimental import jet
from jax.extend.core import Primitive

# Raised by JAX if a result of a compiled program is NaN or infinite while a debugging mode checks for that.
InternalFloatingPointError: type[Exception] = api_util.InternalFloatingPointError


def as_one_operation(function: Callable[..., Any], name: str) -> Callable[..., Any]:
    """Jits `function` as a single operation for `jax.debug_nans` and `jax.debug_infs`.

    If a result is NaN, JAX runs a jitted function again, equation by equation, to find the equation that produced it.
    For a function that JAX treats as one operation, it raises `FloatingPointError` with `name` instead.
    """
    function.__name__ = function.__qualname__ = name
    function._apply_primitive = True  # type: ignore[attr-defined]
    return jax.jit(function)


def is_expanded_by_jet(args: Sequence[Any]) -> bool:
    """Returns whether `jax.experimental.jet` expands a call with these arguments: it fails on any `jax.custom_vjp`."""
    return any(isinstance(x, jet.JetTracer) for x in args)


def let_checkify_see(primitive: Primitive, name: Callable[..., str]) -> None:
    """Makes the float checks of `checkify` look for NaN in the results of `primitive`.

    Args:
      primitive: a JAX primitive with multiple results.
      name: from the parameters of an application to the name in the message.
    """

    def check(*args: Any, **params: Any) -> Any:
        named: Any = types.SimpleNamespace(name=name(**params), bind=primitive.bind, multiple_results=True)
        return checkify.nan_error_check(named, *args, **params)

    checkify.error_checks[primitive] = check


def let_jet_see(primitive: Primitive, name: Callable[..., str], formula: Callable[..., Any]) -> None:
    """Makes `jax.experimental.jet` expand applications of `primitive` by ``formula(*args, **params)``.

    If JAX has no rule for an equation of the formula, a `NotImplementedError` with the call's `name` is raised.
    """

    def expand(primals: Sequence[Any], series: Sequence[Any], **params: Any) -> Any:
        try:
            return jet.jet2(functools.partial(formula, **params), tuple(primals), tuple(series))
        except KeyError as error:
            if not isinstance(error.args[0], Primitive):
                raise
            raise NotImplementedError(
                f"jax.experimental.jet has no rule for {error.args[0]}, which the formula of {name(**params)} needs: "
                "use jax.jvp several times instead"
            ) from None

    rules: dict[Any, Any] = jet.jet_rules
    rules[primitive] = expand
