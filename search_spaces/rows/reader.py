"""Derives the row program of a function of one row from its jaxpr."""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from search_spaces.derivative_rules import as_selection
from search_spaces.recognise import Inlined, Node, Value, graph
from search_spaces.rows.builder import Builder, NoProgram, number_of
from search_spaces.rows.elementwise import EXACT, SAME_NAMES, is_elementwise
from search_spaces.rows.keys import LEAST, Keys, is_key, require_signed
from search_spaces.rows.program import Atom, Number, Operand, Program, Result
from search_spaces.rows.shapes import Array, broadcast, columns_of, no_shape, objects, segments_of


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
        _require_narrow(shape.dtype)
    jaxpr = jax.make_jaxpr(lambda *args: jax.tree.leaves(function(*args)))(*shapes)
    traced = graph(jaxpr.jaxpr, _constants(jaxpr))
    nodes = list(_nodes(traced.items))
    segments = segments_of(nodes, shapes, kinds)
    if segments is not None:
        try:
            return _Reader(shapes, kinds, segments, 0).program(traced, nodes, summed), segments[0]
        except NoProgram:
            pass
    columns = columns_of(nodes, shapes, kinds)
    return _Reader(shapes, kinds, None, columns).program(traced, nodes, summed), 1


# JAX 0.12 differentiates the error function by exp(-x^2), and computes that from the bits of x. A random word is one
# equation in place of a hundred, so that the text of a program stays short.
_WHOLE = frozenset({"exp_neg_sq", "threefry2x32_13", "threefry2x32_20"})


def _nodes(items: Iterable[Node | Inlined]) -> Iterator[Node]:
    """Yields equations in order, with inlined calls replaced by their bodies.

    Functions of `_WHOLE` stay one equation. Of `relu` the derivative is that of its rule, at ties, too.
    """
    for item in items:
        if isinstance(item, Node):
            yield item
        elif (name := _name_of_body(item.equation)) in _WHOLE:
            yield Node(name, item.equation, item.inputs, list(item.results))
        elif (selection := as_selection(item)) is not None:
            yield from selection
        else:
            yield from _nodes(item.items)


def _name_of_body(call: Any) -> str:
    body = call.params.get("call_jaxpr", call.params.get("jaxpr"))
    return str(getattr(getattr(getattr(body, "jaxpr", body), "debug_info", None), "func_name", ""))


def _constants(jaxpr: Any) -> dict[Any, Value]:
    return {
        var: Value(np.shape(x), x.dtype if is_key(x) else jnp.result_type(x), literal=x)
        for var, x in zip(jaxpr.jaxpr.constvars, jaxpr.consts, strict=True)
    }


def _require_narrow(dtype: Any) -> None:
    if jnp.issubdtype(dtype, jnp.integer) and jnp.iinfo(dtype).bits < 8:
        raise NoProgram(f"has {dtype} arrays, whose arithmetic XLA does not wrap: convert to int8 first")
    if jnp.issubdtype(dtype, jax.dtypes.extended):
        raise NoProgram(f"has {dtype} arrays, as random bits do")
    if jnp.issubdtype(dtype, jnp.complexfloating) or jnp.dtype(dtype).itemsize > 4 or dtype == jnp.uint32:
        raise NoProgram(f"has {dtype} arrays: kernels on rows compute in float32 and int32")


_COPIES = frozenset({"copy", "copy_p", "stop_gradient", "optimization_barrier", "name", "pvary", "reshard", "pcast"})


class _Reader(Keys):
    """Translates the equations of one jaxpr."""

    def __init__(
        self,
        shapes: Sequence[jax.ShapeDtypeStruct],
        kinds: Sequence[str],
        segments: tuple[int, int] | None,
        columns: int,
    ) -> None:
        self.segments, self.columns = segments, segments[1] if segments else columns
        self.kinds, self.shapes = kinds, shapes
        # An element per segment is an element per row.
        of_segments = [
            "scalar" if segments and kind == "row" and s.shape == segments[:1] else kind
            for kind, s in zip(kinds, shapes, strict=True)
        ]
        operands = [
            Operand(own, str(s.dtype), 1 if own != kind else self._parts(kind, s))  # type: ignore[arg-type]
            for kind, own, s in zip(kinds, of_segments, shapes, strict=True)
        ]
        self.make = Builder(self.columns, operands)
        self.arrays: dict[Value, Array] = {}

    def _parts(self, kind: str, shape: jax.ShapeDtypeStruct) -> int:
        if kind not in ("row", "shared"):
            if shape.shape and math.prod(shape.shape) > 1:
                raise NoProgram(f"takes {shape.shape} per row, which is neither a row nor one element")
            return 1
        if len(shape.shape) != 1:
            raise NoProgram(f"takes an array of shape {shape.shape} per row: a row has one axis")
        if self.segments is None:
            return shape.shape[-1] // self.columns
        if kind == "row" and shape.shape[-1] != math.prod(self.segments):
            raise NoProgram("has rows of different lengths, of which one is segments")
        if kind == "shared" and shape.shape[-1] != self.columns:
            raise NoProgram("has segments, and an array for all rows that is no segment")
        return 1

    def program(self, traced: Any, nodes: Sequence[Node], summed: Callable[[int], bool]) -> Program:
        for number, (value, kind) in enumerate(zip(traced.inputs, self.kinds, strict=True)):
            parts = [self.make.read(number, part) for part in range(self.make.operands[number].parts)]
            mapped = self.segments is not None and kind == "row"
            if self.segments is not None and kind == "scalar":
                raise NoProgram("has segments, and one element per row")
            vector = self.make.operands[number].kind in ("row", "shared")
            shape = (1,) if mapped else value.shape if not vector else (len(parts),)
            self.arrays[value] = Array(objects(parts, shape), vector, mapped)
        for node in nodes:
            self._read(node)
        results = [self._result(value, summed(number)) for number, value in enumerate(traced.results)]
        return self.make.program(results)

    def _result(self, value: Value, summed: bool) -> Result:
        found = self._array(value)
        atoms = tuple(found.blocks.reshape(-1).tolist())
        dtype = str(value.dtype)
        _require_narrow(value.dtype)
        # In rows of one column, an array of one element is a row: `Derivative` gives it a cotangent of its shape.
        if not found.vector and not (self.columns == 1 and value.shape):
            if len(atoms) != 1:
                raise NoProgram(f"returns {len(atoms)} elements per row, which is neither a row nor one element")
            return Result("scalar", dtype, atoms)
        zero = all(isinstance(x, Number) and x.value == 0 for x in atoms)  # the gradient of an array that is not read
        if self.segments is not None and (found.summed if not summed else not (found.mapped or found.summed or zero)):
            raise NoProgram("returns a sum over segments")
        if self.segments is not None and not found.mapped and not summed:
            raise NoProgram("returns a segment that is the same for all segments")
        return Result("row sum", "float32", atoms) if summed else Result("row", dtype, atoms)

    # ------------------------------------------------------------------------------

    def _array(self, value: Value) -> Array:
        if value not in self.arrays:
            if value.literal is None:
                raise NoProgram("reads an array that it captures: pass the array as an argument")
            if is_key(value):
                self._random_seed(value)
            if isinstance(value.literal, jax.core.Tracer):
                raise NoProgram("captures a value that JAX traces: pass it as an argument")
            number = np.asarray(value.literal)
            if number.size != 1:
                if number.size and (number == number.flat[0]).all():
                    return self._full(number_of(number.flat[0]), value.shape)
                raise NoProgram(f"captures an array of shape {number.shape}: pass the array as an argument")
            return Array(objects([number_of(number.reshape(()))], value.shape), vector=False)
        return self.arrays[value]

    def _read(self, node: Node) -> None:
        for result in node.results:
            if result.dtype != jnp.uint32 and not is_key(result) and not _unused(result):
                _require_narrow(result.dtype)
        if node.name in _COPIES:
            for result, value in zip(node.results, node.inputs, strict=True):
                self.arrays[result] = self._array(value)
            return
        require_signed(node)
        method = getattr(self, f"_{node.name}", None)
        if node.name in SAME_NAMES or node.name in ("div", "rem"):
            found = self._elementwise(node, self._named(node))
        elif method is None:
            raise NoProgram(f"uses {node.name}, which kernels on rows do not compute")
        else:
            found = method(node)
        arithmetic = node.name == "scatter_add" or (is_elementwise(node.name) and node.name not in EXACT)
        if arithmetic and not found.summed:
            found = self._map(lambda atom: self.make.stored(atom, node.results[0].dtype), found)
        self.arrays.update(zip(node.results, found if isinstance(found, list) else [found], strict=False))

    def _named(self, node: Node) -> str:
        floating = jnp.issubdtype(node.inputs[0].dtype, jnp.floating)
        if node.name == "div":
            return "div" if floating else "int_div"
        if node.name == "rem" and floating:
            raise NoProgram("uses the remainder of floating-point numbers")
        if node.name == "sign" and not floating:
            raise NoProgram("uses the sign of integers")
        return SAME_NAMES.get(node.name, node.name)

    def _elementwise(self, node: Node, name: str) -> Array:
        arrays = [self._array(x) for x in node.inputs]
        if any(x.summed for x in arrays):
            return self._of_sums(name, arrays)
        if name in ("lt", "le", "gt", "ge") and node.inputs[0].dtype == jnp.uint32:
            arrays = [self._map(lambda atom: self.make.emit("xor", atom, LEAST), x) for x in arrays]
        if name in ("shift_right_logical", "shift_right_arithmetic"):
            # Narrow integers are extended by zeros, or by their sign, to the 32 bits that are shifted.
            signed = "int" if name == "shift_right_arithmetic" else "uint"
            extended = f"{signed}{jnp.iinfo(node.inputs[0].dtype).bits}"
            arrays[0] = self._map(lambda atom: self.make.convert(atom, node.inputs[0].dtype, extended), arrays[0])
        return self._map(lambda *atoms: self.make.emit(name, *atoms), *arrays)

    def _inlined(self, function: Callable[..., Any], node: Node, *arrays: Array) -> Array:
        shapes = [jax.ShapeDtypeStruct(x.blocks.shape, jnp.uint32) for x in arrays]
        jaxpr = jax.make_jaxpr(function)(*shapes)
        traced = graph(jaxpr.jaxpr, _constants(jaxpr))
        self.arrays.update(zip(traced.inputs, arrays, strict=True))
        for each in _nodes(traced.items):
            self._read(each)
        return self._array(traced.results[0])

    def _of_sums(self, name: str, arrays: Sequence[Array]) -> Array:
        """Returns a sum of sums over segments as the sum of the sums of each segment, whose order nobody defines."""
        if name not in ("add", "sub", "neg") or not all(x.summed for x in arrays):
            raise NoProgram("computes with a sum over segments")
        atoms = [x.blocks.reshape(-1)[0] for x in arrays]
        return Array(objects([self.make.emit(name, *atoms)], (1,)), vector=True, summed=True)

    def _map(self, emit: Callable[..., Atom], *arrays: Array) -> Array:
        """Applies an equation to arrays of the same shape, or scalars."""
        if any(x.summed for x in arrays):
            raise NoProgram("computes with a sum over segments")
        shaped = [x for x in arrays if x.blocks.size > 1 or x.vector or x.mapped]
        vector = any(x.vector for x in shaped)
        if any(x.vector != vector and x.blocks.size > 1 for x in shaped):
            raise NoProgram("joins rows with elements per row")
        return Array(
            np.asarray(np.frompyfunc(emit, len(arrays), 1)(*broadcast([x.blocks for x in arrays])), object),
            vector,
            any(x.mapped for x in arrays),
        )

    def _exp_neg_sq(self, node: Node) -> Array:
        def exp(x: Atom) -> Atom:
            return self.make.emit("exp", self.make.emit("neg", self.make.emit("mul", x, x)))

        return self._map(exp, self._array(node.inputs[0]))

    def _polynomial(self, node: Node) -> Array:
        def horner(x: Atom, *coefficients: Atom) -> Atom:
            return functools.reduce(
                lambda rest, c: self.make.emit("add", c, self.make.emit("mul", x, rest)), reversed(coefficients)
            )

        return self._map(horner, *map(self._array, node.inputs))

    def _square(self, node: Node) -> Array:
        return self._map(lambda x: self.make.emit("mul", x, x), self._array(node.inputs[0]))

    def _one_minus_square(self, node: Node) -> Array:
        def less(x: Atom) -> Atom:
            return self.make.emit("sub", Number(1.0), self.make.emit("mul", x, x))

        return self._map(less, self._array(node.inputs[0]))

    def _integer_pow(self, node: Node) -> Array:
        def power(x: Atom) -> Atom:
            y = abs(node.params["y"])
            if y > 8:
                raise NoProgram(f"uses the power {node.params['y']}")
            result: Atom = Number(1.0, self.make.dtype(x))
            for _ in range(y):
                result = self.make.emit("mul", x, result)
            return result if node.params["y"] >= 0 else self.make.emit("div", Number(1.0), result)

        return self._map(power, self._array(node.inputs[0]))

    def _not(self, node: Node) -> Array:
        if node.inputs[0].dtype != jnp.bool_:
            raise NoProgram("inverts the bits of integers")
        return self._map(lambda x: self.make.emit("xor", x, Number(1.0, "bool")), self._array(node.inputs[0]))

    def _is_finite(self, node: Node) -> Array:
        def finite(x: Atom) -> Atom:
            return self.make.emit("lt", self.make.emit("abs", x), Number(float("inf")))

        return self._map(finite, self._array(node.inputs[0]))

    def _clamp(self, node: Node) -> Array:
        def clamp(least: Atom, x: Atom, most: Atom) -> Atom:
            return self.make.emit("min", self.make.emit("max", x, least), most)

        return self._map(clamp, *map(self._array, node.inputs))

    def _round(self, node: Node) -> Array:
        nearest = node.params["rounding_method"] == lax.RoundingMethod.TO_NEAREST_EVEN
        return self._elementwise(node, "nearest" if nearest else "away")

    def _select_n(self, node: Node) -> Array:
        if len(node.inputs) != 3:
            raise NoProgram(f"selects among {len(node.inputs) - 1} arrays")
        pred, no, yes = map(self._array, node.inputs)
        return self._map(lambda p, x, y: self.make.emit("where", p, y, x), pred, no, yes)

    def _convert_element_type(self, node: Node) -> Array:
        before, after = node.inputs[0].dtype, node.params["new_dtype"]
        x = self._array(node.inputs[0])
        if x.summed and jnp.issubdtype(before, jnp.floating) and jnp.issubdtype(after, jnp.floating):
            return x  # a sum over rows is float32
        return self._map(lambda x: self.make.convert(x, before, after), x)

    def _reduce_precision(self, node: Node) -> Array:
        bits = node.params["exponent_bits"], node.params["mantissa_bits"]
        known = {(8, 7): "bfloat16", (5, 10): "float16", (8, 23): "float32"}
        if bits not in known:
            raise NoProgram(f"rounds to {bits[0]} bits of exponent and {bits[1]} of mantissa")

        def reduced(x: Atom) -> Atom:
            rounded = self.make.convert(x, "float32", known[bits])
            return self.make.emit("flushed", rounded) if bits == (5, 10) else rounded

        return self._map(reduced, self._array(node.inputs[0]))

    # ------------------------------------------------------------------------------
    # Reductions, and elements by their column.

    def _reduced(self, node: Node, name: str) -> Array:
        x, axes = self._array(node.inputs[0]), node.params["axes"]
        ndim = len(node.inputs[0].shape)
        joined = {"reduce_sum": "add", "reduce_max": "max", "reduce_min": "min"}[name]
        if self.make.dtype(x.blocks.reshape(-1)[0]) != "float32":
            raise NoProgram(f"reduces {node.inputs[0].dtype}: convert to float32 first")
        if self.segments is not None:
            if all(node.inputs[0].shape[axis] == 1 for axis in axes):
                return x
            if name == "reduce_sum" and x.mapped and x.vector and axes == (0,) and ndim == 2:
                return Array(x.blocks, vector=True, summed=True)
            if not (x.mapped and x.vector and axes == (1,) and ndim == 2):
                no_shape(node)
            return Array(objects([self.make.reduce(name, x.blocks.reshape(-1)[0])], (1,)), vector=False, mapped=True)
        blocks = x.blocks
        for axis in sorted(axes, reverse=True):
            blocks = functools.reduce(
                lambda a, b: np.frompyfunc(lambda p, q: self.make.emit(joined, p, q), 2, 1)(a, b),
                [np.asarray(part, object) for part in np.moveaxis(blocks, axis, 0)],
            )
        blocks = np.asarray(blocks, object)
        whole = x.vector and ndim - 1 in axes
        if whole:
            blocks = np.asarray(np.frompyfunc(lambda p: self.make.reduce(name, p), 1, 1)(blocks), object)
        return Array(blocks, x.vector and not whole)

    def _reduce_sum(self, node: Node) -> Array:
        return self._reduced(node, "reduce_sum")

    def _reduce_max(self, node: Node) -> Array:
        return self._reduced(node, "reduce_max")

    def _reduce_min(self, node: Node) -> Array:
        return self._reduced(node, "reduce_min")

    def _any_or_all(self, node: Node, name: str) -> Array:
        """Reduces booleans as the numbers 0 and 1."""
        x = self._array(node.inputs[0])
        numbers = self._map(lambda p: self.make.emit("bool_to_float", p, dtype="float32"), x)
        held = Value(node.inputs[0].shape, np.dtype(np.float32))
        self.arrays[held] = numbers
        reduced = self._reduced(dataclasses.replace(node, inputs=(held,)), name)
        return self._map(lambda p: self.make.emit("is_nonzero", p), reduced)

    def _reduce_or(self, node: Node) -> Array:
        return self._any_or_all(node, "reduce_max")

    def _reduce_and(self, node: Node) -> Array:
        return self._any_or_all(node, "reduce_min")

    def _argmax(self, node: Node) -> Array:
        return self._first(node, "reduce_max")

    def _argmin(self, node: Node) -> Array:
        return self._first(node, "reduce_min")

    def _first(self, node: Node, name: str) -> Array:
        """Returns the first column of the extreme element; NaN is the extreme of a row that has one."""
        x, make = self._array(node.inputs[0]), self.make
        if not jnp.issubdtype(node.inputs[0].dtype, jnp.floating):
            raise NoProgram(f"takes the {node.name} of {node.inputs[0].dtype}: convert to float32 first")
        if x.blocks.size != 1 or not x.vector or x.summed or self.columns > 2**24:
            no_shape(node)
        if self.segments is not None and not (x.mapped and node.params["axes"] == (1,)):
            no_shape(node)
        atom = x.blocks.reshape(-1)[0]
        extreme = make.reduce(name, atom)
        is_it = make.emit("or", make.emit("eq", atom, extreme), make.emit("ne", atom, atom))
        column = make.emit("to_float", make.emit("index", dtype="int32"), dtype="float32")
        first = make.reduce("reduce_min", make.emit("where", is_it, column, Number(float(self.columns))))
        shape = () if self.segments is None else (1,)
        return Array(
            objects([make.convert(first, "float32", node.results[0].dtype)], shape), vector=False, mapped=x.mapped
        )

    def _chosen(self, x: Array, index: Atom, otherwise: Callable[[Atom], Atom]) -> list[Atom]:
        """Returns, for each part of a row, the part with all but the element at `index` replaced."""
        found = []
        for part, atom in enumerate(x.blocks.reshape(-1).tolist()):
            here = self.make.emit("eq", self._column(part), index)
            found.append(self.make.emit("where", here, atom, otherwise(atom)))
        return found

    def _element(self, node: Node, x: Array, index: Atom) -> Array:
        """Returns the element of a row at an index, which a scalar per row gives."""
        if not x.vector or x.blocks.ndim != 1 or self.segments is not None or self.make.dtype(x.blocks[0]) != "float32":
            no_shape(node)
        parts = self._chosen(x, index, lambda _: Number(0.0))
        total = functools.reduce(lambda a, b: self.make.emit("add", a, b), parts)
        return Array(objects([self.make.reduce("reduce_sum", total)], node.results[0].shape), vector=False)

    def _clamped_index(self, index: Atom, length: int) -> Atom:
        low = self.make.emit("max", index, Number(0.0, "int32"))
        return self.make.emit("min", low, Number(float(length - 1), "int32"))

    def _dynamic_slice(self, node: Node) -> Array:
        x, index = self._array(node.inputs[0]), self._array(node.inputs[1]).blocks.reshape(-1)[0]
        if node.params["slice_sizes"] != (1,):
            no_shape(node)
        return self._element(node, x, self._clamped_index(index, node.inputs[0].shape[0]))

    def _gather(self, node: Node) -> Array:
        x, indices = map(self._array, node.inputs)
        length = node.inputs[0].shape
        if len(length) != 1 or node.params["slice_sizes"] != (1,) or indices.blocks.size != 1 or indices.vector:
            no_shape(node)
        index, mode = indices.blocks.reshape(-1)[0], str(node.params["mode"]).lower()
        if "fill" not in mode:
            return self._element(node, x, self._clamped_index(index, length[0]))
        if (fill := node.params["fill_value"]) is None:
            fill = np.nan
        inside = self.make.emit(
            "and",
            self.make.emit("ge", index, Number(0.0, "int32")),
            self.make.emit("lt", index, Number(float(length[0]), "int32")),
        )
        found = self._element(node, x, index)
        return self._map(lambda value: self.make.emit("where", inside, value, Number(float(fill))), found)

    def _scatter_add(self, node: Node) -> Array:
        x, indices, updates = map(self._array, node.inputs)
        if len(node.inputs[0].shape) != 1 or indices.blocks.size != 1 or updates.blocks.size != 1 or updates.vector:
            no_shape(node)
        if self.segments is not None or not x.vector:
            no_shape(node)
        index, update = indices.blocks.reshape(-1)[0], updates.blocks.reshape(-1)[0]
        parts = []
        for part, atom in enumerate(x.blocks.reshape(-1).tolist()):
            here = self.make.emit("eq", self._column(part), index)
            parts.append(self.make.emit("where", here, self.make.emit("add", atom, update), atom))
        return Array(objects(parts, x.blocks.shape), vector=True)

    def _dynamic_update_slice(self, node: Node) -> Array:
        x, update, index = (self._array(each) for each in node.inputs[:3])
        if len(node.inputs[0].shape) != 1 or update.blocks.size != 1 or update.vector or not x.vector:
            no_shape(node)
        at = self._clamped_index(index.blocks.reshape(-1)[0], node.inputs[0].shape[0])
        value = update.blocks.reshape(-1)[0]
        parts = []
        for part, atom in enumerate(x.blocks.reshape(-1).tolist()):
            parts.append(self.make.emit("where", self.make.emit("eq", self._column(part), at), value, atom))
        return Array(objects(parts, x.blocks.shape), vector=True)


def _unused(value: Value) -> bool:
    return value.node is not None and not value.node.users
