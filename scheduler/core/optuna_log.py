"""Suppression of Optuna's log messages about this program's studies, but not about the user's own studies."""

from __future__ import annotations

import contextlib
import logging
import threading
from collections.abc import Iterator

_thread = threading.local()


@contextlib.contextmanager
def quietly() -> Iterator[None]:
    """Drops messages of Optuna's storages from this thread. The user's verbosity setting is unchanged."""
    _thread.quiet = True
    try:
        yield
    finally:
        _thread.quiet = False


def _wanted(record: logging.LogRecord) -> bool:
    return not getattr(_thread, "quiet", False)


for _name in ("optuna.storages._in_memory", "optuna.storages._rdb.storage"):
    logging.getLogger(_name).addFilter(_wanted)
