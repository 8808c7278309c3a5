"""The declaration passed to `autotune` for a function, checked, with its functions callable by name."""

from __future__ import annotations

import dataclasses
import inspect
import sys
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from search_spaces.autotuned.arguments import RANDOM, TARGET, Arguments, arguments_of, by_name
from search_spaces.bindings import Bindings, tracing
from search_spaces.checking import DISPUTED, VALUE_KINDS
from search_spaces.problem import DOWN, Tolerance
from search_spaces.space import Choice, DeclarationError, Space

# A function of a mapping by name: arrays as `jax.ShapeDtypeStruct`, static parameters, choices, the target.
Asked = Callable[[Mapping[str, Any]], Any]


@dataclasses.dataclass(frozen=True, eq=False)
class Declaration:
    """The declaration of a function with choices to search.

    Attributes:
      function: the function.
      bindings: the globals and closures that it and the reference read.
      reference: computes the expected result from the same arrays, by plain JAX.
      reference_statics: names of the static parameters that the reference also takes.
      arguments: the function's parameters.
      schedule: the frozen dataclass of its choices.
      choices: the values of each choice, or a function that returns them for a problem.
      rules: reason, as text -> a predicate that legal combinations satisfy.
      footprint: as `Kernel.footprint`; None if not declared.
      supports: as `Kernel.supports`.
      tolerance, inputs, flops, bytes_moved: as those of `Problem`; None selects the default there, and 0 for flops.
      special: kinds of special operands for which results are verified.
      disputed: the kinds of these for which a wrong result is a warning.
    """

    function: Callable[..., Any]
    bindings: Bindings
    reference: Callable[..., Any]
    reference_statics: tuple[str, ...]
    arguments: Arguments
    schedule: type[Any]
    choices: Mapping[str, Sequence[Choice] | Asked]
    rules: Mapping[str, Asked]
    footprint: Asked | None
    supports: Asked | None
    tolerance: Asked | None
    inputs: Asked | None
    flops: Asked | None
    bytes_moved: Asked | None
    special: tuple[str, ...] = VALUE_KINDS
    disputed: frozenset[str] = DISPUTED

    def run(self, *arrays: Any, **named: Any) -> Any:
        """Runs the function; `named` are its static parameters, its choices and the target."""
        with tracing(self.bindings.generation()):
            return self.function(*arrays, **named)

    def answer(self, arrays: Sequence[Any], statics: Mapping[str, Any]) -> Any:
        """Computes the reference on the function's arrays, given all static parameters."""
        named = {name: statics[name] for name in self.reference_statics}
        with tracing(self.bindings.generation()):
            result = self.reference(*arrays, **named)
        return tuple(result) if isinstance(result, list) else result


def declared(
    function: Callable[..., Any],
    choices: Mapping[str, Any],
    *,
    reference: Any,
    configs: Any = None,
    rules: Mapping[str, Any] | None = None,
    footprint: Any = None,
    supports: Any = None,
    tolerance: Any = None,
    inputs: Any = None,
    flops: Any = None,
    bytes_moved: Any = None,
    special: Any = None,
) -> Declaration:
    """Checks the arguments of `autotune` and returns the declaration of `function`.

    Raises:
      DeclarationError: an argument is invalid; the message says what to write instead.
    """
    if not callable(function) or not hasattr(inspect.unwrap(function), "__code__"):
        raise DeclarationError(f"autotune decorates a function, not {function!r}: write a function that calls it")
    if hasattr(function, "operation"):
        raise DeclarationError(f"{function.__name__} is decorated already: give all of its choices to one autotune")
    if not callable(reference):
        raise DeclarationError(
            f"the reference of {function.__name__} is {reference!r}: write a function of its arrays that computes the "
            "right answer by plain JAX"
        )
    if configs is not None:
        choices = _of_configs(configs, choices)
    arguments = arguments_of(function, choices)
    posed = *arguments.arrays, *arguments.statics

    def asked(given: Any, what: str, known: Sequence[str]) -> Asked | None:
        return None if given is None else by_name(given, f"the {what} of {function.__name__}", known)

    fixed = {name: values for name, values in choices.items() if not callable(values)}
    schedule = dataclasses.make_dataclass(f"{function.__name__}_schedule", list(choices), frozen=True)
    for name, values in fixed.items():
        if len(Space(schedule, {name: values}).choices[name]) == 0:
            raise DeclarationError(f"{name} has no value to choose: write those to try, as in (64, 128)")
    return Declaration(
        function=function,
        bindings=Bindings(function, reference),
        reference=reference,
        reference_statics=_takes(reference, arguments.statics),
        arguments=arguments,
        schedule=schedule,
        choices=fixed
        | {
            name: by_name(values, f"the choice {name}", (*posed, TARGET))
            for name, values in choices.items()
            if name not in fixed
        },
        rules=({} if configs is None else _belonging(list(choices), configs))
        | {reason: by_name(rule, f"the rule {reason!r}", arguments.known) for reason, rule in _reasons(rules).items()},
        footprint=asked(footprint, "footprint", arguments.known),
        supports=asked(supports, "supports", (*posed, TARGET)),
        tolerance=asked(_tolerance(tolerance), "tolerance", posed),
        inputs=asked(inputs, "inputs", (RANDOM, *posed)),
        flops=asked(flops, "flops", posed),
        bytes_moved=asked(bytes_moved, "bytes_moved", posed),
        special=_special(inputs is None if special is None else special),
        disputed=DISPUTED if special is None else frozenset(),
    )


def _of_configs(configs: Any, choices: Mapping[str, Any]) -> dict[str, tuple[Any, ...]]:
    """Returns the values of each choice in these complete choices, without duplicates, in order.

    Raises:
      DeclarationError: `configs` is invalid, or choices are given besides it.
    """
    written = 'write a list of complete choices, as in [{"tile": 64, "stages": 2}, {"tile": 128, "stages": 1}]'
    if choices:
        raise DeclarationError(f"configs and choices ({', '.join(choices)}) exclude each other: give one of these")
    if not isinstance(configs, list | tuple) or not configs:
        raise DeclarationError(f"configs={configs!r}: {written}")
    for config in configs:
        if not isinstance(config, Mapping) or not config or not all(isinstance(name, str) for name in config):
            raise DeclarationError(f"{config!r} among the configs is no dict of choices: {written}")
        if config.keys() != configs[0].keys():
            raise DeclarationError(f"{config!r} among the configs has other names than {configs[0]!r}: {written}")
    found: dict[str, tuple[Any, ...]] = {}
    for name in configs[0]:
        each = {(type(config[name]), repr(config[name])): config[name] for config in configs}
        found[name] = tuple(each.values())
    return found


def _belonging(names: Sequence[str], configs: Sequence[Mapping[str, Any]]) -> dict[str, Asked]:
    """Returns rules that keep only these combinations.

    There is one rule per choice, on it and those before it, so that few combinations are built.
    """

    def rule(known: Sequence[str]) -> Asked:
        def holds(values: Mapping[str, Any]) -> Any:
            told, found = {name: values[name] for name in known}, False
            for config in configs:
                same: Any = True
                for name in known:
                    same = same & (told[name] == config[name])
                found = found | same
            return found

        return holds

    return {
        f"{name} is one of the configs, with {', '.join(names[:place])}": rule(names[: place + 1])
        for place, name in enumerate(names)
        if place
    }


def _reasons(rules: Any) -> Mapping[str, Any]:
    if not isinstance(rules, Mapping | None):
        raise DeclarationError(
            f"rules={rules!r}: write a dict, the reason in words -> a function that says if it holds"
        )
    return rules or {}


def _tolerance(given: Any) -> Any:
    """Converts a constant to a function of no arguments; a number is both the absolute and the relative error."""
    if given is None or callable(given):
        return given
    allowed = tolerance_of(given)
    return lambda: allowed


def tolerance_of(given: Any) -> Tolerance | tuple[Tolerance, ...]:
    """Returns a tolerance, or one for each result; a number is both the absolute and the relative error.

    Raises:
      DeclarationError: `given` is no tolerance.
    """
    match given:
        case Tolerance():
            return given
        case bool():
            pass
        case int() | float() if 0 <= given <= sys.float_info.max:
            return Tolerance(absolute=float(given), relative=float(given), scale=DOWN)
        case tuple() | list():
            return tuple(one for each in given for one in [tolerance_of(each)] if isinstance(one, Tolerance))
    raise DeclarationError(
        f"tolerance={given!r}: write a number, 0 or more, a Tolerance, or one of these for each result"
    )


def _special(given: Any) -> tuple[str, ...]:
    if isinstance(given, bool):
        return VALUE_KINDS if given else ()
    kinds = tuple(given) if isinstance(given, tuple | list | set | frozenset) else (given,)
    if wrong := [kind for kind in kinds if kind not in VALUE_KINDS]:
        raise DeclarationError(
            f"special={given!r}: {wrong[0]!r} is no kind of special operands; write True, False, or some of "
            f"{', '.join(VALUE_KINDS)}"
        )
    return tuple(kind for kind in VALUE_KINDS if kind in kinds)


def _takes(reference: Callable[..., Any], statics: Mapping[str, Any]) -> tuple[str, ...]:
    try:
        parameters = inspect.signature(reference).parameters.values()
    except ValueError:  # a builtin, or a ufunc
        return ()
    everything = any(p.kind is p.VAR_KEYWORD for p in parameters)
    return tuple(name for name in statics if everything or any(p.name == name for p in parameters))
