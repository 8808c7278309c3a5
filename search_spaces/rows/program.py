"""Row programs: the equations of a function of one row, on vectors of `columns` elements and on scalars per row.

`builder.trace` derives a program from a function. A kernel computes it in *stages*: a stage reads the row, computes
elements, and reduces them to scalars, which later stages read. The last stage computes the results. Floating-point
numbers are float32 within a program; the equation "round" rounds to a narrower type where the function does.
"""

from __future__ import annotations

import dataclasses
import functools
import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np

from search_spaces.rows.elementwise import COSTS, ELEMENTWISE, OF_XLA, REDUCTIONS, clamped, narrow


@dataclasses.dataclass(frozen=True, eq=False)
class Number:
    """A literal operand of an equation; `dtype` is "float32", "int32" or "bool". NaN equals NaN, and 0 is not -0."""

    value: float
    dtype: str = "float32"

    @property
    def _key(self) -> tuple[str, str]:
        return repr(float(self.value)), self.dtype

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Number) and self._key == other._key

    def __hash__(self) -> int:
        return hash(self._key)


# The index of a value of the program, or a literal.
Atom = int | Number


Kind = Literal["row", "shared", "scalar", "number", "row sum"]


@dataclasses.dataclass(frozen=True)
class Operand:
    """An array that a program reads.

    Attributes:
      kind: "row" is ``[rows, parts * columns]``, "shared" ``[parts * columns]`` for all rows, "scalar" ``[rows]`` with
        one element per row, and "number" ``[]``.
      parts: number of vectors of `columns` elements in a row.
    """

    kind: Kind
    dtype: str
    parts: int = 1

    def of_one_row(self, columns: int) -> jax.ShapeDtypeStruct:
        """Returns what the function of one row takes."""
        shape = (self.parts * columns,) if self.kind in ("row", "shared") else ()
        return jax.ShapeDtypeStruct(shape, jnp.dtype(self.dtype))


@dataclasses.dataclass(frozen=True)
class Input:
    """A value that is read from memory: a part of an operand."""

    operand: int
    part: int = 0


@dataclasses.dataclass(frozen=True)
class Equation:
    """One step of a program.

    Attributes:
      name: a key of `ELEMENTWISE` or `REDUCTIONS`, or "index", the column of each element.
      vector: whether the result has one element per column; otherwise, the result is a scalar per row.
      dtype: "float32", "int32" or "bool".
      params: further arguments.
    """

    name: str
    inputs: tuple[Atom, ...]
    vector: bool
    dtype: str
    params: tuple[Any, ...] = ()


@dataclasses.dataclass(frozen=True)
class Result:
    """An array that a program computes.

    Attributes:
      kind: "row" or "scalar", as for operands; "row sum" is float32 ``[parts * columns]``, summed over all rows.
      values: the value of each part; a scalar in place of a vector is broadcast.
    """

    kind: Literal["row", "scalar", "row sum"]
    dtype: str
    values: tuple[Atom, ...]


class Equations:
    """Values of a program, numbered: first `inputs`, then the results of `equations`, each after its inputs."""

    columns: int
    operands: tuple[Operand, ...]
    inputs: Sequence[Input]
    equations: Sequence[Equation]

    def vector(self, atom: Atom) -> bool:
        """Returns whether a value has one element per column."""
        if isinstance(atom, Number):
            return False
        if atom < len(self.inputs):
            return self.source(atom).kind in ("row", "shared")
        return self.equations[atom - len(self.inputs)].vector

    def source(self, value: int) -> Operand:
        """Returns the operand of an input."""
        return self.operands[self.inputs[value].operand]

    def inputs_of(self, kind: Kind) -> tuple[int, ...]:
        """Returns the inputs that are of operands of this kind."""
        return tuple(x for x in range(len(self.inputs)) if self.source(x).kind == kind)

    def equation(self, atom: Atom) -> Equation | None:
        """Returns the equation that computes a value; None for inputs and numbers."""
        if isinstance(atom, Number) or atom < len(self.inputs):
            return None
        return self.equations[atom - len(self.inputs)]

    def dtype(self, atom: Atom) -> str:
        """Returns the dtype of a value within the program."""
        if isinstance(atom, Number):
            return atom.dtype
        equation = self.equation(atom)
        return within(self.source(atom).dtype) if equation is None else equation.dtype


@dataclasses.dataclass(frozen=True)
class Program(Equations):
    """A function of one row."""

    columns: int
    operands: tuple[Operand, ...]
    inputs: tuple[Input, ...]
    equations: tuple[Equation, ...]
    results: tuple[Result, ...]

    def text(self) -> str:
        """Returns the program as one line of JSON, the inverse of `parse`."""

        def atom(x: Atom) -> Any:
            return x if isinstance(x, int) else [repr(x.value), x.dtype]

        def fields(x: Any) -> list[Any]:
            return list(dataclasses.astuple(x))

        said = {
            "columns": self.columns,
            "operands": [fields(x) for x in self.operands],
            "inputs": [fields(x) for x in self.inputs],
            "equations": [
                [e.name, [atom(x) for x in e.inputs], int(e.vector), e.dtype, *([list(e.params)] if e.params else [])]
                for e in self.equations
            ],
            "results": [[r.kind, r.dtype, [atom(x) for x in r.values]] for r in self.results],
        }
        return json.dumps(said, separators=(",", ":"))

    # ------------------------------------------------------------------------------
    # Facts derived from the equations.

    @functools.cached_property
    def levels(self) -> tuple[int, ...]:
        """For each value, the number of reductions on the longest path to it."""
        found = [0] * len(self.inputs)
        for equation in self.equations:
            below = max((found[x] for x in equation.inputs if isinstance(x, int)), default=0)
            found.append(below + (equation.name in REDUCTIONS))
        return tuple(found)

    @functools.cached_property
    def stages(self) -> tuple[tuple[int, ...], ...]:
        """The reductions of each stage but the last, which has none."""
        reductions = [i for i in self._computed() if self.equation(i).name in REDUCTIONS]  # type: ignore[union-attr]
        depth = max((self.levels[i] for i in reductions), default=0)
        return tuple(tuple(i for i in reductions if self.levels[i] == level + 1) for level in range(depth))

    def _computed(self) -> range:
        return range(len(self.inputs), len(self.inputs) + len(self.equations))

    @functools.cached_property
    def written(self) -> tuple[Atom, ...]:
        """The values of all results."""
        return tuple(x for result in self.results for x in result.values)

    def needed(self, atoms: Sequence[Atom], known: Sequence[int] = ()) -> set[int]:
        """Returns the vectors to compute or to read for these values, given all scalars and some known vectors."""
        found: set[int] = set()
        waiting = [x for x in atoms if isinstance(x, int) and self.vector(x)]
        while waiting:
            if (value := waiting.pop()) in found:
                continue
            found.add(value)
            equation = None if value in known else self.equation(value)
            waiting += [x for x in (equation.inputs if equation else ()) if isinstance(x, int) and self.vector(x)]
        return found

    @functools.cached_property
    def reads(self) -> tuple[frozenset[int], ...]:
        """The inputs with one element per column that each stage reads; those of the last stage come last."""
        wanted = [[self.equation(i).inputs[0] for i in stage] for stage in self.stages]  # type: ignore[union-attr]
        return tuple(
            frozenset(x for x in self.needed(atoms) if x < len(self.inputs)) for atoms in (*wanted, list(self.written))
        )

    @property
    def sums_rows(self) -> bool:
        """Whether a result is a sum over all rows."""
        return any(result.kind == "row sum" for result in self.results)

    @property
    def has_parts(self) -> bool:
        """Whether a row of an operand or of a result has several parts."""
        return any(x.parts > 1 for x in self.operands) or any(len(x.values) > 1 for x in self.results)

    def costs(self, *, again: bool) -> tuple[float, float]:
        """Returns instructions per element: FP32 operations, and operations of the special function units.

        Args:
          again: whether each stage computes its vectors again, from the inputs.
        """
        wanted = [[self.equation(i).inputs[0] for i in stage] for stage in self.stages]  # type: ignore[union-attr]
        each = [self.needed(atoms) for atoms in (*wanted, list(self.written))]
        if not again:
            each = [set().union(*each)]
        plain = float(sum(map(len, self.stages)))
        special = 0.0
        for values in each:
            names = [equation.name for x in values if (equation := self.equation(x)) is not None]
            plain += sum(COSTS.get(name, (1, 0))[0] for name in names)
            special += sum(COSTS.get(name, (1, 0))[1] for name in names)
        for stage in self.stages:
            names = [self.equation(i).name for i in stage]  # type: ignore[union-attr]
            plain += 4 * names.count("sum_exp") + 5 * names.count("centred_squares")
            special += 1.25 * names.count("sum_exp")
        conversions = sum(x < len(self.inputs) for x in each[-1]) + len(self.written)
        return plain + conversions, special

    @property
    def flops(self) -> float:
        """Floating-point operations per element."""
        return float(sum(e.vector or e.name in REDUCTIONS for e in self.equations if e.name not in ("index", "round")))


def parse(text: str) -> Program:
    """Returns the program of a `Program.text`.

    Raises:
      ValueError: the text is no program.
    """
    try:
        said = json.loads(text)

        def atom(x: Any) -> Atom:
            return int(x) if isinstance(x, int) else Number(float(x[0]), str(x[1]))

        equations = [
            Equation(str(name), tuple(map(atom, inputs)), bool(vector), str(dtype), tuple(rest[0]) if rest else ())
            for name, inputs, vector, dtype, *rest in said["equations"]
        ]
        program = Program(
            int(said["columns"]),
            tuple(Operand(kind, str(dtype), int(parts)) for kind, dtype, parts in said["operands"]),
            tuple(Input(int(operand), int(part)) for operand, part in said["inputs"]),
            tuple(equations),
            tuple(Result(kind, str(dtype), tuple(map(atom, values))) for kind, dtype, values in said["results"]),
        )
    except (ValueError, TypeError, KeyError, IndexError, AttributeError, RecursionError) as error:
        raise ValueError(f"{text[:60]!r} is no row program: {type(error).__name__}: {error}") from error
    _require_valid(program)
    return program


def _require_valid(program: Program) -> None:
    """Raises a ValueError if a program that was read from text could not be computed."""
    kinds = {"row", "shared", "scalar", "number"}
    if program.columns < 1 or any(x.kind not in kinds or x.parts < 1 for x in program.operands):
        raise ValueError("a row program has one column or more, and known operands")
    for dtype in [x.dtype for x in program.operands] + [x.dtype for x in program.results]:
        jnp.dtype(dtype)
    for number, read in enumerate(program.inputs):
        if not 0 <= read.operand < len(program.operands):
            raise ValueError(f"input {number} of a row program reads operand {read.operand}, which there is not")
        if not 0 <= read.part < program.operands[read.operand].parts:
            raise ValueError(f"input {number} of a row program reads part {read.part}, which there is not")
    for place, equation in enumerate(program.equations, len(program.inputs)):
        if equation.name not in {*ELEMENTWISE, *REDUCTIONS, "index"}:
            raise ValueError(f"a row program has an unknown equation {equation.name!r}")
        if any(isinstance(x, int) and not 0 <= x < place for x in equation.inputs):
            raise ValueError(f"value {place} of a row program reads one that is not computed before")
    last = len(program.inputs) + len(program.equations)
    if any(isinstance(x, int) and not 0 <= x < last for x in program.written):
        raise ValueError("a result of a row program is no value of it")


def within(dtype: str) -> str:
    """Returns the dtype in which a program computes with elements of `dtype`."""
    if jnp.issubdtype(dtype, jnp.floating):
        return "float32"
    return "bool" if dtype == "bool" else "int32"


class Values:
    """Values of a program for some elements of some rows, computed when they are asked for.

    Attributes:
      known: values by their number. Vectors and scalars have shapes that `broadcast` makes equal.
    """

    def __init__(
        self,
        program: Program,
        known: Mapping[int, jax.Array],
        load: Callable[[int], jax.Array],
        broadcast: Callable[[jax.Array], jax.Array],
    ) -> None:
        """Makes the values.

        Args:
          known: scalars.
          load: returns an input, or the "index", of these elements; called once for each.
          broadcast: broadcasts a scalar per row to the elements.
        """
        self.program, self.known, self.load, self.broadcast = program, dict(known), load, broadcast

    def __getitem__(self, atom: Atom) -> jax.Array | np.generic:
        """Returns a value: a vector, a scalar, or a number of NumPy."""
        if isinstance(atom, Number):
            return np.dtype(atom.dtype).type(atom.value)
        if atom not in self.known:
            equation = self.program.equation(atom)
            if equation is None or equation.name == "index":
                self.known[atom] = self.load(atom)
            else:
                self.known[atom] = compute(equation, [self.operand(x, equation) for x in equation.inputs])
        return self.known[atom]

    def operand(self, atom: Atom, equation: Equation) -> jax.Array | np.generic:
        """Returns an operand of an equation, broadcast if the result is a vector."""
        value = self[atom]
        alone = isinstance(atom, Number) or not equation.vector or self.program.vector(atom)
        return value if alone else self.broadcast(value)  # type: ignore[arg-type]

    def vector(self, atom: Atom) -> jax.Array:
        """Returns a value as a vector."""
        value = self[atom]
        if self.program.vector(atom):
            return value  # type: ignore[return-value]
        return self.broadcast(jnp.asarray(value))


def compute(equation: Equation, inputs: Sequence[Any]) -> jax.Array:
    """Returns the result of an elementwise equation in a kernel."""
    return ELEMENTWISE[equation.name](*inputs, *equation.params)


def narrowed(values: Values, atom: Atom, dtype: str) -> jax.Array:
    """Returns a value as a vector of the dtype of a result."""
    equation = values.program.equation(atom)
    if equation is not None and equation.name == "round" and equation.params[0] == dtype:
        rounded: jax.Array = narrow(values.operand(equation.inputs[0], equation), *equation.params)  # type: ignore[arg-type]
        return rounded if equation.vector else values.broadcast(rounded)
    return values.vector(atom).astype(dtype)


def scalar_equations(program: Program, level: int) -> Iterator[int]:
    """Yields the scalars of this level, in order, that are no reductions."""
    for value in range(len(program.inputs), len(program.inputs) + len(program.equations)):
        equation = program.equation(value)
        if equation and not equation.vector and equation.name not in REDUCTIONS and program.levels[value] == level:
            yield value


def evaluate(
    program: Program, *arrays: jax.Array, rounded: bool = True, counted: jax.Array | None = None, axis: int = -1
) -> tuple[jax.Array, ...]:
    """Computes all rows at once, in float32 or in float64 if an operand is float64.

    Args:
      rounded: round floating-point results to their dtypes; else they keep the dtype of the computation.
      counted: for each row, whether sums over rows include it; None includes all. The columns are then the last axis.
      axis: the axis of the columns in arrays of rows, negative. Elements per row have the other axes.
    """
    wide = any(x.dtype == jnp.float64 for x in arrays)
    real = jnp.float64 if wide else jnp.float32
    of_rows = [
        jnp.expand_dims(x, axis) if o.kind == "scalar" else x
        for x, o in zip(arrays, program.operands, strict=True)
        if o.kind in ("row", "scalar")
    ]
    whole = list(of_rows[0].shape) if of_rows else [1, 1]
    whole[axis] = program.columns
    known: dict[int, Any] = {}

    def convert(x: jax.Array) -> jax.Array:
        return x.astype(real) if within(str(x.dtype)) == "float32" else x.astype(within(str(x.dtype)))

    def shared(vector: jax.Array) -> jax.Array:
        return vector.reshape(-1, *(1,) * (-1 - axis))

    for number, read in enumerate(program.inputs):
        operand, array = program.operands[read.operand], arrays[read.operand]
        part = slice(read.part * program.columns, (read.part + 1) * program.columns)
        if operand.kind == "row":
            array = array[(..., part, *(slice(None),) * (-1 - axis))]
        elif operand.kind == "shared":
            array = shared(array[part])
        known[number] = convert(jnp.expand_dims(array, axis) if operand.kind == "scalar" else array)
    for value, equation in enumerate(program.equations, len(program.inputs)):
        inputs = [np.dtype(x.dtype).type(x.value) if isinstance(x, Number) else known[x] for x in equation.inputs]
        if equation.name == "index":
            known[value] = shared(jnp.arange(program.columns, dtype=jnp.int32))
            continue
        if equation.name in REDUCTIONS:
            known[value] = _reduce(equation.name, jnp.broadcast_to(inputs[0], whole), axis)
            continue
        shape = jnp.broadcast_shapes(*map(jnp.shape, inputs))  # operations of `jax.lax` need equal shapes
        inputs = [jnp.broadcast_to(x, shape) if jnp.ndim(x) else x for x in inputs]
        if equation.name in OF_XLA:
            known[value] = OF_XLA[equation.name](*inputs, *equation.params)
        else:
            known[value] = compute(equation, inputs)

    def finish(result: Result) -> jax.Array:
        floating = jnp.issubdtype(result.dtype, jnp.floating)
        dtype = jnp.dtype(real) if floating and (wide or not rounded) else jnp.dtype(result.dtype)
        shape = list(whole)
        shape[axis] = 1 if result.kind == "scalar" else program.columns
        # Without the rounding to the dtype of the result, and with any other that the function makes.
        atoms = result.values if rounded else [before_rounding(program, x, result.dtype) for x in result.values]
        values = [x.value if isinstance(x, Number) else known[x] for x in atoms]
        parts = [jnp.broadcast_to(jnp.asarray(x), shape) for x in values]
        if result.kind == "scalar":
            return jnp.squeeze(parts[0], axis).astype(dtype)
        joined = parts[0] if len(parts) == 1 else jnp.concatenate(parts, axis=axis)
        if result.kind == "row sum" and counted is not None:
            joined = jnp.where(counted[:, None], joined, 0)
        others = tuple(i for i in range(joined.ndim) if i != joined.ndim + axis)
        return (jnp.sum(joined, axis=others) if result.kind == "row sum" else joined).astype(dtype)

    return tuple(map(finish, program.results))


def before_rounding(program: Program, atom: Atom, dtype: str) -> Atom:
    """Returns the value that this one is after rounding to a dtype; the value itself if it is not so rounded."""
    equation = program.equation(atom)
    rounded = equation is not None and equation.name == "round" and equation.params[0] == dtype
    return equation.inputs[0] if equation is not None and rounded else atom


def _reduce(name: str, x: jax.Array, axis: int) -> jax.Array:
    if name == "sum_exp":
        return jnp.sum(jnp.exp(x - clamped(jnp.max(x, axis=axis, keepdims=True))), axis=axis, keepdims=True)
    if name == "centred_squares":
        return jnp.sum(jnp.square(x - jnp.mean(x, axis=axis, keepdims=True)), axis=axis, keepdims=True)
    if x.shape[axis] == 1 and name in ("reduce_sum", "reduce_max", "reduce_min"):
        return x  # linear, as `jax.linear_transpose` needs it
    return REDUCTIONS[name].along(x, axis=axis, keepdims=True)
