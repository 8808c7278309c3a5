"""What the stores answer: a record of the problem itself, or else of the points next to it in a range."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from typing import Any

from scheduler.core.hardware import Hardware
from scheduler.core.identity import key_of
from scheduler.core.records import Key, Record, Schedule
from scheduler.prediction.validation import recheck
from scheduler.store.layered import Cache
from search_spaces.operation import Operation
from search_spaces.problem import Problem

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
    """Backend and schedule that the stores answer, and why; or why what they have is of no use; "" for want of any.

    The reason is a `Changed` where code was edited.

    What was measured goes first: a record of the problem itself, then a range; then likewise what was estimated.

    Args:
      estimates: whether records that nobody measured answer, for want of one that was.
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
    if ranges := cache.ranges(operation=operation.name, hardware=hardware.id, shared_only=shared_only):
        from scheduler.prediction.between import Between, between  # most stores have none, and most calls ask for none

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


def say_once(message: str) -> None:
    """Logs what calls meet again and again, the first time."""
    if message not in _said:
        _said.add(message)
        logger.info(message)
