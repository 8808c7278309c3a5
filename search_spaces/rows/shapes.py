"""Arrays of a row's jaxpr as blocks of a program's values, and the primitives that only rearrange them."""

from __future__ import annotations

import abc
import dataclasses
import math
from collections.abc import Sequence
from typing import Any, NoReturn

import jax
import jax.numpy as jnp
import numpy as np

from search_spaces.recognise import Node, Value
from search_spaces.rows.builder import Builder, NoProgram
from search_spaces.rows.program import Atom, Number


@dataclasses.dataclass(frozen=True)
class Array:
    """A value of the jaxpr as values of the program.

    Attributes:
      blocks: an object array of atoms. With `vector`, its last axis counts blocks of `columns` elements.
      vector: whether the last axis of the array is an axis of columns.
      mapped: whether the array has an axis of segments, which is not in `blocks`: rows are then segments.
      summed: whether it is a sum over the segments, which the sum over all rows includes.
    """

    blocks: Any
    vector: bool
    mapped: bool = False
    summed: bool = False


class Shapes(abc.ABC):
    """Translates primitives that rearrange elements.

    Attributes:
      columns: elements of a vector.
      segments: number and length of the segments of a row that are rows of their own, or None.
      make: the equations.
      arrays: the values of the jaxpr that are known.
    """

    columns: int
    segments: tuple[int, int] | None
    make: Builder
    arrays: dict[Value, Array]

    @abc.abstractmethod
    def _array(self, value: Value) -> Array:
        """Returns a value of the jaxpr."""

    def _full(self, atom: Atom, shape: tuple[int, ...]) -> Array:
        """Returns an array of equal elements."""
        if self.segments is not None:
            vector = shape != () and shape[-1] in (self.columns, math.prod(self.segments))
            return Array(objects([atom], (1,)), vector, mapped=shape != () and math.prod(shape) > self.columns)
        vector = shape != () and shape[-1] >= self.columns and shape[-1] % self.columns == 0
        blocks = (*shape[:-1], shape[-1] // self.columns) if vector else shape
        return Array(objects([atom] * math.prod(blocks), blocks), vector)

    def _reshape(self, node: Node) -> Array:
        x, shape = self._array(node.inputs[0]), node.results[0].shape
        if self.segments is not None:
            if x.summed and shape[-1:] != (self.columns,):
                no_shape(node)
            if x.mapped:
                sizes = ((math.prod(self.segments),), self.segments) if x.vector else ((self.segments[0],),)
                allowed = (*sizes, *(() if x.vector else ((self.segments[0], 1),)))
                if shape not in allowed:
                    no_shape(node)
            return x
        if not x.vector:
            return Array(x.blocks.reshape(shape), vector=False)
        atom = x.blocks.reshape(-1)[0]
        if not shape and self.columns == 1 and self.make.dtype(atom) == "float32":  # an element per row
            return Array(objects([self.make.reduce("reduce_sum", atom)], ()), vector=False)
        if not shape or shape[-1] % self.columns:
            no_shape(node)
        return Array(x.blocks.reshape((*shape[:-1], shape[-1] // self.columns)), vector=True)

    def _squeeze(self, node: Node) -> Array:
        return self._reshape(node)

    def _expand_dims(self, node: Node) -> Array:
        return self._reshape(node)

    def _broadcast_in_dim(self, node: Node) -> Array:
        x, shape = self._array(node.inputs[0]), node.params["shape"]
        axes, before = node.params["broadcast_dimensions"], node.inputs[0].shape
        if self.segments is not None:
            return self._broadcast_segments(node, x, shape, axes)
        if x.blocks.size == 1 and not x.vector:
            return self._full(x.blocks.reshape(-1)[0], shape)
        wide = not x.vector and shape[-1] >= self.columns and shape[-1] % self.columns == 0
        if self.columns > 1:  # else all axes have elements as blocks
            if x.vector and (not axes or axes[-1] != len(shape) - 1):
                no_shape(node)
            if wide and axes and axes[-1] == len(shape) - 1 and before[-1] != 1:
                no_shape(node)
        last = shape[-1] // (self.columns if x.vector or wide else 1)
        target = (*shape[:-1], last)
        placed = [1] * len(shape)
        for axis, size in zip(axes, x.blocks.shape, strict=True):
            placed[axis] = size
        return Array(np.broadcast_to(x.blocks.reshape(placed), target), x.vector or wide)

    def _broadcast_segments(self, node: Node, x: Array, shape: tuple[int, ...], axes: tuple[int, ...]) -> Array:
        assert self.segments is not None
        before = node.inputs[0].shape
        if not x.vector and not x.mapped:
            return self._full(x.blocks.reshape(-1)[0], shape)
        axes = tuple(map(int, axes))
        if shape == before:
            return x
        wide = shape in (self.segments, (math.prod(self.segments),))
        kept = shape in ((self.segments[0], 1), (1, self.columns))
        at = {axes[i] for i, extent in enumerate(before) if extent > 1}
        if x.vector and not x.mapped and at == {len(shape) - 1} and (wide or kept):
            return Array(x.blocks, vector=True, mapped=wide)
        if x.mapped and not x.vector and at == {0} and (wide or kept) and len(shape) == 2:
            return Array(x.blocks, vector=wide, mapped=True)
        return no_shape(node)

    def _slice(self, node: Node) -> Array:
        x, params = self._array(node.inputs[0]), node.params
        if self.segments is not None or set(params["strides"] or (1,)) != {1}:
            no_shape(node)
        where = []
        for axis, (start, limit) in enumerate(zip(params["start_indices"], params["limit_indices"], strict=True)):
            unit = self.columns if x.vector and axis == x.blocks.ndim - 1 else 1
            if start % unit or limit % unit:
                no_shape(node)
            where.append(slice(start // unit, limit // unit))
        return Array(x.blocks[tuple(where)], x.vector)

    def _iota(self, node: Node) -> Array:
        shape, axis = node.params["shape"], node.params["dimension"]
        if self.segments is not None and shape in (self.segments, (self.columns,)) and axis == len(shape) - 1:
            return Array(objects([self._column(0, node.params["dtype"])], (1,)), vector=True, mapped=len(shape) == 2)
        if self.segments is not None or axis != len(shape) - 1:
            no_shape(node)
        counted = self._counted(node, shape[-1:], node.params["dtype"])
        return Array(np.broadcast_to(counted.blocks, (*shape[:-1], *counted.blocks.shape)), counted.vector)

    def _counted(self, node: Node, shape: tuple[int, ...], dtype: Any = np.int32) -> Array:
        """Returns an array whose elements are numbered in order, from 0."""
        if self.segments is None and shape[-1] % self.columns == 0:
            parts = [self._column(part, dtype) for part in range(math.prod(shape) // self.columns)]
            return Array(objects(parts, (*shape[:-1], shape[-1] // self.columns)), vector=True)
        if math.prod(shape) > MOST_PARTS:
            no_shape(node)
        numbers = [self.make.convert(Number(float(x), "int32"), "int32", dtype) for x in range(math.prod(shape))]
        return Array(objects(numbers, shape), vector=False)

    def _column(self, part: int, dtype: Any = np.int32) -> Atom:
        column = self.make.emit("index", dtype="int32")
        if part:
            column = self.make.emit("add", column, Number(float(part * self.columns), "int32"))
        return self.make.convert(column, "int32", dtype)

    def _split(self, node: Node) -> list[Array]:
        x, axis = self._array(node.inputs[0]), node.params["axis"]
        unit = self.columns if x.vector and axis == x.blocks.ndim - 1 else 1
        if self.segments is not None or any(size % unit for size in node.params["sizes"]):
            no_shape(node)
        ends = np.cumsum([size // unit for size in node.params["sizes"]])[:-1].tolist()
        return [Array(part, x.vector) for part in np.split(x.blocks, ends, axis=axis)]

    def _unstack(self, node: Node) -> list[Array]:
        x, axis = self._array(node.inputs[0]), node.params["axis"]
        if self.segments is not None or (x.vector and axis == x.blocks.ndim - 1):
            no_shape(node)
        return [Array(np.asarray(part, object), x.vector) for part in np.moveaxis(x.blocks, axis, 0)]

    def _stack(self, node: Node) -> Array:
        arrays, axis = [self._array(x) for x in node.inputs], node.params["axis"]
        vector = arrays[0].vector
        last = vector and axis == arrays[0].blocks.ndim
        if self.segments is not None or last or any(x.vector != vector for x in arrays):
            no_shape(node)
        return Array(np.stack([x.blocks for x in arrays], axis=axis), vector)

    def _concatenate(self, node: Node) -> Array:
        arrays, axis = [self._array(x) for x in node.inputs], node.params["dimension"]
        if self.segments is not None or len({x.vector for x in arrays}) != 1:
            no_shape(node)
        return Array(np.concatenate([x.blocks for x in arrays], axis=axis), arrays[0].vector)

    def _pad(self, node: Node) -> Array:
        x, value = map(self._array, node.inputs)
        widths = []
        for axis, (low, high, interior) in enumerate(node.params["padding_config"]):
            unit = self.columns if x.vector and axis == x.blocks.ndim - 1 else 1
            if self.segments is not None or interior or low < 0 or high < 0 or low % unit or high % unit:
                no_shape(node)
            widths.append((low // unit, high // unit))
        atom = value.blocks.reshape(-1)[0]
        padded = np.full([low + n + high for n, (low, high) in zip(x.blocks.shape, widths, strict=True)], None, object)
        for place in np.ndindex(padded.shape):
            padded[place] = atom
        padded[tuple(slice(low, low + n) for n, (low, _) in zip(x.blocks.shape, widths, strict=True))] = x.blocks
        return Array(padded, x.vector)


def no_shape(node: Node) -> NoReturn:
    shapes = " and ".join(str(x.shape) for x in node.inputs)
    raise NoProgram(f"uses {node.name} of {shapes} to {node.results[0].shape}, which kernels on rows do not compute")


def objects(atoms: Sequence[Any], shape: Any) -> Any:
    made = np.empty(len(atoms), object)
    for place, atom in enumerate(atoms):
        made[place] = atom
    return made.reshape(shape)


def broadcast(blocks: Sequence[Any]) -> Sequence[Any]:
    """Gives arrays of one element the shape of the others."""
    shape = max((x.shape for x in blocks), key=lambda shape: (math.prod(shape), len(shape)))
    return [x if x.shape == shape else np.broadcast_to(x.reshape(-1) if x.size == 1 else x, shape) for x in blocks]


# ------------------------------------------------------------------------------
# How a function divides its rows.

LEAST_COLUMNS = 16  # shorter vectors are rows, or halves of rows, but no other parts of them
MOST_PARTS = 16


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
