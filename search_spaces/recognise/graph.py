"""A jaxpr as arrays and the equations that make them, with the bodies of calls inlined."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping
from types import MappingProxyType
from typing import Any

from jax.extend import core

from search_spaces import jaxprs

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
    held = list(jaxprs.held(equation))
    inner = jaxprs.opened(held[0]) if len(held) == 1 else None
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
