"""Derivative rules in a jaxpr, and which of them may be dropped because they equal the derivative of the equations.

`jax.custom_jvp`, `jax.custom_vjp` and `stop_gradient` replace the derivative of equations. A tuned call has the
derivative of the equations that it replaces. A rule is harmless only if both are provably equal.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from search_spaces import lowering_compat
from search_spaces.fingerprint import all_equations, held_jaxprs, opened_jaxpr
from search_spaces.recognise import Inlined, Node, Value, between, constants, graph, number

_WITH_RULES = frozenset({"custom_jvp_call", "custom_vjp_call", "custom_vjp_call_jaxpr"})


class KnownRule(NamedTuple):
    """A function with a rule that equals the derivative of its equations.

    Attributes:
      operands: how many operands its equation has.
      calls: from the number of axes of the first operand to functions, one of which has the rule.
      selection: the same function, and the derivative of its equations is the rule at ties, too: there, JAX's
        derivative of a maximum is 1/2. None if the rule is that of the equations everywhere.
    """

    operands: int
    calls: Callable[[int], Sequence[Callable[..., Any]]]
    selection: Callable[[jax.Array], jax.Array] | None = None


def _softmax(axis: int) -> Callable[..., Any]:
    return lambda x, _: jax.nn.softmax(x, axis)


def _relu(x: jax.Array) -> jax.Array:
    return lax.select(x <= 0, jnp.zeros_like(x), x)


def _relu6(x: jax.Array) -> jax.Array:
    return lax.select(x >= 6, jnp.full_like(x, 6), _relu(x))


# By the name of the function that has the rule. `rows.formulas` adds its own functions.
KNOWN: dict[str, KnownRule] = {
    # max(x, 0) is x for x > 0 and 0 for x < 0: its derivative is 1 and 0. At 0 the rule gives 0.
    "relu": KnownRule(1, lambda _: [jax.nn.relu], _relu),
    # min(max(x, 0), 6): its derivative is 1 between 0 and 6, else 0. At 0 and 6 the rule gives 0.
    "relu6": KnownRule(1, lambda _: [jax.nn.relu6], _relu6),
    # out = log(e^x + e^y), and d out / dx = e^x / (e^x + e^y) = e^(x - out).
    "logaddexp": KnownRule(2, lambda _: [jnp.logaddexp, lambda x, _: jax.nn.softplus(x)]),
    # d log(1 - e^-x) / dx = e^-x / (1 - e^-x) = 1 / (e^x - 1).
    "log1mexp": KnownRule(1, lambda _: [jax.nn.log1mexp]),
    # y = e^x / sum(e^x), and dy = y dx - y sum(e^x dx) / sum(e^x) = y (dx - sum(y dx)).
    "_softmax": KnownRule(2, lambda axes: [*map(_softmax, range(axes))]),
}


def has_own_rule(equation: Any, *, at_ties: bool) -> bool:
    """Returns whether an equation is a call with a rule that may differ from the derivative of its body.

    Args:
      at_ties: whether a rule counts that differs only where two arguments of a maximum are equal, as that of `relu`.
    """
    if equation.primitive.name not in _WITH_RULES:
        return False
    known = KNOWN.get(_name_of(equation))
    avals = [jax.ShapeDtypeStruct(x.aval.shape, x.aval.dtype) for x in equation.invars]
    if known is None or len(avals) != known.operands or (at_ties and known.selection is not None):
        return True
    if not (_is_jvp(equation) and all(jnp.issubdtype(x.dtype, jnp.floating) for x in avals)):
        return True
    own = _rule(equation)
    made = (jax.make_jaxpr(call)(*avals) for call in known.calls(len(avals[0].shape)))
    return not any(_is_jvp(each) and _rule(each) == own for jaxpr in made for each in all_equations(jaxpr))


def as_selection(call: Inlined) -> list[Node] | None:
    """Returns equations of the same values and, at ties, of the derivative of a call's rule; None of any other call."""
    equation = call.equation
    known = KNOWN.get(_name_of(equation)) if _is_jvp(equation) else None
    if known is None or known.selection is None or has_own_rule(equation, at_ties=False):
        return None
    (x,) = call.inputs
    jaxpr = jax.make_jaxpr(known.selection)(jax.ShapeDtypeStruct(x.shape, x.dtype)).jaxpr
    *first, last = graph(jaxpr, dict(zip(jaxpr.invars, call.inputs, strict=True))).nodes
    return [*first, Node(last.name, last.equation, last.inputs, list(call.results))]


def has_own_rules(function: Callable[..., Any], arrays: Sequence[jax.ShapeDtypeStruct]) -> bool:
    """Returns whether the derivative of a function may differ from that of its equations, with those of `as_selection`.

    Raises:
      Exception: whatever the function raises.
    """
    closed = jax.make_jaxpr(function)(*arrays)
    keeps = functools.partial(has_own_rule, at_ties=False)
    whole = graph(closed.jaxpr, constants(closed), keeps=keeps)
    nodes = nodes_between(whole.nodes, whole.results, whole.inputs)
    return any(node.name in _WITH_RULES for node in nodes) or bool(held_arrays(nodes, whole.results))


def nodes_between(nodes: Iterable[Node], results: Iterable[Value], inputs: Sequence[Value]) -> list[Node]:
    """Returns the equations, of those in order, on the paths from the inputs to the results."""
    found = frozenset[Node]().union(*(between(x, inputs) for x in results))
    return [node for node in nodes if node in found]


def _is_jvp(equation: Any) -> bool:
    return bool(equation.primitive.name == "custom_jvp_call")


def _name_of(call: Any) -> str:
    return str(opened_jaxpr(next(held_jaxprs(call))).debug_info.func_name)


def _rule(call: Any) -> str:
    """Returns the equations of a call's result and tangent as text."""
    avals = [jax.ShapeDtypeStruct(x.aval.shape, x.aval.dtype) for x in call.invars]
    run = functools.partial(lowering_compat.evaluate_equation, call)
    return str(jax.make_jaxpr(lambda primals, tangents: jax.jvp(run, primals, tangents))(avals, avals))


# ------------------------------------------------------------------------------
# `stop_gradient`: harmless if no result depends on the held array.
#
# A softmax and a log-sum-exp subtract a held maximum m from the logits, but do not depend on it: with m + d in place of
# m, exponentials and their sum are multiplied by e^-d, so their quotient stays, and the logarithm of the sum is less by
# d. `_changes` follows d from m to the results.


class _Change(NamedTuple):
    """The change of an array if d is added to a held array: ``+ factor d``, or times ``e^(factor d)``, or another.

    Attributes:
      axes: each axis along which d differs: its number in the held array, and in this one.
    """

    kind: Literal["sum", "product", "other"]
    factor: float
    axes: frozenset[tuple[int, int]] = frozenset()


_OTHER = _Change("other", 1.0)
# The result of these equations changes as their first input.
_UNCHANGED = frozenset({"convert_element_type", "copy", "name", "pvary", "optimization_barrier", "reshape", "squeeze"})
_UNCHANGED |= {"expand_dims", "transpose", "slice", "broadcast_in_dim", "reduce_max", "reduce_min", "stop_gradient"}
# The kinds of the argument and of the result, and the factor of the result over that of the argument.
_FUNCTIONS: Mapping[str, tuple[str, Literal["sum", "product"], float]] = {
    "neg": ("sum", "sum", -1.0),
    "exp": ("sum", "product", 1.0),
    "log": ("product", "sum", 1.0),
    "abs": ("product", "product", 1.0),
    "sqrt": ("product", "product", 0.5),
    "rsqrt": ("product", "product", -0.5),
    "square": ("product", "product", 2.0),
    "sign": ("product", "product", 0.0),
    "reduce_sum": ("product", "product", 1.0),
}


def held_arrays(nodes: Sequence[Node], results: Sequence[Value]) -> list[Node]:
    """Returns the `stop_gradient` equations that change the derivative of the results by the inputs.

    Args:
      nodes: the equations on the paths from the inputs to the results, in order.
    """
    inside, found, left = {id(node) for node in nodes}, dict[int, Node](), list(results)
    seen = set[int]()
    while left:  # what only a held array needs has no derivative in any case
        node = left.pop().node
        if node is None or id(node) not in inside or id(node) in seen:
            continue
        seen.add(id(node))
        if node.name != "stop_gradient":
            left += node.inputs
        elif jnp.issubdtype(node.results[0].dtype, jnp.inexact):
            found[id(node)] = node
    return [node for node in found.values() if any(id(x) in _changes(node, nodes) for x in results)]


def _changes(held: Node, nodes: Sequence[Node]) -> dict[int, _Change]:
    """Returns the changes of arrays that depend on a held array, by their ``id``."""
    (x,) = held.results
    found = {id(x): _Change("sum", 1.0, frozenset((i, i) for i, n in enumerate(x.shape) if n > 1))}
    for node in nodes:
        given = [found.get(id(each)) for each in node.inputs]
        if node is not held and any(given):
            change = _OTHER if _OTHER in given else _changed(node, given)
            found |= {id(each): change for each in node.results if change.factor}
    return found


def _changed(node: Node, given: Sequence[_Change | None]) -> _Change:
    """Returns the change of the result of an equation from the changes of its inputs; no change has the factor 0."""
    known = [each for each in given if each is not None]
    (kind, factor, _), axes = known[0], _axes(node, known)
    if axes is None or any(each.kind != kind for each in known):
        return _OTHER
    # A selection's first input selects among the others.
    cases = list(zip(given, node.inputs, strict=True))[node.name == "select_n" :]
    alike = all(each == known[0] or (each is None and _is_unchanged(x, kind)) for each, x in cases)
    factors = [0.0 if each is None else each.factor for each in given]
    numbers = [number(x) for x, each in zip(node.inputs, given, strict=True) if each is None]
    match node.name, kind:
        case ("add" | "add_any", "sum") | ("mul", "product"):
            return _Change(kind, sum(factors), axes)
        case ("sub", "sum") | ("div", "product"):
            return _Change(kind, factors[0] - factors[1], axes)
        case ("add" | "add_any" | "sub" | "neg", "product") | ("max" | "min" | "select_n", _) if alike:
            return _Change(kind, factor, axes)
        case "eq" | "ne" | "lt" | "le" | "gt" | "ge", _ if alike:
            return _Change(kind, 0.0)
        case "mul", "sum" if numbers and numbers[0] is not None:
            return _Change(kind, factor * numbers[0], axes)
        case "div", "sum" if numbers and numbers[0] and given[0]:
            return _Change(kind, factor / numbers[0], axes)
        case "integer_pow", "product":
            return _Change(kind, factor * node.params["y"], axes)
        case (name, argument) if name in _FUNCTIONS and _FUNCTIONS[name][0] == argument:
            return _Change(_FUNCTIONS[name][1], _FUNCTIONS[name][2] * factor, axes)
        case (name, _) if name in _UNCHANGED:
            return _Change(kind, factor, axes)
    return _OTHER


def _is_unchanged(x: Value, kind: str) -> bool:
    """Returns whether a number stays the same if another is added to it, or if it is multiplied by a positive one."""
    value = number(x)
    return value is not None and (value == 0 if kind == "product" else math.isinf(value))


def _axes(node: Node, given: Sequence[_Change]) -> frozenset[tuple[int, int]] | None:
    """Returns the axes of the result of an equation along which d differs; None if these are not known."""
    axes, params = given[0].axes, node.params
    if any(each.axes != axes for each in given):
        return None
    if not axes:  # d is one number
        return axes
    before, after = node.inputs[0].shape, node.results[0].shape
    match node.name:
        case "broadcast_in_dim":
            places = dict(enumerate(params["broadcast_dimensions"]))
        case "transpose":
            places = {axis: place for place, axis in enumerate(params["permutation"])}
        case "reduce_sum" | "reduce_max" | "reduce_min":
            left = [axis for axis in range(len(before)) if axis not in params["axes"]]
            places = {axis: place for place, axis in enumerate(left)}
        case "reshape" | "squeeze" | "expand_dims":
            wide, places_of_wide = ([i for i, n in enumerate(shape) if n > 1] for shape in (before, after))
            kept = [before[i] for i in wide] == [after[i] for i in places_of_wide]
            places = dict(zip(wide, places_of_wide, strict=True)) if kept else {}
        case "slice":
            return None
        case _:
            places = {axis: axis for axis in range(len(after))}
    moved = frozenset((axis, places[place]) for axis, place in axes if place in places)
    return moved if len(moved) == len(axes) else None
