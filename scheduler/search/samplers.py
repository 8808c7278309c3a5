"""Samplers of the next candidate: the model-based sampler, and an adapter from Optuna's samplers to legal schedules.

`ModelSampler` proposes candidates in the order of the cost model. Every few trials it draws one from all candidates,
because only measurements far from the model's favourites can contradict the model. If the scatter of the times about
the predictions exceeds the model's usual error, a Gaussian process of the logarithm of time proposes the candidate with
the largest expected improvement. `LegalSampler` wraps any Optuna sampler and proposes the nearest legal schedule that
is untried.
"""

from __future__ import annotations

import contextlib
import copy
import dataclasses
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt
import optuna
from optuna.distributions import BaseDistribution, CategoricalDistribution, FloatDistribution, IntDistribution
from optuna.samplers import BaseSampler
from optuna.trial import FrozenTrial, TrialState, create_trial

from scheduler.core.errors import SamplerFailed
from search_spaces.space import Choice

# ------------------------------------------------------------------------------
# A Gaussian process over points of a unit cube, and its expected improvement.
#
# The kernel is Matern 5/2 with one length for all coordinates. The length is not fitted: on recorded shapes with a
# shuffled model, fitted lengths found no better schedules in 16 and 32 trials. Formulas: Rasmussen and Williams,
# Gaussian Processes for Machine Learning (2006), chapters 2 and 4.2.

_Array = npt.NDArray[np.float64]

# The length scale, which is multiplied by the root of the number of coordinates because distances grow with it; and the
# variance of the noise relative to that of the function.
_LENGTH, _NOISE = 0.5, 1e-2
# Number of multiplications above which LAPACK's threads are worth their cost to concurrent processes.
_THREADED = 2**28


def predict(x: _Array, y: _Array, at: _Array) -> tuple[_Array, _Array]:
    """Returns the mean and standard deviation of the function at points `at`, given values `y` at points `x`."""
    level = y.mean()
    lower: _Array = np.linalg.cholesky(_correlation(x, x) + _NOISE * np.eye(len(y))).astype(np.float64, copy=False)
    whitened = _solved(lower, (y - level)[:, None])[:, 0]
    cross = _solved(lower, _correlation(x, at))
    variance = max(float(whitened @ whitened) / len(y), 1e-12)
    left = np.maximum(1 - np.einsum("ij,ij->j", cross, cross), 1e-12)
    return level + whitened @ cross, np.sqrt(variance * left)


def _solved(lower: _Array, right: _Array) -> _Array:
    """Solves ``lower @ solution = right``, in this thread alone if that takes at most tens of milliseconds.

    After each solution with many columns, OpenBLAS's threads (one per core) spin for about 0.1 s, waiting for more
    work. A search solves every 0.1 s while workers compile: on two cores, two workers got only 70 % of their work done.
    """
    if lower.size * right.shape[1] > _THREADED:
        from scipy.linalg import solve_triangular  # importing SciPy takes 0.7 s

        solution: _Array = solve_triangular(lower, right, lower=True)
        return solution
    solved = np.empty_like(right)
    for row, factors in enumerate(lower):
        solved[row] = (right[row] - np.einsum("i,ij->j", factors[:row], solved[:row])) / factors[row]
    return solved


def expected_improvement(mean: _Array, deviation: _Array, best: float) -> _Array:
    """Returns the expected improvement below `best` at each point (Jones et al., 1998)."""
    z = (best - mean) / deviation
    density = np.exp(-(z**2) / 2) / np.sqrt(2 * np.pi)
    below = np.array([*map(math.erfc, -z / 2**0.5)]) / 2
    improvement: _Array = deviation * (z * below + density)
    return improvement


def _correlation(x: _Array, at: _Array) -> _Array:
    squares = sum((np.subtract.outer(a, b) ** 2 for a, b in zip(x.T, at.T, strict=True)), np.zeros((len(x), len(at))))
    r = 5.0**0.5 / (_LENGTH * max(x.shape[1], 1) ** 0.5) * np.sqrt(squares)
    correlation: _Array = (1 + r + r**2 / 3) * np.exp(-r)
    return correlation


# ------------------------------------------------------------------------------
# Optuna parameters of schedules: the backend, and every field of the backend's schedule.

BACKEND = "backend"


def parameters_of(backend: str, schedule: Mapping[str, Choice]) -> dict[str, Choice]:
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


def suggested_schedule(distribution: BaseDistribution, value: Choice) -> Any:
    """Converts `value` to the form that `distribution` uses."""
    if isinstance(distribution, CategoricalDistribution) and not any(
        type(choice) is type(value) and choice == value for choice in distribution.choices
    ):
        return str(value)
    return value


def middle_of(distribution: BaseDistribution) -> Any:
    """Returns the middle of a range, or the first category: the value of a parameter that a candidate lacks."""
    match distribution:
        case CategoricalDistribution():
            return distribution.choices[0]
        case IntDistribution() | FloatDistribution():
            low, high = distribution.low, distribution.high
            centre = math.sqrt(low * high) if distribution.log else (low + high) / 2
            return round(centre) if isinstance(distribution, IntDistribution) else centre
    raise TypeError(f"no middle of {distribution}")


def _values_text(distribution: BaseDistribution) -> str:
    match distribution:
        case CategoricalDistribution():
            return ", ".join(map(str, distribution.choices))
        case IntDistribution() | FloatDistribution():
            return f"{distribution.low} to {distribution.high}"
    raise TypeError(f"no values of {distribution}")


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


Mask = npt.NDArray[np.bool_]

# User attribute of a trial: the index of its candidate.
CANDIDATE = "candidate"
# System attribute of a trial: the grid of a `GridSampler`, parameter -> values.
_GRID = "search_space"
_MISSING = object()
_PROBE = 5  # one of this many trials is a probe, drawn from all candidates
# Threshold for the standard deviation of the model's residuals, log(measured / predicted). Above it, measurements
# contradict the model. The value is the model's own error on the swept shapes.
_ACCURATE = 0.07
_FEWEST = 5  # minimum number of times that can contradict the model


class Candidate(Protocol):
    """The interface of a candidate in a search. `floor_s` is a lower bound of its time, or 0 if none is known."""

    @property
    def backend(self) -> str: ...
    @property
    def schedule(self) -> Mapping[str, Choice]: ...
    @property
    def predicted_s(self) -> float: ...
    @property
    def floor_s(self) -> float: ...


class CandidateSpace:
    """Maps candidates to Optuna parameters and back.

    Every candidate has a value for every parameter, so that samplers that need a fixed space (GP, CMA-ES) can use it. A
    parameter that a backend lacks gets the middle of its range.

    Attributes:
      distributions: parameter -> its distribution.
      free: mask of candidates that may be proposed: untried, and able to beat the fastest. Updated by the search.
      log_predicted: logarithms of the predicted seconds.
    """

    def __init__(self, candidates: Sequence[Candidate]) -> None:
        self._labels = [parameters_of(c.backend, c.schedule) for c in candidates]
        self.distributions = distributions_of(self._labels)
        self.free = np.ones(len(candidates), dtype=bool)
        self.log_predicted = np.log(np.maximum([c.predicted_s for c in candidates], 1e-12))
        self.points = _encode(self._labels, self.log_predicted)
        self._columns = {name: self._column(name) for name in self.distributions}

    def __len__(self) -> int:
        return len(self._labels)

    def parameters(self, index: int) -> dict[str, Any]:
        """Returns a value for every parameter."""
        label = self._labels[index]
        return {
            name: suggested_schedule(each, label[name]) if name in label else middle_of(each)
            for name, each in self.distributions.items()
        }

    def nearest(self, wanted: Mapping[str, Any]) -> int:
        """Returns the free candidate nearest to the `wanted` parameters, from the same backend if possible.

        The distance is the sum over the fields of that candidate. A number contributes the squared distance relative to
        its range (logarithmic, where the distribution is), a different category contributes one whole range. Of several
        equally near candidates, the one with the shortest predicted time is returned.
        """
        apart = np.zeros(len(self))
        for name, value in wanted.items():
            column, distribution = self._columns[name], self.distributions[name]
            (place,) = _places(distribution, [value])
            categories = isinstance(distribution, CategoricalDistribution)
            differs = (column != place).astype(np.float64) if categories else (column - place) ** 2
            weight = len(self._columns) if name == BACKEND else 1.0
            apart += weight * np.where(np.isnan(column), 0.0, differs)
        free = np.flatnonzero(self.free)
        return int(free[np.lexsort((self.log_predicted[free], apart[free]))[0]])

    def _column(self, name: str) -> _Array:
        """Returns the values of one parameter, mapped by `_places`; NaN if a candidate lacks the parameter."""
        values = [label.get(name, _MISSING) for label in self._labels]
        return _places(self.distributions[name], values)


class _OfCandidates(BaseSampler):
    """Base class of samplers that propose all parameters of a candidate together."""

    _space: CandidateSpace

    def infer_relative_search_space(self, study: optuna.Study, trial: FrozenTrial) -> dict[str, BaseDistribution]:
        return self._space.distributions

    def sample_independent(
        self, study: optuna.Study, trial: FrozenTrial, param_name: str, param_distribution: BaseDistribution
    ) -> Any:
        raise ValueError(f"the parameter {param_name!r} is none of {', '.join(self._space.distributions)}")


class ModelSampler(_OfCandidates):
    """Proposes in the order of the model, then by a surrogate if measurements contradict the model.

    Args:
      space: candidates to propose from.
      seed: seed of the probes.
    """

    def __init__(self, space: CandidateSpace, seed: int) -> None:
        self._space = space
        ranked = np.argsort(space.log_predicted, kind="stable")
        # A random candidate at every `_PROBE`-th position; a candidate may then occur twice.
        places = np.arange(_PROBE - 1, len(ranked), _PROBE - 1)
        probes = np.random.default_rng(seed).permutation(ranked)[: len(places)]
        self._order: list[int] = np.insert(ranked, places, probes).tolist()

    def sample_relative(
        self, study: optuna.Study, trial: FrozenTrial, search_space: dict[str, BaseDistribution]
    ) -> dict[str, Any]:
        known = Known.of(other for other in study.get_trials(deepcopy=False) if other.number != trial.number)
        if self.contradicted(known):
            return self._space.parameters(int(np.argmax(self.improvement(known))))
        return self._space.parameters(next(index for index in self._order if self._space.free[index]))

    def contradicted(self, known: Known) -> bool:
        """Whether the model misses the known times by more than its usual error, up to a constant factor."""
        return len(known.log_s) >= _FEWEST and bool(np.std(self._residuals(known)) > _ACCURATE)

    def _residuals(self, known: Known) -> _Array:
        residuals: _Array = np.array(list(known.log_s.values())) - self._space.log_predicted[list(known.log_s)]
        return residuals

    def improvement(self, known: Known) -> _Array:
        """Returns the expected improvement of each candidate as a share of the time; -1 if the candidate is not free.

        The estimate comes from the model and its residuals, or from the surrogate if the residuals contradict the
        model. The surrogate takes the slowest known time for failures, and the predicted mean for candidates that are
        still running.
        """
        space = self._space
        log_s, free = list(known.log_s.values()), np.flatnonzero(space.free)
        expected = np.full(len(space), -1.0)
        if not self.contradicted(known):
            mean = space.log_predicted[free] + self._residuals(known).mean()
            expected[free] = expected_improvement(mean, np.full(len(free), _ACCURATE), min(log_s))
            return expected
        x = space.points[[*known.log_s, *known.failed]]
        y = np.array([*log_s, *[max(log_s)] * len(known.failed)])
        if known.running:
            fantasies, _ = predict(x, y, space.points[known.running])
            x, y = np.concatenate([x, space.points[known.running]]), np.concatenate([y, fantasies])
        expected[free] = expected_improvement(*predict(x, y, space.points[free]), min(log_s))
        return expected


class LegalSampler(_OfCandidates):
    """Wraps another sampler and proposes the nearest legal schedule that is untried.

    An exception of the other sampler becomes a `SamplerFailed`.

    Args:
      proposing: any Optuna sampler.
      space: the legal candidates.
      first: candidates to propose before calling `proposing`. As for trials that are added to a study, its hooks are
        not called for them: `GridSampler` would count them as points of its grid.

    Attributes:
      chosen: index of the candidate proposed last; None before the first.
    """

    def __init__(self, proposing: BaseSampler, space: CandidateSpace, first: Sequence[int]) -> None:
        self.chosen: int | None = None
        self._proposing, self._space, self._first = proposing, space, first
        self._proposed: set[int] = set()

    def before_trial(self, study: optuna.Study, trial: FrozenTrial) -> None:
        self.chosen = next((index for index in self._first if self._space.free[index]), None)
        if self.chosen is None:
            self._proposed.add(trial.number)
            with self._failures():
                self._proposing.before_trial(study, trial)

    def sample_relative(
        self, study: optuna.Study, trial: FrozenTrial, search_space: dict[str, BaseDistribution]
    ) -> dict[str, Any]:
        if self.chosen is None:
            with self._failures():
                self.chosen = self._space.nearest(self._proposal(study, trial))
        return self._space.parameters(self.chosen)

    def _proposal(self, study: optuna.Study, trial: FrozenTrial) -> dict[str, Any]:
        """Returns a value for every parameter, sampled as `optuna.Trial.suggest_*` does in turn."""
        trial = copy.copy(study.get_trials(deepcopy=False)[trial.number])  # with the attributes that `before_trial` set
        trial.params, trial.distributions = {}, {}
        relative = self._proposing.infer_relative_search_space(study, trial)
        found = self._proposing.sample_relative(study, trial, relative)
        for name, distribution in self._space.distributions.items():
            if distribution.single():  # Optuna never samples these
                value = middle_of(distribution)
            elif name in found:
                value = found[name]
            else:
                value = self._proposing.sample_independent(study, trial, name, distribution)
            distribution.to_internal_repr(value)  # raises a ValueError for an unknown category
            trial.params = trial.params | {name: value}
            trial.distributions = trial.distributions | {name: distribution}
        return trial.params

    def after_trial(
        self, study: optuna.Study, trial: FrozenTrial, state: TrialState, values: Sequence[float] | None
    ) -> None:
        if trial.number in self._proposed:
            with self._failures():
                self._proposing.after_trial(study, trial, state, values)

    def reseed_rng(self) -> None:
        self._proposing.reseed_rng()

    @contextlib.contextmanager
    def _failures(self) -> Iterator[None]:
        try:
            yield
        except Exception as error:
            if isinstance(self._proposing, ModelSampler):
                raise
            parameters = "; ".join(f"{name}: {_values_text(d)}" for name, d in self._space.distributions.items())
            raise SamplerFailed(
                f"the sampler {type(self._proposing).__name__} cannot propose a schedule ({type(error).__name__}: "
                f"{error}); the parameters are {parameters}"
            ) from error

    def rehearse(self, study: optuna.Study) -> None:
        """Proposes one schedule in an empty `study`, and checks all values of a `GridSampler`.

        Raises:
          SamplerFailed: the sampler fails at once.
        """
        trial = study.ask(self._space.distributions)
        with self._failures():
            for name, values in study.get_trials(deepcopy=False)[trial.number].system_attrs.get(_GRID, {}).items():
                if (distribution := self._space.distributions.get(name)) is None:
                    raise ValueError(f"{name} is not a parameter")
                for value in values:  # raises a ValueError for a value outside of the distribution
                    create_trial(value=0.0, params={name: value}, distributions={name: distribution})


@dataclasses.dataclass(frozen=True)
class Known:
    """The trials of a study by candidate: logarithms of the times, failures, and running candidates."""

    log_s: Mapping[int, float]
    failed: Sequence[int]
    running: Sequence[int]

    @classmethod
    def of(cls, trials: Iterable[FrozenTrial]) -> Known:
        log_s, failed, running = {}, [], []
        for trial in trials:
            index = trial.user_attrs[CANDIDATE]
            match trial.state:
                case TrialState.COMPLETE if trial.value is not None:
                    log_s[index] = float(np.log(trial.value))
                case TrialState.RUNNING:
                    running.append(index)
                case _:
                    failed.append(index)
        return cls(log_s, failed, running)


def _places(distribution: BaseDistribution, values: Sequence[Any]) -> _Array:
    """Maps values to their position in the range, from 0 to 1, or to category numbers; NaN for `_MISSING`."""
    if isinstance(distribution, CategoricalDistribution):
        numbers = {(type(choice), choice): number for number, choice in enumerate(distribution.choices)}
        known = (value if (type(value), value) in numbers else str(value) for value in values)
        return np.array([numbers.get((type(value), value), np.nan) for value in known])
    assert isinstance(distribution, IntDistribution | FloatDistribution)
    at = np.array([np.nan if value is _MISSING else value for value in values], dtype=np.float64)
    low, high = float(distribution.low), float(distribution.high)
    if distribution.log:
        low, high, at = np.log(low), np.log(high), np.log(at)
    places: _Array = (at - low) / ((high - low) or 1.0)
    return places


def _encode(labels: Sequence[Mapping[str, Choice]], log_predicted: _Array) -> _Array:
    """Encodes candidates as points ``[candidate, coordinate]`` of the unit cube: fields and the model's prediction.

    Positive numbers are encoded by their logarithms, other values one-hot. A number that a backend lacks lies in the
    middle; the backend itself has coordinates of its own. Coordinates in which all candidates agree are dropped.
    """
    columns = [log_predicted]
    for name in dict.fromkeys(name for label in labels for name in label):
        values = [label.get(name) for label in labels]
        kinds = {type(value) for value in values if value is not None}
        if kinds in ({int}, {float}):
            numbers = np.array([np.nan if value is None else value for value in values], dtype=np.float64)
            columns.append(np.log2(numbers) if np.nanmin(numbers) > 0 else numbers)
        else:
            distinct = sorted({str(value) for value in values if value is not None})
            texts = np.array([str(value) for value in values])
            columns += [(texts == text).astype(np.float64) for text in distinct[len(distinct) == 2 :]]
    points = np.stack(columns, axis=1)
    if not len(points):
        return points
    low, high = np.nanmin(points, axis=0), np.nanmax(points, axis=0)
    varied = high > low
    scaled: _Array = (points[:, varied] - low[varied]) / (high - low)[varied]
    return np.nan_to_num(scaled, nan=0.5)
