"""Problems on rows: a program, the number of rows, and the arrays and errors of both."""

from __future__ import annotations

import abc
import dataclasses
import functools
import hashlib
import math
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
import numpy as np
import numpy.typing as npt

from search_spaces import checking
from search_spaces.front_end import in_front
from search_spaces.problem import PROPORTIONAL, Problem, TakeRows, Tolerance, as_tuple, nbytes, scaled
from search_spaces.rows.derivative import Derivative, as_function, differentiate
from search_spaces.rows.program import Operand, Program, evaluate, parse
from search_spaces.rows.written import Exported, Written, exported, remember, written
from search_spaces.sharding import Sharding

# Special operands of row functions: rows times 2^100. Their sums fit float32, and their squares do not.
HUGE, HUGE_EXPONENT = "huge", 100

# XLA keeps rows on chip if the program has one row operand, one result, and at most so many columns. On an H200, RMS
# norms and softmaxes of 16384 columns take one pass; those of 24577 and of 32000 take several.
ONE_PASS = 16384


@dataclasses.dataclass(frozen=True)
class RowProblem(Problem):
    """Results of which each row follows from the same row of the operands, and sums of such results over all rows.

    Attributes:
      rows: number of rows, at least 1.
      axis: the axis of the columns in arrays of rows, negative.
    """

    axis: ClassVar[int] = -1

    rows: int

    @property
    @abc.abstractmethod
    def program(self) -> Program:
        """The function of one row."""

    def program_of(self, **params: Any) -> Program:
        """Returns the program for the parameters of a call; they change neither operands nor results."""
        return self.program

    @property
    def cotangents(self) -> int:
        """Number of cotangents, the last operands of `program`, if this is the transpose of that backward pass; else 0.

        Operands of the transpose are what the backward pass reads of the forward pass, and tangents.
        """
        return 0

    @property
    def arrays(self) -> tuple[tuple[Operand, ...], tuple[Operand, ...]]:
        """The operands, and the results in the same terms; the kind of a result may be "row sum"."""
        operands, last = self.program.operands, self.cotangents
        results = tuple(Operand(x.kind, x.dtype, len(x.values)) for x in self.program.results)
        if not last:
            return operands, results
        tangents = tuple(dataclasses.replace(x, kind="shared") if x.kind == "row sum" else x for x in results)
        return (*operands[:-last], *tangents), operands[-last:]

    def operands(self) -> tuple[jax.ShapeDtypeStruct, ...]:
        return tuple(self._array(x) for x in self.arrays[0])

    def result(self) -> jax.ShapeDtypeStruct | tuple[jax.ShapeDtypeStruct, ...]:
        found = tuple(self._array(x) for x in self.arrays[1])
        return found if len(found) > 1 else found[0]

    def _array(self, x: Operand) -> jax.ShapeDtypeStruct:
        columns = x.parts * self.columns_of_program
        shapes = {"row": (self.rows, columns), "scalar": (self.rows,), "number": ()}
        return jax.ShapeDtypeStruct(shapes.get(x.kind, (columns,)), jnp.dtype(x.dtype))

    @property
    def sums_rows(self) -> bool:
        """Whether a result is a sum over all rows, or the tangent of one."""
        return any(x.kind in ("row sum", "shared") for x in self.arrays[1])

    def derivative(self, **params: Any) -> Derivative:
        """Returns the derivative of the program.

        Raises:
          NoProgram: there is none.
        """
        return _derivative(self.program_of(**params).text())

    def by_xla(self, *args: jax.Array, **params: Any) -> Any:
        """Computes the program by XLA, in float32 or wider."""
        run = functools.partial(evaluate, self.program_of(**params), rounded=False, axis=self.axis)
        if not self.cotangents:
            return self.pack(run(*args))
        count = len(args) - len(self.program.results)
        shapes = [jax.ShapeDtypeStruct(s.shape, jnp.float32) for s in self.results()]
        transposed = jax.linear_transpose(functools.partial(run, *args[:count]), *shapes)
        return self.pack(transposed(tuple(x.astype(jnp.float32) for x in args[count:])))

    def reference(self, *args: jax.Array, **params: Any) -> Any:
        return self.by_xla(*args, **params)

    def inputs(self, seed: int) -> tuple[jax.Array, ...]:
        """Returns standard normal operands, but for elements per row: labels are columns, other numbers at least 1/2.

        A backward pass may divide by saved sums of exponentials, and results for labels that are no column are NaN.
        Saved numbers need not follow from the rows: the backward pass is a function of both.
        """
        drawn = zip(super().inputs(seed), self.arrays[0], strict=True)
        return tuple(
            checking.run_program(_per_row, x, columns=self.columns_of_program) if of.kind == "scalar" else x
            for x, of in drawn
        )

    def special(self) -> tuple[str, ...]:
        return checking.kinds_of([s.dtype for s in self.operands() if jnp.issubdtype(s.dtype, jnp.floating)])

    @property
    def columns_of_program(self) -> int:
        """Elements of a vector of the program."""
        return self.program.columns

    @property
    def library_bytes_moved(self) -> float:
        """Includes XLA's separate writes of the parts of a result, and another read and write to join them."""
        joined = sum(nbytes(s) for s, x in zip(self.results(), self.arrays[1], strict=True) if x.parts > 1)
        return self.bytes_moved + 2.0 * joined

    @property
    def library_bytes_read_again(self) -> float:
        """Counts the rows that each further stage reads. XLA computes short norms and softmaxes in one pass."""
        program = self.program
        rows = {x: program.operands[each.operand] for x, each in enumerate(program.inputs)}
        rows = {x: operand for x, operand in rows.items() if operand.kind == "row"}
        alone = len(rows) == len(program.results) == 1 and program.results[0].kind == "row"
        if alone and self.axis == -1 and program.columns <= ONE_PASS:
            return 0.0
        reads = Counter(x for stage in program.reads for x in stage if x in rows)
        again = sum((count - 1) * jnp.dtype(rows[x].dtype).itemsize for x, count in reads.items())
        return float(self.rows * program.columns * again)

    @property
    def flops(self) -> float:
        return max(1.0, self.program.flops) * self.rows * self.columns_of_program

    @property
    def arithmetic(self) -> str:
        return "float32"

    @property
    def row_axes(self) -> tuple[int, ...]:
        return tuple(-2 if x.kind == "row" else -1 for x in self.arrays[1])

    def at_rows(self, rows: npt.NDArray[np.int32]) -> tuple[Problem, TakeRows] | None:
        if self.sums_rows or self.cotangents:
            return None
        kinds = [x.kind for x in self.arrays[0]]

        def take(args: Sequence[jax.Array]) -> tuple[jax.Array, ...]:
            return tuple(
                jnp.take(x, rows, axis=0) if kind in ("row", "scalar") else x
                for x, kind in zip(args, kinds, strict=True)
            )

        return dataclasses.replace(self, rows=len(rows)), take

    def tolerance(self) -> Tolerance | tuple[Tolerance, ...]:
        """Returns the rounding of each result, and an error of its steps that its largest element bounds.

        Steps may cancel, so their error of about 2^-19 each is not relative to the element. A rounding between steps
        may differ if the steps before it do. An integer that is a rounded number may be off by one.
        """
        between = self._rounded_between()
        found = []
        for result in self.arrays[1]:
            if not jnp.issubdtype(result.dtype, jnp.floating):
                found.append(Tolerance(absolute=1.0, relative=0.0))
                continue
            eps = float(jnp.finfo(result.dtype).eps)
            found.append(Tolerance(2.0**-14 + between, eps + 2.0**-16 + between, scale=PROPORTIONAL))
        return self.pack(found)

    def _rounded_between(self) -> float:
        """Returns the eps of all roundings before which others follow."""
        read = {x for equation in self.program.equations for x in equation.inputs if isinstance(x, int)}
        rounds = [self.program.equation(x) for x in read]
        return sum(float(jnp.finfo(e.params[0]).eps) for e in rounds if e is not None and e.name == "round")

    def special_inputs(self, kind: str, seed: int) -> tuple[jax.Array, ...]:
        """Returns operands with special values in rows and shared vectors; elements per row are as in `inputs`.

        The first row has special values of each operand: of a large result, not all rows are compared.
        """
        plain = self.inputs(seed)
        special = checking.with_special_values(plain, kind, integers=False)
        kinds = [x.kind for x in self.arrays[0]]
        first = kinds.index("row") if "row" in kinds else 0
        found = []
        for number, (x, y, of) in enumerate(zip(plain, special, kinds, strict=True)):
            moved = of == "row" and number > first and self.rows > 1
            found.append(x if of == "scalar" else checking.run_program(_infinite_first, y) if moved else y)
        return tuple(found)

    def special_tolerance(self, kind: str) -> tuple[Tolerance, ...]:
        return tuple(
            each if jnp.issubdtype(s.dtype, jnp.floating) else Tolerance(absolute=1.0, relative=0.0)
            for each, s in zip(super().special_tolerance(kind), self.results(), strict=True)
        )


@functools.partial(jax.jit, static_argnames="columns")
def _per_row(x: jax.Array, *, columns: int) -> jax.Array:
    return x % columns if jnp.issubdtype(x.dtype, jnp.integer) else (jnp.abs(x) + 0.5).astype(x.dtype)


@jax.jit
def _infinite_first(x: jax.Array) -> jax.Array:
    """Rolls the first row, or sample, with an infinity or a NaN to the front."""
    return jnp.roll(x, -jnp.argmax(~jnp.isfinite(x.astype(jnp.float32)).all(axis=tuple(range(1, x.ndim)))), axis=0)


def _holds_huge(dtype: Any, of: Operand) -> bool:
    floating = of.kind == "row" and jnp.issubdtype(dtype, jnp.floating)
    return floating and float(jnp.finfo(dtype).max) > 2.0 ** (HUGE_EXPONENT + 20)


@functools.lru_cache(maxsize=1024)
def _derivative(text: str) -> Derivative:
    with jax.enable_x64(False):
        return differentiate(*as_function(_parsed(text)))


# ------------------------------------------------------------------------------
# A program as text is a problem of the operation "rows".


@functools.lru_cache(maxsize=1024)
def _parsed(text: str) -> Program:
    return parse(text)


@dataclasses.dataclass(frozen=True)
class ProgramProblem(RowProblem):
    """A row program, derived from a function and named after it.

    Attributes:
      text: the program as `Program.text`.
      name: name of the function, for people.
    """

    text: str = ""
    name: str = ""

    def __post_init__(self) -> None:
        if self.rows < 1:
            raise ValueError(f"rows={self.rows} must be at least 1")
        _parsed(self.text)
        super().__post_init__()

    @classmethod
    def of(cls, *args: Any, text: str = "", name: str = "") -> ProgramProblem:
        """Returns the problem of the arrays of a program."""
        kinds = [x.kind for x in _parsed(text).operands]
        rows = [x.shape[0] for x, kind in zip(args, kinds, strict=True) if kind in ("row", "scalar")]
        return cls(rows=rows[0], text=text, name=name)

    @property
    def program(self) -> Program:
        return _parsed(self.text)

    def by_xla(self, *args: jax.Array, **params: Any) -> Any:
        """Computes the function of which the program was derived, or the program if that function is not known."""
        origin = params.get("origin")
        function = written(self.text) if origin is None else origin.written
        if function is None or self.cotangents:
            return super().by_xla(*args, **params)
        return self.pack(function.over_rows(self, *args))

    def at_rows(self, rows: npt.NDArray[np.int32]) -> tuple[Problem, TakeRows] | None:
        function = written(self.text)
        return super().at_rows(rows) if function is None or function.segments == 1 else None

    def special(self) -> tuple[str, ...]:
        """Returns also `HUGE`, if the function is known: its squares overflow, and those of the program must, too."""
        return super().special() if written(self.text) is None else (*super().special(), HUGE)

    def special_inputs(self, kind: str, seed: int) -> tuple[jax.Array, ...]:
        if kind != HUGE:
            return super().special_inputs(kind, seed)
        arrays = zip(self.inputs(seed), self.arrays[0], strict=True)
        return tuple(scaled(x, 2.0**HUGE_EXPONENT) if _holds_huge(x.dtype, of) else x for x, of in arrays)

    def reference_text(self) -> str:
        function = written(self.text)
        if isinstance(function, Written):
            return exported(function, self)
        return "" if function is None else function.text

    def use_reference(self, text: str) -> None:
        remember(self.text, Exported(text))

    @classmethod
    def parse(cls, texts: Mapping[str, str]) -> Any:
        if "text" not in texts:
            raise ValueError(
                "a row program has too many equations to type: name its function, as in `tile-scheduler tune file.py:f "
                "'x=float32[64,128]'`, or run `tile-scheduler tune-missed`"
            )
        return super().parse(texts)

    def __str__(self) -> str:
        """Formats the problem with a digest in place of the program."""
        digest = hashlib.sha256(self.text.encode()).hexdigest()[:8]
        return f"name={self.name} rows={self.rows} columns={self.columns_of_program} program={digest}"

    def brief(self) -> str:
        """Formats the problem without the equations of its program."""
        program = self.program
        read, written = (", ".join(f"{x.kind} {x.dtype}" for x in arrays) for arrays in self.arrays)
        return f"rows={self.rows} columns={program.columns} ({read} -> {written})"

    def coordinates(self) -> Mapping[str, int | bool | str]:
        program = self.program
        like = [e.name for e in program.equations], [x.dtype for x in program.operands]
        return {"rows": self.rows, "columns": program.columns, "like": str(like)}


@dataclasses.dataclass(frozen=True)
class ProgramAlongProblem(ProgramProblem):
    """A row program along an axis that is not the last: rows ``[samples, columns, inner]``.

    Elements per row are ``[samples, inner]``, and vectors that all rows share ``[columns]``.

    Attributes:
      inner: rows of a sample; their elements at the same column are adjacent in memory. It divides `rows`.
    """

    axis = -2
    # As in `GroupNormProblem`: a row is one of the channels.
    group: ClassVar[int] = 1
    shared_axis: ClassVar[str] = "positions"

    inner: int = 1

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.inner < 1 or self.rows % self.inner:
            raise ValueError(f"rows={self.rows} are no samples of inner={self.inner} rows")

    @classmethod
    def of(cls, *args: Any, text: str = "", name: str = "") -> ProgramAlongProblem:
        by_row = [x for x, of in zip(args, _parsed(text).operands, strict=True) if of.kind in ("row", "scalar")]
        return cls(by_row[0].shape[0] * by_row[0].shape[-1], text, name, by_row[0].shape[-1])

    @property
    def samples(self) -> int:
        return self.rows // self.inner

    @property
    def positions(self) -> int:
        return self.columns_of_program

    @property
    def channels(self) -> int:
        return self.inner

    def _array(self, x: Operand) -> jax.ShapeDtypeStruct:
        columns = x.parts * self.columns_of_program
        shapes = {"row": (self.samples, columns, self.inner), "scalar": (self.samples, self.inner), "number": ()}
        return jax.ShapeDtypeStruct(shapes.get(x.kind, (columns,)), jnp.dtype(x.dtype))

    def at_rows(self, rows: npt.NDArray[np.int32]) -> None:
        return None

    def __str__(self) -> str:
        return f"{super().__str__()} inner={self.inner}"

    def brief(self) -> str:
        return f"inner={self.inner} {super().brief()}"

    def coordinates(self) -> Mapping[str, int | bool | str]:
        return {**super().coordinates(), "inner": self.inner}


@dataclasses.dataclass(frozen=True)
class ProgramTangentProblem(ProgramProblem):
    """The tangent of a row program, from the text of its backward pass.

    Attributes:
      last: number of cotangents among its operands.
    """

    last: int = 1

    @property
    def cotangents(self) -> int:
        return self.last


@dataclasses.dataclass(frozen=True)
class ProgramAlongTangentProblem(ProgramTangentProblem, ProgramAlongProblem):
    """The tangent of a row program along an axis that is not the last."""


# ------------------------------------------------------------------------------
# Batching and sharding: a batch axis becomes more rows, and devices divide the rows.

Call = Callable[..., Any]


def batch(call: Call, p: RowProblem, args: Any, dims: Any) -> tuple[Any, int] | None:
    """Folds the batch axis into the rows; None if an operand that all rows share is batched, or rows are summed."""
    kinds = [x.kind for x in p.arrays[0]]
    shared = [dim for dim, kind in zip(dims, kinds, strict=True) if kind in ("shared", "number")]
    if p.sums_rows or any(dim is not None for dim in shared):
        return None
    size = next(arg.shape[dim] for arg, dim in zip(args, dims, strict=True) if dim is not None)
    many = dataclasses.replace(p, rows=size * p.rows)
    by_row = [
        in_front(x, dim, size) if kind in ("row", "scalar") else x
        for x, dim, kind in zip(args, dims, kinds, strict=True)
    ]
    return call(many, *by_row), 0


def shard(p: RowProblem) -> Sharding[Any]:
    """Returns a sharding that divides rows; each row, and each operand shared by all rows, is whole on one device."""

    def letters(x: Operand) -> str:
        columns = "columns" if x.parts == 1 else f"columns_{x.parts}"
        row = " ".join((rows[0], columns, *rows[1:]))
        return {"row": row, "scalar": " ".join(rows), "number": ""}.get(x.kind, columns)

    rows = ("samples", "inner") if isinstance(p, ProgramAlongProblem) else ("rows",)
    operands, results = p.arrays
    rule = f"{', '.join(map(letters, operands))} -> {', '.join(map(letters, results))}"

    def local(problem: RowProblem, extents: Mapping[str, int]) -> RowProblem:
        inner = {name: extents[name] for name in rows[1:]}
        return dataclasses.replace(problem, rows=math.prod(extents[name] for name in rows), **inner)

    if p.sums_rows:
        return Sharding(rule, (), rows, local=local)
    return Sharding(rule, rows, local=local)


def rounded_at_each_step(problem: RowProblem) -> Any:
    """Returns the tolerance of a formula computed in the dtype of its operands.

    The exponent of a softmax of normally distributed values reaches 9 below the maximum, and is off by half an eps of
    that.
    """
    exact: tuple[Tolerance, ...] = as_tuple(problem.tolerance())
    return problem.pack([each.wider(8) for each in exact])
