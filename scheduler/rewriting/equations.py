"""Walks over a function's jaxpr: its equations, how often each runs, and the line of the user's code."""

from __future__ import annotations

import collections
import dataclasses
import functools
import itertools
import warnings
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from typing import Any

import jax
import numpy as np
from jax.extend import core
from jax.interpreters import partial_eval
from jax.sharding import AxisType

from scheduler.core import frames
from scheduler.core.frames import Call, asked_by
from scheduler.core.hardware import Hardware
from scheduler.model.cost import CostModel
from search_spaces import OPERATIONS, fingerprint, load
from search_spaces.fingerprint import is_jaxpr, opened_jaxpr
from search_spaces.operation import MatchedEquation, Operation
from search_spaces.problem import Problem
from search_spaces.recognise import Inlined, Node

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

    Raises:
      ValueError: an array has symbols for extents, as of `jax.export`.
    """
    shapes = [getattr(x, "shape", ()) for x in arrays]
    if symbolic := [shape for shape in shapes if not all(isinstance(n, int | np.integer) for n in shape)]:
        raise ValueError(f"an argument has symbols for extents, {symbolic[0]}: give the shapes of one call")
    closed = jax.jit(fn).trace(*arrays).jaxpr
    jaxpr = whole = opened_jaxpr(closed)
    if jaxpr.outvars:
        jaxpr = partial_eval.dce_jaxpr(jaxpr, [True] * len(jaxpr.outvars), instantiate=True)[0]
    if _has_backward(whole) and not _has_backward(jaxpr):
        warnings.warn(
            "the function computes derivatives that none of its results needs: XLA removes them, and they are not "
            "counted. Return the values that depend on them (gradients, parameters, a model). A function of jax.jit "
            "loses updates of its arguments: use flax.nnx.jit, or no jit",
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
    body = Body(opened_jaxpr(jaxpr), count, manual, line)
    yield body
    for equation in body.jaxpr.eqns:
        if equation.primitive.name in ("while", "cond"):
            yield Loop(equation.primitive.name, body.line_of(equation))
        for within, times in held(equation):
            yield from bodies(within, count * times, manual or is_manual(equation), body.line_of(equation))


def held(equation: Any) -> Iterator[tuple[Any, int]]:
    """Yields the jaxprs that an equation runs, and how often each runs. Kernel bodies are left out."""
    if equation.primitive.name in _KERNELS:
        return
    times = equation.params["length"] if equation.primitive.name == "scan" else 1
    inside = fingerprint.held_jaxprs(equation)
    if equation.primitive.name == "custom_linear_solve":  # the other jaxprs are for derivatives
        inside = iter((equation.params["jaxprs"].solve,))
    if times:
        yield from ((jaxpr, times) for jaxpr in inside)


def is_manual(equation: Any) -> bool:
    """Returns whether an equation is a `shard_map` after which all axes of its mesh are manual."""
    if equation.primitive.name != "shard_map":
        return False
    mesh = equation.params["mesh"]
    before = {name for name, kind in zip(mesh.axis_names, mesh.axis_types, strict=True) if kind == AxisType.Manual}
    return set(mesh.axis_names) == before | set(equation.params["newly_manual_axes"])


def evaluated(
    jaxpr: Any,
    constants: Sequence[Any],
    arrays: Sequence[Any],
    results: Callable[[Any, Sequence[Any]], Sequence[Any]],
) -> list[Any]:
    """Returns the results of a jaxpr. `results` computes one equation, under the mesh of the equation's types."""
    values: dict[Any, Any] = dict(zip((*jaxpr.constvars, *jaxpr.invars), (*constants, *arrays), strict=True))

    def read(atom: Any) -> Any:
        return atom.val if isinstance(atom, core.Literal) else values[atom]

    for equation in jaxpr.eqns:
        with equation.ctx.manager:
            found = results(equation, [*map(read, equation.invars)])
        values |= dict(zip(equation.outvars, found, strict=True))
    return [read(atom) for atom in jaxpr.outvars]


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


def lines_of(items: Iterable[Node | Inlined], around: Call | None = None) -> dict[int, Call | None]:
    """Returns the line of each equation of a graph, or of the call around it, by the ``id`` of its node."""
    found: dict[int, Call | None] = {}
    for item in items:
        line = line_of(item.equation) or around
        found |= lines_of(item.items, line) if isinstance(item, Inlined) else {id(item): line}
    return found


def is_backward(equation: Any) -> bool:
    """Returns whether an equation belongs to a backward pass, by its name stack."""
    return "transpose(" in str(equation.source_info.name_stack)


@functools.cache
def operations_by_primitive() -> Mapping[Any, tuple[Operation[Any], ...]]:
    """Returns, for each JAX primitive, the operations that can replace its equations."""
    found: dict[Any, tuple[Operation[Any], ...]] = {}
    for operation in map(load, OPERATIONS):
        for primitive in operation.equations:
            found[primitive] = (*found.get(primitive, ()), operation)
    return found


def replacing_operations() -> tuple[Operation[Any], ...]:
    """Returns the operations that can replace equations or regions, without duplicates."""
    of_regions = [operation for operation in map(load, OPERATIONS) if operation.regions is not None]
    return tuple(dict.fromkeys(itertools.chain(*operations_by_primitive().values(), of_regions)))


def match(
    primitive: Any, avals: Sequence[Any], params: Mapping[str, Any], layout: StoredLayout | None
) -> tuple[Operation[Any], MatchedEquation[Any]] | str:
    """Returns the operation that can replace an equation and the problem that it computes, or the first reason why not.

    Args:
      layout: memory layouts of the equation's arrays, from `layouts_around`; None if these are not known.
    """
    reasons = []
    for operation in operations_by_primitive()[primitive]:
        known = {} if layout is None else {"stored": layout}
        matched = operation.equations[primitive](*avals, **params, **known)
        if not isinstance(matched, str):
            return operation, matched
        reasons.append(matched)
    return reasons[0]


# ------------------------------------------------------------------------------
# Counts the problems of a function, with the lines of the user's code that compute them.


@dataclasses.dataclass(frozen=True)
class ProblemCount:
    """One problem of a function.

    Attributes:
      count: How often one call of the function runs it; inside a `shard_map`, how often on each device.
      lines: Lines of the user's code that compute it, without duplicates.
      least_s: Lower bound of the seconds for all runs together, by the chip's roofline.
    """

    operation: Operation[Any]
    problem: Problem
    count: int
    lines: tuple[Call, ...]
    least_s: float


class ProblemCounter:
    """Collects problems, with one row for each distinct problem."""

    def __init__(self, hardware: Hardware) -> None:
        self._bound = CostModel(hardware).lower_bound
        self._found: dict[tuple[Operation[Any], Problem], tuple[int, dict[Call, None]]] = {}

    def add(self, operation: Operation[Any], problem: Problem, count: int, lines: Iterable[Call | None]) -> None:
        """Adds a problem computed by equations of these lines together."""
        before, known = self._found.get((operation, problem), (0, {}))
        known |= {line: None for line in lines if line is not None}
        self._found[operation, problem] = before + count, known

    def rows(self) -> tuple[ProblemCount, ...]:
        """Returns the problems, the most expensive first."""
        rows = [
            ProblemCount(operation, problem, count, tuple(sorted(lines, key=_in_order)), count * self._bound(problem))
            for (operation, problem), (count, lines) in self._found.items()
        ]
        return tuple(sorted(rows, key=lambda row: -row.least_s))


def _in_order(line: Call) -> tuple[str, int]:
    return line.file, line.line


# ------------------------------------------------------------------------------
# Finds the memory layouts of arrays around an equation, from the transposes before and after it.
#
# XLA folds a transpose into its own matmul, but copies the array for one of our kernels. A kernel that reads the array
# as it was before the transpose needs no copy, because the two transposes cancel.

# For each input and result, its axes in memory order. None is the default order.
StoredLayout = tuple[tuple[int, ...] | None, ...]


def layout_key(primitive: Any, avals: Sequence[Any], params: Mapping[str, Any]) -> Any:
    """Returns the key by which JAX lowers equations once: the primitive, the types and the parameters."""
    return primitive, tuple((x.shape, str(x.dtype)) for x in avals), tuple(sorted(params.items()))


def layouts_around(jaxpr: Any, primitives: Collection[Any]) -> tuple[dict[Any, StoredLayout], dict[Any, int]]:
    """Returns the most common layouts of each kind of equation, and how often one call runs it, by `layout_key`."""
    votes: dict[Any, collections.Counter[StoredLayout]] = collections.defaultdict(collections.Counter)
    for body in bodies(jaxpr):
        if isinstance(body, Body):
            for found, stored in _of_body(body.jaxpr, primitives):
                votes[found][stored] += body.count
    common = {found: counted.most_common(1)[0][0] for found, counted in votes.items()}
    return common, {found: counted.total() for found, counted in votes.items()}


def _of_body(jaxpr: Any, primitives: Collection[Any]) -> Iterator[tuple[Any, StoredLayout]]:
    made = {id(equation.outvars[0]): equation for equation in jaxpr.eqns if _is_transpose(equation)}
    users: dict[int, list[Any]] = collections.defaultdict(list)
    for equation in jaxpr.eqns:
        for x in equation.invars:
            users[id(x)].append(equation)
    for x in jaxpr.outvars:
        users[id(x)].append(None)
    for equation in jaxpr.eqns:
        if equation.primitive in primitives:
            avals = [x.aval for x in equation.invars]
            read = (_read(x, made) for x in equation.invars)
            written = (_written(x, users) for x in equation.outvars)
            yield layout_key(equation.primitive, avals, equation.params), (*read, *written)


def _read(x: Any, made: Mapping[int, Any]) -> tuple[int, ...] | None:
    """Returns the memory order of the axes of `x` in the array that transposes made it from."""
    axes = list(range(x.aval.ndim))
    while (transpose := made.get(id(x))) is not None:
        permutation = transpose.params["permutation"]
        axes, x = [permutation[axis] for axis in axes], transpose.invars[0]
    return _unless_own(tuple(int(axis) for axis in np.argsort(axes)))


def _written(x: Any, users: Mapping[int, Sequence[Any]]) -> tuple[int, ...] | None:
    """Returns the memory order of the axes of `x` after the transposes of it, if these are its only users."""
    axes = list(range(x.aval.ndim))
    while (after := users.get(id(x), [])) and all(user is not None and _is_transpose(user) for user in after):
        permutations = {user.params["permutation"] for user in after}
        if len(permutations) > 1:
            break
        axes = [axes[axis] for axis in permutations.pop()]
        if len(after) > 1:
            break
        (x,) = after[0].outvars
    return _unless_own(tuple(axes))


def _is_transpose(equation: Any) -> bool:
    return bool(equation.primitive.name == "transpose")


def _unless_own(order: tuple[int, ...]) -> tuple[int, ...] | None:
    return None if order == tuple(range(len(order))) else order
