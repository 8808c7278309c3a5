"""Location of the user's cache."""

from __future__ import annotations

import contextlib
import os

import platformdirs

from scheduler.core.errors import StoreError
from scheduler.store.database import CACHE_VARIABLE


def default_url() -> str:
    """Returns `TILE_SCHEDULER_CACHE` (a path or an SQLAlchemy URL) or, if unset, a file in the user's cache directory.

    Raises:
      StoreError: the variable is not set, and the user has no cache directory.
    """
    if given := os.environ.get(CACHE_VARIABLE):
        return given
    with contextlib.suppress(RuntimeError):
        if (place := platformdirs.user_cache_path("tile-scheduler", False)).is_absolute():
            return str(place / "cache.db")
    raise StoreError(f"this user has no home, and so no cache: set {CACHE_VARIABLE} to a file")
