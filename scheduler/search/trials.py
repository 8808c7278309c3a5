"""The trials of a search under way, and the store that keeps them as they end."""

from __future__ import annotations

import collections
import contextlib
import dataclasses
import threading
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Protocol

from scheduler.core import safe_text
from scheduler.core.errors import CandidateFailed, StoreError
from scheduler.core.identity import Versioned, label_of, versioned
from scheduler.core.records import Environment, Failure, Key, Measurement, Outcome, Record, Trial
from scheduler.core.similar import Near
from scheduler.model.pruning import Candidate
from scheduler.store.lease import Leases

if TYPE_CHECKING:
    from scheduler.store.studies import Described


class Keeper(Leases, Protocol):
    """What keeps a search while it runs and what it found: a `Store`, or the cache as calls see it."""

    def put(self, record: Record) -> None: ...
    def prepare_trials(self) -> None: ...
    def nearest(self, near: Near) -> list[Record]: ...
    def trials(self, key: Key, environment: Environment, *, unfinished: bool) -> list[Trial]: ...
    def add_trial(
        self, key: Key, trial: Trial, environment: Environment, described: Described | None = None
    ) -> None: ...
    def replace_trial(self, key: Key, trial: Trial) -> None: ...
    def finish(self, key: Key) -> None: ...


class Keeping:
    """A store that a search writes to; None keeps nothing. One that refuses is done without from then on.

    The search costs more than its trace: a warning says so, and it goes on.

    A write takes milliseconds, or longer where the disk is slow. So a search leaves trials to `later`, has the device
    begin with the next candidates, and then calls `flush`. The end of a ``with`` flushes, too.
    """

    def __init__(self, store: Keeper | None) -> None:
        self.store = store
        self._left: collections.deque[Callable[[Keeper], None]] = collections.deque()

    def prepare(self) -> None:
        """Starts a thread that makes Optuna's tables while the first candidate compiles."""
        if (store := self.store) is not None:
            threading.Thread(target=_prepared, args=(store,), name="scheduler-trials", daemon=True).start()

    def later(self, write: Callable[[Keeper], None]) -> None:
        """Leaves a write to the next `flush`."""
        self._left.append(write)

    def flush(self) -> None:
        """Writes what was left, in order."""
        while self._left:
            try:
                if self.store is not None:
                    self._left[0](self.store)
            except StoreError as error:
                self.store = None
                safe_text.warn(f"{error} (the search goes on without it)")
            self._left.popleft()  # not before: Ctrl-C may have come, and the end of the ``with`` writes it

    def write(self, write: Callable[[Keeper], None]) -> None:
        """Writes now, after what was left."""
        self.later(write)
        self.flush()

    def __enter__(self) -> Keeping:
        return self

    def __exit__(self, *_: object) -> None:
        self.flush()


def _prepared(store: Keeper) -> None:
    with contextlib.suppress(StoreError):  # the first trial meets it again
        store.prepare_trials()


class Trials:
    """What became of the candidates of one search.

    Args:
      key, environment: of the search.
      candidates: a place in them says which is meant.
      known: trials of an earlier run of this search.
      keeping: gets every trial as it ends.
      first_error: raise the first failure of a candidate, the library's aside.
      fingerprint: of a candidate that was measured, as in `Trial`.
      described: the parameters of a candidate and their distributions, for Optuna's dashboard.

    Attributes:
      ended: candidate -> its trial, in the order they ended.
      resumed: how many of them an earlier run made.
      fastest_s: the fastest time so far, seconds, or None.
    """

    def __init__(
        self,
        key: Key,
        environment: Environment,
        candidates: Sequence[Candidate],
        known: Mapping[Versioned, Trial],
        keeping: Keeping,
        *,
        first_error: bool,
        fingerprint: Callable[[Candidate], str],
        described: Callable[[Candidate], Described] | None = None,
    ) -> None:
        self._fingerprint, self._described = fingerprint, described
        self._key, self._environment, self._candidates = key, environment, candidates
        self._keeping, self._first_error = keeping, first_error
        place = {versioned(candidate): i for i, candidate in enumerate(candidates)}
        self.ended: dict[int, Trial] = {place[which]: trial for which, trial in known.items() if which in place}
        self.resumed = len(self.ended)
        self.fastest_s = min(filter(None, map(seconds, self.ended.values())), default=None)

    def measured(self) -> list[int]:
        """The candidates that have a time, the fastest first."""
        times = {index: time_s for index, trial in self.ended.items() if (time_s := seconds(trial)) is not None}
        return sorted(times, key=times.__getitem__)

    def end(self, index: int, outcome: Outcome) -> Trial:
        """The trial of a candidate that ended now.

        Raises:
          CandidateFailed: it failed, and is the first.
        """
        self._raise_first(index, outcome)
        c = self._candidates[index]
        number = max((trial.number for trial in self.ended.values()), default=-1) + 1
        fingerprint = self._fingerprint(c) if isinstance(outcome, Measurement) else ""
        trial = Trial(number, c.backend, c.version, c.schedule, outcome, c.predicted_s, fingerprint)
        self.ended[index] = trial
        if isinstance(outcome, Measurement):
            self.fastest_s = min(outcome.median_s, self.fastest_s or outcome.median_s)
        described = self._described(c) if self._described is not None and self._keeping.store is not None else None
        self._keeping.later(lambda store: store.add_trial(self._key, trial, self._environment, described))
        return trial

    def refute(self, index: int, failure: Failure) -> None:
        """A candidate that has a time was found wrong: it has failed.

        Raises:
          CandidateFailed: it is the first.
        """
        self._raise_first(index, failure)
        trial = self.ended[index] = dataclasses.replace(self.ended[index], outcome=failure)
        self._keeping.later(lambda store: store.replace_trial(self._key, trial))

    def _raise_first(self, index: int, outcome: Outcome) -> None:
        c = self._candidates[index]
        if self._first_error and isinstance(outcome, Failure) and not c.library:
            raise CandidateFailed(f"{label_of(c.backend, c.schedule)}: {outcome}")


def seconds(trial: Trial) -> float | None:
    """The time of a trial; None where it failed."""
    return trial.outcome.median_s if isinstance(trial.outcome, Measurement) else None
