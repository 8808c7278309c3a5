"""Spend a budget of trials on a list of candidates: which one to measure next.

What is known to be good comes first, then the model's order, with a probe drawn from all candidates now and then: only
far from its favourites can measurements contradict a model. Where they do, as they scatter about the prediction by more
than its usual error, a Gaussian process of the logarithm of time proposes the candidate that promises the largest
improvement, from the schedules' fields and the prediction. What cannot beat the fastest time so far, by its lower
bound, is left out.

Optuna keeps the trials and asks a sampler of ours: its own repeat points, ignore failures and know no list of legal
candidates (its TPE finds less than drawing at random, benchmarks/search_quality.py).
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt
import optuna
from optuna.distributions import BaseDistribution, IntDistribution
from optuna.trial import FrozenTrial, TrialState

from scheduler.search.gaussian_process import expected_improvement, predict
from search_spaces.space import Choice

Array = npt.NDArray[np.float64]

_PROBE = 5  # of so many trials one is a probe, drawn from all candidates
# Standard deviation of the model's residuals, the logarithms of measured over predicted time, above which measurements
# contradict it: its own error on the shapes that were swept.
_ACCURATE = 0.07
_FEWEST = 5  # times that can contradict it
_NOTHING = 1e-3  # an expected improvement, as a share of the time, that is not worth a trial
_CANDIDATE = "candidate"


class Candidate(Protocol):
    """What a search needs to know of a candidate: `backend` and `schedule` tell it from others.

    It takes at least `floor_s` seconds, 0 where that is unknown.
    """

    @property
    def backend(self) -> str: ...
    @property
    def schedule(self) -> Mapping[str, Choice]: ...
    @property
    def predicted_s(self) -> float: ...
    @property
    def floor_s(self) -> float: ...


class Search:
    """One search over `candidates`: ask for an index, measure it, tell its time, until `ask` returns None.

    Several indices may be asked for before the first is told. No index is ever given twice.

    Args:
      candidates: the legal ones; sorted or not.
      budget: how many may be asked for.
      seed: of every random draw.
      first: indices to begin with, in this order: incumbents, the library, winners of similar problems.
      known: what was asked for and told in an earlier part of this search: index -> seconds, None where it failed. It
        counts against the budget.
      patience: stop after so many trials in a row that brought nothing, where nothing is expected of the next; None
        goes on.
    """

    def __init__(
        self,
        candidates: Sequence[Candidate],
        *,
        budget: int,
        seed: int = 0,
        first: Sequence[int] = (),
        known: Mapping[int, float | None] | None = None,
        patience: int | None = None,
    ) -> None:
        self._count, self._budget, self._patience = len(candidates), budget, patience
        self._floors = np.array([c.floor_s for c in candidates], dtype=np.float64)
        if outside := [index for index in first if not 0 <= index < self._count]:
            raise ValueError(f"first={outside} are no indices of {self._count} candidates")
        self._sampler = PoolSampler(candidates, seed=seed, first=first)
        self._study = _quiet_study(self._sampler)
        self._running: dict[int, optuna.Trial] = {}
        self._seconds: dict[int, float | None] = dict(known or {})
        for index, seconds in self._seconds.items():
            self._study.add_trial(
                optuna.trial.create_trial(
                    state=TrialState.FAIL if seconds is None else TrialState.COMPLETE,
                    value=seconds,
                    params={_CANDIDATE: index},
                    distributions={_CANDIDATE: IntDistribution(0, self._count - 1)},
                    user_attrs=self._sampler.labels[index],
                )
            )

    @property
    def asked(self) -> int:
        """Candidates given out so far."""
        return len(self._running) + len(self._seconds)

    @property
    def best(self) -> tuple[int, float] | None:
        """Index and seconds of the fastest told so far."""
        times = [(seconds, index) for index, seconds in self._seconds.items() if seconds is not None]
        return (min(times)[1], min(times)[0]) if times else None

    @property
    def excluded(self) -> int:
        """Candidates not asked for whose lower bound exceeds the fastest time told."""
        return int(np.delete(self._hopeless(), [*self._running, *self._seconds]).sum())

    @property
    def reason(self) -> str:
        """Why `ask` returns None, or "" while it does not."""
        if self.asked == self._count:
            return f"all {self._count} candidates were tried"
        if self.asked >= self._budget:
            return f"the budget of {self._budget} trials is spent"
        if self.asked + self.excluded == self._count:
            return "nothing untried can beat the fastest, by its lower bound"
        if self._patience is not None and self._idle() >= self._patience and self._expected() < _NOTHING:
            return f"the last {self._patience} trials brought nothing, and less than {_NOTHING:.1%} is expected"
        return ""

    def _hopeless(self) -> npt.NDArray[np.bool_]:
        """Which candidates cannot beat the fastest told so far."""
        return self._floors > (self.best[1] if self.best is not None else np.inf)

    def _idle(self) -> int:
        """Trials told since the fastest was."""
        if self.best is None:
            return 0
        return len(self._seconds) - 1 - list(self._seconds).index(self.best[0])

    def _expected(self) -> float:
        """The largest improvement that is expected of an untried candidate, as a share of the time."""
        self._sampler.hopeless = self._hopeless()
        known = Known.of(self._study.get_trials(deepcopy=False))
        return float(self._sampler.improvement(known).max()) if known.log_s else np.inf

    def ask(self) -> int | None:
        """Index of the candidate to measure next, or None: the budget is spent or nothing is left."""
        if self.reason:
            return None
        self._sampler.hopeless = self._hopeless()
        trial = self._study.ask()
        index = trial.suggest_int(_CANDIDATE, 0, self._count - 1)
        for name, value in self._sampler.labels[index].items():
            trial.set_user_attr(name, value)
        self._running[index] = trial
        return index

    def tell(self, index: int, seconds: float | None) -> None:
        """The outcome of a candidate that was asked for: its time, or None where it failed.

        Raises:
          ValueError: it was not asked for, or was told before, or `seconds` is no time.
        """
        if index not in self._running:
            raise ValueError(f"candidate {index} is not being measured: ask for it first, and tell it once")
        if seconds is not None and not 0 < seconds < float("inf"):
            raise ValueError(f"candidate {index} took {seconds} s: a time is positive and finite, a failure is None")
        trial = self._running.pop(index)
        self._seconds[index] = seconds
        if seconds is None:
            self._study.tell(trial, state=TrialState.FAIL)
        else:
            self._study.tell(trial, seconds)


class PoolSampler(optuna.samplers.BaseSampler):
    """Proposes candidates of a list that no trial of the study has had, whatever became of those trials.

    Attributes:
      labels: what Optuna shows of each candidate.
      hopeless: candidates to leave out.
    """

    def __init__(self, candidates: Sequence[Candidate], *, seed: int, first: Sequence[int]) -> None:
        self.labels = [{"backend": c.backend, **c.schedule} for c in candidates]
        self.hopeless = np.zeros(len(candidates), dtype=bool)
        self._log_predicted = np.log(np.maximum([c.predicted_s for c in candidates], 1e-12))
        self._x = _encode(self.labels, self._log_predicted)
        ranked = np.argsort(self._log_predicted, kind="stable")
        self._order = [*first, *_with_probes(ranked, np.random.default_rng(seed))]

    def infer_relative_search_space(self, study: optuna.Study, trial: FrozenTrial) -> dict[str, BaseDistribution]:
        return {_CANDIDATE: IntDistribution(0, len(self._x) - 1)}

    def sample_relative(
        self, study: optuna.Study, trial: FrozenTrial, search_space: dict[str, BaseDistribution]
    ) -> dict[str, Any]:
        known = Known.of(other for other in study.get_trials(deepcopy=False) if other.number != trial.number)
        if self.contradicted(known):
            return {_CANDIDATE: int(np.argmax(self.improvement(known)))}
        free = self._free(known)
        return {_CANDIDATE: next(index for index in self._order if free[index])}

    def sample_independent(
        self, study: optuna.Study, trial: FrozenTrial, param_name: str, param_distribution: BaseDistribution
    ) -> Any:
        raise ValueError(f"this sampler knows no parameter but {_CANDIDATE!r}, asked for {param_name!r}")

    def contradicted(self, known: Known) -> bool:
        """Whether the model, but for one factor, misses the known times by more than its usual error."""
        return len(known.log_s) >= _FEWEST and bool(np.std(self._residuals(known)) > _ACCURATE)

    def _residuals(self, known: Known) -> Array:
        residuals: Array = np.array(list(known.log_s.values())) - self._log_predicted[list(known.log_s)]
        return residuals

    def improvement(self, known: Known) -> Array:
        """What is expected of each candidate, as a share of the time; -1 for those that are not free.

        By the model and its residuals, or, where these contradict it, by the surrogate: failures count as the slowest
        known time there, and candidates that still run as their mean.
        """
        log_s, free = list(known.log_s.values()), np.flatnonzero(self._free(known))
        expected = np.full(len(self._x), -1.0)
        if not self.contradicted(known):
            mean = self._log_predicted[free] + self._residuals(known).mean()
            expected[free] = expected_improvement(mean, np.full(len(free), _ACCURATE), min(log_s))
            return expected
        x = self._x[[*known.log_s, *known.failed]]
        y = np.array([*log_s, *[max(log_s)] * len(known.failed)])
        if known.running:
            fantasies, _ = predict(x, y, self._x[known.running])
            x, y = np.concatenate([x, self._x[known.running]]), np.concatenate([y, fantasies])
        expected[free] = expected_improvement(*predict(x, y, self._x[free]), min(log_s))
        return expected

    def _free(self, known: Known) -> npt.NDArray[np.bool_]:
        free = ~self.hopeless
        free[[*known.log_s, *known.failed, *known.running]] = False
        return free


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
            index = trial.params[_CANDIDATE]
            match trial.state:
                case TrialState.COMPLETE if trial.value is not None:
                    log_s[index] = float(np.log(trial.value))
                case TrialState.RUNNING:
                    running.append(index)
                case _:
                    failed.append(index)
        return cls(log_s, failed, running)


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


def _quiet_study(sampler: optuna.samplers.BaseSampler) -> optuna.Study:
    """A study in memory, made without the line that Optuna logs about it; the user's verbosity stays as it was."""
    verbosity = optuna.logging.get_verbosity()
    optuna.logging.set_verbosity(optuna.logging.WARNING)
    try:
        return optuna.create_study(sampler=sampler)
    finally:
        optuna.logging.set_verbosity(verbosity)
