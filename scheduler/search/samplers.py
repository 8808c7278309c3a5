"""Which candidate to measure next: our sampler, any other one of Optuna, and the step back to a legal schedule.

`ModelSampler` proposes candidates in the order of the cost model, and now and then one drawn from all of them: only far
from its favourites can measurements contradict a model. Where the times scatter about the predictions by more than the
model's usual error, a Gaussian process of the logarithm of time proposes the candidate with the largest expected
improvement. `LegalSampler` asks any sampler of Optuna and takes the nearest legal schedule that was not tried.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt
import optuna
from optuna.distributions import BaseDistribution, CategoricalDistribution, FloatDistribution, IntDistribution
from optuna.samplers import BaseSampler
from optuna.trial import FrozenTrial, TrialState

from scheduler.search import parameters
from scheduler.search.gaussian_process import expected_improvement, predict
from search_spaces.space import Choice

Array = npt.NDArray[np.float64]
Mask = npt.NDArray[np.bool_]

# A trial's attribute: the index of its candidate.
CANDIDATE = "candidate"
_MISSING = object()
_PROBE = 5  # of so many trials one is a probe, drawn from all candidates
# Standard deviation of the model's residuals, the logarithms of measured over predicted time, above which measurements
# contradict the model: its own error on the shapes that were swept.
_ACCURATE = 0.07
_FEWEST = 5  # times that can contradict it


class Candidate(Protocol):
    """What a search needs to know of a candidate. `floor_s` is a lower bound of its time, 0 where none is known."""

    @property
    def backend(self) -> str: ...
    @property
    def schedule(self) -> Mapping[str, Choice]: ...
    @property
    def predicted_s(self) -> float: ...
    @property
    def floor_s(self) -> float: ...


class CandidateSpace:
    """A list of candidates as parameters of Optuna, and back.

    Every candidate has a value for every parameter, so that samplers that need a fixed space (GP, CMA-ES) can use it: a
    parameter that a backend lacks has the middle of its range.

    Attributes:
      distributions: parameter -> its distribution.
      free: candidates that may be proposed: untried, and able to beat the fastest. The search keeps it up to date.
      log_predicted: logarithms of the predicted seconds.
    """

    def __init__(self, candidates: Sequence[Candidate]) -> None:
        self._labels = [parameters.parameters(c.backend, c.schedule) for c in candidates]
        self.distributions = parameters.distributions_of(self._labels)
        self.free = np.ones(len(candidates), dtype=bool)
        self.log_predicted = np.log(np.maximum([c.predicted_s for c in candidates], 1e-12))
        self.points = _encode(self._labels, self.log_predicted)
        self._columns = {name: self._column(name) for name in self.distributions}

    def __len__(self) -> int:
        return len(self._labels)

    def parameters(self, index: int) -> dict[str, Any]:
        """A value for every parameter."""
        label = self._labels[index]
        return {
            name: parameters.suggested(each, label[name]) if name in label else parameters.middle(each)
            for name, each in self.distributions.items()
        }

    def nearest(self, wanted: Mapping[str, Any]) -> int:
        """The free candidate nearest to these parameters: of the same backend if possible, then in its own fields.

        Ranges count by their (logarithmic) length, and a different category as one whole range. Of several that are
        equally near, the one that the model predicts to be fastest.
        """
        apart = np.zeros(len(self))
        for name, value in wanted.items():
            column, distribution = self._columns[name], self.distributions[name]
            (place,) = _places(distribution, [value])
            categories = isinstance(distribution, CategoricalDistribution)
            differs = (column != place).astype(np.float64) if categories else (column - place) ** 2
            weight = len(self._columns) if name == parameters.BACKEND else 1.0
            apart += weight * np.where(np.isnan(column), 0.0, differs)
        free = np.flatnonzero(self.free)
        return int(free[np.lexsort((self.log_predicted[free], apart[free]))[0]])

    def _column(self, name: str) -> Array:
        """The values of one parameter as `_places` has them; NaN where a candidate lacks it."""
        values = [label.get(name, _MISSING) for label in self._labels]
        return _places(self.distributions[name], values)


class _OfCandidates(BaseSampler):
    """A sampler that proposes all parameters of a candidate together."""

    _space: CandidateSpace

    def infer_relative_search_space(self, study: optuna.Study, trial: FrozenTrial) -> dict[str, BaseDistribution]:
        return self._space.distributions

    def sample_independent(
        self, study: optuna.Study, trial: FrozenTrial, param_name: str, param_distribution: BaseDistribution
    ) -> Any:
        raise ValueError(f"the parameter {param_name!r} is none of {', '.join(self._space.distributions)}")


class ModelSampler(_OfCandidates):
    """The model's order first, then, where measurements contradict the model, a surrogate.

    Args:
      space: what it proposes from.
      seed: of the probes.
    """

    def __init__(self, space: CandidateSpace, seed: int) -> None:
        self._space = space
        ranked = np.argsort(space.log_predicted, kind="stable")
        self._order = _with_probes(ranked, np.random.default_rng(seed))

    def sample_relative(
        self, study: optuna.Study, trial: FrozenTrial, search_space: dict[str, BaseDistribution]
    ) -> dict[str, Any]:
        known = Known.of(other for other in study.get_trials(deepcopy=False) if other.number != trial.number)
        if self.contradicted(known):
            return self._space.parameters(int(np.argmax(self.improvement(known))))
        return self._space.parameters(next(index for index in self._order if self._space.free[index]))

    def contradicted(self, known: Known) -> bool:
        """Whether the model, but for one factor, misses the known times by more than its usual error."""
        return len(known.log_s) >= _FEWEST and bool(np.std(self._residuals(known)) > _ACCURATE)

    def _residuals(self, known: Known) -> Array:
        residuals: Array = np.array(list(known.log_s.values())) - self._space.log_predicted[list(known.log_s)]
        return residuals

    def improvement(self, known: Known) -> Array:
        """What is expected of each candidate, as a share of the time; -1 for those that are not free.

        By the model and its residuals, or, where these contradict it, by the surrogate: failures count as the slowest
        known time there, and candidates that still run as their mean.
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
    """Asks another sampler, and proposes the nearest legal schedule that was not tried.

    Args:
      proposing: any sampler of Optuna.
      space: the legal candidates.
      first: candidates to propose before `proposing` is asked.

    Attributes:
      chosen: the index of the candidate that was proposed last; None before the first.
    """

    def __init__(self, proposing: BaseSampler, space: CandidateSpace, first: Sequence[int]) -> None:
        self.chosen: int | None = None
        self._proposing, self._space, self._first = proposing, space, first

    def sample_relative(
        self, study: optuna.Study, trial: FrozenTrial, search_space: dict[str, BaseDistribution]
    ) -> dict[str, Any]:
        begun = next((index for index in self._first if self._space.free[index]), None)
        index = self._space.nearest(self._proposal(study, trial)) if begun is None else begun
        self.chosen = index
        return self._space.parameters(index)

    def _proposal(self, study: optuna.Study, trial: FrozenTrial) -> dict[str, Any]:
        relative = self._proposing.infer_relative_search_space(study, trial)
        found = self._proposing.sample_relative(study, trial, relative)
        return {
            name: found[name] if name in found else self._proposing.sample_independent(study, trial, name, distribution)
            for name, distribution in self._space.distributions.items()
            if not distribution.single()  # these no sampler is asked for, by Optuna's own custom
        }

    def before_trial(self, study: optuna.Study, trial: FrozenTrial) -> None:
        self._proposing.before_trial(study, trial)

    def after_trial(
        self, study: optuna.Study, trial: FrozenTrial, state: TrialState, values: Sequence[float] | None
    ) -> None:
        self._proposing.after_trial(study, trial, state, values)

    def reseed_rng(self) -> None:
        self._proposing.reseed_rng()


@dataclasses.dataclass(frozen=True)
class Known:
    """The trials of a study by candidate: logarithms of their times, those that failed, and those that still run."""

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


def _places(distribution: BaseDistribution, values: Sequence[Any]) -> Array:
    """Where values lie in their range, from 0 to 1, or the numbers of their categories; NaN for `_MISSING`."""
    if isinstance(distribution, CategoricalDistribution):
        numbers = {(type(choice), choice): number for number, choice in enumerate(distribution.choices)}
        known = (value if (type(value), value) in numbers else str(value) for value in values)
        return np.array([numbers.get((type(value), value), np.nan) for value in known])
    assert isinstance(distribution, IntDistribution | FloatDistribution)
    at = np.array([np.nan if value is _MISSING else value for value in values], dtype=np.float64)
    low, high = float(distribution.low), float(distribution.high)
    if distribution.log:
        low, high, at = np.log(low), np.log(high), np.log(at)
    places: Array = (at - low) / ((high - low) or 1.0)
    return places


def _with_probes(ranked: npt.NDArray[np.intp], random: np.random.Generator) -> list[int]:
    """`ranked`, with every `_PROBE`-th place given to one of them drawn at random: a candidate may be there twice."""
    places = np.arange(_PROBE - 1, len(ranked), _PROBE - 1)
    order: list[int] = np.insert(ranked, places, random.permutation(ranked)[: len(places)]).tolist()
    return order


def _encode(labels: Sequence[Mapping[str, Choice]], log_predicted: Array) -> Array:
    """Candidates as points of the unit cube ``[candidate, coordinate]``: their fields, and the model's prediction.

    Numbers count by their logarithms, other values by a coordinate each. A number that a backend lacks lies in
    the middle; which backend it is has coordinates of its own. Coordinates in which all agree are left out.
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
    scaled: Array = (points[:, varied] - low[varied]) / (high - low)[varied]
    return np.nan_to_num(scaled, nan=0.5)
