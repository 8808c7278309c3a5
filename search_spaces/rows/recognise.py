"""Recognition of the named operations on rows in a jaxpr."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from typing import NamedTuple

from search_spaces.problem import Problem
from search_spaces.recognise import (
    Node,
    Recognised,
    Value,
    as_of,
    between,
    factors,
    number,
    reduced,
    rounded,
    rows_of,
    same,
    source,
    strip,
)

# ------------------------------------------------------------------------------
# Softmax along the last axis: exponentials over their sum.


def softmax(of: Callable[..., Problem], node: Node) -> Recognised | None:
    """Recognises `jax.nn.softmax`, and the formula with or without the maximum subtracted."""
    if node.name != "div" or (x := argument(node.results[0])) is None:
        return None
    result, read = _in_one_dtype(node, x)
    if read is None or read.shape != result.shape:
        return None
    return _of_rows(of, node, result, read)


def _in_one_dtype(node: Node, x: Value) -> tuple[Value, Value | None]:
    """Returns the result of an equation, rounded if `x` had that dtype, and `x` in the dtype of the result."""
    result = rounded(node.results[0])
    if (read := as_of(x, result.dtype)) is not None:
        return result, read
    return node.results[0], as_of(x, node.results[0].dtype)


def _of_rows(of: Callable[..., Problem], node: Node, result: Value, x: Value) -> Recognised | None:
    """Returns the equations from `x` to `result` as a problem of this type, which has a dtype and no weight."""
    rows, columns = rows_of(result)
    try:
        problem = of(rows=rows, columns=columns, dtype=str(result.dtype))
    except ValueError:
        return None
    return Recognised(problem, between(result, [strip(x)]), (node,))


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
    if (less := strip(exponent).by("sub")) is not None and axis not in source(less.inputs[1])[1]:
        return less.inputs[0]
    return exponent


# ------------------------------------------------------------------------------
# A root-mean-square norm with a weight.


class Norm(NamedTuple):
    """A norm: its rows, in the dtype of the result; its weight; and the result that is used."""

    x: Value
    weight: Value
    weight_dtypes: tuple[str, str]
    result: Value


def rms_norm(of: Callable[..., Problem], node: Node) -> Recognised | None:
    """Recognises ``x * rsqrt(mean(x^2) + eps) * weight``, with factors in any order, or a square root and a quotient.

    A norm of centred rows is a layer norm, and is not recognised.
    """
    found = norm(node)
    return found and _recognised(of, found, [found.x, found.weight], node)


def _recognised(
    of: Callable[..., Problem], found: Norm, inputs: list[Value], node: Node, call: str = ""
) -> Recognised | None:
    """Returns a norm as a problem of this type, which replaces the equations between these inputs and the result."""
    rows, columns = rows_of(found.result)
    for dtype in found.weight_dtypes:  # as it is stored, or as it is multiplied
        try:
            problem = of(rows=rows, columns=columns, dtype=str(found.result.dtype), weight_dtype=dtype)
        except ValueError:
            continue
        return Recognised(problem, between(found.result, map(strip, inputs)), (node,), call)
    return None


def norm(node: Node) -> Norm | None:
    """Returns the norm whose last equation is `node`."""
    if node.name not in ("mul", "div") or len(node.results[0].shape) < 1:
        return None
    found = list(_factors(node.results[0]))
    scales = [(value, squared) for value, inverse in found if (squared := _mean_square(value, inverse)) is not None]
    if len(found) != 3 or len(scales) != 1:
        return None
    scale, x = scales[0]
    others = [value for value, inverse in found if value is not scale and not inverse]
    if len(others) != 2 or _is_centred(x):
        return None
    weights = [value for value in others if not same(value, x) and _is_of_columns(value, len(x.shape) - 1)]
    rows = [value for value in others if same(value, x)]
    if len(weights) != 1 or len(rows) != 1:
        return None
    weight, _ = source(weights[0])
    for result in (rounded(node.results[0]), node.results[0]):
        of = as_of(rows[0], result.dtype)
        if of is not None and of.shape == result.shape:
            return Norm(of, weight, (str(weight.dtype), str(weights[0].dtype)), result)
    return None


def _factors(value: Value) -> Iterator[tuple[Value, bool]]:
    """Yields the factors (False) and the divisors (True) of a product."""
    for factor in factors(value):
        node = strip(factor).by("div")
        if node is None or number(node.inputs[0]) == 1.0:
            yield factor, False
        else:
            yield from _factors(node.inputs[0])
            yield node.inputs[1], True


def _mean_square(value: Value, inverse: bool) -> Value | None:
    """Returns the array whose rows have `value` as the inverse root of their mean square (the root, if `inverse`)."""
    base, where = source(value)
    if inverse:
        root = base.by("sqrt")
    elif (root := base.by("rsqrt")) is None and (one := base.by("div")) is not None and number(one.inputs[0]) == 1.0:
        root = source(one.inputs[1])[0].by("sqrt")
    if root is None:
        return None
    mean = root.inputs[0]
    if (plus := strip(mean).by("add")) is not None:
        rest = [each for each in plus.inputs if number(each) is None]
        if len(rest) != 1:
            return None
        (mean,) = rest
    base, _ = source(mean)
    if (node := base.by("div", "mul")) is None:
        return None
    numbers = [number(each) for each in node.inputs]
    over = numbers[1] if node.name == "div" else next((1 / n for n in numbers if n), None)
    total = node.inputs[0] if node.name == "div" or numbers[0] is None else node.inputs[1]
    summed, _ = source(total)
    if (node := summed.by("reduce_sum")) is None or over is None:
        return None
    squares = node.inputs[0]
    last = len(squares.shape) - 1
    if node.params["axes"] != (last,) or abs(over / squares.shape[last] - 1) > 1e-6:
        return None
    if last in where or any(at not in (None, i) for i, at in enumerate(where)):
        return None
    return _squared(strip(squares))


def _squared(value: Value) -> Value | None:
    if (node := value.by("square")) is not None:
        return strip(node.inputs[0])
    if (node := value.by("integer_pow")) is not None and node.params["y"] == 2:
        return strip(node.inputs[0])
    if (node := value.by("mul")) is not None and same(node.inputs[0], node.inputs[1]):
        return strip(node.inputs[0])
    return None


def _is_of_columns(value: Value, last: int) -> bool:
    """Returns whether the value is a single row that all rows share."""
    base, where = source(value)
    return len(base.shape) == 1 and where == (last,)


def _is_centred(x: Value) -> bool:
    """Returns whether the mean of each row was subtracted."""
    if (node := strip(x).by("sub")) is None:
        return False
    base, _ = source(node.inputs[1])
    mean = base.by("div", "mul")
    return mean is not None and any(
        reduced(each, "reduce_sum") or source(each)[0].by("reduce_sum") for each in mean.inputs
    )


def add_rms_norm(of: Callable[..., Problem], node: Node) -> Recognised | None:
    """Recognises a norm of ``x + residual`` if the sum is rounded to the dtype of the result."""
    found = norm(node)
    added = None if found is None else strip(found.x).by("add")
    if found is None or added is None or strip(found.x).dtype != found.result.dtype:
        return None
    for each in added.inputs:
        same_dtype = as_of(each, found.result.dtype)
        if (
            same_dtype is None
            or same_dtype.shape != found.result.shape
            or source(same_dtype)[0].shape != same_dtype.shape
        ):  # one row for all is a bias
            return None
    return _recognised(of, found, [*added.inputs, found.weight], node, "tuned_rms_norm(residual=)")


# ------------------------------------------------------------------------------
# A gate: SiLU of the first half of each row times the other half.


def silu_and_mul(of: Callable[..., Problem], node: Node) -> Recognised | None:
    """Recognises ``silu(x[..., :d]) * x[..., d:]``, with halves by slices or by `jnp.split`."""
    if node.name != "mul" or (found := gate_and_up(node.results[0])) is None:
        return None
    gate, up = map(half, found)
    if gate is None or up is None or not same(gate[0], up[0]) or (gate[1], up[1]) != (0, 1):
        return None
    result, x = _in_one_dtype(node, gate[0])
    return None if x is None else _of_rows(of, node, result, x)


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
