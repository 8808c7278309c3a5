"""The equations that a function runs, how often, and the user's line of each: a walk over its jaxpr."""

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

# What they hold is the inside of a kernel.
_KERNELS = frozenset({"pallas_call", "core_map", "mpmd_map"})


@dataclasses.dataclass(frozen=True, eq=False)
class Body:
    """A jaxpr whose equations all run equally often.

    Attributes:
      count: how often in one call of the function.
      manual: whether it is of one device: inside a `shard_map` over all axes of its mesh.
      line: of the user's code that runs it as a whole; None where none is known.
    """

    jaxpr: Any
    count: int
    manual: bool = False
    line: Call | None = None

    def line_of(self, equation: Any) -> Call | None:
        """The line of one of its equations. JAX forgets who called what is in a `shard_map`: then the one above."""
        return line_of(equation) or self.line


@dataclasses.dataclass(frozen=True, eq=False)
class Loop:
    """An equation whose own count no jaxpr tells.

    Attributes:
      kind: "while", whose turns are counted as one, or "cond", whose branches are all counted.
      line: of the user's code; None where none is known.
    """

    kind: str
    line: Call | None


@dataclasses.dataclass(frozen=True, eq=False)
class Traced:
    """A function as JAX lowers it.

    Attributes:
      jaxpr: open: without what the function's results do not need.
      constants: arrays that it closes over, of ``jaxpr.constvars``.
      arguments: of ``jaxpr.invars``, as they were given.
    """

    jaxpr: Any
    constants: tuple[Any, ...]
    arguments: tuple[Any, ...]


def traced(fn: Callable[..., Any], *arrays: Any) -> Traced:
    """``fn(*arrays)``, without what its results do not need: JAX lowers none of that, either.

    Where it returns nothing, nothing is left out; where all derivatives are left out, there is a warning. `fn` is not
    jitted itself: what it calls may be, and the shardings that were given to that are in its equation.
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
    """All jaxprs that run within this one, itself among them, and what their counts leave open.

    The length of a scan multiplies. Calls (`jit`, `jax.checkpoint`, custom derivatives, `shard_map`) run what they hold
    once; in a `shard_map` shapes and counts are those of one device.
    """
    body = Body(opened(jaxpr), count, manual, line)
    yield body
    for equation in body.jaxpr.eqns:
        if equation.primitive.name in ("while", "cond"):
            yield Loop(equation.primitive.name, body.line_of(equation))
        for within, times in inside(equation):
            yield from bodies(within, count * times, manual or is_manual(equation), body.line_of(equation))


def inside(equation: Any) -> Iterator[tuple[Any, int]]:
    """The jaxprs that an equation runs, and how often each; nothing of kernels, which are no part of the function."""
    yield from ((opened(jaxpr), times) for jaxpr, times in held(equation))


def held(equation: Any) -> Iterator[tuple[Any, int]]:
    """The same, with their constants: the objects that the equation's parameters have."""
    if equation.primitive.name in _KERNELS:
        return
    times = equation.params["length"] if equation.primitive.name == "scan" else 1
    if times:
        yield from ((jaxpr, times) for jaxpr in _held(equation))


def is_manual(equation: Any) -> bool:
    """Whether what an equation holds is of one device: a `shard_map` over all axes of its mesh that are not so yet."""
    if equation.primitive.name != "shard_map":
        return False
    mesh = equation.params["mesh"]
    before = {name for name, kind in zip(mesh.axis_names, mesh.axis_types, strict=True) if kind == AxisType.Manual}
    return set(mesh.axis_names) == before | set(equation.params["newly_manual_axes"])


def replaced(jaxpr: Any, replace: Callable[[Any], Any]) -> Any:
    """`jaxpr` with other equations in place of its own.

    Args:
      replace: of an equation. What that holds stays, unless `replace` replaces that (`with_inside`), too.
    """
    if isinstance(jaxpr, core.Jaxpr):
        return jaxpr.replace(eqns=[replace(equation) for equation in jaxpr.eqns])
    return jaxpr.replace(jaxpr=replaced(jaxpr.jaxpr, replace))


def with_inside(equation: Any, replace: Callable[[Any], Any]) -> Any:
    """An equation with other jaxprs in place of those that it holds; as it is, where it holds a kernel.

    Args:
      replace: of a jaxpr.
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
    """The line of the user's code that an equation comes from; of a derivative, that of what was differentiated."""
    return asked_by(frames.traced(equation.source_info.traceback))


def is_backward(equation: Any) -> bool:
    """Whether an equation is of a backward pass, by the transformations that JAX names it after."""
    return "transpose(" in str(equation.source_info.name_stack)


def _held(equation: Any) -> Iterator[Any]:
    if equation.primitive.name == "custom_linear_solve":  # the others are for its derivatives
        return iter((equation.params["jaxprs"].solve,))
    return jaxprs.held(equation)
