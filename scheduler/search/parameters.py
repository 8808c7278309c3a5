"""Optuna parameters of schedules: the backend, and every field of the backend's schedule."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from typing import Any

from optuna.distributions import BaseDistribution, CategoricalDistribution, FloatDistribution, IntDistribution

from search_spaces.space import Choice

BACKEND = "backend"


def parameters(backend: str, schedule: Mapping[str, Choice]) -> dict[str, Choice]:
    """Returns the parameters of one candidate. A field named "backend" becomes "schedule.backend"."""
    return {BACKEND: backend} | {name_of(field): value for field, value in schedule.items()}


def distributions_of(candidates: Iterable[Mapping[str, Choice]]) -> dict[str, BaseDistribution]:
    """Returns a distribution for each parameter of these candidates.

    Integers and floats become ranges from the smallest to the largest value, logarithmic if all values are positive.
    All other values become categories. Tuples, and values of several types, become categories of text.
    """
    found: dict[str, dict[tuple[type, Choice], Choice]] = {}
    for candidate in candidates:
        for name, value in candidate.items():
            found.setdefault(name, {})[type(value), value] = value  # also by type, because 1 == True
    return {name: _distribution(list(values.values())) for name, values in found.items()}


def suggested(distribution: BaseDistribution, value: Choice) -> Any:
    """Converts `value` to the form that `distribution` uses."""
    if isinstance(distribution, CategoricalDistribution) and not any(
        type(choice) is type(value) and choice == value for choice in distribution.choices
    ):
        return str(value)
    return value


def middle(distribution: BaseDistribution) -> Any:
    """Returns the middle of a range, or the first category: the value of a parameter that a candidate lacks."""
    match distribution:
        case CategoricalDistribution():
            return distribution.choices[0]
        case IntDistribution() | FloatDistribution():
            low, high = distribution.low, distribution.high
            centre = math.sqrt(low * high) if distribution.log else (low + high) / 2
            return round(centre) if isinstance(distribution, IntDistribution) else centre
    raise TypeError(f"no middle of {distribution}")


def name_of(field: str) -> str:
    """Returns the parameter name of a schedule's field."""
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
