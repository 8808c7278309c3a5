"""A call of a function as a problem: the types of its arrays, and its static parameters."""

from __future__ import annotations

import dataclasses
import functools
import math
import types
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

import jax
import jax.numpy as jnp

from search_spaces import special_values
from search_spaces.autotuned.arguments import RANDOM, array_text, operand_of, operand_text
from search_spaces.autotuned.declaration import Asked, Declaration, tolerance_of
from search_spaces.autotuned.statics import spelled, value_of
from search_spaces.autotuned.trees import leaves_of, named_leaves
from search_spaces.errors import DeclarationError
from search_spaces.problem import Arrays, Problem, Tolerance, as_tuple, nbytes


@dataclasses.dataclass(frozen=True)
class CallProblem(Problem):
    """The types of a call's arrays, and its static parameters, each as text in a field of its own.

    A subclass per function has the fields (`problem_type`), so no field may have the name of an attribute here.
    """

    declared: ClassVar[Declaration]

    def __post_init__(self) -> None:
        arguments = self.declared.arguments
        for name in arguments.arrays:
            operand = operand_of(name, getattr(self, name))
            if operand is None and name not in arguments.optional:
                raise ValueError(f"{name} is left out, and has no default")
            for array in leaves_of(operand):
                if (size := nbytes(array)) >= 2**63:
                    raise ValueError(
                        f"{name}={array_text(array)} would be {size / 2**30:.3g} GiB, which no memory holds"
                    )
            object.__setattr__(self, name, operand_text(operand))
        for name in arguments.statics:
            try:
                object.__setattr__(self, name, spelled(name, value_of(getattr(self, name))))
            except TypeError as error:
                raise ValueError(str(error)) from error

    @classmethod
    def of(cls, *args: Any, **params: Any) -> CallProblem:
        arrays = {name: operand_text(x) for name, x in zip(cls.declared.arguments.arrays, args, strict=False)}
        return cls(**arrays, **{name: spelled(name, value) for name, value in params.items()})

    def operands(self) -> tuple[jax.ShapeDtypeStruct, ...]:
        return tuple(leaves_of([values_of(self)[name] for name in self.declared.arguments.arrays]))

    def result(self) -> jax.ShapeDtypeStruct | tuple[jax.ShapeDtypeStruct, ...]:
        return _result(self)

    def reference(self, *args: jax.Array) -> Arrays:
        """Computes the reference at the highest precision, with operands narrower than float32 widened to it.

        Operands are not widened if results would then change shape, or would not be floating-point (bits of operands,
        for example).
        """
        with jax.default_matmul_precision("highest"):
            return as_written(self, *(map(_widened, args) if _widens(self) else args))

    @property
    def flops(self) -> float:
        return self._amount("flops", self.declared.flops, 0.0)

    @property
    def bytes_moved(self) -> float:
        return self._amount("bytes_moved", self.declared.bytes_moved, super().bytes_moved)

    @property
    def arithmetic(self) -> str:
        """The fastest type that could compute the first floating-point operand: a bound must hold for any kernel."""
        dtypes = [str(x.dtype) for x in self.operands() if jnp.issubdtype(x.dtype, jnp.floating)]
        first = dtypes[0] if dtypes else super().arithmetic
        return "tf32" if first == "float32" else first

    def tolerance(self) -> Tolerance | tuple[Tolerance, ...]:
        given = self._asked(self.declared.tolerance, None)
        return super().tolerance() if given is None else tolerance_of(given)

    def special(self) -> tuple[str, ...]:
        there_are = special_values.kinds_of([s.dtype for s in self.operands()])
        wanted = self.declared.special
        return tuple(kind for kind in there_are if kind in wanted)

    def special_inputs(self, kind: str, seed: int) -> tuple[jax.Array, ...]:
        """Leaves integers as the declared `inputs` drew them: they may be indices."""
        return special_values.altered(self.inputs(seed), kind, integers=self.declared.inputs is None)

    def inputs(self, seed: int) -> tuple[jax.Array, ...]:
        if self.declared.inputs is None:
            return super().inputs(seed)
        made = self.declared.inputs({RANDOM: jax.random.key(seed), **values_of(self)})
        given = leaves_of(made)
        wanted = self.operands()
        try:
            found = tuple(map(jnp.asarray, given))
        except TypeError as error:
            kinds = " and ".join(type(x).__name__ for x in given)
            raise DeclarationError(
                f"the inputs of {self.declared.function.__name__} are {kinds} instead of "
                f"{' and '.join(map(array_text, wanted))}"
            ) from error
        if [(x.shape, x.dtype) for x in found] != [(x.shape, x.dtype) for x in wanted]:
            raise DeclarationError(
                f"the inputs of {self.declared.function.__name__} are {' and '.join(map(array_text, found))} "
                f"instead of {' and '.join(map(array_text, wanted))}"
            )
        return found

    def coordinates(self) -> Mapping[str, int | bool | str]:
        told: dict[str, int | bool | str] = {}
        values = values_of(self)
        for name in self.declared.arguments.arrays:
            told |= {name: "None"} if values[name] is None else {}
            for each, array in named_leaves(name, values[name]):
                told[each] = str(array.dtype)
                told |= {f"{each}.{axis}": extent for axis, extent in enumerate(array.shape)}
        for name in self.declared.arguments.statics:
            told[name] = value if isinstance(value := values[name], int) else str(value)
        return told

    def _amount(self, what: str, function: Asked | None, default: float) -> float:
        told = self._asked(function, default)
        try:
            amount = float(told)
        except (TypeError, ValueError, OverflowError):
            amount = math.nan
        if not 0 <= amount < math.inf:
            name = self.declared.function.__name__
            raise DeclarationError(f"the {what} of {name} are {told!r}: a finite number from 0 on is wanted")
        return amount

    def _asked(self, function: Asked | None, default: Any) -> Any:
        return default if function is None else function(values_of(self))


def problem_type(name: str, declared: Declaration) -> type[CallProblem]:
    """Returns the problem type of a function, with a field for each array and static parameter, in call order."""
    arguments = declared.arguments
    required: list[Any] = [(array, str) for array in arguments.arrays if array not in arguments.optional]
    required += [(static, str) for static, default in arguments.statics.items() if default is None]
    optional: list[Any] = [
        (array, str, dataclasses.field(default="None")) for array in arguments.arrays if array in arguments.optional
    ]
    optional += [
        (static, str, dataclasses.field(default=default))
        for static, default in arguments.statics.items()
        if default is not None
    ]
    namespace = {"declared": declared, "__doc__": f"A call of {declared.function.__name__}."}
    made: type[CallProblem] = dataclasses.make_dataclass(
        name, [*required, *optional], bases=(CallProblem,), namespace=namespace, frozen=True
    )
    return made


@functools.lru_cache(maxsize=1024)
def values_of(problem: CallProblem) -> Mapping[str, Any]:
    """Returns the arrays, as shapes and dtypes, and the static parameters, by name."""
    arguments = problem.declared.arguments
    arrays = {name: operand_of(name, getattr(problem, name)) for name in arguments.arrays}
    return types.MappingProxyType(arrays | {name: value_of(getattr(problem, name)) for name in arguments.statics})


def statics_of(problem: CallProblem) -> dict[str, Any]:
    return {name: values_of(problem)[name] for name in problem.declared.arguments.statics}


def placed(problem: CallProblem, args: Sequence[Any]) -> tuple[Any, ...]:
    """Returns the function's operands from a kernel's arrays: None for those left out."""
    values = values_of(problem)
    structure = jax.tree.structure(tuple(values[name] for name in problem.declared.arguments.arrays))
    operands: tuple[Any, ...] = jax.tree.unflatten(structure, args)
    return operands


def as_written(problem: CallProblem, *args: Any) -> Arrays:
    """Computes the reference in the dtypes of its operands, at the precision set by the caller."""
    return problem.declared.answer(placed(problem, args), statics_of(problem))


@functools.lru_cache(maxsize=1024)
def _result(problem: CallProblem) -> jax.ShapeDtypeStruct | tuple[jax.ShapeDtypeStruct, ...]:
    """Returns shapes and dtypes of the reference's results, computed as written."""
    found = jax.eval_shape(functools.partial(as_written, problem), *problem.operands())
    several = isinstance(found, tuple)
    results = found if isinstance(found, tuple) else (found,)
    if not results or not all(isinstance(x, jax.ShapeDtypeStruct) for x in results):
        raise DeclarationError(
            f"the reference of {problem.declared.function.__name__} returns a {type(found).__name__}"
            f"{f' of {[type(x).__name__ for x in results]}' if several else ''}: let it return an array, or a tuple of "
            "arrays"
        )
    plain = tuple(jax.ShapeDtypeStruct(x.shape, x.dtype) for x in results)
    return plain if several else plain[0]


@functools.lru_cache(maxsize=1024)
def _widens(problem: CallProblem) -> bool:
    """Returns whether wider operands give results of the same shapes, and the same or other floating-point dtypes."""
    try:
        found = as_tuple(jax.eval_shape(lambda *args: as_written(problem, *map(_widened, args)), *problem.operands()))
    except Exception:  # the reference may raise anything for operands that it never gets
        return False
    return [x.shape for x in found] == [s.shape for s in problem.results()] and all(
        x.dtype == s.dtype or (jnp.issubdtype(x.dtype, jnp.inexact) and jnp.issubdtype(s.dtype, jnp.inexact))
        for x, s in zip(found, problem.results(), strict=True)
    )


def _widened(x: jax.Array) -> jax.Array:
    narrow = jnp.issubdtype(x.dtype, jnp.floating) and jnp.dtype(x.dtype).itemsize < 4
    return x.astype(jnp.float32) if narrow else x
