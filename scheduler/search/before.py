"""The baseline of a search: the schedule that calls used before it (from a record, a range or the model)."""

from __future__ import annotations

import contextlib

from scheduler.core.errors import NoCandidate, StoreError
from scheduler.core.hardware import Hardware
from scheduler.core.identity import point_of
from scheduler.core.records import Measurement, Record, Trial
from scheduler.prediction.between import answer
from scheduler.prediction.evidence import Evidence, merged, read
from scheduler.search.task import Before, Task
from scheduler.store.store import Store, shipped


def stored_now(task: Task, hardware: Hardware, store: Store) -> Evidence:
    """Returns the stored evidence for a problem, the user's before the shipped. An unreadable store is skipped."""
    found: list[Evidence] = []
    with contextlib.ExitStack() as stack:
        stores = [store]
        with contextlib.suppress(StoreError):
            if (other := shipped()) is not None:
                stores.append(stack.enter_context(contextlib.closing(other)))
        for each in stores:
            with contextlib.suppress(StoreError):  # the search issues the warning
                found.append(read(each, task.operation, task.problem, hardware))
    return merged(found)


def before(task: Task, hardware: Hardware, had: Evidence, record: Record, store: Store) -> Before | None:
    """Returns the schedule that calls selected from the earlier evidence `had`, with its time: the baseline.

    Returns None if no schedule could be selected.
    """
    try:
        found = answer(
            task.operation,
            task.problem,
            hardware,
            backends=task.backends,
            records=had.records,
            ranges=had.ranges,
        )
    except NoCandidate:
        return None
    trials: list[Trial] = []
    with contextlib.suppress(StoreError):
        trials = store.trials(record.key, record.environment)
    # Times of the run-off compare best with the winner's; the time of a trial is second best.
    times = {point_of(t.backend, t.schedule): t.outcome for t in trials}
    times |= {point_of(e.backend, e.schedule): e.measurement for e in record.entries}
    match times.get(point_of(found.backend, found.schedule)):
        case Measurement(median_s=median_s):
            return Before(found.backend, found.schedule, median_s, measured=True)
        case _:
            alike = found.source == "record" and found.estimated == record.estimated
            return Before(found.backend, found.schedule, found.predicted_s, measured=alike)
