"""A decorated function as a kernel, and its reference as the library kernel."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from search_spaces.autotuned.arguments import TARGET, array_text
from search_spaces.autotuned.problem import CallProblem, as_written, placed, statics_of, values_of
from search_spaces.errors import DeclarationError
from search_spaces.footprint import Footprint
from search_spaces.kernel import Kernel, Library, LibraryKernel, Target
from search_spaces.problem import Tolerance, as_tuple
from search_spaces.space import Columns, Space, one_truth_value


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
        if answer is None:
            _require_results(self, problem, target, problem.declared.bindings.generation())
        return answer

    def space(self, problem: CallProblem, target: Target) -> Space[Any]:
        declared, told = problem.declared, {**values_of(problem), TARGET: target}
        choices = {name: given(told) if callable(given) else given for name, given in declared.choices.items()}

        def bound(rule: Callable[[Mapping[str, Any]], Any]) -> Callable[[Any], Any]:
            return lambda schedule: rule(_Told(told, schedule, choices))

        return Space(declared.schedule, choices, {reason: bound(rule) for reason, rule in declared.rules.items()})

    def footprint(self, problem: CallProblem, schedules: Columns, target: Target) -> Footprint | None:
        declared = problem.declared
        if declared.footprint is None:
            return None
        who = f"the footprint of {declared.function.__name__}"
        with one_truth_value(who):
            found = declared.footprint(_Told({**values_of(problem), TARGET: target}, schedules, declared.choices))
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


class _Told(Mapping[str, Any]):
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
        return (Library.program, "plain") if _rounds(problem) else (Library.program,)

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
def _rounds(problem: CallProblem) -> bool:
    """Returns whether the reference as written differs from the one on float32 operands at the highest precision."""
    floats = [x.dtype for x in problem.operands() if jnp.issubdtype(x.dtype, jnp.floating)]
    if any(jnp.dtype(dtype).itemsize < 4 for dtype in floats):
        return True
    traced = str(jax.make_jaxpr(functools.partial(as_written, problem))(*problem.operands()))
    return any(product in traced for product in ("dot_general", "conv_general_dilated"))
