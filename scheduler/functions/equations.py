"""The equations that a function runs, how often, and the user's line of each: a walk over its jaxpr."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator
from typing import Any

import jax
from jax.extend import core
from jax.interpreters import partial_eval

from scheduler.core import frames
from scheduler.core.frames import Call, asked_by

# Functions of `jax.jit`; those that a library jits in its own way are functions like others.
_JITTED: Any = type(jax.jit(lambda: None))
# What they hold is the inside of a kernel.
_KERNELS = frozenset({"pallas_call", "core_map", "mpmd_map"})


@dataclasses.dataclass(frozen=True, eq=False)
class Body:
    """A jaxpr whose equations all run equally often.

    Attributes:
      count: how often in one call of the function.
    """

    jaxpr: Any
    count: int


@dataclasses.dataclass(frozen=True, eq=False)
class Loop:
    """An equation whose own count no jaxpr tells.

    Attributes:
      kind: "while", whose turns are counted as one, or "cond", whose branches are all counted.
      line: of the user's code; None where none is known.
    """

    kind: str
    line: Call | None


def traced(fn: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """The jaxpr of ``fn(*args, **kwargs)``, without what its results do not need: JAX lowers none of that, either.

    Where it returns nothing, nothing is left out.
    """
    jitted: Any = fn if isinstance(fn, _JITTED) else jax.jit(fn)
    jaxpr = _open(jitted.trace(*args, **kwargs).jaxpr)
    if not jaxpr.outvars:
        return jaxpr
    return partial_eval.dce_jaxpr(jaxpr, [True] * len(jaxpr.outvars), instantiate=True)[0]


def bodies(jaxpr: Any, count: int = 1) -> Iterator[Body | Loop]:
    """All jaxprs that run within this one, itself among them, and what their counts leave open.

    The length of a scan multiplies. Calls (`jit`, `jax.checkpoint`, custom derivatives, `shard_map`) run what they hold
    once; in a `shard_map` shapes and counts are those of one device.
    """
    jaxpr = _open(jaxpr)
    yield Body(jaxpr, count)
    for equation in jaxpr.eqns:
        if equation.primitive.name in ("while", "cond"):
            yield Loop(equation.primitive.name, line_of(equation))
        for held, times in inside(equation):
            yield from bodies(held, count * times)


def inside(equation: Any) -> Iterator[tuple[Any, int]]:
    """The jaxprs that an equation runs, and how often each; nothing of kernels, which are no part of the function."""
    if equation.primitive.name in _KERNELS:
        return
    times = equation.params["length"] if equation.primitive.name == "scan" else 1
    if times:
        yield from ((_open(jaxpr), times) for jaxpr in _held(equation))


def line_of(equation: Any) -> Call | None:
    """The line of the user's code that an equation comes from; of a derivative, that of what was differentiated."""
    return asked_by(frames.traced(equation.source_info.traceback))


def is_backward(equation: Any) -> bool:
    """Whether an equation is of a backward pass, by the transformations that JAX names it after."""
    return "transpose(" in str(equation.source_info.name_stack)


def _held(equation: Any) -> Iterator[Any]:
    params = equation.params
    if equation.primitive.name == "custom_linear_solve":  # the others are for its derivatives
        yield params["jaxprs"].solve
        return
    for value in params.values():
        for each in value if isinstance(value, tuple | list) else (value,):
            if isinstance(each, core.Jaxpr | core.ClosedJaxpr):
                yield each


def _open(jaxpr: Any) -> Any:
    """Without its constants, which newer versions of JAX keep in the same type."""
    return getattr(jaxpr, "jaxpr", jaxpr)
