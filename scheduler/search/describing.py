"""What Optuna's dashboard shows of a trial: its parameters, over all choices of the kernels' spaces."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Protocol

from optuna.distributions import BaseDistribution

from scheduler.search.parameters import BACKEND, distributions_of, name_of, parameters, suggested
from search_spaces.kernel import Target
from search_spaces.operation import Operation
from search_spaces.problem import Problem
from search_spaces.space import Choice


class Tried(Protocol):
    """A candidate or a trial."""

    @property
    def backend(self) -> str: ...
    @property
    def schedule(self) -> Mapping[str, Choice]: ...


class Describing:
    """The parameters of candidates of one problem, with their distributions, as Optuna's dashboard shows them."""

    def __init__(self, operation: Operation[Any], problem: Problem, target: Target) -> None:
        self._distributions = distributions_of_problem(operation, problem, target)
        self._defaults = {
            kernel.backend: dict(kernel.space(problem, target).defaults)
            for kernel in operation.kernels
            if kernel.supports(problem, target) is None
        }

    def __call__(self, which: Tried) -> tuple[dict[str, Any], dict[str, BaseDistribution]]:
        """Those of a candidate or trial, with the fields that records leave out, as they have their default."""
        found = parameters(which.backend, {**self._defaults.get(which.backend, {}), **which.schedule})
        named = {name: value for name, value in found.items() if name in self._distributions}
        return {n: suggested(self._distributions[n], value) for n, value in named.items()}, self._distributions


def distributions_of_problem(
    operation: Operation[Any], problem: Problem, target: Target
) -> dict[str, BaseDistribution]:
    """A distribution for each parameter of the kernels that support `problem`, over every choice of their spaces."""
    values: list[Mapping[str, Choice]] = []
    for kernel in operation.kernels:
        if kernel.supports(problem, target) is None:
            values.append({BACKEND: kernel.backend})
            choices = kernel.space(problem, target).choices
            values += [{name_of(field): value} for field, several in choices.items() for value in several]
    return distributions_of(values)
