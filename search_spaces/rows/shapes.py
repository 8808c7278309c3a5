"""The primitives that only rearrange elements of a row, and how a function divides its rows."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from search_spaces.recognise import Node
from search_spaces.rows.builder import NoProgram
from search_spaces.rows.program import Number
from search_spaces.rows.translation import LEAST_COLUMNS, MOST_PARTS, Array, Trace, no_shape, objects, rule


@rule("reshape", "squeeze", "expand_dims")
def _reshape(t: Trace, node: Node, x: Array) -> Array:
    shape = node.results[0].shape
    if t.segments is not None:
        if x.summed and shape[-1:] != (t.columns,):
            no_shape(node)
        if x.mapped:
            sizes = ((math.prod(t.segments),), t.segments) if x.vector else ((t.segments[0],),)
            allowed = (*sizes, *(() if x.vector else ((t.segments[0], 1),)))
            if shape not in allowed:
                no_shape(node)
        return x
    if not x.vector:
        return Array(x.blocks.reshape(shape), vector=False)
    atom = x.blocks.reshape(-1)[0]
    if not shape and t.columns == 1 and t.make.dtype(atom) == "float32":  # an element per row
        return Array(objects([t.make.reduce("reduce_sum", atom)], ()), vector=False)
    if not shape or shape[-1] % t.columns:
        no_shape(node)
    return Array(x.blocks.reshape((*shape[:-1], shape[-1] // t.columns)), vector=True)


@rule("broadcast_in_dim")
def _broadcast_in_dim(t: Trace, node: Node, x: Array) -> Array:
    shape, axes, before = node.params["shape"], node.params["broadcast_dimensions"], node.inputs[0].shape
    if t.segments is not None:
        return _broadcast_segments(t, node, x, shape, axes)
    if x.blocks.size == 1 and not x.vector:
        return t.full(x.blocks.reshape(-1)[0], shape)
    wide = not x.vector and shape[-1] >= t.columns and shape[-1] % t.columns == 0
    if t.columns > 1:  # else all axes have elements as blocks
        if x.vector and (not axes or axes[-1] != len(shape) - 1):
            no_shape(node)
        if wide and axes and axes[-1] == len(shape) - 1 and before[-1] != 1:
            no_shape(node)
    last = shape[-1] // (t.columns if x.vector or wide else 1)
    target = (*shape[:-1], last)
    placed = [1] * len(shape)
    for axis, size in zip(axes, x.blocks.shape, strict=True):
        placed[axis] = size
    return Array(np.broadcast_to(x.blocks.reshape(placed), target), x.vector or wide)


def _broadcast_segments(t: Trace, node: Node, x: Array, shape: tuple[int, ...], axes: tuple[int, ...]) -> Array:
    assert t.segments is not None
    before = node.inputs[0].shape
    if not x.vector and not x.mapped:
        return t.full(x.blocks.reshape(-1)[0], shape)
    axes = tuple(map(int, axes))
    if shape == before:
        return x
    wide = shape in (t.segments, (math.prod(t.segments),))
    kept = shape in ((t.segments[0], 1), (1, t.columns))
    at = {axes[i] for i, extent in enumerate(before) if extent > 1}
    if x.vector and not x.mapped and at == {len(shape) - 1} and (wide or kept):
        return Array(x.blocks, vector=True, mapped=wide)
    if x.mapped and not x.vector and at == {0} and (wide or kept) and len(shape) == 2:
        return Array(x.blocks, vector=wide, mapped=True)
    return no_shape(node)


@rule("slice")
def _slice(t: Trace, node: Node, x: Array) -> Array:
    params = node.params
    if t.segments is not None or set(params["strides"] or (1,)) != {1}:
        no_shape(node)
    where = []
    for axis, (start, limit) in enumerate(zip(params["start_indices"], params["limit_indices"], strict=True)):
        unit = t.columns if x.vector and axis == x.blocks.ndim - 1 else 1
        if start % unit or limit % unit:
            no_shape(node)
        where.append(slice(start // unit, limit // unit))
    return Array(x.blocks[tuple(where)], x.vector)


@rule("iota")
def _iota(t: Trace, node: Node) -> Array:
    shape, axis = node.params["shape"], node.params["dimension"]
    if t.segments is not None and shape in (t.segments, (t.columns,)) and axis == len(shape) - 1:
        return Array(objects([t.column(0, node.params["dtype"])], (1,)), vector=True, mapped=len(shape) == 2)
    if t.segments is not None or axis != len(shape) - 1:
        no_shape(node)
    last = counted(t, node, shape[-1:], node.params["dtype"])
    return Array(np.broadcast_to(last.blocks, (*shape[:-1], *last.blocks.shape)), last.vector)


def counted(t: Trace, node: Node, shape: tuple[int, ...], dtype: Any = np.int32) -> Array:
    """Returns an array of consecutive numbers, from 0."""
    if t.segments is None and shape[-1] % t.columns == 0:
        parts = [t.column(part, dtype) for part in range(math.prod(shape) // t.columns)]
        return Array(objects(parts, (*shape[:-1], shape[-1] // t.columns)), vector=True)
    if math.prod(shape) > MOST_PARTS:
        no_shape(node)
    numbers = [t.make.convert(Number(float(x), "int32"), "int32", dtype) for x in range(math.prod(shape))]
    return Array(objects(numbers, shape), vector=False)


@rule("split")
def _split(t: Trace, node: Node, x: Array) -> list[Array]:
    axis = node.params["axis"]
    unit = t.columns if x.vector and axis == x.blocks.ndim - 1 else 1
    if t.segments is not None or any(size % unit for size in node.params["sizes"]):
        no_shape(node)
    ends = np.cumsum([size // unit for size in node.params["sizes"]])[:-1].tolist()
    return [Array(part, x.vector) for part in np.split(x.blocks, ends, axis=axis)]


@rule("unstack")
def _unstack(t: Trace, node: Node, x: Array) -> list[Array]:
    axis = node.params["axis"]
    if t.segments is not None or (x.vector and axis == x.blocks.ndim - 1):
        no_shape(node)
    return [Array(np.asarray(part, object), x.vector) for part in np.moveaxis(x.blocks, axis, 0)]


@rule("stack")
def _stack(t: Trace, node: Node, *arrays: Array) -> Array:
    axis, vector = node.params["axis"], arrays[0].vector
    last = vector and axis == arrays[0].blocks.ndim
    if t.segments is not None or last or any(x.vector != vector for x in arrays):
        no_shape(node)
    return Array(np.stack([x.blocks for x in arrays], axis=axis), vector)


@rule("concatenate")
def _concatenate(t: Trace, node: Node, *arrays: Array) -> Array:
    if t.segments is not None or len({x.vector for x in arrays}) != 1:
        no_shape(node)
    return Array(np.concatenate([x.blocks for x in arrays], axis=node.params["dimension"]), arrays[0].vector)


@rule("pad")
def _pad(t: Trace, node: Node, x: Array, value: Array) -> Array:
    widths = []
    for axis, (low, high, interior) in enumerate(node.params["padding_config"]):
        unit = t.columns if x.vector and axis == x.blocks.ndim - 1 else 1
        if t.segments is not None or interior or low < 0 or high < 0 or low % unit or high % unit:
            no_shape(node)
        widths.append((low // unit, high // unit))
    atom = value.blocks.reshape(-1)[0]
    padded = np.full([low + n + high for n, (low, high) in zip(x.blocks.shape, widths, strict=True)], None, object)
    for place in np.ndindex(padded.shape):
        padded[place] = atom
    padded[tuple(slice(low, low + n) for n, (low, _) in zip(x.blocks.shape, widths, strict=True))] = x.blocks
    return Array(padded, x.vector)


# ------------------------------------------------------------------------------
# How a function divides its rows.


def columns_of(nodes: Sequence[Node], shapes: Sequence[jax.ShapeDtypeStruct], kinds: Sequence[str]) -> int:
    """Returns the length of the parts into which slices and concatenations divide rows."""
    lengths = [s.shape[-1] for s, kind in zip(shapes, kinds, strict=True) if kind in ("row", "shared") and s.shape]
    if not lengths:
        raise NoProgram("has no row to compute")
    for node in nodes:
        if any(jnp.issubdtype(x.dtype, jax.dtypes.extended) or x.dtype == jnp.uint32 for x in node.inputs):
            continue  # words of random keys, and bits, are no parts of rows
        if node.name == "slice" and node.inputs[0].shape:
            lengths += [node.params["start_indices"][-1], node.params["limit_indices"][-1]]
        elif node.name == "split" and node.params["axis"] == len(node.inputs[0].shape) - 1:
            lengths += list(node.params["sizes"])
        elif node.name == "concatenate" and node.params["dimension"] == len(node.inputs[0].shape) - 1:
            lengths += [x.shape[-1] for x in node.inputs]
        elif node.name == "reshape" and node.inputs[0].shape and node.results[0].shape:
            lengths += [node.results[0].shape[-1]] if node.results[0].shape[-1] > 1 else []
    columns = math.gcd(*lengths)
    parts = max(lengths) // columns
    if parts > MOST_PARTS or (parts > 2 and columns < LEAST_COLUMNS):
        raise NoProgram(f"divides a row of {max(lengths)} elements into vectors of {columns}")
    return columns


def segments_of(
    nodes: Sequence[Node], shapes: Sequence[jax.ShapeDtypeStruct], kinds: Sequence[str]
) -> tuple[int, int] | None:
    """Returns number and length of the segments to which all reductions apply; None if there are none."""
    longest = max((s.shape[-1] for s, kind in zip(shapes, kinds, strict=True) if kind == "row"), default=0)
    reduced = {
        (tuple(node.inputs[0].shape), tuple(node.params["axes"]))
        for node in nodes
        if node.name.startswith(("reduce_", "argm")) and "axes" in node.params
    }
    found = {
        shape
        for shape, axes in reduced
        if len(shape) == 2 and axes == (1,) and shape[0] * shape[1] == longest and shape[1] >= LEAST_COLUMNS
    }
    return next(iter(found)) if len(found) == 1 else None
