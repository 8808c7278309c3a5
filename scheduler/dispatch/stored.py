"""Lookup of stored schedules of a problem, and of the records by which its schedule is predicted."""

from __future__ import annotations

import itertools
import logging
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from datetime import UTC, datetime
from typing import Any, NamedTuple

from jax.extend import source_info_util

from scheduler.core import arguments, frames
from scheduler.core.hardware import Hardware
from scheduler.core.records import Entry, Key, Miss, Record, Schedule, key_of, preferred
from scheduler.core.text import log, log_once
from scheduler.prediction.transfer import recheck, telling_records
from scheduler.store.cache import Cache
from search_spaces import OPERATIONS, locate
from search_spaces.operation import Operation
from search_spaces.problem import Problem


class Times(NamedTuple):
    """The times of a selected schedule and of the library, alone, measured or predicted, in seconds."""

    kernel_s: float
    library_s: float


def times_in(record: Record, entry: Entry) -> Times:
    """Returns the times of an entry of a record. Where the library did not run, nothing is gained."""
    library = record.library_entry or entry
    return Times(entry.measurement.median_s, library.measurement.median_s)


def stored(
    cache: Cache,
    operation: Operation[Any],
    problem: Problem,
    hardware: Hardware,
    *,
    backends: frozenset[str] | None,
    shared_only: bool,
    estimates: bool = True,
) -> tuple[str, Schedule, str, Times] | str:
    """Returns the stored backend and schedule, with their origin and times.

    The lowest `Record.precedence` is used: measured before imported, imported before estimated. At the same precedence,
    the user's record is used before a shipped one.

    Args:
      backends: the allowed backends; None allows all.
      shared_only: whether to read only shipped records, which are the same in all processes.
      estimates: whether estimated records may be used if there is no other one.

    Returns:
      Backend, schedule, origin and times. If nothing stored can be used, the reason, or "" if nothing is stored. The
      reason is a `Changed` if code was edited.
    """
    call_text, invalid_reason = f"{operation.name} {problem} on {hardware.kind}", ""
    answers: list[tuple[int, tuple[str, Schedule, str, Times]]] = []
    for source, record in cache.find(key_of(operation, problem, hardware), shared_only=shared_only):
        found = recheck(operation, problem, hardware, record, backends=backends)
        if isinstance(found, str):
            log_once(f"{call_text}: the schedule in {source} is no longer valid: {found}", logging.INFO)
            invalid_reason = invalid_reason or type(found)(f"the record in {source} is invalid: {found}")
        elif estimates or not record.estimated:
            reason = f"{record.origin.rstrip(',')}, from {source}"
            answers.append((record.precedence, (found.backend, found.schedule, reason, times_in(record, found))))
            if not record.precedence:
                return answers[-1][1]
    return min(answers, key=lambda each: each[0])[1] if answers else invalid_reason


def evidence(
    cache: Cache, operation: Operation[Any], problem: Problem, hardware: Hardware, *, shared_only: bool = False
) -> list[Record]:
    """Returns the stored records that a prediction for `problem` may use."""
    own = [] if shared_only else cache.remembered(operation=operation.name, hardware=hardware.id)
    stores = cache.ask(lambda store: telling_records(store, operation, problem, hardware), shared_only=shared_only)
    return list(preferred(itertools.chain(own, *stores)).values())


# ------------------------------------------------------------------------------
# Logging of cache misses to the user's store at each lowering, with the line of user code that made the call.

MISSES_ENVIRONMENT = "TILE_SCHEDULER_MISSES"
_ON, _OFF = ("on", "1", "yes", "true"), ("off", "0", "no", "false")

_locations: dict[Operation[Any], str] = {}
# The line of a call that XLA is compiling. The Python frame of that line has already returned.
_calling_line: ContextVar[str | None] = ContextVar("asking", default=None)


def logs_misses() -> bool:
    """Whether misses are logged. `TILE_SCHEDULER_MISSES=off` disables logging.

    Raises:
      ValueError: the environment variable is neither on nor off.
    """
    setting = os.environ.get(MISSES_ENVIRONMENT, "").strip().lower() or "on"
    return arguments.checked_choice(MISSES_ENVIRONMENT, setting, (*_ON, *_OFF)) in _ON


def note_miss(cache: Cache, operation: Operation[Any], key: Key) -> None:
    """Logs a cache miss for `key` to the user's own store, asynchronously. Failures are logged at debug level."""
    if not logs_misses():
        return
    try:
        now = datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%SZ")
        cache.note(Miss(key, 1, now, now, calling_line(), _operation_location(operation)))
    except Exception as error:  # a failure to log a miss must not fail the call
        log.debug("the miss of %s is not logged: %r", key, error)


def calling_line() -> str:
    """Returns ``file:line`` of the user code that made the call being lowered; "" if the file is unknown.

    For a call traced within another function, this is the line in that function. For an eager call, it is the line of
    the call.
    """
    if (line := _calling_line.get()) is not None:
        return line
    traced = frames.traced(source_info_util.current().traceback)
    call = frames.asked_by(traced) or frames.asked_by(_running())
    return f"{os.path.abspath(call.file)}:{call.line}" if call else ""


@contextmanager
def misses_from(line: str) -> Iterator[None]:
    """Makes `calling_line` return `line` within this context."""
    before = _calling_line.set(line)
    try:
        yield
    finally:
        _calling_line.reset(before)


def _running() -> Iterator[frames.Place]:
    frame = sys._getframe()
    while frame is not None:
        yield frame.f_code.co_filename, frame.f_lineno, frame.f_code.co_name
        frame = frame.f_back  # type: ignore[assignment]


def _operation_location(operation: Operation[Any]) -> str:
    if operation.name in OPERATIONS:
        return ""
    if operation not in _locations:
        _locations[operation] = locate(operation) or ""
    return _locations[operation]
