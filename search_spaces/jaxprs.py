"""The jaxprs that equations hold, of which JAX has one type or two."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from jax.extend import core


def is_jaxpr(value: Any) -> bool:
    return isinstance(value, core.Jaxpr | core.ClosedJaxpr)


def opened(jaxpr: Any) -> Any:
    """Without its constants, which newer versions of JAX keep in the same type."""
    return getattr(jaxpr, "jaxpr", jaxpr)


def held(equation: Any) -> Iterator[Any]:
    """Those among the parameters of an equation, as they are there."""
    for value in equation.params.values():
        yield from filter(is_jaxpr, value if isinstance(value, tuple | list) else (value,))


def equations(jaxpr: Any) -> Iterator[Any]:
    """Those of a jaxpr in order, each before all that it holds, inside of kernels, too."""
    for equation in opened(jaxpr).eqns:
        yield equation
        for inner in held(equation):
            yield from equations(inner)
