"""Derives the row program of a function of one row from its jaxpr."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from search_spaces.recognise import Node, Value
from search_spaces.rows import keys as _keys  # noqa: F401 (adds its rules)
from search_spaces.rows.builder import Builder, NoProgram
from search_spaces.rows.elementwise import SAME_NAMES
from search_spaces.rows.program import Atom, Number, Operand, Program, Result
from search_spaces.rows.shapes import columns_of, segments_of
from search_spaces.rows.translation import (
    COPIES,
    Array,
    Trace,
    no_shape,
    nodes_of,
    objects,
    per_element,
    require_narrow,
    rule,
)


def trace(
    function: Callable[..., Any],
    shapes: Sequence[jax.ShapeDtypeStruct],
    kinds: Sequence[str],
    summed: Callable[[int], bool] = lambda result: False,
) -> tuple[Program, int]:
    """Returns the program of a function of one row, and the segments of a row that it takes as rows of their own.

    Args:
      function: takes an array per operand, without the axis of rows; returns an array or a tuple of arrays.
      shapes: of these arrays.
      kinds: as in `Operand`, for each array.
      summed: whether the result of this index is a sum over rows.

    Raises:
      NoProgram: kernels on rows do not compute this.
      Exception: whatever the function raises.
    """
    for shape in shapes:
        require_narrow(shape.dtype)
    traced, nodes = nodes_of(jax.make_jaxpr(lambda *args: jax.tree.leaves(function(*args)))(*shapes))

    def program(segments: tuple[int, int] | None, columns: int) -> Program:
        t = Trace(Builder(columns, _operands(shapes, kinds, segments, columns)), segments)
        for number, (value, kind) in enumerate(zip(traced.inputs, kinds, strict=True)):
            parts = [t.make.read(number, part) for part in range(t.make.operands[number].parts)]
            mapped = segments is not None and kind == "row"
            if segments is not None and kind == "scalar":
                raise NoProgram("has segments, and one element per row")
            vector = t.make.operands[number].kind in ("row", "shared")
            shape = (1,) if mapped else value.shape if not vector else (len(parts),)
            t.arrays[value] = Array(objects(parts, shape), vector, mapped)
        for node in nodes:
            t.read(node)
        return t.make.program([_result(t, value, summed(number)) for number, value in enumerate(traced.results)])

    segments = segments_of(nodes, shapes, kinds)
    if segments is not None:
        try:
            return program(segments, segments[1]), segments[0]
        except NoProgram:
            pass
    return program(None, columns_of(nodes, shapes, kinds)), 1


def _operands(
    shapes: Sequence[jax.ShapeDtypeStruct], kinds: Sequence[str], segments: tuple[int, int] | None, columns: int
) -> list[Operand]:
    found = []
    for kind, s in zip(kinds, shapes, strict=True):
        # An element per segment is an element per row.
        own: Any = "scalar" if segments and kind == "row" and s.shape == segments[:1] else kind
        parts = 1
        if own == kind and kind not in ("row", "shared"):
            if math.prod(s.shape) > 1:
                raise NoProgram(f"takes {s.shape} per row, which is neither a row nor one element")
        elif own == kind:
            if len(s.shape) != 1:
                raise NoProgram(f"takes an array of shape {s.shape} per row: a row has one axis")
            if segments is None:
                parts = s.shape[-1] // columns
            elif kind == "row" and s.shape[-1] != math.prod(segments):
                raise NoProgram("has rows of different lengths, of which one is segments")
            elif kind == "shared" and s.shape[-1] != columns:
                raise NoProgram("has segments, and an array for all rows that is no segment")
        found.append(Operand(own, str(s.dtype), parts))
    return found


def _result(t: Trace, value: Value, summed: bool) -> Result:
    found = t.array(value)
    atoms = tuple(found.blocks.reshape(-1).tolist())
    dtype = str(value.dtype)
    require_narrow(value.dtype)
    # In rows of one column, an array of one element is a row: `Derivative` gives it a cotangent of its shape.
    if not found.vector and not (t.columns == 1 and value.shape):
        if len(atoms) != 1:
            raise NoProgram(f"returns {len(atoms)} elements per row, which is neither a row nor one element")
        return Result("scalar", dtype, atoms)
    zero = all(isinstance(x, Number) and x.value == 0 for x in atoms)  # the gradient of an array that is not read
    if t.segments is not None and (found.summed if not summed else not (found.mapped or found.summed or zero)):
        raise NoProgram("returns a sum over segments")
    if t.segments is not None and not found.mapped and not summed:
        raise NoProgram("returns a segment that is the same for all segments")
    return Result("row sum", "float32", atoms) if summed else Result("row", dtype, atoms)


# ------------------------------------------------------------------------------
# Elementwise primitives.


@rule(*COPIES)
def _copies(_t: Trace, _node: Node, *arrays: Array) -> list[Array]:
    return list(arrays)


@rule(*SAME_NAMES, "div", "rem")
def _same_name(t: Trace, node: Node, *arrays: Array) -> Array:
    floating, name = jnp.issubdtype(node.inputs[0].dtype, jnp.floating), SAME_NAMES.get(node.name, node.name)
    if name == "div":
        return _elementwise(t, "div" if floating else "int_div", *arrays)
    if name == "rem" and floating:
        raise NoProgram("uses the remainder of floating-point numbers")
    if name == "sign" and not floating:
        raise NoProgram("uses the sign of integers")
    if name in ("lt", "le", "gt", "ge") and node.inputs[0].dtype == jnp.uint32:
        least = Number(float(-(2**31)), "int32")
        arrays = tuple(t.map(lambda atom: t.emit("xor", atom, least), x) for x in arrays)
    if name in ("shift_right_logical", "shift_right_arithmetic"):
        # Narrow integers are extended by zeros, or by their sign, to the 32 bits that are shifted.
        signed = "int" if name == "shift_right_arithmetic" else "uint"
        extended = f"{signed}{jnp.iinfo(node.inputs[0].dtype).bits}"
        x, *others = arrays
        arrays = (t.map(lambda atom: t.make.convert(atom, node.inputs[0].dtype, extended), x), *others)
    return _elementwise(t, name, *arrays)


def _elementwise(t: Trace, name: str, *arrays: Array) -> Array:
    if not any(x.summed for x in arrays):
        return t.map(functools.partial(t.emit, name), *arrays)
    # A sum of sums over segments is the sum of the sums of each segment, in an undefined order.
    if name not in ("add", "sub", "neg") or not all(x.summed for x in arrays):
        raise NoProgram("computes with a sum over segments")
    atoms = [x.blocks.reshape(-1)[0] for x in arrays]
    return Array(objects([t.emit(name, *atoms)], (1,)), vector=True, summed=True)


@rule("round")
def _round(t: Trace, node: Node, x: Array) -> Array:
    nearest = node.params["rounding_method"] == lax.RoundingMethod.TO_NEAREST_EVEN
    return _elementwise(t, "nearest" if nearest else "away", x)


per_element("square")(lambda t, _, x: t.emit("mul", x, x))
per_element("one_minus_square")(lambda t, _, x: t.emit("sub", Number(1.0), t.emit("mul", x, x)))
per_element("exp_neg_sq")(lambda t, _, x: t.emit("exp", t.emit("neg", t.emit("mul", x, x))))
per_element("is_finite")(lambda t, _, x: t.emit("lt", t.emit("abs", x), Number(float("inf"))))
per_element("clamp")(lambda t, _, least, x, most: t.emit("min", t.emit("max", x, least), most))


@per_element("polynomial")
def _polynomial(t: Trace, _: Node, x: Atom, *coefficients: Atom) -> Atom:
    return functools.reduce(lambda rest, c: t.emit("add", c, t.emit("mul", x, rest)), reversed(coefficients))


@per_element("integer_pow")
def _integer_pow(t: Trace, node: Node, x: Atom) -> Atom:
    y = node.params["y"]
    if abs(y) > 8:
        raise NoProgram(f"uses the power {y}")
    one: Atom = Number(1.0, t.make.dtype(x))
    power = functools.reduce(lambda result, _: t.emit("mul", x, result), range(abs(y)), one)
    return power if y >= 0 else t.emit("div", Number(1.0), power)


@per_element("not")
def _not(t: Trace, node: Node, x: Atom) -> Atom:
    if node.inputs[0].dtype != jnp.bool_:
        raise NoProgram("inverts the bits of integers")
    return t.emit("xor", x, Number(1.0, "bool"))


@per_element("select_n")
def _select_n(t: Trace, _: Node, pred: Atom, *cases: Atom) -> Atom:
    if len(cases) != 2:
        raise NoProgram(f"selects among {len(cases)} arrays")
    return t.emit("where", pred, *cases[::-1])


@rule("convert_element_type")
def _convert_element_type(t: Trace, node: Node, x: Array) -> Array:
    before, after = node.inputs[0].dtype, node.params["new_dtype"]
    if x.summed and jnp.issubdtype(before, jnp.floating) and jnp.issubdtype(after, jnp.floating):
        return x  # a sum over rows is float32
    return t.map(lambda atom: t.make.convert(atom, before, after), x)


@per_element("reduce_precision")
def _reduce_precision(t: Trace, node: Node, x: Atom) -> Atom:
    bits = node.params["exponent_bits"], node.params["mantissa_bits"]
    known = {(8, 7): "bfloat16", (5, 10): "float16", (8, 23): "float32"}
    if bits not in known:
        raise NoProgram(f"rounds to {bits[0]} bits of exponent and {bits[1]} of mantissa")
    rounded = t.make.convert(x, "float32", known[bits])
    return t.emit("flushed", rounded) if bits == (5, 10) else rounded


# ------------------------------------------------------------------------------
# Reductions, and elements by their column.


@rule("reduce_sum", "reduce_max", "reduce_min")
def _reduced(t: Trace, node: Node, x: Array, logical: str = "") -> Array:
    name, axes, ndim = logical or node.name, node.params["axes"], len(node.inputs[0].shape)
    joined = {"reduce_sum": "add", "reduce_max": "max", "reduce_min": "min"}[name]
    if t.make.dtype(x.blocks.reshape(-1)[0]) != "float32":
        raise NoProgram(f"reduces {node.inputs[0].dtype}: convert to float32 first")
    if t.segments is not None:
        if all(node.inputs[0].shape[axis] == 1 for axis in axes):
            return x
        if name == "reduce_sum" and x.mapped and x.vector and axes == (0,) and ndim == 2:
            return Array(x.blocks, vector=True, summed=True)
        if not (x.mapped and x.vector and axes == (1,) and ndim == 2):
            no_shape(node)
        return Array(objects([t.make.reduce(name, x.blocks.reshape(-1)[0])], (1,)), vector=False, mapped=True)
    join, blocks = np.frompyfunc(functools.partial(t.emit, joined), 2, 1), x.blocks
    for axis in sorted(axes, reverse=True):
        blocks = functools.reduce(join, [np.asarray(part, object) for part in np.moveaxis(blocks, axis, 0)])
    blocks = np.asarray(blocks, object)
    whole = x.vector and ndim - 1 in axes
    if whole:
        blocks = np.asarray(np.frompyfunc(functools.partial(t.make.reduce, name), 1, 1)(blocks), object)
    return Array(blocks, x.vector and not whole)


@rule("reduce_or", "reduce_and")
def _any_or_all(t: Trace, node: Node, x: Array) -> Array:
    """Reduces booleans as the numbers 0 and 1."""
    numbers = t.map(functools.partial(t.emit, "bool_to_float", dtype="float32"), x)
    reduced = _reduced(t, node, numbers, "reduce_max" if node.name == "reduce_or" else "reduce_min")
    return t.map(functools.partial(t.emit, "is_nonzero"), reduced)


@rule("argmax", "argmin")
def _first(t: Trace, node: Node, x: Array) -> Array:
    """Returns the first column of the extreme element; NaN is the extreme of a row that has one."""
    if not jnp.issubdtype(node.inputs[0].dtype, jnp.floating):
        raise NoProgram(f"takes the {node.name} of {node.inputs[0].dtype}: convert to float32 first")
    if x.blocks.size != 1 or not x.vector or x.summed or t.columns > 2**24:
        no_shape(node)
    if t.segments is not None and not (x.mapped and node.params["axes"] == (1,)):
        no_shape(node)
    atom = x.blocks.reshape(-1)[0]
    extreme = t.make.reduce(f"reduce_{node.name[3:]}", atom)
    is_it = t.emit("or", t.emit("eq", atom, extreme), t.emit("ne", atom, atom))
    column = t.emit("to_float", t.emit("index", dtype="int32"), dtype="float32")
    first = t.make.reduce("reduce_min", t.emit("where", is_it, column, Number(float(t.columns))))
    found = t.make.convert(first, "float32", node.results[0].dtype)
    return Array(objects([found], () if t.segments is None else (1,)), vector=False, mapped=x.mapped)


def _replaced(t: Trace, x: Array, of: Callable[[Atom, Atom], Atom]) -> list[Atom]:
    """Returns ``of(column, part)`` for each part of a row."""
    return [of(t.column(number), part) for number, part in enumerate(x.blocks.reshape(-1).tolist())]


def _element(t: Trace, node: Node, x: Array, index: Atom) -> Array:
    """Returns the element of a row at an index, which a scalar per row gives."""
    if not x.vector or x.blocks.ndim != 1 or t.segments is not None or t.make.dtype(x.blocks[0]) != "float32":
        no_shape(node)
    parts = _replaced(t, x, lambda column, part: t.emit("where", t.emit("eq", column, index), part, Number(0.0)))
    total = functools.reduce(lambda a, b: t.emit("add", a, b), parts)
    return Array(objects([t.make.reduce("reduce_sum", total)], node.results[0].shape), vector=False)


def _clamped_index(t: Trace, index: Array, length: int) -> Atom:
    low = t.emit("max", index.blocks.reshape(-1)[0], Number(0.0, "int32"))
    return t.emit("min", low, Number(float(length - 1), "int32"))


@rule("dynamic_slice")
def _dynamic_slice(t: Trace, node: Node, x: Array, index: Array, *_: Array) -> Array:
    if node.params["slice_sizes"] != (1,):
        no_shape(node)
    return _element(t, node, x, _clamped_index(t, index, node.inputs[0].shape[0]))


@rule("gather")
def _gather(t: Trace, node: Node, x: Array, indices: Array) -> Array:
    shape = node.inputs[0].shape
    if len(shape) != 1 or node.params["slice_sizes"] != (1,) or indices.blocks.size != 1 or indices.vector:
        no_shape(node)
    if "fill" not in str(node.params["mode"]).lower():
        return _element(t, node, x, _clamped_index(t, indices, shape[0]))
    index, fill = indices.blocks.reshape(-1)[0], node.params["fill_value"]
    least, end = Number(0.0, "int32"), Number(float(shape[0]), "int32")
    inside = t.emit("and", t.emit("ge", index, least), t.emit("lt", index, end))
    otherwise = Number(float(np.nan if fill is None else fill))
    return t.map(lambda value: t.emit("where", inside, value, otherwise), _element(t, node, x, index))


@rule("scatter_add", "dynamic_update_slice")
def _updated(t: Trace, node: Node, x: Array, second: Array, third: Array, *_: Array) -> Array:
    """Adds to, or replaces, the element of a row at an index."""
    adds = node.name == "scatter_add"
    indices, updates = (second, third) if adds else (third, second)
    if len(node.inputs[0].shape) != 1 or updates.blocks.size != 1 or updates.vector or not x.vector:
        no_shape(node)
    if adds and (indices.blocks.size != 1 or t.segments is not None):
        no_shape(node)
    index = indices.blocks.reshape(-1)[0] if adds else _clamped_index(t, indices, node.inputs[0].shape[0])
    update = updates.blocks.reshape(-1)[0]

    def updated(column: Atom, part: Atom) -> Atom:
        here = t.emit("eq", column, index)
        return t.emit("where", here, t.emit("add", part, update) if adds else update, part)

    return Array(objects(_replaced(t, x, updated), x.blocks.shape), vector=True)
