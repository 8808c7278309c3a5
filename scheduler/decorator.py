"""autotune(): a plain function that leaves choices to its caller becomes a tuned one."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from scheduler.api import forget, tune, tuned
from search_spaces.autotuned import operation_of
from search_spaces.autotuned.statics import Spelled, spelled
from search_spaces.errors import DeclarationError

if TYPE_CHECKING:
    from search_spaces.footprint import Footprint
    from search_spaces.problem import Tolerance
    from search_spaces.space import Choice


def autotune(
    function: None = None,
    /,
    *,
    reference: Callable[..., Any],
    configs: Sequence[Mapping[str, Choice]] | None = None,
    rules: Mapping[str, Callable[..., Any]] | None = None,
    footprint: Callable[..., Footprint] | None = None,
    supports: Callable[..., str | None] | None = None,
    tolerance: float | Tolerance | Sequence[float | Tolerance] | Callable[..., Any] | None = None,
    inputs: Callable[..., Any] | None = None,
    special: bool | Sequence[str] | None = None,
    flops: Callable[..., float] | None = None,
    bytes_moved: Callable[..., float] | None = None,
    name: str | None = None,
    **choices: Sequence[Choice] | Callable[..., Sequence[Choice]],
) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Decorates a function that calls `pallas_call` or `plgpu.kernel`: its choices are searched, verified and stored.

    ::

        @scheduler.autotune(
            tile_m=(64, 128, 256),
            reference=lambda x: x.sum(axis=1),
            rules={"tile_m divides the rows": lambda x, tile_m: x.shape[0] % tile_m == 0},
        )
        def row_sum(x, *, tile_m, target):
            ...  # a pallas_call with blocks of tile_m rows, interpreted where target.platform is "cpu"

    The function's parameters are arrays, then, after a ``*``, its choices and what else is static. It becomes
    ``row_sum(*arrays, on_miss=None, backends=None, schedule=None, **static)``, a function as `tuned` makes them;
    ``row_sum.tune(x)`` searches for the problem of such a call, ``row_sum.problem(x)``; ``row_sum.operation`` is what
    is tuned. Schedules are stored by the shapes and dtypes of the arrays and by the static parameters: int, float,
    bool, str, None, a dtype (which arrives as its name), or a tuple of these. An array that may be left out has the
    default None.

    Those below are functions of what their parameters name: arrays, each with a shape and a dtype; static parameters;
    and, where it is said, choices and `target` (`search_spaces.Target`, the chip). The function itself may have a
    parameter `target`, too.

    Args:
      reference: the right answer of the same arrays (by place, with those static parameters that it names) by plain
        JAX. It is verified against in float32 or wider, with products at the highest precision; XLA's program of it is
        the answer to beat, and derivatives are its own.
      configs: in place of `choices`, a list of complete ones, ``[{"tile_m": 64, "stages": 2}, ...]``, as Triton's
        `@autotune` has them; rules may leave some out.
      rules: the reason in words -> what a legal schedule obeys; may name choices and `target`. It is asked of many
        schedules at once: `&`, `|` and `np.where` in place of `and`, `or` and `if`.
      footprint: what one launch demands (`search_spaces.Footprint`); may name choices, each an array of many values,
        and `target`. None prunes nothing, and ranks nothing before it is measured.
      supports: why there is no kernel for these arrays on `target`, in words, or None where there is.
      tolerance: how far an element may be off, absolutely and relative to the right one; one for each result, or one
        for all. None is 8 eps of the result's dtype: long sums need more. Of a number the absolute error is for right
        elements up to 1 or more, and less where all are smaller; that of a `Tolerance` is what it says. Integers and
        truth values are exact by default.
      inputs: operands to measure with, one for each array, given `rng`, a `jax.random.key`; None draws normal numbers.
      special: which operands of other values the result must be right for, too, before it is stored: some of "large",
        "tiny" (magnitudes, and the extremes of integers), "halves" (ties, zeros, equal elements), "nan", "inf" and
        "-inf". True is all, False none. None is all, or none where `inputs` is given: then only such operands are
        promised. With both, floating-point numbers take these values, and integers stay as `inputs` draws them.
      flops, bytes_moved: what the answer needs: no time below what the chip takes for them is believed. None is no
        operation, and every array moved once.
      name: under which schedules are stored; None is the function's module and name.
      choices: keyword of the function -> the values to try, or a function of arrays, static parameters and `target`.
        Values are int, bool, float, str or tuples, of one type for each choice, and None beside them. Rules and
        footprints that look at tuples or None are asked of one schedule after another.

    Raises:
      DeclarationError: what cannot be meant, with what to write instead.
    """
    if function is not None:
        raise DeclarationError(
            "autotune takes what is to be chosen: write @scheduler.autotune(tile_m=(64, 128), reference=...)"
        )

    def decorate(function: Callable[..., Any]) -> Callable[..., Any]:
        operation = operation_of(
            function,
            choices,
            name=name,
            reference=reference,
            configs=configs,
            rules=rules,
            footprint=footprint,
            supports=supports,
            tolerance=tolerance,
            inputs=inputs,
            special=special,
            flops=flops,
            bytes_moved=bytes_moved,
        )
        arguments, answer = operation.problem.declared.arguments, tuned(operation)
        bindings, answered = operation.problem.declared.bindings, 0
        arrays, chosen = arguments.arrays, frozenset(arguments.choices)

        def placed(given: tuple[Any, ...], named: dict[str, Any]) -> tuple[Any, ...]:
            """All arrays by place: the named ones are taken from `named`, of which the rest is static."""
            if wrong := sorted(chosen & named.keys()):
                raise TypeError(f"{wrong[0]} is chosen for {function.__name__}: to choose it, give schedule={{...}}")
            if any(array in named for array in arrays[: len(given)]):
                twice = next(array for array in arrays[: len(given)] if array in named)
                raise TypeError(f"{function.__name__} got several values of {twice}")
            last = max((place + 1 for place, array in enumerate(arrays) if array in named), default=0)
            given += tuple(named.pop(array, None) for array in arrays[len(given) : last])
            for static, value in named.items():
                named[static] = Spelled(spelled(static, value))
            return given

        @functools.wraps(function)
        def call(*given: Any, on_miss: Any = None, backends: Any = None, schedule: Any = None, **named: Any) -> Any:
            nonlocal answered
            if (now := bindings.generation()) != answered:
                forget(operation)
                answered = now
            if named:
                given = placed(given, named)
            return answer(*given, on_miss=on_miss, backends=backends, schedule=schedule, **named)

        def problem(*given: Any, **named: Any) -> Any:
            return answer.problem(*placed(given, named), **named)  # type: ignore[attr-defined]

        call.operation, call.problem = operation, problem  # type: ignore[attr-defined]
        call.tune = functools.partial(tune, call)  # type: ignore[attr-defined]
        return call

    return decorate
