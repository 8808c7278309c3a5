"""JAX's private half of debugging modes, `checkify` and `jet`: how they see an application of a primitive."""

from __future__ import annotations

import functools
import types
from collections.abc import Callable, Sequence
from typing import Any

import jax
from jax._src import api_util, checkify
from jax.experimental import jet
from jax.extend.core import Primitive

# What JAX raises, where a compiled program's result is NaN or infinite, while a user looks for that.
InternalFloatingPointError: type[Exception] = api_util.InternalFloatingPointError


def as_one_operation(function: Callable[..., Any], name: str) -> Callable[..., Any]:
    """`function`, jitted, as one operation for `jax.debug_nans` and `jax.debug_infs`.

    Where a result is NaN, JAX computes jitted functions once more, equation by equation, to find the equation that made
    it. What JAX knows as one operation raises `FloatingPointError` with its `name` instead.
    """
    function.__name__ = function.__qualname__ = name
    function._apply_primitive = True  # type: ignore[attr-defined]
    return jax.jit(function)


def is_expanded_by_jet(args: Sequence[Any]) -> bool:
    """Whether `jax.experimental.jet` expands a call of these arguments: it fails on every `jax.custom_vjp`."""
    return any(isinstance(x, jet.JetTracer) for x in args)


def let_checkify_see(primitive: Primitive, name: Callable[..., str]) -> None:
    """Makes `checkify`'s float checks look for NaN in the results of `primitive`.

    Args:
      primitive: has several results, as JAX has it.
      name: of what made it, for the message, from an application's parameters.
    """

    def check(*args: Any, **params: Any) -> Any:
        named: Any = types.SimpleNamespace(name=name(**params), bind=primitive.bind, multiple_results=True)
        return checkify.nan_error_check(named, *args, **params)

    checkify.error_checks[primitive] = check


def let_jet_see(primitive: Primitive, name: Callable[..., str], formula: Callable[..., Any]) -> None:
    """Makes `jax.experimental.jet` expand applications of `primitive` by ``formula(*args, **params)``.

    Where JAX has no rule for an equation of the formula, it raises a `NotImplementedError` with the call's `name`.
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
