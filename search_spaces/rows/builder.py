"""Builds row programs: equations without repetition, and simplifications that change no result.

A simplification is allowed only if it is exact for every float (NaN, infinities, signed zeros, overflow, underflow), or
if a proof of why it is harmless stands beside it. All others keep the form that the user wrote. The reference is
`jax.jit` of the user's function, so a rewrite that XLA makes of every program is harmless, too.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import jax.numpy as jnp
import numpy as np

from search_spaces.rows.elementwise import REDUCTIONS
from search_spaces.rows.program import Atom, Equation, Equations, Input, Number, Operand, Program, Result, within


class NoProgram(Exception):
    """A function of a row that no kernel computes; the message has the reason."""


_BOOLEAN = frozenset({"eq", "ne", "lt", "le", "gt", "ge", "is_nonzero"})


class Builder(Equations):
    """Equations of a program, each distinct one once, simplified as the module allows."""

    def __init__(self, columns: int, operands: Sequence[Operand], *, distributes: bool = False) -> None:
        """Makes a builder.

        Args:
          distributes: sum terms separately, and without their scalar factors, if that saves a stage. This may overflow,
            and large terms that cancel lose digits: the caller proves that neither occurs.
        """
        self.columns, self.operands, self.distributes = columns, tuple(operands), distributes
        self.inputs: list[Input] = []
        self.equations: list[Equation] = []
        self.known: dict[Any, int] = {}
        self._of_rows: dict[int, bool] = {}
        self._levels: dict[Equation, int] = {}

    def program(self, results: Sequence[Result]) -> Program:
        """Returns the program of the equations that the results need; operands that it does not read stay."""
        whole = Program(self.columns, self.operands, tuple(self.inputs), tuple(self.equations), tuple(results))
        return pruned(whole)

    def read(self, operand: int, part: int = 0) -> int:
        """Returns a part of an operand as a value. All inputs must be read before the first equation."""
        assert not self.equations, "inputs are numbered before equations"
        self.inputs.append(Input(operand, part))
        return len(self.inputs) - 1

    def of_rows(self, atom: Atom) -> bool:
        """Returns whether a value differs between rows."""
        if isinstance(atom, Number):
            return False
        if atom < len(self.inputs):
            return self.source(atom).kind != "shared"
        if atom not in self._of_rows:
            self._of_rows[atom] = any(map(self.of_rows, self.equations[atom - len(self.inputs)].inputs))
        return self._of_rows[atom]

    def made_by(self, atom: Atom, *names: str) -> Equation | None:
        """Returns the equation of a value if it has one of these names."""
        equation = self.equation(atom)
        return equation if equation is not None and equation.name in names else None

    def level(self, atom: Atom) -> int:
        """Returns the number of reductions on the longest path to a value."""
        if (equation := self.equation(atom)) is None:
            return 0
        if equation not in self._levels:
            below = max((self.level(x) for x in equation.inputs), default=0)
            self._levels[equation] = below + (equation.name in REDUCTIONS)
        return self._levels[equation]

    def emit(self, name: str, *inputs: Atom, params: tuple[Any, ...] = (), dtype: str = "") -> Atom:
        """Returns the value of an equation: one that is known, a simpler one, or a new one."""
        if (simpler := self._simplified(name, inputs)) is not None:
            return simpler
        if name in _BOOLEAN:
            dtype = "bool"
        elif not dtype:
            dtype = self.dtype(inputs[-1])
        vector = name == "index" or (name not in REDUCTIONS and any(map(self.vector, inputs)))
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
            # Exact but for -0 + 0, of which XLA's algebraic simplifier makes -0 in the user's program, too.
            case ("add", [a, b]) if a == 0 or b == 0:
                return inputs[1] if a == 0 else inputs[0]
            case ("sub", [_, b]) if b == 0:
                return inputs[0]
            case ("mul", [a, b]) if 1 in (a, b):  # exact
                return inputs[1] if a == 1 else inputs[0]
            # XLA's simplifier, too, makes A / constant, and A / broadcast(B), a product with the reciprocal.
            case ("div", [_, b]) if b is not None and b != 0 and math.isfinite(b):
                return self.emit("mul", inputs[0], Number(float(1 / np.float32(b))))
            case ("div", [None, None]) if self.columns > 1 and self.vector(inputs[0]) and not self.vector(inputs[1]):
                return self.emit("mul", inputs[0], self.emit("div", Number(1.0), inputs[1]))
            # XLA's simplifier, too, makes a product with a converted truth value of its shape a select, also of NaN.
            case ("mul", _) if (masked := self._masked(*inputs) or self._masked(*inputs[::-1])) is not None:
                return self.emit("where", *masked, Number(0.0))
            case ("max", [_, b]) if b == -math.inf:  # exact: a maximum with NaN is NaN
                return inputs[0]
            case ("min", [_, b]) if b == math.inf:
                return inputs[0]
            case ("neg", _) if (inner := self.made_by(inputs[0], "neg")) is not None:  # exact
                return inner.inputs[0]
            case ("shift_left" | "shift_right_logical", [_, b]) if b is not None and b >= 32:  # as `jax.lax` defines it
                return Number(0.0, "int32")
            case ("where", [p, _, _]) if p is not None:  # exact, as is the next
                return inputs[1] if p else inputs[2]
            case ("where", _) if inputs[1] == inputs[2]:
                return inputs[1]
            # Exact: IEEE 754 defines the signs of all zeros, and a maximum of 0 and -0 is 0 in either order.
            case ("mul" | "add" | "max" | "min" | "and" | "or" | "xor", _) if _later(*inputs):
                return self.emit(name, inputs[1], inputs[0])
        return None

    def _masked(self, x: Atom, mask: Atom) -> tuple[Atom, Atom] | None:
        """Returns a truth value and x if `mask` is that value as float32, and no broadcast to the shape of x."""
        made = self.made_by(mask, "bool_to_float")
        if made is None or self.vector(x) > made.vector or self.of_rows(x) > self.of_rows(mask):
            return None
        return made.inputs[0], x

    # ------------------------------------------------------------------------------
    # Reductions of a vector to a scalar per row.

    def reduce(self, name: str, atom: Atom) -> Atom:
        """Returns the reduction of a value along the row."""
        if not self.vector(atom):  # XLA's simplifier, too, makes a reduction of a broadcast a product
            return self.emit("mul", atom, Number(float(self.columns))) if name == "reduce_sum" else atom
        if self.columns == 1 and self.dtype(atom) == "float32":
            name = "reduce_max"  # exact: the element itself, also -0, as XLA has it; 0 + -0 is 0
        if name == "reduce_sum" and self.distributes and self.level(atom):
            # Only scalars of a later stage are worth taking out: the reductions then need no stage of their own.
            terms = [
                (sign, *(self._factors(x) if self.level(x) == self.level(atom) else ([], x)))
                for sign, x in self._terms(atom)
            ]
            if all(self.vector(rest) and self.level(rest) < self.level(atom) for _, _, rest in terms):
                sums: list[Atom] = []
                for sign, factors, rest in terms:
                    total = functools.reduce(lambda x, y: self.emit("mul", x, y), factors, self.reduce(name, rest))
                    sums.append(total if sign > 0 else self.emit("neg", total))
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

    def centred_in_square(self, atom: Atom) -> Atom | None:
        """Returns x of the square of x - mean(x)."""
        if (square := self.made_by(atom, "mul")) is None or square.inputs[0] != square.inputs[1]:
            return None
        if (less := self.made_by(square.inputs[0], "sub")) is None or (
            mean := self.made_by(less.inputs[1], "mul")
        ) is None:
            return None
        total, over = self.made_by(mean.inputs[0], "reduce_sum"), mean.inputs[1]
        is_mean = isinstance(over, Number) and over.value == float(np.float32(1) / np.float32(self.columns))
        return less.inputs[0] if is_mean and total is not None and total.inputs[0] == less.inputs[0] else None

    def _factors(self, atom: Atom) -> tuple[list[Atom], Atom]:
        """Returns the factors of a product that are scalars per row, and the product of the others."""
        if not self.vector(atom):
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
        if before == after or {before, after} == {"int32", "uint32"}:
            return atom
        if isinstance(atom, Number):
            return _number_converted(atom, before, after)
        if "uint32" in (before, after) and (
            jnp.issubdtype(before, jnp.floating) or jnp.issubdtype(after, jnp.floating)
        ):
            raise NoProgram(f"converts {before} to {after}: convert to int32 between")
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
            case ("bool", "float32") if after != "float32":
                return self.emit("where", atom, Number(1.0), Number(0.0))
            case ("bool", "float32"):
                return self.emit("bool_to_float", atom, dtype="float32")
            case ("bool", "int32"):
                return self.emit("bool_to_int", atom, dtype="int32")
        held = jnp.iinfo(before), jnp.iinfo(after)
        return atom if held[1].min <= held[0].min and held[0].max <= held[1].max else self.stored(atom, after)

    def stored(self, atom: Atom, dtype: Any) -> Atom:
        """Returns a result of arithmetic as `dtype` has it: integers wrap, and floats of 8 bits are rounded.

        Floats of 16 bits remain float32 until the function, or the end of the program, casts them.
        """
        if jnp.issubdtype(dtype, jnp.floating):
            return self.convert(atom, "float32", dtype) if jnp.finfo(dtype).bits <= 8 else atom
        if not jnp.issubdtype(dtype, jnp.integer) or (info := jnp.iinfo(dtype)).bits == 32:
            return atom
        if isinstance(atom, Number):
            return _number_converted(atom, "int32", dtype)
        if info.min == 0:
            return self.emit("and", atom, Number(float(info.max), "int32"))
        bits = Number(float(32 - info.bits), "int32")
        return self.emit("shift_right_arithmetic", self.emit("shift_left", atom, bits), bits)

    def _rounded(self, atom: Atom, dtype: str) -> Atom:
        return atom if dtype == "float32" else self.emit("round", atom, params=(dtype,))

    def _is_bounded(self, atom: Atom, most: float) -> bool:
        """Returns whether a value was clipped to at most `most` in magnitude."""
        ends: dict[str, float] = {}
        while (clipped := self.made_by(atom, "min", "max")) is not None and isinstance(clipped.inputs[1], Number):
            ends[clipped.name] = max(ends.get(clipped.name, 0.0), abs(clipped.inputs[1].value))
            atom = clipped.inputs[0]
        return len(ends) == 2 and max(ends.values()) <= most

    def _exact(self, atom: Atom) -> str:
        """Returns the narrow dtype that certainly holds a value; "" if there is none."""
        if isinstance(atom, int) and atom < len(self.inputs):
            return self.source(atom).dtype
        rounded = self.made_by(atom, "round")
        return str(rounded.params[0]) if rounded else ""


def _number_converted(atom: Number, before: Any, after: Any) -> Number:
    """Returns a number converted as XLA converts arrays: floats become the nearest integers that there are, NaN 0."""
    value: Any = atom.value
    if jnp.issubdtype(after, jnp.integer):
        info = jnp.iinfo(after)
        if jnp.issubdtype(before, jnp.floating):
            value = 0 if math.isnan(value) else min(max(value, info.min), info.max)
        value = (int(value) - int(info.min)) % 2**info.bits + int(info.min)
    elif str(before) == "uint32":
        value %= 2**32
    with np.errstate(over="ignore"):
        return number_of(np.asarray(value).astype(jnp.dtype(after)))


def number_of(x: Any) -> Number:
    """Returns a number of NumPy as a literal; of uint32 its bits as int32."""
    value = np.asarray(x)
    if value.dtype == np.uint32:
        value = value.view(np.int32)
    return Number(float(value), "bool" if value.dtype == np.bool_ else within(str(value.dtype)))


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
    inputs = {x: program.inputs[x] for x in needed if x < len(program.inputs)}
    return renumbered(program, inputs, needed - inputs.keys(), program.operands, program.results)


def renumbered(
    program: Program,
    inputs: Mapping[int, Input],
    computed: Iterable[int],
    operands: Sequence[Operand],
    results: Sequence[Result],
) -> Program:
    """Returns the program that reads the values `inputs` from these operands, and computes the values `computed`."""
    first, rest = sorted(inputs), sorted(computed)
    place = {value: number for number, value in enumerate([*first, *rest])}

    def moved(atoms: Iterable[Atom]) -> tuple[Atom, ...]:
        return tuple(x if isinstance(x, Number) else place[x] for x in atoms)

    equations = [equation for x in rest if (equation := program.equation(x)) is not None]
    return Program(
        program.columns,
        tuple(operands),
        tuple(inputs[x] for x in first),
        tuple(dataclasses.replace(e, inputs=moved(e.inputs)) for e in equations),
        tuple(dataclasses.replace(r, values=moved(r.values)) for r in results),
    )


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
# A program for rows that are read in chunks: sums of exponentials, and variances, need no pass of their own.


def online(program: Program) -> Program:
    """Returns the program with sums computed along with the reduction that they are relative to.

    They are sums of exponentials relative to the row's maximum, and sums of squares of differences from its mean. For
    any shift c, sum(exp(x - c)) = sum(exp(x - m)) * exp(m - c), where m is the clamped maximum.
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
        elif equation.name == "reduce_sum" and (centred := make.centred_in_square(inputs[0])) is not None:
            moved[value] = make.emit("centred_squares", centred)
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
    if not make.vector(x) or make.vector(shift) or make.level(shift) <= make.level(x):
        return None
    return x, shift
