"""The part of export that writes studies of Optuna: from the trials that the user's own cache keeps, or from sweeps."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from scheduler.cli.arguments import usage_errors, wanted_by
from scheduler.cli.stores import user_store
from scheduler.cli.terminal import say
from scheduler.core.errors import SchedulerError
from scheduler.core.redaction import shown_url

if TYPE_CHECKING:
    from scheduler.core.records import Key
    from scheduler.inspect.points import Tried
    from search_spaces.operation import Operation


def export_studies(
    url: str, recordings: Sequence[Path], operation: str | None, hardware: str | None, *, replace: bool
) -> None:
    """Writes them, and says what became of each.

    Raises:
      SchedulerError: there is nothing to write, or it cannot be written.
    """
    from scheduler.inspect import studies
    from search_spaces import load

    own = None
    if operation is not None and ":" in operation:
        with usage_errors():
            own = load(operation)
    store = user_store()
    found = list(_recorded(recordings, own) if recordings else _stored(own))
    wanted = wanted_by([tried.key for tried in found], operation, hardware)
    kept = [tried for tried in found if wanted(tried.key)]
    if not kept:
        where = "none of these recordings" if recordings else store.location
        raise SchedulerError(
            f"no trials of that are in {where}; shipped records come without theirs: tune a problem, or name a "
            "recorded sweep by --recording"
        )
    for written in studies.write(url, kept, replace=replace):
        news = f"{written.added} of {written.trials} trials" if written.added else f"all {written.trials} were there"
        say(f"{written.name}: {news}")
    shown = shown_url(url)
    say(f"wrote {len(kept)} stud{'y' if len(kept) == 1 else 'ies'} to {shown}; to look: optuna-dashboard {shown}")


def _stored(own: Operation[Any] | None) -> Iterator[Tried]:
    """The trials of the last search of each problem in the user's own cache."""
    from scheduler.core.identity import point_of
    from scheduler.inspect.points import Tried

    store = user_store()
    for key in store.keys():  # noqa: SIM118 (a store is no dict)
        if trials := store.last_trials(key):
            record = store.get(key)
            entries = record.entries if record is not None else ()
            final_s = {point_of(e.backend, e.schedule): e.measurement.median_s for e in entries}
            environment = record.environment if record is not None else None
            yield Tried(key, trials, environment, record, _case(key, own), final_s)


def _recorded(recordings: Sequence[Path], own: Operation[Any] | None) -> Iterator[Tried]:
    from scheduler.core import hardware as chips
    from scheduler.core.identity import point_of
    from scheduler.core.records import Key, Measurement
    from scheduler.inspect.points import Tried
    from scheduler.measure import replay

    for path in recordings:
        sweep, trials = replay.read(path)
        key = Key(sweep.operation, chips.swept(sweep).id, sweep.problem)
        final_s = {
            point_of(trial.backend, trial.schedule): trial.outcome.median_s
            for trial in replay.read_again(path)
            if isinstance(trial.outcome, Measurement)
        }
        yield Tried(key, trials, sweep.environment, None, _case(key, own), final_s, path.name)


def _case(key: Key, own: Operation[Any] | None) -> Any:
    """The problem and the chip of a key, None where one of them is not known here."""
    from scheduler.inspect import case

    return case.of_key(key, own if own is not None and own.name == key.operation else None)
