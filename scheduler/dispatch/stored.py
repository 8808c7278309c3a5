"""Lookup of stored schedules: a record of the problem itself, otherwise the nearest points in a tuned range."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from scheduler.core.hardware import Hardware
from scheduler.core.identity import families_of, key_of
from scheduler.core.ranges import Range
from scheduler.core.records import Key, Record, Schedule, preferred
from scheduler.prediction.validation import recheck
from scheduler.store.layered import Cache
from search_spaces.operation import Operation
from search_spaces.problem import Problem

if TYPE_CHECKING:
    from scheduler.prediction.evidence import Evidence

logger = logging.getLogger("scheduler")
_said: set[str] = set()


def stored(
    cache: Cache,
    operation: Operation[Any],
    problem: Problem,
    hardware: Hardware,
    *,
    backends: frozenset[str] | None,
    shared_only: bool,
    estimates: bool = True,
) -> tuple[str, Schedule, str] | str:
    """Returns the stored backend and schedule, with their origin.

    Order of priority: a measured record of the problem, a measured range, an estimated record, an estimated range.

    Args:
      cache: the stores.
      operation: the operation.
      problem: the problem.
      hardware: the chip.
      backends: the allowed backends; None allows all.
      shared_only: whether to read only shipped records, which are the same in all processes.
      estimates: whether estimated records may be used if there is no measured one.

    Returns:
      Backend, schedule and origin. If nothing stored can be used, the reason, or "" if nothing is stored. The reason is
      a `Changed` if code was edited.
    """
    question, useless = f"{operation.name} {problem} on {hardware.kind}", ""
    estimated: tuple[str, Schedule, str] | None = None
    for place, record in cache.find(key_of(operation, problem, hardware), shared_only=shared_only):
        found = recheck(operation, problem, hardware, record, backends=backends)
        if isinstance(found, str):
            say_once(f"{question}: the schedule in {place} no longer holds: {found}")
            useless = useless or type(found)(f"what {place} has does not hold: {found}")
        elif not record.estimated:
            return found.backend, found.schedule, f"measured, from {place}"
        elif estimated is None:
            estimated = found.backend, found.schedule, f"estimated by the compiler, not measured, from {place}"
    if ranges := _ranges(cache, operation, problem, hardware, shared_only=shared_only):
        from scheduler.prediction.between import Between, between  # imported late, as few stores have ranges

        def points(key: Key) -> Iterator[Record]:
            held = [record for _, record in cache.find(key, shared_only=shared_only)]
            return iter(sorted(held, key=lambda record: record.estimated))

        lying = between(operation, problem, hardware, ranges, points, backends=backends, shared_only=shared_only)
        if isinstance(lying, Between):
            if not lying.estimated or (estimates and estimated is None):
                return lying.backend, lying.schedule, lying.reason
        elif lying:
            say_once(f"{question}: {lying}")
            useless = useless or lying
    if estimated is not None and estimates:
        return estimated
    return useless


def evidence(
    cache: Cache, operation: Operation[Any], problem: Problem, hardware: Hardware, *, shared_only: bool = False
) -> Evidence:
    """Returns the stored records and ranges that a prediction for `problem` may use."""
    from scheduler.prediction.evidence import Evidence, merged, read

    own = [] if shared_only else cache.remembered(operation=operation.name, hardware=hardware.id)
    stores = cache.ask(lambda store: read(store, operation, problem, hardware), shared_only=shared_only)
    found = merged([Evidence(own), *stores])
    return Evidence(list(preferred(found.records).values()), found.ranges)


def _ranges(
    cache: Cache, operation: Operation[Any], problem: Problem, hardware: Hardware, *, shared_only: bool
) -> list[Range]:
    """Returns the stored ranges that may contain the problem."""
    families = families_of(problem)
    found = cache.ask(
        lambda store: store.ranges.all(operation=operation.name, hardware=hardware.id, problems=families),
        shared_only=shared_only,
    )
    return [one for ranges in found for one in ranges]


def say_once(message: str) -> None:
    """Logs a message the first time only, as many calls repeat it."""
    if message not in _said:
        _said.add(message)
        logger.info(message)
