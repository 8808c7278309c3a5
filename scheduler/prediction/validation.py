"""Checks whether a stored record is still valid."""

from __future__ import annotations

from typing import Any

from scheduler.core.backends import allowed_backends
from scheduler.core.fingerprints import changed
from scheduler.core.hardware import Hardware
from scheduler.core.records import Entry, Record
from scheduler.model.feasibility import illegal
from search_spaces.operation import Operation
from search_spaces.problem import Problem


def recheck(
    operation: Operation[Any],
    problem: Problem,
    hardware: Hardware,
    record: Record,
    *,
    backends: frozenset[str] | None = None,
) -> Entry | str:
    """Returns the entry of a stored record to use now, or the reason why the record is no longer valid.

    The reason is a `Changed` if code without its own version was edited. To find this out, the kernels are traced here.
    """
    allowed = allowed_backends(operation, backends)
    for kernel in operation.kernels:
        then = record.versions.get(kernel.backend)
        if kernel.backend not in allowed and not kernel.library:
            continue
        if then is None and kernel.supports(problem, hardware.target) is None:
            return f"it was measured before there was a {kernel.backend} kernel for it"
        if then is not None and then != kernel.version:
            return f"the {kernel.backend} kernel is now version {kernel.version}, and {then} was measured"
    entry = record.best(allowed)
    if entry is None:
        failed = "; ".join(str(lost) for lost in record.failed if lost.backend in allowed)
        return failed or f"none of {', '.join(sorted(allowed))} ran when it was measured"
    if reason := illegal(operation.kernel(entry.backend), problem, hardware, entry.schedule):
        return reason
    best = {one.backend: one for one in reversed(record.entries) if one.backend in allowed}
    edited = changed(
        operation,
        problem,
        hardware.target,
        [entry, *(one for one in best.values() if one is not entry)],
        reference=record.reference,
        jax_version=record.environment.jax,
    )
    return edited or entry
