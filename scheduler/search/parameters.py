"""Parameters of Optuna for schedules: the backend, and every field of the backend's schedule."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from typing import Any

from optuna.distributions import BaseDistribution, CategoricalDistribution, FloatDistribution, IntDistribution

from search_spaces.space import Choice

BACKEND = "backend"


def parameters(backend: str, schedule: Mapping[str, Choice]) -> dict[str, Choice]:
    """The parameters of one candidate. A field that is itself named "backend" becomes "schedule.backend"."""
    return {BACKEND: backend} | {name_of(field): value for field, value in schedule.items()}


def distributions_of(candidates: Iterable[Mapping[str, Choice]]) -> dict[str, BaseDistribution]:
    """A distribution for each parameter that any of these candidates has.

    Integers and floats become ranges from the smallest to the largest value, logarithmic where all are positive.
    Everything else becomes categories; tuples, and values of several types, become categories of text.
    """
    found: dict[str, dict[tuple[type, Choice], Choice]] = {}
    for candidate in candidates:
        for name, value in candidate.items():
            found.setdefault(name, {})[type(value), value] = value  # by type, too: 1 == True
    return {name: _distribution(list(values.values())) for name, values in found.items()}


def suggested(distribution: BaseDistribution, value: Choice) -> Any:
    """`value` as `distribution` spells it."""
    if isinstance(distribution, CategoricalDistribution) and not any(
        type(choice) is type(value) and choice == value for choice in distribution.choices
    ):
        return str(value)
    return value


def middle(distribution: BaseDistribution) -> Any:
    """A value from the middle of a range, or the first category: it stands for a parameter that a candidate lacks."""
    match distribution:
        case CategoricalDistribution():
            return distribution.choices[0]
        case IntDistribution() | FloatDistribution():
            low, high = distribution.low, distribution.high
            centre = math.sqrt(low * high) if distribution.log else (low + high) / 2
            return round(centre) if isinstance(distribution, IntDistribution) else centre
    raise TypeError(f"no middle of {distribution}")


def name_of(field: str) -> str:
    """The parameter of a field of a schedule."""
    return f"schedule.{field}" if field == BACKEND else field


def _distribution(values: list[Choice]) -> BaseDistribution:
    kinds = {type(value) for value in values}
    if kinds == {int}:
        low, high = min(values), max(values)  # type: ignore[type-var]
        return IntDistribution(low, high, log=low >= 1)  # type: ignore[arg-type,operator]
    if kinds == {float} and all(math.isfinite(value) for value in values):  # type: ignore[arg-type]
        low, high = min(values), max(values)  # type: ignore[type-var]
        return FloatDistribution(low, high, log=low > 0)  # type: ignore[arg-type,operator]
    if len(kinds) > 1 or kinds & {tuple, float}:
        return CategoricalDistribution(list(dict.fromkeys(map(str, values))))
    return CategoricalDistribution(values)  # type: ignore[arg-type]  # booleans, texts or None
