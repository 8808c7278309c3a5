"""The baseline of a search (the schedule that calls used before it), and whether a stored record is still valid."""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from typing import Any

from scheduler.core.arguments import allowed_backends
from scheduler.core.errors import MalformedRecord, NoCandidate, StoreError
from scheduler.core.fingerprints import Tracer
from scheduler.core.hardware import Hardware, siblings
from scheduler.core.records import Key, Measurement, Point, Record, Trial, key_of, point_of
from scheduler.measure.buffers import timing_conditions
from scheduler.prediction.predict import predict
from scheduler.prediction.transfer import WORTH_A_TRIAL, near, recheck, telling_records
from scheduler.search.task import Baseline, Task
from scheduler.search.trials import TrialStore
from scheduler.store.store import Store, shipped
from search_spaces.operation import Operation
from search_spaces.problem import Problem


def stored_evidence(task: Task, hardware: Hardware, store: Store) -> list[Record]:
    """Returns the stored records for a prediction of a problem, the user's before the shipped. An unreadable store is
    skipped."""
    found: list[Record] = []
    with contextlib.ExitStack() as stack:
        stores = [store]
        with contextlib.suppress(StoreError):
            if (other := shipped()) is not None:
                stores.append(stack.enter_context(contextlib.closing(other)))
        for each in stores:
            with contextlib.suppress(StoreError):  # the search issues the warning
                found += telling_records(each, task.operation, task.problem, hardware)
    return found


def baseline_of(
    task: Task, hardware: Hardware, evidence: Sequence[Record], record: Record, store: Store
) -> Baseline | None:
    """Returns the schedule that calls selected from the earlier records `evidence`, with its time: the baseline.

    Returns None if no schedule could be selected.
    """
    try:
        found = predict(task.operation, task.problem, hardware, backends=task.options.backends, records=evidence)
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
            return Baseline(found.backend, found.schedule, median_s, measured=True)
        case _:
            measured = found.source == "record" and found.estimated == record.estimated
            return Baseline(found.backend, found.schedule, found.predicted_s, measured=measured)


# ------------------------------------------------------------------------------
# Decides whether a stored record makes a search unnecessary: one rule for calls, `tune` and jobs.


def is_current(task: Task, hardware: Hardware, store: TrialStore, tracer: Tracer | None = None) -> Record | str:
    """Returns the record in `store` that makes a search unnecessary, or why one is needed; "" if there is no record.

    Such a record is valid (`recheck`) and was measured under the requested conditions. Each requested backend that
    still supports the problem must have run.
    """
    operation = task.operation
    try:
        record = store.get(key_of(operation, task.problem, hardware))
    except MalformedRecord as error:
        return str(error)
    if record is None:
        return ""
    if reason := stale_reason(task, hardware, record, tracer):
        return reason
    required = allowed_backends(operation, task.options.backends) | {operation.library.backend}
    failed = [
        str(lost)
        for lost in record.failed
        if lost.backend in required and operation.kernel(lost.backend).supports(task.problem, hardware.target) is None
    ]
    return "; ".join(failed) or record


def similar_records(operation: Operation[Any], problem: Problem, hardware: Hardware, store: TrialStore) -> list[Record]:
    """Returns records of similar problems; a search tries their winners first.

    These are records in `store` of this chip, and shipped records of the most similar sibling that has any, of the
    problem itself and of similar ones.

    Raises:
      StoreError: `store` cannot be read.
    """
    found = list(store.nearest(near(operation, problem, hardware, within=WORTH_A_TRIAL)))
    with contextlib.suppress(StoreError, MalformedRecord):  # calls report a broken package
        if (package := shipped()) is not None:
            for chip in siblings(hardware):
                same = package.get(key_of(operation, problem, chip))
                others = package.nearest(near(operation, problem, chip, within=WORTH_A_TRIAL))
                if records := [*([same] if same else []), *others]:
                    return [*found, *records]
    return found


def imported_schedules(key: Key, store: TrialStore | None) -> list[Point]:
    """Returns the schedules of the imported record of `key`, for a search to try first; empty if there is none."""
    with contextlib.suppress(StoreError):  # the search issues the warning
        record = None if store is None else store.get(key)
        if record is not None and record.imported is not None:
            return [point_of(entry.backend, entry.schedule) for entry in record.entries]
    return []


def stale_reason(task: Task, hardware: Hardware, record: Record, tracer: Tracer | None = None) -> str | None:
    """Returns why a record does not satisfy the request, or None if it does."""
    if record.imported is not None:
        return "it was imported, and not verified here"
    backends = task.options.backends
    entry = recheck(task.operation, task.problem, hardware, record, backends=backends, tracer=tracer)
    if isinstance(entry, str):
        return entry
    if entry.measurement.estimated and not hardware.abilities.estimates:
        return "it was estimated by the compiler, not measured"
    _, found = timing_conditions(task.problem, hardware, task.options.l2)
    if not entry.measurement.estimated and entry.measurement.l2 != found:
        return f"it was measured with its operands in {'memory' if found == 'warm' else 'the cache'}"
    return None


def refuse_to_replace_measured(key: Key, hardware: Hardware, store: TrialStore) -> None:
    """Raises NoCandidate if times are estimated on `hardware` and `store` has a measured record of `key`."""
    if not hardware.abilities.estimates:
        return
    with contextlib.suppress(MalformedRecord):
        record = store.get(key)
        if record is not None and not record.estimated:
            raise NoCandidate(
                f"the stored record of {key} is measured, and an estimate does not replace it: tune it on "
                f"{hardware.kind}, or `tile-scheduler forget` it"
            )
