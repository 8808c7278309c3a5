"""Walks over a function's jaxpr: its equations, how often each runs, and the line of the user's code."""

from __future__ import annotations

import dataclasses
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import jax
from jax.extend import core
from jax.interpreters import partial_eval
from jax.sharding import AxisType

from scheduler.core import frames
from scheduler.core.frames import Call, asked_by
from search_spaces import jaxprs
from search_spaces.jaxprs import is_jaxpr, opened

# Their jaxprs are kernel bodies.
_KERNELS = frozenset({"pallas_call", "core_map", "mpmd_map"})


@dataclasses.dataclass(frozen=True, eq=False)
class Body:
    """A jaxpr with equations that all run equally often.

    Attributes:
      count: How often it runs in one call of the function.
      manual: Whether it runs on one device: inside a `shard_map` over all axes of its mesh.
      line: The line of the user's code that runs it as a whole; None if unknown.
    """

    jaxpr: Any
    count: int
    manual: bool = False
    line: Call | None = None

    def line_of(self, equation: Any) -> Call | None:
        """Returns the line of an equation, or of the body where JAX drops the caller (inside a `shard_map`)."""
        return line_of(equation) or self.line


@dataclasses.dataclass(frozen=True, eq=False)
class Loop:
    """A `while` or `cond` equation, where the jaxpr does not give the count.

    Attributes:
      kind: "while" (its iterations count as one) or "cond" (all its branches are counted).
      line: The line of the user's code; None if unknown.
    """

    kind: str
    line: Call | None


@dataclasses.dataclass(frozen=True, eq=False)
class Traced:
    """A function as JAX lowers it.

    Attributes:
      jaxpr: An open jaxpr, without equations that the results do not need.
      constants: Closed-over arrays, for ``jaxpr.constvars``.
      arguments: The given arguments, for ``jaxpr.invars``.
    """

    jaxpr: Any
    constants: tuple[Any, ...]
    arguments: tuple[Any, ...]


def traced(fn: Callable[..., Any], *arrays: Any) -> Traced:
    """Traces ``fn(*arrays)`` and removes equations that its results do not need, as JAX does when lowering.

    If `fn` returns nothing, no equation is removed. If all derivatives are removed, a warning is issued. `fn` itself
    must not be jitted. Functions that it calls may be: their shardings are in the equation of the call.
    """
    closed = jax.jit(fn).trace(*arrays).jaxpr
    jaxpr = whole = opened(closed)
    if jaxpr.outvars:
        jaxpr = partial_eval.dce_jaxpr(jaxpr, [True] * len(jaxpr.outvars), instantiate=True)[0]
    if _has_backward(whole) and not _has_backward(jaxpr):
        warnings.warn(
            "the function computes derivatives that none of its results needs: XLA drops them, and here they do not "
            "count. Return what it makes of them (gradients, parameters, a model). What a function of jax.jit writes "
            "into its arguments is lost: let flax.nnx.jit jit it, or nothing",
            RuntimeWarning,
            stacklevel=3,
        )
    return Traced(jaxpr, tuple(closed.consts), arrays)


def _has_backward(jaxpr: Any) -> bool:
    within = (body.jaxpr for body in bodies(jaxpr) if isinstance(body, Body))
    return any(is_backward(equation) for each in within for equation in each.eqns)


def bodies(jaxpr: Any, count: int = 1, manual: bool = False, line: Call | None = None) -> Iterator[Body | Loop]:
    """Yields all jaxprs that run within this one, including itself, and the loops with unknown counts.

    Counts inside a scan are multiplied by its length. Calls (`jit`, `jax.checkpoint`, custom derivatives, `shard_map`)
    run their jaxprs once. Inside a `shard_map`, shapes and counts are those of one device.
    """
    body = Body(opened(jaxpr), count, manual, line)
    yield body
    for equation in body.jaxpr.eqns:
        if equation.primitive.name in ("while", "cond"):
            yield Loop(equation.primitive.name, body.line_of(equation))
        for within, times in inside(equation):
            yield from bodies(within, count * times, manual or is_manual(equation), body.line_of(equation))


def inside(equation: Any) -> Iterator[tuple[Any, int]]:
    """Yields the jaxprs that an equation runs, and how often each runs. Kernel bodies are left out."""
    yield from ((opened(jaxpr), times) for jaxpr, times in held(equation))


def held(equation: Any) -> Iterator[tuple[Any, int]]:
    """Yields the same as `inside`, but the original objects in the equation's parameters, including constants."""
    if equation.primitive.name in _KERNELS:
        return
    times = equation.params["length"] if equation.primitive.name == "scan" else 1
    if times:
        yield from ((jaxpr, times) for jaxpr in _held(equation))


def is_manual(equation: Any) -> bool:
    """Returns whether an equation is a `shard_map` after which all axes of its mesh are manual."""
    if equation.primitive.name != "shard_map":
        return False
    mesh = equation.params["mesh"]
    before = {name for name, kind in zip(mesh.axis_names, mesh.axis_types, strict=True) if kind == AxisType.Manual}
    return set(mesh.axis_names) == before | set(equation.params["newly_manual_axes"])


def replaced(jaxpr: Any, replace: Callable[[Any], Any]) -> Any:
    """Returns `jaxpr` with replaced equations.

    Args:
      replace: Maps an equation to its replacement. Nested jaxprs are unchanged unless `replace` also maps them
        (`with_inside`).
    """
    if isinstance(jaxpr, core.Jaxpr):
        return jaxpr.replace(eqns=[replace(equation) for equation in jaxpr.eqns])
    return jaxpr.replace(jaxpr=replaced(jaxpr.jaxpr, replace))


def with_inside(equation: Any, replace: Callable[[Any], Any]) -> Any:
    """Returns an equation with replaced nested jaxprs. A kernel's equation is returned unchanged.

    Args:
      replace: Maps a jaxpr to its replacement.
    """
    if equation.primitive.name in _KERNELS:
        return equation

    def other(value: Any) -> Any:
        if is_jaxpr(value):
            return replace(value)
        if isinstance(value, tuple) and any(map(is_jaxpr, value)):
            each = map(other, value)
            return type(value)(*each) if hasattr(value, "_fields") else tuple(each)
        return value

    return equation.replace(params={name: other(value) for name, value in equation.params.items()})


def line_of(equation: Any) -> Call | None:
    """Returns the line of the user's code that made an equation; for a derivative, the line that was differentiated."""
    return asked_by(frames.traced(equation.source_info.traceback))


def is_backward(equation: Any) -> bool:
    """Returns whether an equation belongs to a backward pass, by its name stack."""
    return "transpose(" in str(equation.source_info.name_stack)


def _held(equation: Any) -> Iterator[Any]:
    if equation.primitive.name == "custom_linear_solve":  # the other jaxprs are for derivatives
        return iter((equation.params["jaxprs"].solve,))
    return jaxprs.held(equation)
