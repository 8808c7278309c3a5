"""Finds what a backward pass reads of an activation, and can compute again from an array that it reads in any case.

The gradient of GELU reads its argument and functions of the tanh in it. XLA computes a tanh once only: it stores those
functions in the forward pass, and reads them in the backward pass. The tanh takes less time than that traffic.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import jax.numpy as jnp

from search_spaces.recognise import Graph, Inlined, Node, Value, equations_between

# Elementwise primitives that XLA computes in several fusions rather than once, and those that it does not.
_CHEAP = frozenset(
    [
        "abs",
        "add",
        "add_any",
        "and",
        "clamp",
        "convert_element_type",
        "copy",
        "div",
        "eq",
        "ge",
        "gt",
        "integer_pow",
        "le",
        "lt",
        "max",
        "min",
        "mul",
        "ne",
        "neg",
        "not",
        "one_minus_square",
        "or",
        "select_n",
        "sign",
        "square",
        "stop_gradient",
        "sub",
    ]
)
_EXPENSIVE = frozenset(
    [
        "cos",
        "erf",
        "erfc",
        "exp",
        "exp2",
        "expm1",
        "log",
        "log1p",
        "logistic",
        "pow",
        "rsqrt",
        "sin",
        "sqrt",
        "tan",
        "tanh",
    ]
)
_ELEMENTWISE = _CHEAP | _EXPENSIVE
# Fewer elements stay in the caches of a chip.
FEWEST = 2**20
# An operand with at most this share of the elements, such as a bias, may be read again.
SMALL = 1 / 64
# Limit of the equations in sequence from the root.
MOST_STEPS = 32


@dataclasses.dataclass(frozen=True, eq=False)
class Recomputed:
    """An array that the backward pass computes again.

    Attributes:
      root: the array of as many elements that it is computed from.
      nodes: the equations that compute it from the root and small arrays, in order.
      small: those small arrays.
    """

    value: Value
    root: Value
    nodes: tuple[Node, ...]
    small: tuple[Value, ...]

    @property
    def expensive(self) -> Node | None:
        """The first equation that XLA would compute only once; None if there is none."""
        return next((node for node in self.nodes if _is_expensive(node)), None)


def text_of(node: Node) -> str:
    """Describes an expensive equation for a report."""
    (x,) = node.results
    return f"{node.name} of {jnp.dtype(x.dtype).name}{list(x.shape)}, computed again in the backward pass"


def backward(items: Iterable[Node | Inlined], is_backward: Callable[[Any], bool], inside: bool = False) -> set[int]:
    """Returns the ``id`` of each equation and call of a backward pass."""
    found = set[int]()
    for item in items:
        own = inside or is_backward(item.equation)
        if own:
            found.add(id(item))
        if isinstance(item, Inlined):
            found |= backward(item.items, is_backward, own)
    return found


def recomputed(graph: Graph, of_backward: set[int]) -> Iterator[Recomputed]:
    """Yields the arrays that equations of a backward pass should compute again.

    Args:
      of_backward: the ``id`` of each of these equations.
    """
    origins = _Origins(of_backward)
    for node in graph.nodes:  # in order, so that no recursion is deep
        for x in node.results:
            origins.of(x)
    read = [
        x
        for node in graph.nodes
        if id(node) not in of_backward and node.name in _ELEMENTWISE
        for x in node.results
        if math.prod(x.shape) >= FEWEST and any(id(user) in of_backward for user in node.users)
    ]
    # Arrays that are stored in any case: other results, and operands of products.
    returned = {id(x) for x in graph.results}
    free = [x for x in read if id(x) not in returned and _is_free(x)]
    found = [_from_root(x, root, origins) for x in free if (root := origins.of(x)) is not x]
    # XLA itself computes cheap functions again, from the root, which is then read.
    stored = {id(x) for node in graph.nodes if id(node) in of_backward for x in node.inputs}
    stored |= {id(each.root) for each in found if each.expensive is None}
    roots = {id(each.root) for each in found if each.expensive is not None and _is_stored(each.root)} & stored
    yield from (each for each in found if id(each.root) in roots)


def _is_free(x: Value) -> bool:
    return x.node is not None and all(user.name in _ELEMENTWISE for user in x.node.users)


def _is_stored(root: Value) -> bool:
    """Returns whether XLA stores an array rather than computing it within the equations that read it."""
    return root.node is None or root.node.name not in _ELEMENTWISE


def _from_root(x: Value, root: Value, origins: _Origins) -> Recomputed:
    small = origins.small(x, root)
    return Recomputed(x, root, tuple(equations_between([x], [root, *small])), tuple(small))


def _is_expensive(node: Node) -> bool:
    return node.name in _EXPENSIVE and math.prod(node.results[0].shape) >= FEWEST


class _Origins:
    """The array that each large array is an elementwise function of, besides small arrays."""

    def __init__(self, of_backward: set[int]) -> None:
        self._of_backward = of_backward
        self._known: dict[int, Value] = {}
        self._steps: dict[int, int] = {}

    def of(self, x: Value) -> Value:
        """Returns the root of a large array: the array itself if it is no elementwise function of one array."""
        if id(x) not in self._known:
            self._known[id(x)] = self._found(x)
        return self._known[id(x)]

    def _found(self, x: Value) -> Value:
        node = x.node
        if node is None or node.name not in _ELEMENTWISE or id(node) in self._of_backward:
            return x
        large = [each for each in node.inputs if not _is_small(each, x) and not _is_broadcast(each)]
        roots = {id(root): root for root in map(self.of, large)}
        if len(roots) != 1:
            return x
        (root,) = roots.values()
        steps = 1 + max(self._steps.get(id(each), 0) for each in large)
        if root.shape != x.shape or steps > MOST_STEPS:
            return x
        self._steps[id(x)] = steps
        return root

    def small(self, x: Value, root: Value) -> list[Value]:
        """Returns the small arrays that `x` is computed from besides its root."""
        found: dict[int, Value] = {}
        left, seen = [x], set[int]()
        while left:
            value = left.pop()
            if value is root or value.literal is not None or id(value) in seen:
                continue
            seen.add(id(value))
            if _is_broadcast(value):
                assert value.node is not None
                left.append(value.node.inputs[0])
            elif _is_small(value, x):
                found[id(value)] = value
            else:
                assert value.node is not None
                left += value.node.inputs
        return list(found.values())


def _is_small(x: Value, other: Value) -> bool:
    return math.prod(x.shape) <= SMALL * math.prod(other.shape)


def _is_broadcast(x: Value) -> bool:
    node = x.by("broadcast_in_dim")
    return node is not None and _is_small(node.inputs[0], x)
