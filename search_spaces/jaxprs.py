"""Helpers for the jaxprs that equations hold; JAX has one or two types of these, depending on its version."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from jax.extend import core


def is_jaxpr(value: Any) -> bool:
    return isinstance(value, core.Jaxpr | core.ClosedJaxpr)


def opened(jaxpr: Any) -> Any:
    """Returns a jaxpr without its constants, which newer versions of JAX keep in the same type."""
    return getattr(jaxpr, "jaxpr", jaxpr)


def held(equation: Any) -> Iterator[Any]:
    """Yields the jaxprs among the parameters of an equation, unopened."""
    for value in equation.params.values():
        yield from filter(is_jaxpr, value if isinstance(value, tuple | list) else (value,))


def equations(jaxpr: Any) -> Iterator[Any]:
    """Yields the equations of a jaxpr in order, including those inside kernels.

    Each equation precedes the equations that it holds.
    """
    for equation in opened(jaxpr).eqns:
        yield equation
        for inner in held(equation):
            yield from equations(inner)
