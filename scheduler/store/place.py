"""Where a user's own cache is."""

from __future__ import annotations

import contextlib
import os

import platformdirs

from scheduler.core.errors import StoreError
from scheduler.store.database import CACHE_VARIABLE


def default_url() -> str:
    """A user's own cache: `TILE_SCHEDULER_CACHE` (a path or an SQLAlchemy URL), else a file in the cache directory.

    Raises:
      StoreError: it is not set, and this user has no directory.
    """
    if given := os.environ.get(CACHE_VARIABLE):
        return given
    with contextlib.suppress(RuntimeError):
        if (place := platformdirs.user_cache_path("tile-scheduler", False)).is_absolute():
            return str(place / "cache.db")
    raise StoreError(f"this user has no home, and so no cache: set {CACHE_VARIABLE} to a file")
