"""Recognition of a gate in a jaxpr: SiLU of the first half of each row times the other half."""

from __future__ import annotations

import itertools

from search_spaces.recognise.graph import Node, Value
from search_spaces.recognise.pattern import Recognised, as_of, between, factors, number, rounded, rows_of, same, strip
from search_spaces.silu_and_mul.problem import SiluAndMulProblem


def recognise(node: Node) -> Recognised | None:
    """Recognises ``silu(x[..., :d]) * x[..., d:]``, with halves by slices or by `jnp.split`."""
    if node.name != "mul" or (found := gate_and_up(node.results[0])) is None:
        return None
    gate, up = map(half, found)
    if gate is None or up is None or not same(gate[0], up[0]) or (gate[1], up[1]) != (0, 1):
        return None
    result = rounded(node.results[0])
    if (x := as_of(gate[0], result.dtype)) is None:
        result, x = node.results[0], as_of(gate[0], node.results[0].dtype)
    if x is None:
        return None
    rows, columns = rows_of(result)
    try:
        problem = SiluAndMulProblem(rows=rows, columns=columns, dtype=str(result.dtype))
    except ValueError:
        return None
    return Recognised(problem, between(result, [strip(x)]), (node,))


def gate_and_up(value: Value) -> tuple[Value, Value] | None:
    """Returns the arrays of which ``silu(gate) * up`` is the value; None if it is no such product."""
    found = list(factors(value))
    for gate, sigmoid, up in itertools.permutations(found) if len(found) == 3 else ():
        if (of := _sigmoid(sigmoid)) is not None and same(of, gate) and gate.shape == up.shape:
            return gate, up
    if len(found) == 2:  # g / (1 + exp(-g)) * up
        for silu, up in (found, found[::-1]):
            node = strip(silu).by("div")
            if node is not None and (of := _one_plus_exp(node.inputs[1])) is not None and same(of, node.inputs[0]):
                return node.inputs[0], up
    return None


def _sigmoid(value: Value) -> Value | None:
    if (node := strip(value).by("logistic")) is not None:
        return node.inputs[0]
    if (node := strip(value).by("div")) is not None and number(node.inputs[0]) == 1.0:
        return _one_plus_exp(node.inputs[1])
    return None


def _one_plus_exp(value: Value) -> Value | None:
    """Returns g of ``1 + exp(-g)``."""
    if (node := strip(value).by("add")) is None or 1.0 not in map(number, node.inputs):
        return None
    exp = next((each for each in map(strip, node.inputs) if each.by("exp")), None)
    negated = None if exp is None or exp.node is None else strip(exp.node.inputs[0]).by("neg")
    return None if negated is None else negated.inputs[0]


def half(value: Value) -> tuple[Value, int] | None:
    """Returns the array of whose rows this is a half, and which half."""
    found = strip(value)
    if (node := found.by("split")) is not None:
        sizes = node.params["sizes"]
        halves = node.params["axis"] == len(found.shape) - 1 and len(sizes) == 2 and len(set(sizes)) == 1
        return (strip(node.inputs[0]), node.results.index(found)) if halves else None
    if (node := found.by("slice")) is None or set(node.params["strides"] or (1,)) != {1}:
        return None
    whole, first = node.inputs[0], node.params["start_indices"][-1]
    halves = found.shape == (*whole.shape[:-1], whole.shape[-1] / 2) and first in (0, found.shape[-1])
    return (strip(whole), int(first > 0)) if halves else None
