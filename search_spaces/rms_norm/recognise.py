"""Recognition of a root-mean-square norm with a weight in a jaxpr."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

from search_spaces.recognise.graph import Node, Value
from search_spaces.recognise.pattern import (
    Recognised,
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
from search_spaces.rms_norm.problem import RmsNormProblem
from search_spaces.rowwise.weighted import WeightedRowProblem


class Norm(NamedTuple):
    """A norm: its rows, in the dtype of the result; its weight; and the result that is used."""

    x: Value
    weight: Value
    weight_dtypes: tuple[str, str]
    result: Value


def recognise(node: Node) -> Recognised | None:
    """Recognises ``x * rsqrt(mean(x^2) + eps) * weight``, with factors in any order, or a square root and a quotient.

    A norm of centred rows is a layer norm, and is not recognised.
    """
    found = norm(node)
    return found and recognised(RmsNormProblem, found, [found.x, found.weight], node)


def recognised(
    of: type[WeightedRowProblem], found: Norm, inputs: list[Value], node: Node, call: str = ""
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
