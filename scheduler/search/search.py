"""A search: an in-memory Optuna study that proposes candidates and records their times, within a budget."""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping, Sequence

import numpy as np
import optuna
from optuna.samplers import BaseSampler
from optuna.trial import TrialState

from scheduler.core import text
from scheduler.core.errors import SamplerFailed
from scheduler.core.text import quietly
from scheduler.search.samplers import CANDIDATE, Candidate, CandidateSpace, Known, LegalSampler, Mask, ModelSampler

_NOTHING = 1e-3  # an expected improvement, as a share of the time, that is too small for another trial


class _Study(optuna.Study):
    """A study that a sampler may stop between `ask` and `tell`; Optuna allows this only within `Study.optimize`."""

    stopped = False

    def stop(self) -> None:
        self.stopped = True


def _study(sampler: LegalSampler) -> _Study:
    storage = optuna.storages.InMemoryStorage()
    with quietly():
        return _Study(optuna.create_study(storage=storage).study_name, storage, sampler)


def _rehearse(sampler: BaseSampler, space: CandidateSpace) -> None:
    """Raises SamplerFailed if the first proposal of a copy of the sampler fails, before anything is measured."""
    try:
        copied = copy.deepcopy(sampler)
    except Exception:  # it holds a generator, a lock or a file: its first proposal is then one of the search
        return
    rehearsed = LegalSampler(copied, space, ())
    rehearsed.rehearse(_study(rehearsed))


class Search:
    """A search over `candidates`: call `ask` for an index, measure it and `tell` its time, until `ask` returns None.

    Several indices may be requested before the first result is reported. No index is returned twice. Candidates with a
    lower bound above the fastest time so far are excluded.

    Args:
      candidates: legal candidates, in any order.
      budget: maximum number of calls of `ask` that return an index.
      seed: seed of every random draw.
      first: indices to try first, in this order: incumbents, the library, winners of similar problems.
      known: results of an earlier part of this search: index -> seconds, or None for a failure. They count against the
        budget.
      patience: stop after this many trials in a row without an improvement, if none is expected of the next; None never
        stops for this reason.
      sampler: proposes candidates; None uses `ModelSampler`. If it fails later, the search ends with a warning.
      same: returns the candidates asked so far that are the program of this one, including this one, in order. Only the
        first is returned by `ask` and counts in the budget; the others get its time.

    Raises:
      SamplerFailed: the sampler cannot propose a candidate.
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
        sampler: BaseSampler | None = None,
        same: Callable[[int], Sequence[int]] = lambda index: (index,),
    ) -> None:
        self._same = same
        self._count, self._budget, self._patience = len(candidates), budget, patience
        self._floors = np.array([c.floor_s for c in candidates], dtype=np.float64)
        if outside := [index for index in first if not 0 <= index < self._count]:
            raise ValueError(f"first must be indices of {self._count} candidates, found {outside}")
        self._space = CandidateSpace(candidates)
        self._model = ModelSampler(self._space, seed)
        if sampler is not None and candidates:
            _rehearse(sampler, self._space)
        self._sampler = LegalSampler(sampler or self._model, self._space, first)
        self._study = _study(self._sampler)
        self._failed = ""
        self._running: dict[int, optuna.Trial] = {}
        self._seconds: dict[int, float | None] = dict(known or {})
        for index, seconds in self._seconds.items():
            self._study.add_trial(
                optuna.trial.create_trial(
                    state=TrialState.FAIL if seconds is None else TrialState.COMPLETE,
                    value=seconds,
                    params=self._space.parameters(index),
                    distributions=self._space.distributions,
                    user_attrs={CANDIDATE: index},
                )
            )

    @property
    def asked(self) -> int:
        """Number of candidates returned by `ask` so far, including those of `known`."""
        return len(self._running) + len(self._seconds)

    @property
    def best(self) -> tuple[int, float] | None:
        """Index and time in seconds of the fastest candidate so far, or None."""
        times = [(seconds, index) for index, seconds in self._seconds.items() if seconds is not None]
        return (min(times)[1], min(times)[0]) if times else None

    @property
    def excluded(self) -> int:
        """Number of untried candidates with a lower bound above the fastest time so far."""
        return int(np.delete(self._cannot_win(), [*self._running, *self._seconds]).sum())

    @property
    def reason(self) -> str:
        """Why `ask` returns None, or "" if it returns an index."""
        if self.asked == self._count:
            return f"all {self._count} candidates were tried"
        if self._failed:
            return self._failed
        if self._study.stopped:
            return "the sampler stopped the search"
        if self.asked >= self._budget:
            return f"the budget of {self._budget} trials is spent"
        if self.asked + self.excluded == self._count:
            return "nothing untried can beat the fastest, by its lower bound"
        if self._patience is not None and self._idle() >= self._patience and self._expected() < _NOTHING:
            return f"the last {self._patience} trials brought nothing, and less than {_NOTHING:.1%} is expected"
        return ""

    def _cannot_win(self) -> Mask:
        """Mask of the candidates that cannot beat the fastest time so far."""
        return self._floors > (self.best[1] if self.best is not None else np.inf)

    def _update_free(self) -> None:
        self._space.free = ~self._cannot_win()
        self._space.free[[*self._running, *self._seconds]] = False

    def _idle(self) -> int:
        """Number of results since the fastest one."""
        if self.best is None:
            return 0
        return len(self._seconds) - 1 - list(self._seconds).index(self.best[0])

    def _expected(self) -> float:
        """The largest improvement that the model expects of an untried candidate, as a share of the time."""
        self._update_free()
        known = Known.of(self._study.get_trials(deepcopy=False))
        return float(self._model.improvement(known).max()) if known.log_s else np.inf

    def ask(self) -> int | None:
        """Returns the index of the candidate to measure next, or None if the search has ended (see `reason`)."""
        try:
            while (index := self._next()) is not None and (first := self._same(index)[0]) != index:
                self._budget += 1
                if first in self._seconds:
                    self._end(index, self._seconds[first])
        except SamplerFailed as error:
            if not self.asked:
                raise
            self._fail(error)
            return None
        return index

    def _fail(self, error: SamplerFailed) -> None:
        self._failed = str(error)
        text.warn_safely(f"{error}; the search ends with the trials so far")

    def _next(self) -> int | None:
        if self.reason:
            return None
        self._update_free()
        self._sampler.chosen = None
        trial = self._study.ask(self._space.distributions)
        if self._sampler.chosen is None:  # Optuna does not call the sampler if every parameter has a single value
            frozen = self._study.get_trials(deepcopy=False)[trial.number]
            self._sampler.sample_relative(self._study, frozen, self._space.distributions)
        index = self._sampler.chosen
        assert index is not None
        trial.set_user_attr(CANDIDATE, index)
        self._running[index] = trial
        return index

    def tell(self, index: int, seconds: float | None) -> None:
        """Records the result of a candidate returned by `ask`: its time in seconds, or None if it failed.

        Raises:
          ValueError: the candidate is not being measured, or `seconds` is not positive and finite.
        """
        if index not in self._running:
            raise ValueError(f"candidate {index} is not being measured: ask for it first, and tell it once")
        if seconds is not None and not 0 < seconds < float("inf"):
            raise ValueError(f"candidate {index} took {seconds} s: a time is positive and finite, a failure is None")
        for each in self._same(index):
            self._end(each, seconds)

    def _end(self, index: int, seconds: float | None) -> None:
        trial = self._running.pop(index)
        self._seconds[index] = seconds
        state = TrialState.FAIL if seconds is None else TrialState.COMPLETE
        try:
            self._study.tell(trial, seconds, state)
        except SamplerFailed as error:
            self._fail(error)
