"""Decides whether a stored record makes a search unnecessary: one rule for calls, `tune` and jobs."""

from __future__ import annotations

from typing import Any

from scheduler.core.backends import allowed_backends
from scheduler.core.errors import MalformedRecord
from scheduler.core.hardware import Hardware
from scheduler.core.identity import key_of
from scheduler.core.records import L2, Record
from scheduler.measure.rotation import condition
from scheduler.prediction.validation import recheck
from scheduler.search.trials import Keeper
from search_spaces.operation import Operation
from search_spaces.problem import Problem


def settled(
    operation: Operation[Any],
    problem: Problem,
    hardware: Hardware,
    store: Keeper,
    *,
    backends: frozenset[str] | None = None,
    l2: L2 = "cold",
    brief: bool = False,
) -> Record | str:
    """Returns the record in `store` that makes a search unnecessary, or why one is needed; "" if there is no record.

    Such a record is valid (`recheck`) and was measured under the requested conditions. A record of a brief search
    counts only if `brief` is set. Each requested backend that still supports the problem must have run.
    """
    try:
        record = store.get(key_of(operation, problem, hardware))
    except MalformedRecord as error:
        return str(error)
    if record is None:
        return ""
    if reason := useless(operation, problem, hardware, record, backends, l2, brief=brief):
        return reason
    asked = allowed_backends(operation, backends) | {operation.library.backend}
    failed = [
        str(lost)
        for lost in record.failed
        if lost.backend in asked and operation.kernel(lost.backend).supports(problem, hardware.target) is None
    ]
    return "; ".join(failed) or record


def useless(
    operation: Operation[Any],
    problem: Problem,
    hardware: Hardware,
    record: Record,
    backends: frozenset[str] | None,
    l2: L2,
    *,
    brief: bool = False,
) -> str | None:
    """Returns why a record does not satisfy the request, or None if it does."""
    entry = recheck(operation, problem, hardware, record, backends=backends)
    if isinstance(entry, str):
        return entry
    if entry.measurement.estimated and not hardware.abilities.estimates:
        return "it was estimated by the compiler, not measured"
    _, found = condition(problem, hardware, l2)
    if not entry.measurement.estimated and entry.measurement.l2 != found:
        return f"it was measured with its operands in {'memory' if found == 'warm' else 'the cache'}"
    if record.brief and not brief:
        return "only a few schedules were tried, between two points of a range"
    return None
