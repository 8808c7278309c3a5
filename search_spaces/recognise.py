"""Recognition of operations in the jaxpr of plain JAX code: arrays, the equations that make them, and patterns."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from types import MappingProxyType
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend import core

from search_spaces import fingerprint, lowering_compat
from search_spaces.problem import Problem

# ------------------------------------------------------------------------------
# A jaxpr as arrays and the equations that make them, with the bodies of calls inlined.

# The primitive that only compares arrays: its equations are no users of them.
OBSERVE = "observe"
# Equations that run their inner jaxpr once, on their own operands.
_CALLS = frozenset(
    {"jit", "pjit", "closed_call", "core_call", "checkpoint", "remat", "remat2"}
    | {"custom_jvp_call", "custom_vjp_call", "custom_vjp_call_jaxpr", "custom_vmap_call"}
)


@dataclasses.dataclass(frozen=True, eq=False)
class Value:
    """An array, distinguished from others by identity.

    Attributes:
      node: the equation that makes it; None for arguments and constants.
      literal: its number if it is a literal of the jaxpr, or its value if it is a constant; else None.
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


@dataclasses.dataclass(frozen=True, eq=False)
class Inlined:
    """A call that the graph replaces by its body.

    Attributes:
      items: the equations and calls of the body, in order.
      results: the arrays that the call returns; arrays of the body.
    """

    equation: Any
    inputs: tuple[Value, ...]
    items: list[Node | Inlined]
    results: tuple[Value, ...]


@dataclasses.dataclass(frozen=True, eq=False)
class Graph:
    """A jaxpr as arrays and equations.

    Attributes:
      items: the equations and the inlined calls, in order.
      inputs, results: the arrays that the jaxpr takes and returns.
      values: the array of each variable of the jaxpr.
    """

    items: list[Node | Inlined]
    inputs: list[Value]
    results: list[Value]
    values: Mapping[Any, Value]

    @property
    def nodes(self) -> Iterator[Node]:
        """The equations in order, with inlined calls replaced by their bodies."""
        return _flat(self.items)


def graph(
    jaxpr: Any,
    known: Mapping[Any, Value] = MappingProxyType({}),
    keeps: Callable[[Any], bool] = lambda equation: False,
) -> Graph:
    """Returns the graph of a jaxpr.

    Args:
      known: arrays of its arguments, as far as they are known.
      keeps: whether a call stays one equation. The bodies of others are inlined.
    """
    values = dict(known)
    items = _items(jaxpr, values, keeps)
    for atom in (*jaxpr.invars, *jaxpr.outvars):
        if not isinstance(atom, core.Literal):
            values.setdefault(atom, _value(atom))
    results = [_literal(x) if isinstance(x, core.Literal) else values[x] for x in jaxpr.outvars]
    return Graph(items, [values[x] for x in jaxpr.invars], results, values)


def _flat(items: Iterable[Node | Inlined]) -> Iterator[Node]:
    for item in items:
        if isinstance(item, Node):
            yield item
        else:
            yield from _flat(item.items)


def live(graph: Graph, replaced: Collection[int] = ()) -> set[int]:
    """Returns the ``id`` of each equation that a result or an effect needs; arrays of `replaced` need none."""
    effects = [node for node in graph.nodes if node.equation.effects]
    found, left = {id(node) for node in effects}, [*graph.results, *(x for node in effects for x in node.inputs)]
    while left:
        value = left.pop()
        if value.node is not None and id(value) not in replaced and id(value.node) not in found:
            found.add(id(value.node))
            left += value.node.inputs
    return found


def arguments(node: Node, jaxpr: Any) -> dict[Any, Value]:
    """Returns the arguments of an inner jaxpr that are the same operands of the equation in each run of it."""
    if node.name == "scan":
        constants, _ = lowering_compat.scan_inputs(node.params)
        return dict(zip(jaxpr.invars[:constants], node.inputs[:constants], strict=True))
    return dict(zip(jaxpr.invars, node.inputs[1:], strict=True)) if node.name == "cond" else {}


def body(equation: Any) -> Any:
    """Returns the jaxpr that a call runs, with its constants; None if the equation is no call."""
    if equation.primitive.name not in _CALLS:
        return None
    held = list(fingerprint.held_jaxprs(equation))
    inner = fingerprint.opened_jaxpr(held[0]) if len(held) == 1 else None
    return held[0] if inner is not None and len(inner.invars) == len(equation.invars) else None


def constants(jaxpr: Any) -> dict[Any, Value]:
    """Returns the arrays that a closed jaxpr holds, by their variables."""
    held = zip(fingerprint.opened_jaxpr(jaxpr).constvars, getattr(jaxpr, "consts", ()), strict=False)
    return {atom: Value(atom.aval.shape, atom.aval.dtype, literal=x) for atom, x in held}


def _items(jaxpr: Any, known: dict[Any, Value], keeps: Callable[[Any], bool]) -> list[Node | Inlined]:
    def value_of(atom: Any) -> Value:
        if isinstance(atom, core.Literal):
            return _literal(atom)
        if atom not in known:
            known[atom] = _value(atom)
        return known[atom]

    items: list[Node | Inlined] = []
    for equation in jaxpr.eqns:
        inputs = tuple(map(value_of, equation.invars))
        if equation.primitive.name == OBSERVE:
            items.append(Inlined(equation, inputs, [], ()))
            continue
        closed = body(equation)
        if closed is not None and not keeps(equation):
            inner = fingerprint.opened_jaxpr(closed)
            within = constants(closed) | dict(zip(inner.invars, inputs, strict=True))
            held = _items(inner, within, keeps)
            results = tuple(
                _literal(atom) if isinstance(atom, core.Literal) else within.get(atom) or _value(atom)
                for atom in inner.outvars
            )
            known.update(zip(equation.outvars, results, strict=True))
            items.append(Inlined(equation, inputs, held, results))
            continue
        if (constant := _constant(equation, inputs)) is not None:
            known[equation.outvars[0]] = constant
            continue
        node = Node(equation.primitive.name, equation, inputs)
        for each in inputs:
            if each.node is not None:
                each.node.users.append(node)
        for atom in equation.outvars:
            known[atom] = _value(atom, node)
            node.results.append(known[atom])
        items.append(node)
    return items


# Functions of NumPy that compute equations of scalars as XLA does. Of 0 and -0, NumPy's maximum is the second.
_OF_SCALARS: Mapping[str, Callable[..., Any]] = {
    "add": np.add,
    "sub": np.subtract,
    "mul": np.multiply,
    "neg": np.negative,
    "and": np.bitwise_and,
    "or": np.bitwise_or,
    "xor": np.bitwise_xor,
    "not": np.bitwise_not,
    "eq": np.equal,
    "ne": np.not_equal,
    "lt": np.less,
    "le": np.less_equal,
    "gt": np.greater,
    "ge": np.greater_equal,
}


def _constant(equation: Any, inputs: Sequence[Value]) -> Value | None:
    """Returns the result of an equation that XLA computes when it compiles; None if it computes it later.

    `jnp.var`, for example, divides by a constant less its argument `ddof`, and selects NaN if that is not positive.
    """
    if not inputs or not _is_number(inputs[0]):
        return None
    if (name := equation.primitive.name) == "select_n":
        return inputs[1 + min(max(int(inputs[0].literal), 0), len(inputs) - 2)]  # as XLA does
    if name == "convert_element_type":
        compute: Any = np.asarray
    elif (compute := _OF_SCALARS.get(name)) is None or not all(map(_is_number, inputs)):
        return None
    made = equation.outvars[0].aval
    if not _is_common(made.dtype) or (made.dtype.kind in "iu") > (inputs[0].dtype.kind in "biu"):
        return None
    with np.errstate(all="ignore"):
        found = compute(*(np.asarray(x.literal, x.dtype) for x in inputs))
    return Value((), made.dtype, literal=np.asarray(found, made.dtype))


def _is_number(value: Value) -> bool:
    known = value.literal is not None and not isinstance(value.literal, jax.Array)
    return known and not value.shape and _is_common(value.dtype)


def _is_common(dtype: Any) -> bool:  # NumPy and XLA convert to int4 differently, for example
    return isinstance(dtype, np.dtype) and (dtype.kind in "biuf" or dtype == jnp.bfloat16)


def _value(atom: Any, node: Node | None = None) -> Value:
    return Value(getattr(atom.aval, "shape", ()), getattr(atom.aval, "dtype", None), node)


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
class RegionStage:
    """Arrays of a region that one tuned call computes.

    Attributes:
      operation: of the call; None means the operation that found the region.
      params: parameters of the call.
      inputs: the arrays that the stage reads.
      results: the arrays that the stage computes. There may be none: a later stage may need what it hands on.
      run: ``run(call, handed_on, *inputs)`` returns the results, and what the next stage reads besides its inputs.
        ``call(*operands)`` is the tuned call.
    """

    operation: Any
    problem: Problem
    params: tuple[tuple[str, Any], ...]
    inputs: tuple[Value, ...]
    results: tuple[Value, ...]
    run: Callable[..., tuple[tuple[Any, ...], Any]]


@dataclasses.dataclass(frozen=True, eq=False)
class Region:
    """Equations that tuned calls can replace as a whole.

    Attributes:
      stages: in the order in which they run.
      roots: the arrays that determine all inputs and results, for a comparison with the equations.
      shown: the equations to report, by their source lines.
    """

    stages: tuple[RegionStage, ...]
    roots: tuple[Value, ...]
    shown: tuple[Node, ...]

    @property
    def inputs(self) -> tuple[Value, ...]:
        return tuple(x for stage in self.stages for x in stage.inputs)

    @property
    def results(self) -> tuple[Value, ...]:
        return tuple(x for stage in self.stages for x in stage.results)


@dataclasses.dataclass(frozen=True, eq=False)
class Left:
    """Equations that look like a region, but that no tuned call may replace.

    Attributes:
      shown: the equation to report, by its source line.
    """

    reason: str
    shown: Node


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


# ------------------------------------------------------------------------------
# Equations of a graph as a program: in order, as text, and evaluated.


class Unknown(Exception):
    """Equations are not those that a tuned call computes; says why."""


# Equations that no region contains: their bodies are not read.
_OPAQUE = ("scan", "while", "cond", "pallas_call")


def equations_between(
    results: Iterable[Value], known: Iterable[Value], products: Iterable[Node] | None = None
) -> list[Node]:
    """Returns the equations that compute `results` from known arrays, in order.

    Args:
      products: the products that may be among the equations, besides those that compute the results; None allows any.

    Raises:
      Unknown: the equations read another array, or are not those of a region.
    """
    order: list[Node] = []
    ends, seen = {id(x) for x in known}, set[int]()
    allowed = None if products is None else {id(node) for node in products}

    def visit(value: Value, last: bool) -> None:
        node = value.node
        if id(value) in ends or value.literal is not None:
            return
        if node is None:
            raise Unknown(f"it reads {value.dtype}{list(value.shape)} besides its operands")
        if id(node) in seen:
            return
        if node.name == "dot_general" and not last and allowed is not None and id(node) not in allowed:
            raise Unknown("another product is computed from its operands")
        if node.name.startswith(("random", "threefry")):
            raise Unknown("it contains random numbers, as of a dropout")
        if node.name in _OPAQUE or node.equation.effects:
            raise Unknown(f"it contains {node.name}")
        seen.add(id(node))
        for x in node.inputs:
            visit(x, last=False)
        order.append(node)

    for result in results:
        visit(result, last=True)
    return order


def program_text(nodes: Sequence[Node], known: Sequence[Value], results: Sequence[Value]) -> str:
    """Returns equations as text that is equal for equal programs."""
    names = {id(x): f"a{i}:{x.dtype}{x.shape}" for i, x in enumerate(known)}

    def name(x: Value) -> str:
        if id(x) in names or x.literal is None:
            return names[id(x)]
        return f"{np.asarray(x.literal).tobytes()!r}{x.dtype}{x.shape}"

    texts = []
    for number_of, node in enumerate(nodes):
        texts.append(f"{node.name}({','.join(map(name, node.inputs))}){node.params}")
        names |= {id(x): f"{number_of}.{i}" for i, x in enumerate(node.results) if id(x) not in names}
    return f"{';'.join(texts)}->{','.join(map(name, results))}"


def evaluate(
    nodes: Sequence[Node],
    known: Mapping[int, Any],
    results: Sequence[Value],
    compute: Callable[[Node, Sequence[Any]], Sequence[Any]] = lambda node, args: lowering_compat.evaluate_equation(
        node.equation, *args
    ),
) -> list[Any]:
    """Computes arrays by equations in order.

    Args:
      known: arrays that are given, by the ``id`` of their values.
      compute: ``compute(node, args)`` returns the results of an equation.
    """
    values = dict(known)

    def read(x: Value) -> Any:
        return values.get(id(x), x.literal)

    for node in nodes:
        found = compute(node, [*map(read, node.inputs)])
        values.update((id(x), each) for x, each in zip(node.results, found, strict=True) if id(x) not in known)
    return [read(x) for x in results]
