"""Recognises a gated matmul in a jaxpr: SiLU of one product times another one of the same rows."""

from __future__ import annotations

from typing import NamedTuple

from search_spaces.gated_matmul.problem import GatedMatmulProblem
from search_spaces.recognise.graph import Node, Value
from search_spaces.recognise.pattern import Recognised, as_of, between, rounded, rows_of, same, strip
from search_spaces.silu_and_mul.recognise import gate_and_up, half


def recognise(node: Node) -> Recognised | None:
    """Recognises ``silu(x @ w1) * (x @ w2)``, or the same of the halves of one product, without biases."""
    if node.name != "mul" or (found := gate_and_up(node.results[0])) is None:
        return None
    gate, up = map(half, found)
    if gate is None or up is None:
        made = list(found)
    elif same(gate[0], up[0]) and (gate[1], up[1]) == (0, 1):
        made = [gate[0]]
    else:
        return None
    products = [product for each in made if (product := _product(each)) is not None]
    if len(products) != len(made) or not all(same(each.x, products[0].x) for each in products):
        return None
    result, transposed = rounded(node.results[0]), {each.transposed for each in products}
    operands = [products[0].x, *(each.weights for each in products)]
    if len(transposed) > 1 or any(as_of(each, result.dtype) is None for each in operands):
        return None
    m, k = rows_of(products[0].x)
    try:
        problem = GatedMatmulProblem(
            m=m,
            n=result.shape[-1],
            k=k,
            dtype=str(result.dtype),
            transpose_w=transposed.pop(),
            pair=len(products) == 2,
        )
    except ValueError:
        return None
    shown = (*(each.node for each in products), node)
    return Recognised(problem, between(result, map(strip, operands)), shown)


class _Product(NamedTuple):
    """A product of rows and weights, ``[k, n]`` or transposed."""

    x: Value
    weights: Value
    transposed: bool
    node: Node


def _product(value: Value) -> _Product | None:
    if (node := strip(value).by("dot_general")) is None:
        return None
    x, weights = node.inputs
    (of_x, of_weights), batch = node.params["dimension_numbers"]
    if any(batch) or tuple(of_x) != (len(x.shape) - 1,) or len(weights.shape) != 2:
        return None
    transposed = tuple(of_weights) == (1,)
    while (before := strip(weights).by("transpose")) is not None:
        weights, transposed = before.inputs[0], not transposed
    return _Product(x, weights, transposed, node)
