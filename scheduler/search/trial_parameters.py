"""Parameters of a trial for Optuna's dashboard, over all choices of the kernels' search spaces."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from optuna.distributions import BaseDistribution

from scheduler.core.fingerprints import Chosen
from scheduler.search.samplers import BACKEND, distributions_of, name_of, parameters_of, suggested_schedule
from search_spaces.operation import Operation
from search_spaces.problem import Problem
from search_spaces.space import Choice
from search_spaces.target import Target


class TrialParameters:
    """Returns the parameters of candidates of one problem, with their distributions, for Optuna's dashboard."""

    def __init__(self, operation: Operation[Any], problem: Problem, target: Target) -> None:
        kernels = [
            kernel for kernel in operation.kernels_on(target.platform) if kernel.supports(problem, target) is None
        ]
        spaces = {kernel.backend: kernel.space(problem, target) for kernel in kernels}
        choices: list[Mapping[str, Choice]] = [{BACKEND: backend} for backend in spaces]
        for space in spaces.values():
            choices += [{name_of(field): value} for field, several in space.choices.items() for value in several]
        self._distributions = distributions_of(choices)
        self._defaults = {backend: dict(space.defaults) for backend, space in spaces.items()}

    def __call__(self, which: Chosen) -> tuple[dict[str, Any], dict[str, BaseDistribution]]:
        """Returns the parameters of a candidate or trial. Fields that records omit have their defaults."""
        found = parameters_of(which.backend, {**self._defaults.get(which.backend, {}), **which.schedule})
        named = {name: value for name, value in found.items() if name in self._distributions}
        return {n: suggested_schedule(self._distributions[n], value) for n, value in named.items()}, self._distributions
