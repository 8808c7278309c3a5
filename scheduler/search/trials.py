"""The trials of a running search, and the store that receives them."""

from __future__ import annotations

import collections
import contextlib
import dataclasses
import threading
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Protocol

from scheduler.core import text
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
    from scheduler.store.studies import Parameters


class TrialStore(Leases, Protocol):
    """The interface that a search needs of its store: implemented by `Store`, and by the cache that serves calls."""

    def put(self, record: Record) -> None: ...
    def prepare_trials(self) -> None: ...
    def nearest(self, near: Near) -> list[Record]: ...
    def trials(self, key: Key, environment: Environment, *, unfinished: bool) -> list[Trial]: ...
    def add_trial(
        self, key: Key, trial: Trial, environment: Environment, parameters: Parameters | None = None
    ) -> None: ...
    def replace_trial(self, key: Key, trial: Trial) -> None: ...
    def finish(self, key: Key) -> None: ...


class BestEffortWriter:
    """Writes the trials of a search to a store, best effort; a store of None discards them.

    After a failed write, a warning is issued and the search continues without the store: a search costs more than its
    trace.

    A write takes milliseconds, or longer on a slow disk. A search therefore queues trials with `later`, starts the next
    candidates on the device, and then calls `flush`. Leaving the ``with`` block also flushes.
    """

    def __init__(self, store: TrialStore | None) -> None:
        self.store = store
        self._queue: collections.deque[Callable[[TrialStore], None]] = collections.deque()

    def prepare(self) -> None:
        """Starts a thread that creates Optuna's tables while the first candidate compiles."""
        if (store := self.store) is not None:
            threading.Thread(target=_prepared, args=(store,), name="scheduler-trials", daemon=True).start()

    def later(self, write: Callable[[TrialStore], None]) -> None:
        """Queues a write for the next `flush`."""
        self._queue.append(write)

    def flush(self) -> None:
        """Runs the queued writes, in order."""
        while self._queue:
            try:
                if self.store is not None:
                    self._queue[0](self.store)
            except StoreError as error:
                self.store = None
                text.warn_safely(f"{error} (the search continues without the store)")
            self._queue.popleft()  # only now: if Ctrl-C interrupts the write, the end of the ``with`` repeats it

    def write(self, write: Callable[[TrialStore], None]) -> None:
        """Runs the queued writes, then this one."""
        self.later(write)
        self.flush()

    def __enter__(self) -> BestEffortWriter:
        return self

    def __exit__(self, *_: object) -> None:
        self.flush()


def _prepared(store: TrialStore) -> None:
    with contextlib.suppress(StoreError):  # the write of the first trial reports it
        store.prepare_trials()


class Trials:
    """The trials of one search.

    Args:
      key, environment: of the search.
      candidates: all candidates; other arguments refer to them by index.
      known: trials of an earlier run of this search.
      writer: receives every trial as it ends.
      first_error: raise the first failure of a candidate, except the library's.
      fingerprint: returns the fingerprint of a measured candidate, as in `Trial`.
      parameters: returns the parameters of a candidate and their distributions, for Optuna's dashboard.

    Attributes:
      ended: candidate index -> its trial, in the order in which the trials ended.
      cautions: candidate index -> the detail of its `Caution`.
      resumed: number of trials reused from an earlier run.
      fastest_s: the fastest time so far in seconds, or None.
    """

    def __init__(
        self,
        key: Key,
        environment: Environment,
        candidates: Sequence[Candidate],
        known: Mapping[Versioned, Trial],
        writer: BestEffortWriter,
        *,
        first_error: bool,
        fingerprint: Callable[[Candidate], str],
        parameters: Callable[[Candidate], Parameters] | None = None,
    ) -> None:
        self._fingerprint, self._parameters = fingerprint, parameters
        self._key, self._environment, self._candidates = key, environment, candidates
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
        parameters = self._parameters(c) if self._parameters is not None and self._writer.store is not None else None
        self._writer.later(lambda store: store.add_trial(self._key, trial, self._environment, parameters))
        return trial

    def refute(self, index: int, failure: Failure) -> None:
        """Replaces the time of a candidate by a failure.

        Raises:
          CandidateFailed: as in `end`.
        """
        self._raise_first(index, failure)
        trial = self.ended[index] = dataclasses.replace(self.ended[index], outcome=failure)
        self._writer.later(lambda store: store.replace_trial(self._key, trial))

    def _raise_first(self, index: int, outcome: Outcome) -> None:
        c = self._candidates[index]
        if self._first_error and isinstance(outcome, Failure) and not c.library:
            raise CandidateFailed(f"{label_of(c.backend, c.schedule)}: {outcome}")


def seconds(trial: Trial) -> float | None:
    """Returns the time of a trial, or None if it failed."""
    return trial.outcome.median_s if isinstance(trial.outcome, Measurement) else None
