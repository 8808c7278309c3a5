"""Recognises the logits of attention and their softmax in a jaxpr, between two products."""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import jax.numpy as jnp

from search_spaces.flash_attention.axes import LAYOUT, Axis, Labels, joined, users
from search_spaces.recognise import Node, Value, number, reduced, same, strip


@dataclasses.dataclass(frozen=True, eq=False)
class Logits:
    """The argument of an exponential.

    Attributes:
      product: ``q k^T``.
      steps: the equations after the product, the last one first.
    """

    product: Node
    steps: tuple[Node, ...] = ()


def logits_of(value: Value) -> Logits | None:
    """Returns the product that an array is computed from by steps that attention takes; None if there is none."""
    steps: list[Node] = []
    while True:
        node = strip(value).node
        if node is None:
            return None
        if node.name == "dot_general":
            return Logits(node, tuple(steps))
        if node.name in ("transpose", "reshape", "squeeze", "expand_dims", "broadcast_in_dim", "tanh"):
            value = node.inputs[0]
        elif node.name in ("sub", "mul", "div", "add", "select_n"):
            before = [x for x in node.inputs if x.shape == node.results[0].shape and _reaches_product(x)]
            if len(before) != 1:
                return None
            value = before[0]
        else:
            return None
        steps.append(node)


def _reaches_product(value: Value) -> bool:
    """Returns whether an array of logits is computed from a product, and not from statistics of its rows."""
    while (node := strip(value).node) is not None:
        if node.name == "dot_general":
            return True
        if node.name not in ("transpose", "reshape", "sub", "mul", "div", "add", "select_n", "tanh", "squeeze"):
            return (
                node.name in ("broadcast_in_dim", "expand_dims")
                and _is_same_size(node)
                and (_reaches_product(node.inputs[0]))
            )
        same_shape = [x for x in node.inputs if math.prod(x.shape) == math.prod(node.results[0].shape)]
        reaching = [x for x in same_shape if x.literal is None]
        if len(reaching) != 1:
            return any(_reaches_product(x) for x in reaching)
        value = reaching[0]
    return False


def _is_same_size(node: Node) -> bool:
    return math.prod(node.inputs[0].shape) == math.prod(node.results[0].shape)


@dataclasses.dataclass(frozen=True, eq=False)
class Softmax:
    """Probabilities, and the axis of keys along which they sum to one.

    Attributes:
      total: the sum of the exponentials, if the product with values is divided by the sum. The probabilities are then
        the exponentials. None if the exponentials are divided.
    """

    exp: Node
    probabilities: Value
    key: Axis
    total: Value | None = None


def softmax_of(exp: Node, labels: Labels) -> Softmax | None:
    """Returns the softmax with this exponential; None if there is none."""
    exponential = exp.results[0]
    if (axes := labels.of(exponential)) is None:
        return None
    sums = []
    for value in _casts_below(exponential):
        for node in users(value):
            if node.name == "reduce_sum" and len(node.params["axes"]) == 1:
                sums.append(node)
            if (total := _total(node, value)) is None or (found := reduced(total, "reduce_sum")) is None:
                continue
            summed, axis = found
            if same(summed, exponential) and len(axes[axis]) == 1 and _less_of_rows(exp, labels, axes[axis][0]):
                return Softmax(exp, node.results[0], axes[axis][0])
    for node in sums:
        keys = axes[node.params["axes"][0]]
        if len(keys) == 1 and _less_of_rows(exp, labels, keys[0]):
            return Softmax(exp, exponential, keys[0], node.results[0])
    return None


def _casts_below(value: Value) -> list[Value]:
    found = [value]
    for each in found:  # grows meanwhile
        found += [user.results[0] for user in users(each) if user.name in ("convert_element_type", "stop_gradient")]
    return found


def _total(node: Node, value: Value) -> Value | None:
    """Returns the array that `node` divides `value` by; None if it does not."""
    if node.name == "div" and node.inputs[0] is value:
        return node.inputs[1]
    if node.name == "mul":
        other = next((x for x in node.inputs if x is not value), None)
        inverse = None if other is None else origin(other).by("div", "integer_pow")
        if inverse is not None and inverse.name == "div" and number(inverse.inputs[0]) == 1.0:
            return inverse.inputs[1]
        if inverse is not None and inverse.name == "integer_pow" and inverse.params["y"] == -1:
            return inverse.inputs[0]
    return None


def _less_of_rows(exp: Node, labels: Labels, key: Axis) -> bool:
    """Returns whether the exponent is the logits, less at most a number per row."""
    less = strip(exp.inputs[0]).by("sub")
    if less is None:
        return True
    axes = labels.of(less.inputs[1])
    return number(less.inputs[1]) is not None if axes is None else key not in joined(axes)


def origin(value: Value) -> Value:
    """Returns the array before casts and changes of its layout."""
    while (node := strip(value).node) is not None and node.name in (*LAYOUT, "broadcast_in_dim"):
        value = node.inputs[0]
    return strip(value)


def root(value: Value, dtype: Any) -> Value:
    """Returns the array before changes of its layout, and before casts to wider dtypes than `dtype`."""
    while (node := value.node) is not None:
        if node.name == "convert_element_type":
            before = node.inputs[0]
            if not is_widened(before.dtype, value.dtype) or not is_widened(dtype, before.dtype):
                return value
        elif node.name not in LAYOUT:
            return value
        value = node.inputs[0]
    return value


def is_widened(before: Any, after: Any) -> bool:
    """Returns whether a cast keeps all values."""
    before, after = jnp.dtype(before), jnp.dtype(after)
    return before == after or bool(
        jnp.issubdtype(before, jnp.floating)
        and jnp.issubdtype(after, jnp.floating)
        and jnp.promote_types(before, after) == after
    )
