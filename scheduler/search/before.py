"""What a call would have got before a search: of a record, of a range or of the model; and its time."""

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
    """What is stored now, the user's own before the shipped; a store that cannot be read has nothing."""
    found: list[Evidence] = []
    with contextlib.ExitStack() as stack:
        stores = [store]
        with contextlib.suppress(StoreError):
            if (other := shipped()) is not None:
                stores.append(stack.enter_context(contextlib.closing(other)))
        for each in stores:
            with contextlib.suppress(StoreError):  # the search warns of it
                found.append(read(each, task.operation, task.problem, hardware))
    return merged(found)


def before(task: Task, hardware: Hardware, had: Evidence, record: Record, store: Store) -> Before | None:
    """What a call got of what was stored, `had`, beside the winner of `record`, which was found since.

    None where no answer was possible.
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
    # Times of the run-off compare best with the winner's; a trial's is the next best.
    times = {point_of(t.backend, t.schedule): t.outcome for t in trials}
    times |= {point_of(e.backend, e.schedule): e.measurement for e in record.entries}
    match times.get(point_of(found.backend, found.schedule)):
        case Measurement(median_s=median_s):
            return Before(found.backend, found.schedule, median_s, measured=True)
        case _:
            alike = found.source == "record" and found.estimated == record.estimated
            return Before(found.backend, found.schedule, found.predicted_s, measured=alike)
