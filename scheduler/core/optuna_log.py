"""Optuna's lines about studies that this program makes are not shown; those about the user's own studies stay."""

from __future__ import annotations

import contextlib
import logging
import threading
from collections.abc import Iterator

_thread = threading.local()


@contextlib.contextmanager
def quietly() -> Iterator[None]:
    """Drops what Optuna's storages log from this thread. The verbosity stays as the user has set it."""
    _thread.quiet = True
    try:
        yield
    finally:
        _thread.quiet = False


def _wanted(record: logging.LogRecord) -> bool:
    return not getattr(_thread, "quiet", False)


for _name in ("optuna.storages._in_memory", "optuna.storages._rdb.storage"):
    logging.getLogger(_name).addFilter(_wanted)
