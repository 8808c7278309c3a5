"""What a call would have got before a search: of a record, of a range or of the model; and its time."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Sequence

from scheduler.core.errors import NoCandidate, StoreError
from scheduler.core.hardware import Hardware
from scheduler.core.identity import point_of
from scheduler.core.ranges import Range
from scheduler.core.records import Measurement, Record, Trial
from scheduler.prediction.between import answer
from scheduler.search.task import Before, Task
from scheduler.store.store import Store, shipped


@dataclasses.dataclass(frozen=True)
class Stored:
    """What calls of an operation find on a chip: the user's own before what comes with this package."""

    records: Sequence[Record]
    ranges: Sequence[Range]


def stored_now(task: Task, hardware: Hardware, store: Store) -> Stored:
    """What is stored now; a store that cannot be read has nothing."""
    records: list[Record] = []
    ranges: list[Range] = []
    with contextlib.ExitStack() as stack:
        stores = [store]
        with contextlib.suppress(StoreError):
            if (other := shipped()) is not None:
                stores.append(stack.enter_context(contextlib.closing(other)))
        for each in stores:
            with contextlib.suppress(StoreError):  # the search warns of it
                records += each.records(operation=task.operation.name, hardware=hardware.id)
                ranges += each.ranges.all(operation=task.operation.name, hardware=hardware.id)
    return Stored(records, ranges)


def before(task: Task, hardware: Hardware, had: Stored, record: Record, store: Store) -> Before | None:
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
