"""Problems of named formulas: their keys have extents and dtypes, and do not depend on how JAX traces a function."""

from __future__ import annotations

import dataclasses
import functools
import inspect
import itertools
from collections.abc import Callable, Mapping
from typing import Any, ClassVar, Literal, Self

import jax
import jax.numpy as jnp
import numpy as np

from search_spaces.operation import Params
from search_spaces.problem import Tolerance
from search_spaces.rows.derivative import Derivative, differentiate
from search_spaces.rows.problem import RowProblem
from search_spaces.rows.program import Operand, Program
from search_spaces.rows.reader import trace
from search_spaces.rows.written import mapped

DTYPES = ("bfloat16", "float16", "float32")


@dataclasses.dataclass(frozen=True)
class Of:
    """An operand of a formula.

    Attributes:
      kind, parts: as in `Operand`.
      dtype: a dtype, or the name of the problem's field that has it.
    """

    kind: Literal["row", "shared", "scalar"] = "row"
    dtype: str = "dtype"
    parts: int = 1


@dataclasses.dataclass(frozen=True, eq=False)
class Formula:
    """A function of one row that is an operation of its name.

    Attributes:
      function: of one row: arrays as in `operands`, and keyword-only parameters: `result_dtype`, which is then a field
        of problems, and parameters of calls, which change no schedule.
      operands: by name, rows first.
      benign: whether no step cancels: each result is then exact but for its rounding and 2^-18.
    """

    function: Callable[..., Any]
    operands: Mapping[str, Of]
    benign: bool = False

    @property
    def name(self) -> str:
        return self.function.__name__

    @functools.cached_property
    def parameters(self) -> tuple[str, ...]:
        return tuple(x.name for x in inspect.signature(self.function).parameters.values() if x.kind is x.KEYWORD_ONLY)

    @functools.lru_cache(maxsize=256)  # noqa: B019 (formulas live as long as the process)
    def _traced(self, part: str, columns: int, dtypes: tuple[str, ...], params: Params) -> Any:
        found = [Operand(of.kind, dtype, of.parts) for of, dtype in zip(self.operands.values(), dtypes, strict=True)]
        shapes = [x.of_one_row(columns) for x in found]
        function = functools.partial(self.function, **dict(params))
        with jax.enable_x64(False):
            if part == "derivative":
                # Of the formulas, only softmaxes read rounded results instead of values: p of p * (dy - sum(p * dy)),
                # with p from 0 to 1. Only `layer_norm` distributes a sum: of a * centred + b, where the elements a *
                # centred and b are terms of the gradient, too, and the sum of `centred`, which is about 0, overflows
                # only if the variance does. Its terms cancel no more than those of the sum that jax.grad computes.
                return differentiate(function, shapes, [x.kind for x in found], bounded=True)
            return trace(function, shapes, [x.kind for x in found])[0]

    def of(self, part: str, problem: FormulaProblem, params: Mapping[str, Any]) -> Any:
        """Returns the program of a problem, or its derivative, by `part`."""
        fields = vars(problem)
        dtypes = [fields.get(of.dtype, of.dtype) or problem.dtype for of in self.operands.values()]
        given = dict(params) | problem._fixed()
        return self._traced(part, problem.columns, tuple(dtypes), Params(given.items()))


@dataclasses.dataclass(frozen=True)
class FormulaProblem(RowProblem):
    """The problem of a formula on rows of one dtype.

    Attributes:
      columns: elements of a vector of the program: of a row, or of a part of it.
      dtype: dtype of the rows.
    """

    formula: ClassVar[Formula]
    part: ClassVar[str] = ""  # of the derivative: "saving", "jvp" or "backward"

    columns: int
    dtype: str = "bfloat16"

    def __post_init__(self) -> None:
        self._spell_dtypes()
        for name in ("rows", "columns"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name}={getattr(self, name)} must be at least 1")
        self._require("dtype", DTYPES)
        super().__post_init__()

    def program_of(self, **params: Any) -> Program:
        if not self.part:
            found: Program = self.formula.of("forward", self, params)
            return found
        derivative: Derivative = self.formula.of("derivative", self, params)
        return derivative.forward if self.part == "saving" else derivative.backward

    def derivative(self, **params: Any) -> Derivative:
        if self.part == "backward":
            return super().derivative(**params)
        found: Derivative = self.formula.of("derivative", self, params)
        return found

    def reference(self, *args: jax.Array, **params: Any) -> Any:
        """Computes the formula itself; of a part of its derivative, the program."""
        if self.part:
            return self.by_xla(*args, **params)
        function = functools.partial(self.formula.function, **params, **self._fixed())
        kinds = [of.kind for of in self.formula.operands.values()]
        floats = [jnp.issubdtype(x.dtype, jnp.floating) for x in args]
        wide = [
            x.astype(jnp.promote_types(x.dtype, jnp.float32)) if f else x for x, f in zip(args, floats, strict=True)
        ]
        return mapped(function, kinds, (1, 0), wide)

    def _fixed(self) -> dict[str, Any]:
        """Returns the parameters of the formula that are fields of the problem."""
        return {"result_dtype": vars(self)["result_dtype"]} if "result_dtype" in self.formula.parameters else {}

    @property
    def program(self) -> Program:
        return self.program_of()

    @property
    def cotangents(self) -> int:
        return len(self.derivative().moving) if self.part == "jvp" else 0

    @property
    def columns_of_program(self) -> int:
        return self.columns

    @classmethod
    def of(cls, *arrays: Any, **fields: Any) -> FormulaProblem:
        """Returns the problem of a formula's operands; rows have two axes.

        Raises:
          TypeError, ValueError: dtypes or shapes that the formula does not take.
        """
        if cls.part:
            return cls._of_derivative(*arrays, **fields)
        named = dict(zip(cls.formula.operands, arrays, strict=True))
        (first, of), *_ = [(name, of) for name, of in cls.formula.operands.items() if of.kind == "row"]
        x = named[first]
        if x.ndim != 2:
            raise ValueError(f"{first} has shape {x.shape}; [rows, columns] is needed: fold the leading axes into one")
        if x.shape[1] % of.parts:
            raise ValueError(f"{first} has shape {x.shape}; a row has {of.parts} parts of the same length")
        values: dict[str, Any] = {"rows": x.shape[0], "columns": x.shape[1] // of.parts, "dtype": str(x.dtype)}
        for name, each in cls.formula.operands.items():
            if each.dtype != "dtype" and each.dtype in cls.__dataclass_fields__:
                values.setdefault(each.dtype, str(named[name].dtype))
        problem = cls(**values, **fields)
        for name, wanted in zip(named, problem.operands(), strict=True):
            found = named[name]
            if found.shape != wanted.shape:
                raise ValueError(f"{name} has shape {found.shape}; {first} {x.shape} needs {wanted.shape}")
            if found.dtype != wanted.dtype:
                raise TypeError(f"{name} is {found.dtype}, and {first} is {x.dtype}: {name} needs {wanted.dtype}")
        return problem

    @classmethod
    def _of_derivative(cls, *arrays: Any, **fields: Any) -> FormulaProblem:
        """Returns the problem with these operands; those of a derivative depend on what it saves."""
        found = ", ".join(f"{x.dtype}{list(x.shape)}" for x in arrays)
        matrices = [x for x in arrays if x.ndim == 2]
        dtypes = ("", "float32") if "weight_dtype" in cls.__dataclass_fields__ else (None,)
        for x, parts, weight in itertools.product(matrices, (1, 2), dtypes):
            values = {"rows": x.shape[0], "columns": max(1, x.shape[1] // parts), "dtype": str(x.dtype)}
            try:
                problem = cls(**values | fields | ({} if weight is None else {"weight_dtype": weight}))
            except ValueError:
                continue
            if [(s.shape, s.dtype) for s in problem.operands()] == [(x.shape, x.dtype) for x in arrays]:
                return problem
        raise ValueError(f"{found} are no operands of {cls.__name__}")

    def neighbour(self) -> FormulaProblem | None:
        """Returns fewer rows, and columns that still divide into the same vectors but not into the same chunks."""
        rows = (self.rows - 1) // 2 * 2 - 1 if self.rows > 8 else self.rows
        less = next((step for step in (256, 8) if self.columns > 4 * step), 0)
        below = dataclasses.replace(self, rows=rows, columns=self.columns - less)
        return None if below == self else below

    def tolerance(self) -> Tolerance | tuple[Tolerance, ...]:
        """Returns, of benign formulas, the rounding error of each result, plus 2^-18 for the float32 steps before it.

        These steps are sums of positive terms in a tree, with an error of about 2^-22, and exponentials by the hardware
        unit. ``ex2.approx`` is off by 2^-22 (PTX ISA). Its argument, with a magnitude below 32 where the result counts,
        is off by 2^-19. Values that the result's dtype cannot hold, or that are subnormal in float32, may become zero.
        """
        if not self.formula.benign or self.part:
            return super().tolerance()
        between = 1.5 * self._rounded_between()
        found = []
        for result in self.program.results:
            info = jnp.finfo(result.dtype)
            least = max(float(info.smallest_subnormal), float(np.finfo(np.float32).tiny))
            if result.kind == "scalar":  # a logarithm of a sum: its error is that of the sum, relative
                found.append(Tolerance(absolute=2.0**-18, relative=2.0**-22))
            else:
                found.append(Tolerance(absolute=least, relative=float(info.eps) + 2.0**-18 + between))
        return self.pack(found)


@dataclasses.dataclass(frozen=True)
class WeightedProblem(FormulaProblem):
    """The problem of a formula with vectors that all rows share.

    Attributes:
      weight_dtype: their dtype: "float32", or "" for that of the rows.
    """

    weight_dtype: str = ""

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.weight_dtype not in ("", self.dtype, "float32"):
            raise ValueError(f"weight_dtype={self.weight_dtype!r} is neither {self.dtype}, as x is, nor float32")
        # Two names for one problem would be two cache keys.
        if self.weight_dtype == self.dtype:
            object.__setattr__(self, "weight_dtype", "")


RESULT_DTYPES = ("float8_e4m3fn", "float8_e5m2", "int8")


@dataclasses.dataclass(frozen=True)
class QuantizedProblem(FormulaProblem):
    """The problem of a formula with an 8-bit result.

    Attributes:
      result_dtype: its dtype.
    """

    result_dtype: str = RESULT_DTYPES[0]

    def __post_init__(self) -> None:
        super().__post_init__()
        self._require("result_dtype", RESULT_DTYPES)

    @classmethod
    def parse(cls, texts: Mapping[str, str]) -> Self:
        """Also takes `block`, as `scheduler.tuned_quantize_rows` does: the blocks of a row are rows of the problem."""
        whole = super().parse({name: text for name, text in texts.items() if name != "block"})
        if (block := texts.get("block")) is None:
            return whole
        if not block.isdecimal() or int(block) < 1 or whole.columns % int(block):
            raise ValueError(f"block={block} does not divide columns={whole.columns}")
        rows = whole.rows * (whole.columns // int(block))
        return dataclasses.replace(whole, rows=rows, columns=int(block))


def problem_type(formula: Formula, part: str = "") -> type[FormulaProblem]:
    """Returns the type of a formula's problems, or of those of a part of its derivative."""
    base = QuantizedProblem if "result_dtype" in formula.parameters else FormulaProblem
    base = WeightedProblem if any(of.dtype == "weight_dtype" for of in formula.operands.values()) else base
    name = "".join(map(str.capitalize, f"{formula.name}_{part}_problem".split("_")))
    fields = {"formula": formula, "part": part, "__doc__": formula.function.__doc__, "__module__": __name__}
    return type(name, (base,), fields)
