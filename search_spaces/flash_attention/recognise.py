"""Recognises attention in a jaxpr: a softmax between two products, identified by the axes that the products share."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from typing import Any

from search_spaces.flash_attention.problem import FlashAttentionProblem
from search_spaces.recognise import Node, Recognised, Value, as_of, between, number, rounded, source, strip
from search_spaces.softmax import argument

# ------------------------------------------------------------------------------
# Recognises a causal mask in a jaxpr: a comparison of query positions with key positions.

# For ``x op y``: whether x is the larger one, and the least difference.
_COMPARISONS = {"ge": (True, 0), "gt": (True, 1), "le": (False, 0), "lt": (False, 1)}


def is_causal(which: Value, keeps: bool, axes: Sequence[str | None]) -> bool:
    """Returns whether `which` equals `keeps` exactly where the key's position is at most the query's.

    Args:
      axes: the meaning of each axis of `which`: "query", "key" or something else.
    """
    base, where = source(which)
    along = [None if at is None else axes[at] for at in where]
    if (node := base.by("not")) is not None:
        return is_causal(node.inputs[0], not keeps, along)
    if (node := base.by("and")) is not None and keeps:
        rest = [each for each in node.inputs if number(each) != 1.0]
        return len(rest) == 1 and is_causal(rest[0], keeps, along)
    if (node := base.by("select_n")) is not None and len(node.inputs) == 3:  # as in `jnp.tril`
        no, yes = map(number, node.inputs[1:])
        return {no, yes} == {0.0, 1.0} and is_causal(node.inputs[0], keeps == (yes == 1.0), along)
    if base.node is None or base.node.name not in _COMPARISONS:
        return False
    larger, least = _COMPARISONS[base.node.name]
    found = [_position(each, along) for each in base.node.inputs]
    if None in found:
        return False
    x, y = (each for each in found if each is not None)
    high, low = (x, y) if larger else (y, x)
    if not keeps:  # if high - low >= least is false, then low - high >= 1 - least
        high, low, least = low, high, 1 - least
    return (high[0], low[0]) == ("query", "key") and least - high[1] + low[1] == 0


def _position(value: Value, axes: Sequence[str | None]) -> tuple[str | None, int] | None:
    """Returns the axis along which the value counts, and its first number."""
    offset = 0.0
    base, where = source(value)
    while (node := base.by("add", "sub")) is not None:
        first, second = map(number, node.inputs)
        if second is not None:
            offset, before = offset + (second if node.name == "add" else -second), node.inputs[0]
        elif first is not None and node.name == "add":
            offset, before = offset + first, node.inputs[1]
        else:
            return None
        base, inner = source(before)
        where = tuple(None if at is None else where[at] for at in inner)
    if (node := base.by("iota")) is None:
        return None
    at = where[node.params["dimension"]]
    return (None if at is None else axes[at]), int(offset)


# A constant of at most this value masks a logit.
_MASKED = -1e4
# An axis of a product: ("batch", i), or ("a", i) or ("b", i) for a free axis of the first or second operand.
Label = tuple[str, int]


@dataclasses.dataclass(frozen=True, eq=False)
class _Logits:
    """The operand of a softmax.

    Attributes:
      product: the ``dot_general`` that computes the logits.
      labels: of each axis of the logits.
      masks: applied between the product and the softmax. Each is a predicate, the predicate's value for visible
        logits, and the labels of the predicate's axes.
    """

    product: Node
    labels: tuple[Label, ...]
    masks: tuple[tuple[Value, bool, tuple[Label, ...]], ...] = ()


def recognise(node: Node) -> Recognised | None:
    """Returns the attention that ends in `node`: ``softmax(q k^T * scale) v``, with or without a causal mask.

    Batch and head axes may be in any position. Other masks, biases and dropout are not recognised, because no kernel
    supports them.
    """
    if node.name != "dot_general":
        return None
    for side in (0, 1):
        weights, order = _transposed(node.inputs[side])
        logits = None if (of := argument(weights)) is None else _logits(of)
        if logits is not None:
            labels = tuple(logits.labels[i] for i in order)
            problem = _problem(node, side, labels, logits)
            if problem is not None:
                inputs = [strip(x) for x in (*logits.product.inputs, node.inputs[1 - side])]
                divided = strip(weights).node
                shown = tuple(each for each in (logits.product, divided, node) if each is not None)
                return Recognised(problem, between(node.results[0], inputs), shown)
    return None


def _transposed(value: Value) -> tuple[Value, tuple[int, ...]]:
    """Returns the source of `value` before transposes and casts, and the source axis of each axis of `value`."""
    order = tuple(range(len(value.shape)))
    while (node := strip(value).by("transpose")) is not None:
        order = tuple(node.params["permutation"][i] for i in order)
        value = node.inputs[0]
    return value, order


def _logits(value: Value) -> _Logits | None:
    value = strip(value)
    if (node := value.by("dot_general")) is not None:
        (of_a, of_b), (batch_a, batch_b) = node.params["dimension_numbers"]
        free = [
            [(name, i) for i in range(len(x.shape)) if i not in (*contracted, *batch)]
            for name, x, contracted, batch in zip("ab", node.inputs, (of_a, of_b), (batch_a, batch_b), strict=True)
        ]
        if len(of_a) != 1:
            return None
        return _Logits(node, (*(("batch", i) for i in range(len(batch_a))), *free[0], *free[1]))
    if (node := value.by("transpose")) is not None:
        inner = _logits(node.inputs[0])
        permutation = node.params["permutation"]
        return inner and dataclasses.replace(inner, labels=tuple(inner.labels[i] for i in permutation))
    if (node := value.by("mul", "div")) is not None:
        first, second = node.inputs
        if not source(second)[0].shape:
            return _logits(first)
        return _logits(second) if node.name == "mul" and not source(first)[0].shape else None
    if (node := value.by("select_n")) is not None and len(node.inputs) == 3:
        return _masked(*node.inputs)
    if (node := value.by("add")) is not None:
        for logits, mask in (node.inputs, node.inputs[::-1]):
            base, where = source(mask)
            chosen = base.by("select_n")
            if chosen is None or len(chosen.inputs) != 3 or (inner := _logits(logits)) is None:
                continue
            seen, values = _kept(chosen.inputs[1:]), [number(each) for each in chosen.inputs[1:]]
            if seen is not None and values[seen] == 0.0 and len(where) == len(chosen.inputs[0].shape):
                labels = tuple(("none", 0) if at is None else inner.labels[at] for at in where)
                return dataclasses.replace(inner, masks=(*inner.masks, (chosen.inputs[0], bool(seen), labels)))
    return None


def _masked(which: Value, *cases: Value) -> _Logits | None:
    if (seen := _kept(cases)) is None or (inner := _logits(cases[seen])) is None:
        return None
    return dataclasses.replace(inner, masks=(*inner.masks, (which, bool(seen), inner.labels)))


def _kept(cases: Sequence[Value]) -> int | None:
    """Returns the index of the case that is not a masking constant; None unless exactly one case is."""
    masked = [(value := number(each)) is not None and value <= _MASKED for each in cases]
    return masked.index(False) if masked.count(True) == 1 else None


def _problem(node: Node, side: int, labels: tuple[Label, ...], logits: _Logits) -> FlashAttentionProblem | None:
    """Returns the attention problem of `node`, the product of weights and values.

    Args:
      side: index of the operand of `node` that is the weights.
      labels: of the axes of the weights.
    """
    key = logits.labels[-1]  # the axis of the softmax
    if key[0] not in "ab":
        return None
    q_side, k_side = (1, 0) if key[0] == "a" else (0, 1)
    q, k, v = logits.product.inputs[q_side], logits.product.inputs[k_side], node.inputs[1 - side]
    contract, batch = node.params["dimension_numbers"]
    if [labels[i] for i in contract[side]] != [key]:
        return None
    shared = [label for label in logits.labels if label[0] == "batch"]
    free = [label for label in logits.labels if label[0] == "ab"[q_side]]
    if sorted(labels[i] for i in batch[side]) != sorted(shared) or len(logits.labels) != len(shared) + len(free) + 1:
        return None
    values = [i for i in range(len(v.shape)) if i not in (*contract[1 - side], *batch[1 - side])]
    heads = _heads(logits.product, q_side, free)
    if len(values) != 1 or heads is None:
        return None
    lead, kv_heads, group, q_axis = heads
    if (causal := _causal(logits.masks, ("ab"[q_side], q_axis), key)) is None:
        return None
    result = rounded(node.results[0])
    if any(as_of(x, result.dtype) is None for x in (q, k, v)):
        return None
    try:
        return FlashAttentionProblem(
            batch=lead,
            q_len=q.shape[q_axis],
            kv_len=k.shape[key[1]],
            heads=kv_heads * group,
            kv_heads=kv_heads,
            head_dim=q.shape[logits.product.params["dimension_numbers"][0][q_side][0]],
            head_dim_v=v.shape[values[0]],
            causal=causal,
            dtype=str(result.dtype),
        )
    except ValueError:
        return None


def _heads(product: Node, q_side: int, free: Sequence[Label]) -> tuple[int, int, int, int] | None:
    """Returns the batch size, the number of key heads, the query heads per key head, and the axis of queries in q.

    The last batch axis of q is the axis of key heads. If q has two free axes, the one after the key heads is the group.
    """
    q = product.inputs[q_side]
    axes = sorted(product.params["dimension_numbers"][1][q_side])
    extents = [q.shape[axis] for axis in axes]
    lead, kv_heads = math.prod(extents[:-1]), (extents or [1])[-1]
    positions = [label[1] for label in free]
    if len(positions) == 1:
        return lead, kv_heads, 1, positions[0]
    if len(positions) != 2 or not axes or axes[-1] + 1 not in positions:
        return None
    group = axes[-1] + 1
    (queries,) = (axis for axis in positions if axis != group)
    return lead, kv_heads, q.shape[group], queries


def _causal(masks: Sequence[Any], query: Label, key: Label) -> bool | None:
    """Returns whether there are masks, all of them causal; None if a mask is not causal."""
    for which, keeps, labels in masks:
        if not is_causal(which, keeps, [{query: "query", key: "key"}.get(label) for label in labels]):
            return None
    return bool(masks)
