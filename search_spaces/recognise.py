"""Recognition of operations in the jaxpr of plain JAX code: arrays, the equations that make them, and patterns."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterable, Iterator, Mapping
from types import MappingProxyType
from typing import Any

import jax.numpy as jnp
from jax.extend import core

from search_spaces import fingerprint
from search_spaces.problem import Problem

# ------------------------------------------------------------------------------
# A jaxpr as arrays and the equations that make them, with the bodies of calls inlined.

# Equations that run their inner jaxpr once, on their own operands.
CALLS = frozenset(
    {"jit", "pjit", "closed_call", "core_call", "checkpoint", "remat", "remat2"}
    | {"custom_jvp_call", "custom_vjp_call", "custom_vjp_call_jaxpr", "custom_vmap_call"}
)


@dataclasses.dataclass(frozen=True, eq=False)
class Value:
    """An array, distinguished from others by identity.

    Attributes:
      node: the equation that makes it; None for arguments and constants.
      literal: its number if it is a literal of the jaxpr; else None.
    """

    shape: tuple[int, ...]
    dtype: Any
    node: Node | None = None
    literal: Any = None

    def by(self, *names: str) -> Node | None:
        """Returns the equation that makes this array if its primitive is one of `names`."""
        return self.node if self.node is not None and self.node.name in names else None


@dataclasses.dataclass(frozen=True, eq=False)
class Node:
    """An equation; `results` and `users` are complete once the graph is.

    Attributes:
      equation: the equation of the jaxpr.
      users: the equations that read a result.
    """

    name: str
    equation: Any
    inputs: tuple[Value, ...]
    results: list[Value] = dataclasses.field(default_factory=list)
    users: list[Node] = dataclasses.field(default_factory=list)

    @property
    def params(self) -> Any:
        return self.equation.params


def nodes(jaxpr: Any, known: Mapping[Any, Value] = MappingProxyType({})) -> list[Node]:
    """Returns the equations of a jaxpr in order, with calls replaced by their bodies.

    Args:
      known: values of its arguments, as far as they are known.
    """
    return list(_nodes(jaxpr, dict(known)))


def arguments(node: Node, jaxpr: Any) -> dict[Any, Value]:
    """Returns the arguments of an inner jaxpr that are the same operands of the equation in each run of it."""
    if node.name == "scan":  # constants first; then the carry, with one shape inside and outside; then slices
        sliced = sum(len(x.aval.shape) != len(given.shape) for x, given in zip(jaxpr.invars, node.inputs, strict=True))
        results = zip(jaxpr.outvars, node.equation.outvars, strict=True)
        carried = sum(len(x.aval.shape) == len(outer.aval.shape) for x, outer in results)
        constants = len(node.inputs) - carried - sliced
        return dict(zip(jaxpr.invars[:constants], node.inputs[:constants], strict=True))
    return dict(zip(jaxpr.invars, node.inputs[1:], strict=True)) if node.name == "cond" else {}


def body(equation: Any) -> Any:
    """Returns the jaxpr that a call runs; None if the equation is no call."""
    if equation.primitive.name not in CALLS:
        return None
    held = list(fingerprint.held_jaxprs(equation))
    inner = fingerprint.opened_jaxpr(held[0]) if len(held) == 1 else None
    return inner if inner is not None and len(inner.invars) == len(equation.invars) else None


def _nodes(jaxpr: Any, known: dict[Any, Value]) -> Iterator[Node]:
    def value_of(atom: Any) -> Value:
        if isinstance(atom, core.Literal):
            return _literal(atom)
        if atom not in known:
            known[atom] = Value(getattr(atom.aval, "shape", ()), getattr(atom.aval, "dtype", None))
        return known[atom]

    for equation in jaxpr.eqns:
        inputs = tuple(map(value_of, equation.invars))
        inner = body(equation)
        if inner is not None:
            within = dict(zip(inner.invars, inputs, strict=True))
            yield from _nodes(inner, within)
            for mine, its in zip(equation.outvars, inner.outvars, strict=True):
                if isinstance(its, core.Literal):
                    known[mine] = _literal(its)
                else:
                    known[mine] = within.get(its) or Value(its.aval.shape, its.aval.dtype)
            continue
        node = Node(equation.primitive.name, equation, inputs)
        for each in inputs:
            if each.node is not None:
                each.node.users.append(node)
        for atom in equation.outvars:
            known[atom] = Value(getattr(atom.aval, "shape", ()), getattr(atom.aval, "dtype", None), node)
            node.results.append(known[atom])
        yield node


def _literal(atom: Any) -> Value:
    return Value(atom.aval.shape, atom.aval.dtype, literal=atom.val)


# ------------------------------------------------------------------------------
# Building blocks of recognition: values behind casts and broadcasts, sums along an axis, factors of a product.

# Primitives that change neither values (except for rounding) nor shapes.
_SAME = (
    "convert_element_type",
    "stop_gradient",
    "copy",
    "name",
    "sharding_constraint",
    "optimization_barrier",
    "pvary",
)


@dataclasses.dataclass(frozen=True, eq=False)
class Recognised:
    """A problem that several equations compute.

    Attributes:
      nodes: all equations that a tuned call would replace.
      shown: the equations whose source lines are reported.
      call: the tuned call, if its name is not ``tuned_`` and the operation's name.
    """

    problem: Problem
    nodes: frozenset[Node]
    shown: tuple[Node, ...]
    call: str = ""


def strip(value: Value) -> Value:
    """Returns the value before all casts."""
    for before in casts(value):
        value = before
    return value


def casts(value: Value) -> Iterator[Value]:
    """Yields the value, and its input before each cast."""
    yield value
    while (node := value.by(*_SAME)) is not None:
        value = node.inputs[node.results.index(value)]
        yield value


def rounded(value: Value) -> Value:
    """Returns the cast of a result if all of its users are casts to one dtype; else the result."""
    if value.node is None:
        return value
    kept = [user for user in value.node.users if value in user.inputs]
    cast = all(user.name == "convert_element_type" for user in kept)
    one = len({user.results[0].dtype for user in kept}) == 1
    return kept[0].results[0] if cast and one else value


def as_of(value: Value, dtype: Any) -> Value | None:
    """Returns the value, or a value it was cast from, in this dtype; None if there is none."""
    return next((each for each in casts(value) if each.dtype == dtype), None)


def number(value: Value) -> float | None:
    """Returns the number that all elements equal; None if they are no literal."""
    base, _ = source(value)
    if base.literal is None or base.shape or jnp.issubdtype(base.dtype, jnp.complexfloating):
        return None
    return float(base.literal)


def source(value: Value) -> tuple[Value, tuple[int | None, ...]]:
    """Returns the array that is broadcast and cast to `value`, and the axes of `value` where its axes lie.

    An axis of extent 1 is None.
    """
    where: list[int | None] = [i if n > 1 else None for i, n in enumerate(value.shape)]
    while True:
        value = strip(value)
        if (node := value.by("broadcast_in_dim")) is not None:
            before = node.inputs[0]
            dims = node.params["broadcast_dimensions"]
            where = [where[dims[i]] if n > 1 else None for i, n in enumerate(before.shape)]
        elif (node := value.by("reshape", "squeeze", "expand_dims")) is not None:
            before = node.inputs[0]
            if [n for n in before.shape if n > 1] != [n for n in value.shape if n > 1]:
                return value, tuple(where)
            wide = [where[i] for i, n in enumerate(value.shape) if n > 1]
            where = [wide.pop(0) if n > 1 else None for n in before.shape]
        else:
            return value, tuple(where)
        value = before


def constant_along(value: Value, axis: int) -> bool:
    """Returns whether the value is constant along this axis when it is combined elementwise with other arrays."""
    return axis not in source(value)[1]


def reduced(value: Value, name: str) -> tuple[Value, int] | None:
    """Returns the array of which `value` is the reduction along one axis, and that axis.

    `value` must have that axis kept or broadcast again.
    """
    base, where = source(value)
    if (node := base.by(name)) is None or len(node.params["axes"]) != 1:
        return None
    (axis,) = node.params["axes"]
    of = node.inputs[0]
    kept = [i for i in range(len(of.shape)) if i != axis]
    same = len(of.shape) == len(value.shape) and all(at in (None, i) for at, i in zip(where, kept, strict=True))
    return (strip(of), axis) if same else None


def factors(value: Value, steps: int = 3) -> list[Value]:
    """Returns the factors of a product, through casts, in at most `steps` steps."""
    if not steps or (node := strip(value).by("mul")) is None:
        return [value]
    return [factor for each in node.inputs for factor in factors(each, steps - 1)]


def between(result: Value, inputs: Iterable[Value]) -> frozenset[Node]:
    """Returns the equations on paths from the inputs to the result, without those that other inputs alone reach."""
    ends = {id(value) for value in inputs}
    above: dict[int, Node] = {}
    left = [result]
    while left:
        value = left.pop()
        if value.node is not None and id(value) not in ends and id(value.node) not in above:
            above[id(value.node)] = value.node
            left += value.node.inputs
    found: dict[int, Node] = {}
    below = [node for node in above.values() if any(id(value) in ends for value in node.inputs)]
    while below:
        node = below.pop()
        if id(node) not in found:
            found[id(node)] = node
            below += [user for user in node.users if id(user) in above]
    return frozenset(found.values())


def rows_of(value: Value) -> tuple[int, int]:
    """Returns rows and columns of an array, its leading axes folded."""
    return math.prod(value.shape[:-1]), value.shape[-1]


def same(one: Value, other: Value, steps: int = 6) -> bool:
    """Returns whether both are one array except for casts, or are computed alike from one in at most `steps` steps."""
    one, other = strip(one), strip(other)
    if one is other:
        return True
    if one.literal is not None or other.literal is not None:
        return number(one) is not None and number(one) == number(other)
    x, y = one.node, other.node
    if x is None or y is None or not steps or (x.name, str(x.params)) != (y.name, str(y.params)):
        return False
    alike = x.results.index(one) == y.results.index(other) and len(x.inputs) == len(y.inputs)
    return alike and all(same(a, b, steps - 1) for a, b in zip(x.inputs, y.inputs, strict=True))
