"""Spend a budget of trials on a list of candidates: which one to measure next.

A short list is enumerated, the model's favourites first. A longer one begins with what is known to be good, the model's
favourites, a few more of them that differ, and a few drawn far from all these; then a Gaussian process of the logarithm
of time proposes the candidate that promises the largest improvement. It sees the schedules' fields and the model's
prediction, which it may trust as far as the measurements bear it out. What cannot beat the fastest time so far, by its
lower bound, is left out.

Optuna keeps the trials; its own samplers do not fit: they repeat points, ignore failures and know no list of legal
ones.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt
import optuna
from optuna.distributions import BaseDistribution, IntDistribution
from optuna.trial import FrozenTrial, TrialState
from scipy.spatial.distance import cdist

from scheduler.search.gaussian_process import Process, expected_improvement
from search_spaces.space import Choice

Array = npt.NDArray[np.float64]

_DESIGN = 14  # trials before the Gaussian process takes over, at a budget of 28 or more
_FAVOURITES = 8  # of these, the model's first
_DIFFERENT = 4  # and its first that differ from them and from each other
_FEWEST = 3  # times that the process needs to say anything
_REFIT = 6  # trials between two fits of the process's lengths
_DRAWN = 64  # candidates drawn at random, of which the farthest is taken
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
        self._sampler = PoolSampler(candidates, budget=budget, seed=seed, first=first)
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
        if self._patience is not None and self._idle() >= self._patience and self._sampler.expected < _NOTHING:
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
      expected: the improvement expected of the last proposal, as a share of the time; infinite where none was computed.
    """

    def __init__(self, candidates: Sequence[Candidate], *, budget: int, seed: int, first: Sequence[int]) -> None:
        self.labels = [{"backend": c.backend, **c.schedule} for c in candidates]
        self._predicted = np.array([c.predicted_s for c in candidates], dtype=np.float64)
        self._x = _encode(self.labels, self._predicted)
        self._random = np.random.default_rng(seed)
        self.hopeless = np.zeros(len(candidates), dtype=bool)
        self.expected = np.inf
        if len(candidates) <= budget:
            # All of them, but the likely ones first: the time may end before the budget.
            shuffled = self._random.permutation(len(candidates)).tolist()
            self._design = [*first, *self._favourites(_DESIGN), *shuffled]
        else:
            size = min(_DESIGN, max(_FAVOURITES, budget // 2))
            self._design = [*first, *self._favourites(size)]
            self._design += self._scattered(self._design, max(0, size - len(set(self._design))))
        self._process = Process.prior(self._x.shape[1])
        self._fitted_at = 0

    def infer_relative_search_space(self, study: optuna.Study, trial: FrozenTrial) -> dict[str, BaseDistribution]:
        return {_CANDIDATE: IntDistribution(0, len(self._x) - 1)}

    def sample_relative(
        self, study: optuna.Study, trial: FrozenTrial, search_space: dict[str, BaseDistribution]
    ) -> dict[str, Any]:
        done, failed, running = [], [], []
        for other in study.get_trials(deepcopy=False):
            if other.number != trial.number:
                index = other.params[_CANDIDATE]
                match other.state:
                    case TrialState.COMPLETE if other.value is not None:
                        done.append((index, float(np.log(other.value))))
                    case TrialState.RUNNING:
                        running.append(index)
                    case _:
                        failed.append(index)
        tried = [*(index for index, _ in done), *failed, *running]
        free = ~self.hopeless
        free[tried] = False
        self.expected = np.inf
        for index in self._design:
            if free[index]:
                return {_CANDIDATE: index}
        if len(done) < _FEWEST:
            return {_CANDIDATE: self._scattered(tried, 1, free)[0]}
        return {_CANDIDATE: self._improve(done, failed, running, np.flatnonzero(free))}

    def sample_independent(
        self, study: optuna.Study, trial: FrozenTrial, param_name: str, param_distribution: BaseDistribution
    ) -> Any:
        raise ValueError(f"this sampler knows no parameter but {_CANDIDATE!r}, asked for {param_name!r}")

    def _improve(
        self, done: list[tuple[int, float]], failed: list[int], running: list[int], free: npt.NDArray[np.intp]
    ) -> int:
        """The free candidate with the largest expected improvement; those still running count as their mean."""
        worst = max(value for _, value in done)
        x = self._x[[index for index, _ in done] + failed]
        y = np.array([value for _, value in done] + [worst] * len(failed))
        if len(y) >= self._fitted_at + _REFIT or not self._fitted_at:
            self._process, self._fitted_at = self._process.fit(x, y), len(y)
        if running:
            fantasies, _ = self._process.predict(x, y, self._x[running])
            x, y = np.concatenate([x, self._x[running]]), np.concatenate([y, fantasies])
        mean, deviation = self._process.predict(x, y, self._x[free])
        improvement = expected_improvement(mean, deviation, min(value for _, value in done))
        self.expected = float(np.max(improvement))  # of a logarithm: a share, while it is small
        return int(free[np.argmax(improvement)])

    def _favourites(self, most: int) -> list[int]:
        """The best predicted candidates, then the best that differ from all chosen ones in two fields or more."""
        ranked = np.argsort(self._predicted, kind="stable").tolist()
        chosen = ranked[: min(most, _FAVOURITES)]
        for index in ranked[len(chosen) :]:
            if len(chosen) >= min(most, _FAVOURITES + _DIFFERENT):
                break
            label = self.labels[index]
            if all(sum(label.get(n) != v for n, v in self.labels[other].items()) >= 2 for other in chosen):
                chosen.append(index)
        return chosen

    def _scattered(self, near: Sequence[int], count: int, free: npt.NDArray[np.bool_] | None = None) -> list[int]:
        """`count` free candidates from the better half of the predictions, each far from `near` and from the others."""
        ranked = np.argsort(self._predicted, kind="stable")
        ranked = ranked if free is None else ranked[free[ranked]]
        pool = ranked[: max(count, (len(ranked) + 1) // 2)]
        chosen = list(near)
        for _ in range(count):
            pool = pool[~np.isin(pool, chosen)]
            if not len(pool):
                break
            drawn = self._random.choice(pool, size=min(_DRAWN, len(pool)), replace=False)
            distance = cdist(self._x[drawn], self._x[chosen]).min(axis=1) if chosen else np.zeros(len(drawn))
            chosen.append(int(drawn[np.argmax(distance)]))
        return chosen[len(near) :]


def _encode(labels: Sequence[Mapping[str, Choice]], predicted_s: Array) -> Array:
    """Candidates as points of the unit cube ``[candidate, coordinate]``: their fields, and the model's prediction.

    Whole numbers count by their logarithms, other values by a coordinate each. A number that a backend lacks lies in
    the middle; which backend it is has coordinates of its own. Coordinates in which all agree are left out.
    """
    columns = [np.log(np.maximum(predicted_s, 1e-12))]
    for name in dict.fromkeys(name for label in labels for name in label):
        values = [label.get(name) for label in labels]
        kinds = {type(value) for value in values if value is not None}
        if kinds == {int}:
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
