"""The decorator ``autotune``: turns a plain Pallas function with tunable parameters into a tuned function."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from scheduler.api import forget, tune, tuned
from search_spaces.autotuned import operation_of
from search_spaces.autotuned.arguments import Spelled, static_to_text
from search_spaces.space import DeclarationError

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

    The function's positional parameters are arrays. Its keyword-only parameters are the choices and the static
    parameters. The decorated function is ``row_sum(*arrays, on_miss=None, backends=None, schedule=None, **static)``, as
    `tuned` creates it. ``row_sum.tune(x)`` searches for the problem of such a call, ``row_sum.problem(x)`` returns that
    problem, and ``row_sum.operation`` is the tuned operation. Schedules are stored by the shapes and dtypes of the
    arrays and by the static parameters: int, float, bool, str, None, a dtype (passed as its name), or a tuple of these.
    An optional array has the default None.

    The callables below receive the arguments that their parameters name: arrays, each with a shape and a dtype; static
    parameters; and, if documented, choices and `target` (`search_spaces.Target`, the chip). The decorated function may
    also have a parameter `target`.

    Args:
      reference: a plain JAX function that computes the correct result from the same arrays (positional) and the static
        parameters that it names. Results are verified against it in float32 or wider, with matmuls at the highest
        precision. XLA's program of it is the baseline. Derivatives are those of the reference.
      configs: an alternative to `choices`: a list of complete configurations, ``[{"tile_m": 64, "stages": 2}, ...]``,
        as in Triton's `@autotune`. Rules may drop some of them.
      rules: a dict from a reason, as text, to a predicate for legal schedules. A predicate may name choices and
        `target`. It is evaluated for many schedules at once: use `&`, `|` and `np.where` instead of `and`, `or` and
        `if`.
      footprint: the resources of one launch (`search_spaces.Footprint`). It may name choices, each an array of many
        values, and `target`. With None, nothing is pruned, and nothing is ranked before it is measured.
      supports: returns the reason why there is no kernel for these arrays on `target`, or None if there is one.
      tolerance: the allowed absolute and relative error of an element; one for each result, or one for all. None means
        8 eps of the result's dtype; long sums need more. For a number, the absolute error applies to correct elements
        of magnitude up to 1 or more, and shrinks if all of them are smaller. A `Tolerance` is used as given. Integers
        and booleans must match exactly by default.
      inputs: creates the operands to measure with, one per array, from `rng`, a `jax.random.key`. None draws normally
        distributed numbers.
      special: kinds of special operand values for which the result is also verified before it is stored: "large",
        "tiny" (magnitudes, and the extremes of integers), "halves" (ties, zeros, equal elements), "offset" (a large
        mean and a small deviation), "nan", "inf" and "-inf". A schedule that is wrong for one of these is refused. True
        means all, False none. None means none if `inputs` is given, because then only such operands are guaranteed;
        otherwise all, but a schedule that is wrong for "large", "nan", "inf" or "-inf" is used with a warning, unless
        all operands are integers, or a NaN is in a row in which the reference is finite. With `inputs` and `special`,
        floating-point numbers take these values, and integers stay as `inputs` draws them.
      flops, bytes_moved: the work that the result needs. A measured time below what the chip needs for that work is
        rejected. None means zero operations, and each array moved once.
      name: the name under which schedules are stored; None means the function's module and name.
      choices: for each keyword of the function, the values to try, or a function of arrays, static parameters and
        `target` that returns them. Values are int, bool, float, str or tuples, of one type per choice, and optionally
        None. Rules and footprints that use tuples or None are evaluated for one schedule at a time.

    Raises:
      DeclarationError: an invalid declaration; the message says what to write instead.
    """
    if function is not None:
        raise DeclarationError("autotune expects choices: write @scheduler.autotune(tile_m=(64, 128), reference=...)")

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
            """Moves the arrays in `named` to their positions; the rest of `named` is static."""
            if wrong := sorted(chosen & named.keys()):
                raise TypeError(f"{wrong[0]} of {function.__name__} is tuned: to set it, pass schedule={{...}}")
            if any(array in named for array in arrays[: len(given)]):
                twice = next(array for array in arrays[: len(given)] if array in named)
                raise TypeError(f"{function.__name__} got several values of {twice}")
            last = max((place + 1 for place, array in enumerate(arrays) if array in named), default=0)
            given += tuple(named.pop(array, None) for array in arrays[len(given) : last])
            for static, value in named.items():
                named[static] = Spelled(static_to_text(static, value))
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
