"""What a call would have got before a search: a stored schedule, or the model's answer; and its time."""

from __future__ import annotations

import contextlib

from scheduler.core.errors import NoCandidate, StoreError
from scheduler.core.hardware import Hardware
from scheduler.core.identity import key_of, point_of
from scheduler.core.ranges import Range
from scheduler.core.records import Entry, Key, Measurement, Record, Trial
from scheduler.prediction.between import answer
from scheduler.prediction.validation import recheck
from scheduler.search.task import Before, Task
from scheduler.store.store import Store, shipped


def served(task: Task, hardware: Hardware, store: Store) -> Entry | None:
    """What a call gets now: from the user's own records, or from those that come with this package."""
    key = key_of(task.operation, task.problem, hardware)
    with contextlib.ExitStack() as stack:
        stores = [store]
        with contextlib.suppress(StoreError):
            if (other := shipped()) is not None:
                stores.append(stack.enter_context(contextlib.closing(other)))
        records = [record for kept in stores if (record := _readable(kept, key)) is not None]
    for record in sorted(records, key=lambda record: record.estimated):
        held = recheck(task.operation, task.problem, hardware, record, backends=task.backends)
        if isinstance(held, Entry):
            return held
    return None


def _readable(store: Store, key: Key) -> Record | None:
    with contextlib.suppress(StoreError):
        return store.get(key)
    return None


def before(task: Task, hardware: Hardware, held: Entry | None, record: Record, store: Store) -> Before | None:
    """What `held`, which a call was served before the search, or else a range or the model, took beside the winner of
    `record`.

    None where no answer was possible.
    """
    trials: list[Trial] = []
    others: list[Record] = []
    ranges: list[Range] = []
    with contextlib.suppress(StoreError):  # the search has warned of it
        trials = store.trials(record.key, record.environment)
        stored_now = store.records(operation=record.key.operation, hardware=record.key.hardware)
        others = [other for other in stored_now if other.key != record.key]
        ranges = store.ranges.all(operation=record.key.operation, hardware=record.key.hardware)
    if held is not None:
        backend, schedule, fallback_s = held.backend, held.schedule, held.measurement.median_s
        measured = held.measurement.estimated == record.estimated
    else:
        try:
            found = answer(
                task.operation, task.problem, hardware, backends=task.backends, records=others, ranges=ranges
            )
        except NoCandidate:
            return None
        backend, schedule, fallback_s, measured = found.backend, found.schedule, found.predicted_s, False
    # Times of the run-off compare best with the winner's; a trial's is the next best.
    times = {point_of(t.backend, t.schedule): t.outcome for t in trials}
    times |= {point_of(e.backend, e.schedule): e.measurement for e in record.entries}
    match times.get(point_of(backend, schedule)):
        case Measurement(median_s=median_s):
            return Before(backend, schedule, median_s, measured=True)
        case _:
            return Before(backend, schedule, fallback_s, measured)
