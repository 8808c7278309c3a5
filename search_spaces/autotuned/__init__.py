"""Converts a plain function, its choices and its reference to an operation."""

from __future__ import annotations

import dataclasses
import functools
import inspect
import math
import types
from collections.abc import Callable, Mapping, Sequence
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
import numpy as np

from search_spaces import checking
from search_spaces.autotuned.arguments import (
    RANDOM,
    TARGET,
    array_text,
    leaves_of,
    named_leaves,
    operand_of,
    operand_text,
    require_tree,
    static_to_text,
    value_of,
)
from search_spaces.autotuned.declaration import Asked, Declaration, declared, tolerance_of
from search_spaces.autotuned.names import captured, name_of
from search_spaces.footprint import Footprint
from search_spaces.front_end import require_array, unsupported_reason, weakly_typed
from search_spaces.kernel import Kernel, Library, LibraryKernel
from search_spaces.operation import BoundCall, Operation, Unsupported
from search_spaces.problem import Arrays, Problem, Tolerance, as_tuple, nbytes
from search_spaces.space import Columns, DeclarationError, Space, one_truth_value
from search_spaces.target import Target

# ------------------------------------------------------------------------------
# A call of a function as a problem: the types of its arrays, and its static parameters.


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
                object.__setattr__(self, name, static_to_text(name, value_of(getattr(self, name))))
            except TypeError as error:
                raise ValueError(str(error)) from error

    @classmethod
    def of(cls, *args: Any, **params: Any) -> CallProblem:
        arrays = {name: operand_text(x) for name, x in zip(cls.declared.arguments.arrays, args, strict=False)}
        return cls(**arrays, **{name: static_to_text(name, value) for name, value in params.items()})

    def operands(self) -> tuple[jax.ShapeDtypeStruct, ...]:
        return tuple(leaves_of([values_of(self)[name] for name in self.declared.arguments.arrays]))

    def result(self) -> jax.ShapeDtypeStruct | tuple[jax.ShapeDtypeStruct, ...]:
        return _result(self, self.declared.bindings.generation())

    def reference(self, *args: jax.Array) -> Arrays:
        """Computes the reference at the highest precision, with operands narrower than float32 widened to it.

        Operands are not widened if results would then change shape, or would not be floating-point (bits of operands,
        for example).
        """
        with jax.default_matmul_precision("highest"):
            widens = _widens(self, self.declared.bindings.generation())
            return as_written(self, *(map(_widened, args) if widens else args))

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
        found = super().tolerance() if given is None else tolerance_of(given)
        if isinstance(found, tuple) and len(found) != len(self.results()):
            raise DeclarationError(f"tolerance has {len(found)} values for {len(self.results())} results")
        return found

    def special(self) -> tuple[str, ...]:
        there_are = checking.kinds_of([s.dtype for s in self.operands()])
        wanted = self.declared.special
        return tuple(kind for kind in there_are if kind in wanted)

    def disputed(self) -> frozenset[str]:
        """Returns none if all operands are integers: their sums are the same in each order."""
        inexact = any(jnp.issubdtype(s.dtype, jnp.inexact) for s in self.operands())
        return self.declared.disputed if inexact else frozenset()

    def special_inputs(self, kind: str, seed: int) -> tuple[jax.Array, ...]:
        """Leaves integers as the declared `inputs` drew them: they may be indices."""
        return checking.with_special_values(self.inputs(seed), kind, integers=self.declared.inputs is None)

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
def _result(problem: CallProblem, generation: int) -> jax.ShapeDtypeStruct | tuple[jax.ShapeDtypeStruct, ...]:
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
def _widens(problem: CallProblem, generation: int) -> bool:
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


# ------------------------------------------------------------------------------
# A decorated function as a kernel, and its reference as the library kernel.


class FunctionKernel(Kernel[CallProblem, Any]):
    """The decorated function. Its jaxpr shows whether it is the one that was measured."""

    backend = "pallas"
    version = 0

    def supports(self, problem: CallProblem, target: Target) -> str | None:
        asked = problem.declared.supports
        answer = None if asked is None else asked({**values_of(problem), TARGET: target})
        if not isinstance(answer, str | None):
            name = problem.declared.function.__name__
            raise DeclarationError(
                f"supports of {name} returns {answer!r}: a text that says why there is no kernel, or None, is wanted"
            )
        return answer

    def require_results(self, problem: CallProblem, target: Target) -> None:
        if self.supports(problem, target) is None:
            _require_results(self, problem, target, problem.declared.bindings.generation())

    def space(self, problem: CallProblem, target: Target) -> Space[Any]:
        declared, told = problem.declared, {**values_of(problem), TARGET: target}
        choices = {name: given(told) if callable(given) else given for name, given in declared.choices.items()}

        def bound(rule: Callable[[Mapping[str, Any]], Any]) -> Callable[[Any], Any]:
            return lambda schedule: rule(_Namespace(told, schedule, choices))

        return Space(declared.schedule, choices, {reason: bound(rule) for reason, rule in declared.rules.items()})

    def footprint(self, problem: CallProblem, schedules: Columns, target: Target) -> Footprint | None:
        declared = problem.declared
        if declared.footprint is None:
            return None
        who = f"the footprint of {declared.function.__name__}"
        with one_truth_value(who):
            found = declared.footprint(_Namespace({**values_of(problem), TARGET: target}, schedules, declared.choices))
        if not isinstance(found, Footprint):
            raise DeclarationError(f"{who} is a {type(found).__name__}: return a Footprint")
        return found

    def run(self, problem: CallProblem, schedule: Any, target: Target, /, *args: Any, **params: Any) -> Any:
        declared = problem.declared
        named = statics_of(problem) | {name: getattr(schedule, name) for name in declared.choices}
        if declared.arguments.wants_target:
            named[TARGET] = target
        return declared.run(*placed(problem, args), **named)


# Number of schedules traced to determine result types, which seldom differ within a space.
_TELLING = 8


@functools.lru_cache(maxsize=1024)
def _require_results(kernel: FunctionKernel, problem: CallProblem, target: Target, generation: int) -> None:
    """Traces schedules, spread over the space, until one returns the reference's result types, or raises.

    Raises:
      DeclarationError: none does, so that no schedule of the function could ever be used.
    """
    space = kernel.space(problem, target)
    points, _ = space.legal()
    wanted, returned = problem.results(), ""
    for index in np.unique(np.linspace(0, len(points) - 1, min(len(points), _TELLING)).astype(int)):
        schedule = space.schedule(**points.row(int(index)))
        try:
            found = jax.eval_shape(functools.partial(kernel.run, problem, schedule, target), *problem.operands())
        except Exception:  # a search reports each schedule that does not build
            return
        results = as_tuple(found)
        if isinstance(found, tuple | list) == isinstance(problem.result(), tuple) and _types(results) == _types(wanted):
            return
        returned = _told(found)
    if returned:
        name = problem.declared.function.__name__
        raise DeclarationError(
            f"{name} returns {returned} for {problem}, and its reference {_told(problem.result())}: no schedule "
            "could ever answer; let both return the same shapes, dtypes and number of results"
        )


def _types(results: Sequence[Any]) -> list[Any]:
    return [(getattr(x, "shape", None), getattr(x, "dtype", None)) for x in results]


def _told(result: Any) -> str:
    """Formats the result type of a function."""
    if isinstance(result, tuple | list):
        return f"({', '.join(map(_told, result))}{',' * (len(result) == 1)})"
    return array_text(result) if isinstance(result, jax.ShapeDtypeStruct) else f"a {type(result).__name__}"


class _Namespace(Mapping[str, Any]):
    """Mapping for rules and footprints: the known values of the problem, and the choices of one schedule or many."""

    def __init__(self, told: Mapping[str, Any], schedules: Any, choices: Mapping[str, Any]) -> None:
        self._told, self._schedules, self._choices = told, schedules, choices

    def __getitem__(self, name: str) -> Any:
        return getattr(self._schedules, name) if name in self._choices else self._told[name]

    def __iter__(self) -> Any:
        return iter((*self._told, *self._choices))

    def __len__(self) -> int:
        return len(self._told) + len(self._choices)


class ReferenceKernel(LibraryKernel[CallProblem]):
    """The reference as XLA compiles it: in float32, rounded once; and as written, if that is another program.

    Records keep the fingerprint of the reference itself, so this kernel needs no other version.
    """

    def programs(self, problem: CallProblem) -> tuple[str, ...]:
        rounds = _rounds(problem, problem.declared.bindings.generation())
        return (Library.program, "plain") if rounds else (Library.program,)

    def tolerance(self, problem: CallProblem, schedule: Library) -> Tolerance | tuple[Tolerance, ...]:
        """Returns the problem's tolerance; for "plain", one that allows rounding at each step, as users' code does."""
        allowed = as_tuple(problem.tolerance())
        if schedule.program == Library.program:
            return problem.tolerance()
        wider = tuple(one.wider(8) for one in allowed)
        return wider if isinstance(problem.tolerance(), tuple) else wider[0]

    def run(self, problem: CallProblem, schedule: Library, target: Target, /, *args: Any, **params: Any) -> Any:
        if schedule.program == "plain":
            return as_written(problem, *args)
        results = zip(as_tuple(problem.reference(*args)), problem.results(), strict=True)
        return problem.pack([x.astype(s.dtype) for x, s in results])


@functools.lru_cache(maxsize=1024)
def _rounds(problem: CallProblem, generation: int) -> bool:
    """Returns whether the reference as written differs from the one on float32 operands at the highest precision."""
    floats = [x.dtype for x in problem.operands() if jnp.issubdtype(x.dtype, jnp.floating)]
    if any(jnp.dtype(dtype).itemsize < 4 for dtype in floats):
        return True
    traced = str(jax.make_jaxpr(functools.partial(as_written, problem))(*problem.operands()))
    return any(product in traced for product in ("dot_general", "conv_general_dilated"))


def operation_of(
    function: Callable[..., Any], choices: Mapping[str, Any], *, name: str | None = None, **told: Any
) -> Operation[CallProblem]:
    """Returns the operation with `function` and its reference as kernels.

    Args:
      choices: keyword of the function -> the values that it may take.
      name: the name under which schedules are stored; None derives it from the location of the function.
      told: further arguments of `declared`.

    Raises:
      DeclarationError: an argument is invalid; the message says what to write instead.
    """
    known = declared(function, choices, **told)
    choices = known.choices
    posed = problem_type(f"{function.__name__}_problem", known)
    taken = name_of(inspect.unwrap(function), name, captured(function, known.reference, choices))
    return Operation(taken, posed, (FunctionKernel(), ReferenceKernel()), front_end=_front_end(posed))


def _front_end(posed: type[CallProblem]) -> Callable[..., BoundCall[CallProblem] | Unsupported]:
    known, name = posed.declared, posed.declared.function.__name__
    names, optional = known.arguments.arrays, known.arguments.optional

    def front_end(*args: Any, **statics: Any) -> BoundCall[CallProblem] | Unsupported:
        arrays = dict(zip(names, (jnp.asarray(x) if isinstance(x, _NUMBERS) else x for x in args), strict=False))
        missing = [array for array in names if array not in optional and arrays.get(array) is None]
        if missing or len(args) > len(names):
            lacks = f", without {', '.join(missing)}" if missing else ""
            raise TypeError(f"{name} takes the arrays {', '.join(names)}; {len(args)} were given{lacks}")
        texts = {static: static_to_text(static, value) for static, value in statics.items()}
        if lacking := [
            each for each, default in known.arguments.statics.items() if default is None and each not in texts
        ]:
            raise TypeError(f"{name} lacks {', '.join(f'{static}=' for static in lacking)}")
        given = {array: x for array, x in arrays.items() if x is not None}
        for array, x in given.items():
            require_array(array, x) if isinstance(x, list) else require_tree(array, x)
        flat = dict(each for array, x in given.items() for each in named_leaves(array, x))
        for array, x in flat.items():
            require_array(array, x)
        if (reason := _unposed(flat)) is not None:
            whole = {
                each: value_of(text) for each, text in {**known.arguments.statics, **texts}.items() if text is not None
            }
            return Unsupported(reason, lambda: known.answer([arrays.get(array) for array in names], whole))
        typed = {array: operand_text(x) for array, x in given.items()}
        return BoundCall(posed(**typed, **texts), tuple(flat.values()))

    # The keyword arguments of `Operation.bind`.
    keywords = [inspect.Parameter(static, inspect.Parameter.KEYWORD_ONLY) for static in known.arguments.statics]
    setattr(front_end, "__signature__", inspect.Signature(keywords))  # noqa: B010 (unknown to type checkers)
    return front_end


_NUMBERS = (bool, int, float, complex)


def _unposed(arrays: Mapping[str, Any]) -> str | None:
    """Returns why there is no problem for these arrays, or None."""
    if (reason := unsupported_reason(arrays)) is not None:
        return reason
    for array, x in arrays.items():
        if jnp.issubdtype(x.dtype, jax.dtypes.extended):
            return f"{array} is of the dtype {x.dtype}, which no key of a schedule spells"
    return weakly_typed(*arrays.values())


__all__ = ["operation_of"]
