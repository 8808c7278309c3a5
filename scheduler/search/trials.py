"""The trials of a running search, and the store that receives them."""

from __future__ import annotations

import contextlib
import dataclasses
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Protocol

from scheduler.core import fingerprints, text
from scheduler.core.errors import CandidateFailed, StoreError
from scheduler.core.neighbours import Near
from scheduler.core.records import (
    Environment,
    Failure,
    Key,
    Measurement,
    Outcome,
    Record,
    Trial,
    Versioned,
    label_of,
    versioned,
)
from scheduler.model.pruning import Candidate
from scheduler.store.lease import Leases

if TYPE_CHECKING:
    from scheduler.store.studies import Described
    from search_spaces.operation import Operation
    from search_spaces.problem import Problem
    from search_spaces.space import Choice
    from search_spaces.target import Target


class TrialStore(Leases, Protocol):
    """The interface that a search needs of its store: implemented by `Store`, and by the cache that serves calls."""

    def put(self, record: Record) -> None: ...
    def prepare_trials(self) -> None: ...
    def nearest(self, near: Near) -> list[Record]: ...
    def trials(self, key: Key, environment: Environment, *, unfinished: bool) -> list[Trial]: ...
    def save_trials(
        self, key: Key, trials: Sequence[Trial], environment: Environment, parameters: Described | None = None
    ) -> None: ...
    def finish(self, key: Key) -> None: ...


# Pauses in seconds before the attempts to write at the end of a search, and the least time between attempts before it.
PAUSES_S = (0.0, 2.0)
RETRY_S = 60.0


class TrialWriter:
    """Keeps the trials of a search in memory and writes them to a store; a store of None receives nothing.

    A store may fail for a moment: its disk is full, its file is deleted, another process locks it, its server restarts.
    After a failed write, a warning is issued and the search continues. It writes again after `RETRY_S` and at the end.
    Each write has all trials, of which the store adds those that it lacks, so that a new file gets them, too.

    A write takes milliseconds, or longer on a slow disk. A search therefore queues trials with `add`, starts the next
    candidates on the device, and then calls `flush`.

    Args:
      key, environment: of the search.
      parameters: returns the parameters of a trial and their distributions, for Optuna's dashboard.
    """

    def __init__(
        self, store: TrialStore | None, key: Key, environment: Environment, parameters: Described | None = None
    ) -> None:
        self._store, self._key, self._environment, self._parameters = store, key, environment, parameters
        self._trials: dict[int, Trial] = {}
        self._unsaved: set[int] = set()
        self._retry_s = 0.0

    def prepare(self) -> None:
        """Starts a thread that creates Optuna's tables while the first candidate compiles."""
        if (store := self._store) is not None:
            threading.Thread(target=_prepared, args=(store,), name="scheduler-trials", daemon=True).start()

    def add(self, trial: Trial) -> None:
        """Queues a trial, or a new outcome of it, for the next `flush`."""
        self._trials[trial.number] = trial
        self._unsaved.add(trial.number)

    def flush(self) -> None:
        """Writes the queued trials, unless a write failed in the last `RETRY_S`."""
        if self._unsaved and time.monotonic() >= self._retry_s and (error := self._save()) is not None:
            text.warn_safely(f"{error} (the search continues, and writes its trials later)")

    def finish(self, write: Callable[[TrialStore], None], what: str) -> None:
        """Writes all trials and then, with `write`, what ends the search; a warning names what could not be written."""
        trials = f"{len(self._unsaved)} of {len(self._trials)} trials"
        lost: dict[str, list[str]] = {}
        for part, attempt in ((trials, self._save), (what, lambda: self._attempt(write))):
            for pause_s in PAUSES_S:
                time.sleep(pause_s)
                if (error := attempt()) is None:
                    break
            else:
                lost.setdefault(str(error), []).append(part)
        for reason, parts in lost.items():
            text.warn_safely(f"{reason}; not stored of {self._key}: {', '.join(parts)}")

    def __enter__(self) -> TrialWriter:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if kind is not None and self._unsaved and (error := self._save()) is not None:
            text.warn_safely(f"{error}; not stored of {self._key}: {len(self._unsaved)} trials")

    def _save(self) -> StoreError | None:
        if not (trials := list(self._trials.values())):
            return None
        error = self._attempt(lambda store: store.save_trials(self._key, trials, self._environment, self._parameters))
        if error is None:
            self._unsaved.clear()  # only now: if Ctrl-C interrupts the write, the end of the ``with`` repeats it
        else:
            self._retry_s = time.monotonic() + RETRY_S
        return error

    def _attempt(self, write: Callable[[TrialStore], None]) -> StoreError | None:
        try:
            if self._store is not None:
                write(self._store)
        except StoreError as error:
            return error
        return None


def _prepared(store: TrialStore) -> None:
    with contextlib.suppress(StoreError):  # the write of the first trial reports it
        store.prepare_trials()


class Trials:
    """The trials of one search.

    Args:
      candidates: all candidates; other arguments refer to them by index.
      known: trials of an earlier run of this search.
      writer: receives every trial as it ends.
      first_error: raise the first failure of a candidate, except the library's.
      fingerprint: returns the fingerprint of a measured candidate, as in `Trial`.

    Attributes:
      ended: candidate index -> its trial, in the order in which the trials ended.
      cautions: candidate index -> the detail of its `Caution`.
      resumed: number of trials reused from an earlier run.
      fastest_s: the fastest time so far in seconds, or None.
    """

    def __init__(
        self,
        candidates: Sequence[Candidate],
        known: Mapping[Versioned, Trial],
        writer: TrialWriter,
        *,
        first_error: bool,
        fingerprint: Callable[[Candidate], str],
    ) -> None:
        self._fingerprint, self._candidates = fingerprint, candidates
        self._writer, self._first_error = writer, first_error
        place = {versioned(candidate): i for i, candidate in enumerate(candidates)}
        self.ended: dict[int, Trial] = {place[which]: trial for which, trial in known.items() if which in place}
        self.cautions: dict[int, str] = {}
        self.resumed = len(self.ended)
        self.fastest_s = min(filter(None, map(seconds, self.ended.values())), default=None)

    def measured(self) -> list[int]:
        """Returns the candidates that have a time, the fastest first."""
        times = {index: time_s for index, trial in self.ended.items() if (time_s := seconds(trial)) is not None}
        return sorted(times, key=times.__getitem__)

    def end(self, index: int, outcome: Outcome) -> Trial:
        """Records the outcome of a candidate and returns its trial.

        Raises:
          CandidateFailed: `first_error` is set, and a candidate other than the library's failed.
        """
        self._raise_first(index, outcome)
        c = self._candidates[index]
        number = max((trial.number for trial in self.ended.values()), default=-1) + 1
        fingerprint = self._fingerprint(c) if isinstance(outcome, Measurement) else ""
        trial = Trial(number, c.backend, c.version, c.schedule, outcome, c.predicted_s, fingerprint)
        self.ended[index] = trial
        if isinstance(outcome, Measurement):
            self.fastest_s = min(outcome.median_s, self.fastest_s or outcome.median_s)
        self._writer.add(trial)
        return trial

    def refute(self, index: int, failure: Failure) -> None:
        """Replaces the time of a candidate by a failure.

        Raises:
          CandidateFailed: as in `end`.
        """
        self._raise_first(index, failure)
        trial = self.ended[index] = dataclasses.replace(self.ended[index], outcome=failure)
        self._writer.add(trial)

    def _raise_first(self, index: int, outcome: Outcome) -> None:
        c = self._candidates[index]
        if self._first_error and isinstance(outcome, Failure) and not c.library:
            raise CandidateFailed(f"{label_of(c.backend, c.schedule)}: {outcome}")


def seconds(trial: Trial) -> float | None:
    """Returns the time of a trial, or None if it failed."""
    return trial.outcome.median_s if isinstance(trial.outcome, Measurement) else None


class TrialParameters:
    """Returns the parameters of candidates of one problem, with their distributions, for Optuna's dashboard."""

    def __init__(self, operation: Operation[Any], problem: Problem, target: Target) -> None:
        from scheduler.search import samplers  # imports Optuna

        kernels = [
            kernel for kernel in operation.kernels_on(target.platform) if kernel.supports(problem, target) is None
        ]
        spaces = {kernel.backend: kernel.space(problem, target) for kernel in kernels}
        choices: list[Mapping[str, Choice]] = [{samplers.BACKEND: backend} for backend in spaces]
        for space in spaces.values():
            choices += [
                {samplers.name_of(field): value} for field, several in space.choices.items() for value in several
            ]
        self._distributions = samplers.distributions_of(choices)
        self._defaults = {backend: dict(space.defaults) for backend, space in spaces.items()}

    def __call__(self, which: fingerprints.Chosen) -> tuple[dict[str, Any], dict[str, Any]]:
        """Returns the parameters of a candidate or trial. Fields that records omit have their defaults."""
        from scheduler.search import samplers

        found = samplers.parameters_of(which.backend, {**self._defaults.get(which.backend, {}), **which.schedule})
        named = {name: value for name, value in found.items() if name in self._distributions}
        return {
            n: samplers.suggested_schedule(self._distributions[n], value) for n, value in named.items()
        }, self._distributions
