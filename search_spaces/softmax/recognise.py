"""Recognition of a softmax along the last axis in a jaxpr: exponentials over their sum."""

from __future__ import annotations

from search_spaces.recognise.graph import Node, Value
from search_spaces.recognise.pattern import (
    Recognised,
    as_of,
    between,
    constant_along,
    reduced,
    rounded,
    rows_of,
    same,
    strip,
)
from search_spaces.softmax.problem import SoftmaxProblem


def recognise(node: Node) -> Recognised | None:
    """Recognises `jax.nn.softmax`, and the formula with or without the maximum subtracted."""
    if node.name != "div" or (x := argument(node.results[0])) is None:
        return None
    result = rounded(node.results[0])
    read = as_of(x, result.dtype)
    if read is None:  # x never had the dtype that the result is rounded to
        result, read = node.results[0], as_of(x, node.results[0].dtype)
    if read is None or read.shape != result.shape:
        return None
    rows, columns = rows_of(result)
    try:
        problem = SoftmaxProblem(rows=rows, columns=columns, dtype=str(result.dtype))
    except ValueError:
        return None
    return Recognised(problem, between(result, [strip(read)]), (node,))


def argument(value: Value) -> Value | None:
    """Returns the array of which `value` is the softmax along the last axis; None if it is no softmax."""
    if (node := strip(value).by("div")) is None:
        return None
    exponentials, total = node.inputs
    if (found := reduced(total, "reduce_sum")) is None:
        return None
    summed, axis = found
    if not same(summed, exponentials) or axis != len(summed.shape) - 1 or (exp := summed.by("exp")) is None:
        return None
    exponent = exp.inputs[0]
    if (less := strip(exponent).by("sub")) is not None and constant_along(less.inputs[1], axis):
        return less.inputs[0]
    return exponent
