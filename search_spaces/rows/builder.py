"""Derives the row program of a function of one row from its jaxpr."""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, NoReturn

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from search_spaces.recognise import Node, Value, graph
from search_spaces.rows.program import (
    REDUCTIONS,
    Atom,
    Equation,
    Input,
    Number,
    Operand,
    Program,
    Result,
    within,
)


class NoProgram(Exception):
    """A function of a row that no kernel computes; the message has the reason."""


LEAST_COLUMNS = 16  # shorter vectors are rows, or halves of rows, but no other parts of them
MOST_PARTS = 16
_BOOLEAN = frozenset({"eq", "ne", "lt", "le", "gt", "ge", "is_nonzero"})


class Builder:
    """Equations of a program, each distinct one once, with algebra that saves stages and divisions."""

    def __init__(
        self, columns: int, operands: Sequence[Operand], *, hoists: bool = True, distributes: bool = False
    ) -> None:
        """Makes a builder.

        Args:
          hoists: take scalars out of sums.
          distributes: sum terms separately if that saves a stage. Large terms that cancel then lose digits.
        """
        self.columns, self.operands, self.hoists, self.distributes = columns, tuple(operands), hoists, distributes
        self.inputs: list[Input] = []
        self.equations: list[Equation] = []
        self.known: dict[Any, int] = {}

    def program(self, results: Sequence[Result]) -> Program:
        """Returns the program of the equations that the results need; operands that it does not read stay."""
        whole = Program(self.columns, self.operands, tuple(self.inputs), tuple(self.equations), tuple(results))
        return pruned(whole)

    def read(self, operand: int, part: int = 0) -> int:
        """Returns a part of an operand as a value. All inputs must be read before the first equation."""
        assert not self.equations, "inputs are numbered before equations"
        self.inputs.append(Input(operand, part))
        return len(self.inputs) - 1

    @property
    def _draft(self) -> Program:
        return Program(self.columns, self.operands, tuple(self.inputs), tuple(self.equations), ())

    def is_vector(self, atom: Atom) -> bool:
        if isinstance(atom, Number):
            return False
        if atom < len(self.inputs):
            return self.operands[self.inputs[atom].operand].kind in ("row", "shared")
        return self.equations[atom - len(self.inputs)].vector

    def made_by(self, atom: Atom, *names: str) -> Equation | None:
        """Returns the equation of a value if it has one of these names."""
        if isinstance(atom, Number) or atom < len(self.inputs):
            return None
        equation = self.equations[atom - len(self.inputs)]
        return equation if equation.name in names else None

    def dtype(self, atom: Atom) -> str:
        if isinstance(atom, Number):
            return atom.dtype
        if atom < len(self.inputs):
            return within(self.operands[self.inputs[atom].operand].dtype)
        return self.equations[atom - len(self.inputs)].dtype

    def level(self, atom: Atom) -> int:
        if isinstance(atom, Number) or atom < len(self.inputs):
            return 0
        equation = self.equations[atom - len(self.inputs)]
        return self._level_of(equation)

    def _level_of(self, equation: Equation) -> int:
        if equation not in self._levels:
            below = max((self.level(x) for x in equation.inputs), default=0)
            self._levels[equation] = below + (equation.name in REDUCTIONS)
        return self._levels[equation]

    @functools.cached_property
    def _levels(self) -> dict[Equation, int]:
        return {}

    def emit(self, name: str, *inputs: Atom, params: tuple[Any, ...] = (), dtype: str = "") -> Atom:
        """Returns the value of an equation: one that is known, a simpler one, or a new one."""
        if (simpler := self._simplified(name, inputs)) is not None:
            return simpler
        if name in _BOOLEAN:
            dtype = "bool"
        elif not dtype:
            dtype = self.dtype(inputs[-1])
        vector = name == "index" or (name not in REDUCTIONS and any(map(self.is_vector, inputs)))
        return self._add(Equation(name, inputs, vector, dtype, params))

    def _add(self, equation: Equation) -> int:
        if equation not in self.known:
            self.known[equation] = len(self.inputs) + len(self.equations)
            self.equations.append(equation)
        return self.known[equation]

    def _simplified(self, name: str, inputs: tuple[Atom, ...]) -> Atom | None:
        numbers = [x.value if isinstance(x, Number) else None for x in inputs]
        if inputs and None not in numbers and (folded := _folded(name, inputs)) is not None:
            return folded
        match name, numbers:
            case ("add", [a, b]) if a == 0 or b == 0:
                return inputs[1] if a == 0 else inputs[0]
            case ("sub", [_, b]) if b == 0:
                return inputs[0]
            case ("sub", [a, _]) if a == 0:
                return self.emit("neg", inputs[1])
            case ("mul", [a, b]) if 1 in (a, b):
                return inputs[1] if a == 1 else inputs[0]
            case ("mul", [a, b]) if 0 in (a, b):
                return Number(0, self.dtype(inputs[0]))
            case ("div", [_, b]) if b is not None and b != 0 and math.isfinite(b):
                return self.emit("mul", inputs[0], Number(float(1 / np.float32(b))))
            case ("div", [None, None]) if self.is_vector(inputs[0]) and not self.is_vector(inputs[1]):
                return self.emit("mul", inputs[0], self.emit("div", Number(1.0), inputs[1]))
            case ("max", [_, b]) if b == -math.inf:
                return inputs[0]
            case ("min", [_, b]) if b == math.inf:
                return inputs[0]
            case ("neg", _) if (inner := self.made_by(inputs[0], "neg")) is not None:
                return inner.inputs[0]
            case ("where", [p, _, _]) if p is not None:
                return inputs[1] if p else inputs[2]
            case ("where", _) if inputs[1] == inputs[2]:
                return inputs[1]
            case ("mul" | "add" | "max" | "min" | "and" | "or" | "xor", _) if _later(*inputs):
                return self.emit(name, inputs[1], inputs[0])
        return None

    # ------------------------------------------------------------------------------
    # Reductions of a vector to a scalar per row.

    def reduce(self, name: str, atom: Atom) -> Atom:
        """Returns the reduction of a value along the row."""
        if not self.is_vector(atom):
            return self.emit("mul", atom, Number(float(self.columns))) if name == "reduce_sum" else atom
        if name == "reduce_sum" and self._is_centred(atom):
            return Number(0.0)
        if name == "reduce_sum" and self.hoists:
            factors, rest = self._factors(atom)
            if not self.is_vector(rest):  # a product of scalars and of nothing else
                factors, rest = [], atom
            # Only a scalar of a later stage is worth taking out: the reduction then needs no stage of its own.
            if rest != atom and self.level(rest) < self.level(atom):
                total = self.reduce(name, rest)
                return functools.reduce(lambda x, y: self.emit("mul", x, y), factors, total)
        if name == "reduce_sum" and self.distributes and self.level(atom):
            terms = list(self._terms(atom))
            if len(terms) > 1 and all(self.level(self._factors(x)[1]) < self.level(atom) for _, x in terms):
                sums = [self.reduce(name, x) if sign > 0 else self.emit("neg", self.reduce(name, x)) for sign, x in terms]
                return functools.reduce(lambda x, y: self.emit("add", x, y), sums)
        return self.emit(name, atom)

    def _terms(self, atom: Atom, sign: int = 1) -> Iterator[tuple[int, Atom]]:
        """Yields the terms of a sum or difference, each with its sign."""
        if (negated := self.made_by(atom, "neg")) is not None:
            yield from self._terms(negated.inputs[0], -sign)
        elif (sum_ := self.made_by(atom, "add", "sub")) is not None:
            yield from self._terms(sum_.inputs[0], sign)
            yield from self._terms(sum_.inputs[1], sign if sum_.name == "add" else -sign)
        else:
            yield sign, atom

    def _is_centred(self, atom: Atom) -> bool:
        """Returns whether a value is x - mean(x), whose sum is zero."""
        if (less := self.made_by(atom, "sub")) is None or (mean := self.made_by(less.inputs[1], "mul")) is None:
            return False
        total = self.made_by(mean.inputs[0], "reduce_sum")
        over = mean.inputs[1]
        is_mean = isinstance(over, Number) and over.value == float(np.float32(1) / np.float32(self.columns))
        return is_mean and total is not None and total.inputs[0] == less.inputs[0]

    def _factors(self, atom: Atom) -> tuple[list[Atom], Atom]:
        """Returns the factors of a product that are scalars per row, and the product of the others."""
        if not self.is_vector(atom):
            return [atom], Number(1.0)
        if (negated := self.made_by(atom, "neg")) is not None:
            factors, rest = self._factors(negated.inputs[0])
            return ([Number(-1.0), *factors], rest) if factors else ([], atom)
        if (product := self.made_by(atom, "mul")) is None:
            return [], atom
        (a, x), (b, y) = map(self._factors, product.inputs)
        return ([*a, *b], self.emit("mul", x, y)) if a or b else ([], atom)

    # ------------------------------------------------------------------------------
    # Conversions between dtypes.

    def convert(self, atom: Atom, before: Any, after: Any) -> Atom:
        """Returns a value of dtype `before`, as JAX sees it, converted to `after`."""
        before, after = str(jnp.dtype(before)), str(jnp.dtype(after))
        if before == after:
            return atom
        if isinstance(atom, Number):
            value = np.asarray(atom.value).astype(jnp.dtype(after)).astype(np.float64)
            return Number(float(value), within(after))
        kinds = within(before), within(after)
        match kinds:
            case ("float32", "float32"):
                narrow = jnp.finfo(after).bits < jnp.finfo(before).bits or jnp.finfo(after).bits <= 16
                if not narrow or self._exact(atom) == after:
                    return atom
                bounded = jnp.dtype(after).itemsize == 1 and self._is_bounded(atom, float(jnp.finfo(after).max))
                return self.emit("round", atom, params=(after, True) if bounded else (after,))
            case ("float32", "int32"):
                info = jnp.iinfo(after)
                bounds = (float(info.min), float(np.nextafter(np.float32(info.max), np.float32(0))))
                bounds = (bounds[0], float(info.max)) if info.bits < 24 else bounds
                return self.emit("to_int", atom, params=bounds, dtype="int32")
            case ("float32" | "int32", "bool"):
                return self.emit("is_nonzero", atom)
            case ("int32", "float32"):
                return self._rounded(self.emit("to_float", atom, dtype="float32"), after)
            case ("bool", "float32"):
                return self.emit("bool_to_float", atom, dtype="float32")
            case ("bool", "int32"):
                return self.emit("bool_to_int", atom, dtype="int32")
        if jnp.iinfo(after).bits >= jnp.iinfo(before).bits and jnp.iinfo(after).bits <= 32:
            return atom
        raise NoProgram(f"converts {before} to {after}, which kernels on rows do not")

    def _rounded(self, atom: Atom, dtype: str) -> Atom:
        return atom if dtype == "float32" else self.emit("round", atom, params=(dtype,))

    def _is_bounded(self, atom: Atom, most: float) -> bool:
        """Returns whether a value was clipped to at most `most` in magnitude."""
        ends = {}
        while (clipped := self.made_by(atom, "min", "max")) is not None and isinstance(clipped.inputs[1], Number):
            ends[clipped.name] = abs(clipped.inputs[1].value)
            atom = clipped.inputs[0]
        return len(ends) == 2 and max(ends.values()) <= most

    def _exact(self, atom: Atom) -> str:
        """Returns the narrow dtype that certainly holds a value; "" if there is none."""
        if isinstance(atom, int) and atom < len(self.inputs):
            return self.operands[self.inputs[atom].operand].dtype
        rounded = self.made_by(atom, "round")
        return str(rounded.params[0]) if rounded else ""


def _later(x: Atom, y: Atom) -> bool:
    """Returns whether the operands of a commutative equation are to be exchanged: values in order, numbers last."""
    if isinstance(x, Number) or isinstance(y, Number):
        return isinstance(x, Number) and not isinstance(y, Number)
    return x > y


_FOLDED: dict[str, Callable[..., Any]] = {
    "add": np.add, "sub": np.subtract, "mul": np.multiply, "max": np.maximum, "min": np.minimum, "neg": np.negative,
    "div": np.divide, "abs": np.abs, "sqrt": np.sqrt, "exp": np.exp, "log": np.log,
    "eq": np.equal, "ne": np.not_equal, "lt": np.less, "le": np.less_equal, "gt": np.greater, "ge": np.greater_equal,
}  # fmt: skip


def _folded(name: str, inputs: Sequence[Atom]) -> Number | None:
    if name not in _FOLDED:
        return None
    values = [np.dtype(x.dtype).type(x.value) for x in inputs if isinstance(x, Number)]
    with np.errstate(all="ignore"):
        found = _FOLDED[name](*values)
    dtype = "bool" if name in _BOOLEAN else str(found.dtype)
    return Number(float(found), dtype)


def pruned(program: Program) -> Program:
    """Returns the program without inputs and equations that no result needs."""
    waiting = [x for x in program.written if isinstance(x, int)]
    needed: set[int] = set()
    while waiting:
        if (value := waiting.pop()) not in needed:
            needed.add(value)
            equation = program.equation(value)
            waiting += [x for x in (equation.inputs if equation else ()) if isinstance(x, int)]
    return renumbered(program, sorted(needed), program.operands, program.results)


def renumbered(
    program: Program, kept: Sequence[int], operands: Sequence[Operand], results: Sequence[Result]
) -> Program:
    """Returns a program of the `kept` values, inputs first, with other operands and these results."""
    place = {value: number for number, value in enumerate(kept)}

    def moved(atoms: Iterable[Atom]) -> tuple[Atom, ...]:
        return tuple(x if isinstance(x, Number) else place[x] for x in atoms)

    equations = [equation for x in kept if (equation := program.equation(x)) is not None]
    return Program(
        program.columns,
        tuple(operands),
        tuple(program.inputs[x] for x in kept if x < len(program.inputs)),
        tuple(dataclasses.replace(e, inputs=moved(e.inputs)) for e in equations),
        tuple(dataclasses.replace(r, values=moved(r.values)) for r in results),
    )


# ------------------------------------------------------------------------------
# From the jaxpr of a function of one row to equations.


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


def trace(
    function: Callable[..., Any],
    shapes: Sequence[jax.ShapeDtypeStruct],
    kinds: Sequence[str],
    summed: Callable[[int], bool] = lambda result: False,
    *,
    hoists: bool = True,
) -> tuple[Program, int]:
    """Returns the program of a function of one row, and the segments of a row that it takes as rows of their own.

    Args:
      function: takes an array per operand, without the axis of rows; returns an array or a tuple of arrays.
      shapes: of these arrays.
      kinds: as in `Operand`, for each array.
      summed: whether the result of this index is a sum over rows.
      hoists: take scalars out of sums (`Builder`).

    Raises:
      NoProgram: kernels on rows do not compute this.
      Exception: whatever the function raises.
    """
    for shape in shapes:
        _require_narrow(shape.dtype)
    jaxpr = jax.make_jaxpr(lambda *args: jax.tree.leaves(function(*args)))(*shapes)
    traced = graph(jaxpr.jaxpr, _constants(jaxpr))
    nodes = list(traced.nodes)
    segments = _segments(nodes, shapes, kinds)
    if segments is not None:
        try:
            return _Reader(shapes, kinds, segments, 0, hoists).program(traced, nodes, summed), segments[0]
        except NoProgram:
            pass
    columns = _columns(nodes, shapes, kinds)
    return _Reader(shapes, kinds, None, columns, hoists).program(traced, nodes, summed), 1


def _constants(jaxpr: Any) -> dict[Any, Value]:
    return {
        var: Value(np.shape(x), np.asarray(x).dtype, literal=x)
        for var, x in zip(jaxpr.jaxpr.constvars, jaxpr.consts, strict=True)
    }


def _require_narrow(dtype: Any) -> None:
    if jnp.issubdtype(dtype, jax.dtypes.extended):
        raise NoProgram(f"has {dtype} arrays, as random bits do")
    if jnp.issubdtype(dtype, jnp.complexfloating) or jnp.dtype(dtype).itemsize > 4 or dtype == jnp.uint32:
        raise NoProgram(f"has {dtype} arrays: kernels on rows compute in float32 and int32")


def _columns(nodes: Sequence[Node], shapes: Sequence[jax.ShapeDtypeStruct], kinds: Sequence[str]) -> int:
    """Returns the length of the parts into which slices and concatenations divide rows."""
    lengths = [s.shape[-1] for s, kind in zip(shapes, kinds, strict=True) if kind in ("row", "shared") and s.shape]
    if not lengths:
        raise NoProgram("has no row to compute")
    for node in nodes:
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


def _segments(
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


_SAME = {
    "add": "add", "add_any": "add", "sub": "sub", "mul": "mul", "max": "max", "min": "min", "neg": "neg",
    "abs": "abs", "sign": "sign", "exp": "exp", "exp2": "exp2", "log": "log", "log1p": "log1p", "expm1": "expm1",
    "tanh": "tanh", "logistic": "logistic", "erf": "erf", "sqrt": "sqrt", "rsqrt": "rsqrt", "floor": "floor",
    "ceil": "ceil", "eq": "eq", "ne": "ne", "lt": "lt", "le": "le", "gt": "gt", "ge": "ge", "and": "and", "or": "or",
    "xor": "xor", "shift_left": "shift_left", "shift_right_arithmetic": "shift_right_arithmetic",
    "shift_right_logical": "shift_right_logical",
}  # fmt: skip
_COPIES = frozenset({"copy", "copy_p", "stop_gradient", "optimization_barrier", "name", "pvary", "reshard", "pcast"})


class _Reader:
    """Translates the equations of one jaxpr."""

    def __init__(
        self,
        shapes: Sequence[jax.ShapeDtypeStruct],
        kinds: Sequence[str],
        segments: tuple[int, int] | None,
        columns: int,
        hoists: bool,
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
        self.make = Builder(self.columns, operands, hoists=hoists)
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
            self.arrays[value] = Array(_objects(parts, shape), vector, mapped)
        for node in nodes:
            self._read(node)
        results = [self._result(value, summed(number)) for number, value in enumerate(traced.results)]
        return self.make.program(results)

    def _result(self, value: Value, summed: bool) -> Result:
        found = self._array(value)
        atoms = tuple(found.blocks.reshape(-1).tolist())
        dtype = str(value.dtype)
        _require_narrow(value.dtype)
        if not found.vector:
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
            number = np.asarray(value.literal)
            if number.size != 1:
                if number.size and (number == number.flat[0]).all():
                    return self._full(_number(number.flat[0]), value.shape)
                raise NoProgram(f"captures an array of shape {number.shape}: pass the array as an argument")
            return Array(_objects([_number(number.reshape(()))], value.shape), vector=False)
        return self.arrays[value]

    def _full(self, atom: Atom, shape: tuple[int, ...]) -> Array:
        """Returns an array of equal elements."""
        if self.segments is not None:
            vector = shape != () and shape[-1] in (self.columns, math.prod(self.segments))
            return Array(_objects([atom], (1,)), vector, mapped=shape != () and math.prod(shape) > self.columns)
        vector = shape != () and shape[-1] >= self.columns and shape[-1] % self.columns == 0
        blocks = (*shape[:-1], shape[-1] // self.columns) if vector else shape
        return Array(_objects([atom] * math.prod(blocks), blocks), vector)

    def _read(self, node: Node) -> None:
        for result in node.results:
            if getattr(result.dtype, "itemsize", 0) > 4 and not _unused(result):
                _require_narrow(result.dtype)
        if node.name in _COPIES:
            for result, value in zip(node.results, node.inputs, strict=True):
                self.arrays[result] = self._array(value)
            return
        if node.name == "split":
            self._split(node)
            return
        method = getattr(self, f"_{node.name}", None)
        if node.name in _SAME or node.name in ("div", "rem"):
            found = self._elementwise(node, self._named(node))
        elif method is None:
            raise NoProgram(f"uses {node.name}, which kernels on rows do not compute")
        else:
            found = method(node)
        self.arrays[node.results[0]] = found

    def _named(self, node: Node) -> str:
        floating = jnp.issubdtype(node.inputs[0].dtype, jnp.floating)
        if node.name == "div":
            return "div" if floating else "int_div"
        if node.name == "rem" and floating:
            raise NoProgram("uses the remainder of floating-point numbers")
        if node.name == "sign" and not floating:
            raise NoProgram("uses the sign of integers")
        return _SAME.get(node.name, node.name)

    def _elementwise(self, node: Node, name: str) -> Array:
        arrays = [self._array(x) for x in node.inputs]
        if any(x.summed for x in arrays):
            return self._of_sums(name, arrays)
        return self._map(lambda *atoms: self.make.emit(name, *atoms), *map(self._array, node.inputs))

    def _of_sums(self, name: str, arrays: Sequence[Array]) -> Array:
        """Returns a linear function of sums over segments as the sum of that function of each segment."""
        numbers = [x for x in arrays if not x.summed and isinstance(x.blocks.reshape(-1)[0], Number)]
        linear = name in ("add", "sub", "neg") if not numbers else name == "mul" or (name == "div" and arrays[0].summed)
        if not linear or any(not x.summed for x in arrays if x not in numbers):
            raise NoProgram("computes with a sum over segments")
        atoms = [x.blocks.reshape(-1)[0] for x in arrays]
        return Array(_objects([self.make.emit(name, *atoms)], (1,)), vector=True, summed=True)

    def _map(self, emit: Callable[..., Atom], *arrays: Array) -> Array:
        """Applies an equation to arrays of the same shape, or scalars."""
        if any(x.summed for x in arrays):
            raise NoProgram("computes with a sum over segments")
        shaped = [x for x in arrays if x.blocks.size > 1 or x.vector or x.mapped]
        vector = any(x.vector for x in shaped)
        if any(x.vector != vector and x.blocks.size > 1 for x in shaped):
            raise NoProgram("joins rows with elements per row")
        return Array(
            np.asarray(np.frompyfunc(emit, len(arrays), 1)(*_broadcast([x.blocks for x in arrays])), object),
            vector,
            any(x.mapped for x in arrays),
        )

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
        return self._map(lambda x: self.make.convert(x, "float32", known[bits]), self._array(node.inputs[0]))

    # ------------------------------------------------------------------------------
    # Shapes.

    def _reshape(self, node: Node) -> Array:
        x, shape = self._array(node.inputs[0]), node.results[0].shape
        if self.segments is not None:
            if x.summed and shape[-1:] != (self.columns,):
                _no_shape(node)
            if x.mapped:
                sizes = ((math.prod(self.segments),), self.segments) if x.vector else ((self.segments[0],),)
                allowed = (*sizes, *(() if x.vector else ((self.segments[0], 1),)))
                if shape not in allowed:
                    _no_shape(node)
                return x
            return x
        if not x.vector:
            return Array(x.blocks.reshape(shape), vector=False)
        if not shape or shape[-1] % self.columns:
            _no_shape(node)
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
        if x.vector and (not axes or axes[-1] != len(shape) - 1):
            _no_shape(node)
        wide = not x.vector and shape[-1] >= self.columns and shape[-1] % self.columns == 0
        if wide and axes and axes[-1] == len(shape) - 1 and before[-1] != 1:
            _no_shape(node)
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
        _no_shape(node)

    def _slice(self, node: Node) -> Array:
        x, params = self._array(node.inputs[0]), node.params
        if self.segments is not None or set(params["strides"] or (1,)) != {1}:
            _no_shape(node)
        where = []
        for axis, (start, limit) in enumerate(zip(params["start_indices"], params["limit_indices"], strict=True)):
            unit = self.columns if x.vector and axis == x.blocks.ndim - 1 else 1
            if start % unit or limit % unit:
                _no_shape(node)
            where.append(slice(start // unit, limit // unit))
        return Array(x.blocks[tuple(where)], x.vector)

    def _split(self, node: Node) -> None:
        x, axis = self._array(node.inputs[0]), node.params["axis"]
        unit = self.columns if x.vector and axis == x.blocks.ndim - 1 else 1
        if self.segments is not None or any(size % unit for size in node.params["sizes"]):
            _no_shape(node)
        ends = np.cumsum([size // unit for size in node.params["sizes"]])[:-1].tolist()
        for result, part in zip(node.results, np.split(x.blocks, ends, axis=axis), strict=True):
            self.arrays[result] = Array(part, x.vector)

    def _concatenate(self, node: Node) -> Array:
        arrays, axis = [self._array(x) for x in node.inputs], node.params["dimension"]
        if self.segments is not None or len({x.vector for x in arrays}) != 1:
            _no_shape(node)
        return Array(np.concatenate([x.blocks for x in arrays], axis=axis), arrays[0].vector)

    def _pad(self, node: Node) -> Array:
        x, value = map(self._array, node.inputs)
        widths = []
        for axis, (low, high, interior) in enumerate(node.params["padding_config"]):
            unit = self.columns if x.vector and axis == x.blocks.ndim - 1 else 1
            if self.segments is not None or interior or low < 0 or high < 0 or low % unit or high % unit:
                _no_shape(node)
            widths.append((low // unit, high // unit))
        atom = value.blocks.reshape(-1)[0]
        padded = np.full([low + n + high for n, (low, high) in zip(x.blocks.shape, widths, strict=True)], None, object)
        for place in np.ndindex(padded.shape):
            padded[place] = atom
        padded[tuple(slice(low, low + n) for n, (low, _) in zip(x.blocks.shape, widths, strict=True))] = x.blocks
        return Array(padded, x.vector)

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
                _no_shape(node)
            return Array(_objects([self.make.reduce(name, x.blocks.reshape(-1)[0])], (1,)), vector=False, mapped=True)
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
        if x.blocks.size != 1 or not x.vector or x.summed or self.columns > 2**24:
            _no_shape(node)
        if self.segments is not None and not (x.mapped and node.params["axes"] == (1,)):
            _no_shape(node)
        atom = x.blocks.reshape(-1)[0]
        extreme = make.reduce(name, atom)
        is_it = make.emit("or", make.emit("eq", atom, extreme), make.emit("ne", atom, atom))
        column = make.emit("to_float", make.emit("index", dtype="int32"), dtype="float32")
        first = make.reduce("reduce_min", make.emit("where", is_it, column, Number(float(self.columns))))
        shape = () if self.segments is None else (1,)
        return Array(_objects([make.convert(first, "float32", "int32")], shape), vector=False, mapped=x.mapped)

    def _iota(self, node: Node) -> Array:
        shape, axis = node.params["shape"], node.params["dimension"]
        if self.segments is not None and shape in (self.segments, (self.columns,)) and axis == len(shape) - 1:
            return Array(_objects([self._column(0, node.params["dtype"])], (1,)), vector=True, mapped=len(shape) == 2)
        if self.segments is not None or axis != len(shape) - 1 or shape[-1] % self.columns:
            _no_shape(node)
        parts = [self._column(part, node.params["dtype"]) for part in range(shape[-1] // self.columns)]
        blocks = np.broadcast_to(_objects(parts, (len(parts),)), (*shape[:-1], len(parts)))
        return Array(blocks, vector=True)

    def _column(self, part: int, dtype: Any = np.int32) -> Atom:
        column = self.make.emit("index", dtype="int32")
        if part:
            column = self.make.emit("add", column, Number(float(part * self.columns), "int32"))
        return self.make.convert(column, "int32", dtype)

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
            _no_shape(node)
        parts = self._chosen(x, index, lambda _: Number(0.0))
        total = functools.reduce(lambda a, b: self.make.emit("add", a, b), parts)
        return Array(_objects([self.make.reduce("reduce_sum", total)], node.results[0].shape), vector=False)

    def _clamped_index(self, index: Atom, length: int) -> Atom:
        low = self.make.emit("max", index, Number(0.0, "int32"))
        return self.make.emit("min", low, Number(float(length - 1), "int32"))

    def _dynamic_slice(self, node: Node) -> Array:
        x, index = self._array(node.inputs[0]), self._array(node.inputs[1]).blocks.reshape(-1)[0]
        if node.params["slice_sizes"] != (1,):
            _no_shape(node)
        return self._element(node, x, self._clamped_index(index, node.inputs[0].shape[0]))

    def _gather(self, node: Node) -> Array:
        x, indices = map(self._array, node.inputs)
        length = node.inputs[0].shape
        if len(length) != 1 or node.params["slice_sizes"] != (1,) or indices.blocks.size != 1 or indices.vector:
            _no_shape(node)
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
            _no_shape(node)
        if self.segments is not None or not x.vector:
            _no_shape(node)
        index, update = indices.blocks.reshape(-1)[0], updates.blocks.reshape(-1)[0]
        parts = []
        for part, atom in enumerate(x.blocks.reshape(-1).tolist()):
            here = self.make.emit("eq", self._column(part), index)
            zero = Number(0.0, self.make.dtype(update))
            parts.append(self.make.emit("add", atom, self.make.emit("where", here, update, zero)))
        return Array(_objects(parts, x.blocks.shape), vector=True)

    def _dynamic_update_slice(self, node: Node) -> Array:
        x, update, index = (self._array(each) for each in node.inputs[:3])
        if len(node.inputs[0].shape) != 1 or update.blocks.size != 1 or update.vector or not x.vector:
            _no_shape(node)
        at = self._clamped_index(index.blocks.reshape(-1)[0], node.inputs[0].shape[0])
        value = update.blocks.reshape(-1)[0]
        parts = []
        for part, atom in enumerate(x.blocks.reshape(-1).tolist()):
            parts.append(self.make.emit("where", self.make.emit("eq", self._column(part), at), value, atom))
        return Array(_objects(parts, x.blocks.shape), vector=True)


def _no_shape(node: Node) -> NoReturn:
    shapes = " and ".join(str(x.shape) for x in node.inputs)
    raise NoProgram(f"uses {node.name} of {shapes} to {node.results[0].shape}, which kernels on rows do not compute")


def _unused(value: Value) -> bool:
    return value.node is not None and not value.node.users


def _objects(atoms: Sequence[Atom], shape: Any) -> Any:
    made = np.empty(len(atoms), object)
    for place, atom in enumerate(atoms):
        made[place] = atom
    return made.reshape(shape)


def _broadcast(blocks: Sequence[Any]) -> Sequence[Any]:
    """Gives arrays of one element the shape of the others."""
    shape = max((x.shape for x in blocks), key=lambda shape: (math.prod(shape), len(shape)))
    return [x if x.shape == shape else np.broadcast_to(x.reshape(-1) if x.size == 1 else x, shape) for x in blocks]


def _number(x: Any) -> Number:
    value = np.asarray(x)
    if value.dtype == np.bool_:
        return Number(float(value), "bool")
    return Number(float(value), within(str(value.dtype)))


def rebuilt(program: Program, *, distributes: bool = False) -> Program:
    """Returns the program with its equations simplified again, as those of a new builder."""
    make = Builder(program.columns, program.operands, distributes=distributes)
    moved: dict[int, Atom] = {x: make.read(*dataclasses.astuple(read)) for x, read in enumerate(program.inputs)}

    def at(atom: Atom) -> Atom:
        return atom if isinstance(atom, Number) else moved[atom]

    for value, equation in enumerate(program.equations, len(program.inputs)):
        inputs = tuple(map(at, equation.inputs))
        if equation.name in REDUCTIONS:
            moved[value] = make.reduce(equation.name, inputs[0])
        else:
            moved[value] = make.emit(equation.name, *inputs, params=equation.params, dtype=equation.dtype)
    return make.program([dataclasses.replace(r, values=tuple(map(at, r.values))) for r in program.results])


# ------------------------------------------------------------------------------
# A program for rows that are read in chunks: sums of exponentials need no pass of their own.


def online(program: Program) -> Program:
    """Returns the program with each sum of exponentials relative to the row's maximum computed along with that maximum.

    For any shift c, sum(exp(x - c)) = sum(exp(x - m)) * exp(m - c), where m is the clamped maximum.
    """
    make = Builder(program.columns, program.operands)
    for read in program.inputs:
        make.read(read.operand, read.part)
    moved: dict[int, Atom] = {x: x for x in range(len(program.inputs))}

    def at(atom: Atom) -> Atom:
        return atom if isinstance(atom, Number) else moved[atom]

    for value, equation in enumerate(program.equations, len(program.inputs)):
        inputs = tuple(map(at, equation.inputs))
        if equation.name == "reduce_sum" and (found := _exponent(make, inputs[0])) is not None:
            x, shift = found
            maximum = make.emit("reduce_max", x)
            top = make.emit("min", make.emit("max", maximum, Number(-_MOST)), Number(_MOST))
            total = make.emit("sum_exp", x)
            moved[value] = make.emit("mul", total, make.emit("exp", make.emit("sub", top, shift)))
        else:
            moved[value] = make._add(dataclasses.replace(equation, inputs=inputs))
    results = [dataclasses.replace(r, values=tuple(map(at, r.values))) for r in program.results]
    return make.program(results)


_MOST = float(np.finfo(np.float32).max)


def _exponent(make: Builder, atom: Atom) -> tuple[Atom, Atom] | None:
    """Returns x and c of exp(x - c) if c is a scalar of a later stage than x."""
    if (power := make.made_by(atom, "exp")) is None or (less := make.made_by(power.inputs[0], "sub")) is None:
        return None
    x, shift = less.inputs
    if not make.is_vector(x) or make.is_vector(shift) or make.level(shift) <= make.level(x):
        return None
    return x, shift
