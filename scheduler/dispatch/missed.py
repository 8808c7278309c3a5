"""Logging of cache misses to the user's store at each lowering, with the line of user code that made the call."""

from __future__ import annotations

import logging
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from datetime import UTC, datetime
from typing import Any

from jax.extend import source_info_util

from scheduler.core import checked, frames
from scheduler.core.records import Key, Miss
from scheduler.store.layered import Cache
from search_spaces import OPERATIONS, locate
from search_spaces.operation import Operation

ENVIRONMENT = "TILE_SCHEDULER_MISSES"
_ON, _OFF = ("on", "1", "yes", "true"), ("off", "0", "no", "false")

_log = logging.getLogger("scheduler")
_places: dict[Operation[Any], str] = {}
# The line of a call that XLA is compiling. The Python frame of that line has already returned.
_asking: ContextVar[str | None] = ContextVar("asking", default=None)


def noted() -> bool:
    """Whether misses are logged. `TILE_SCHEDULER_MISSES=off` disables logging.

    Raises:
      ValueError: the environment variable is neither on nor off.
    """
    said = os.environ.get(ENVIRONMENT, "").strip().lower() or "on"
    return checked.one_of(ENVIRONMENT, said, (*_ON, *_OFF)) in _ON


def note(cache: Cache, operation: Operation[Any], key: Key) -> None:
    """Logs a cache miss for `key` to the user's own store, asynchronously. Failures are logged at debug level."""
    if not noted():
        return
    try:
        now = datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%SZ")
        cache.note(Miss(key, 1, now, now, line_asking(), _place(operation)))
    except Exception as error:  # a failure to log a miss must not fail the call
        _log.debug("%s is not noted as a miss: %r", key, error)


def line_asking() -> str:
    """Returns ``file:line`` of the user code that made the call being lowered; "" if the file is unknown.

    For a call traced within another function, this is the line in that function. For an eager call, it is the line of
    the call.
    """
    if (told := _asking.get()) is not None:
        return told
    traced = frames.traced(source_info_util.current().traceback)
    call = frames.asked_by(traced) or frames.asked_by(_running())
    return f"{os.path.abspath(call.file)}:{call.line}" if call else ""


@contextmanager
def asking_from(line: str) -> Iterator[None]:
    """Makes `line_asking` return `line` within this context."""
    before = _asking.set(line)
    try:
        yield
    finally:
        _asking.reset(before)


def _running() -> Iterator[frames.Place]:
    frame = sys._getframe()
    while frame is not None:
        yield frame.f_code.co_filename, frame.f_lineno, frame.f_code.co_name
        frame = frame.f_back  # type: ignore[assignment]


def _place(operation: Operation[Any]) -> str:
    if operation.name in OPERATIONS:
        return ""
    if operation not in _places:
        _places[operation] = locate(operation) or ""
    return _places[operation]
