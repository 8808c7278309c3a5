"""One file lock per device, which serializes the measurements of all processes and users of a host."""

from __future__ import annotations

import contextlib
import functools
import re
import tempfile
from collections.abc import Iterator
from pathlib import Path

import filelock
import platformdirs

from scheduler.core import safe_text

# All users of a host share this directory, regardless of TMPDIR, and no user can delete the lock of another.
SHARED = Path("/tmp")
# No measurement takes this long: compiling a library program is limited to twelve minutes (`limits`). A process that
# holds the lock for longer hangs.
LIMIT_S = 900.0
POLL_S = 0.01
# All users may lock the file.
MODE = 0o666

_never_waited_for: set[Path] = set()


@contextlib.contextmanager
def exclusive(device: str) -> Iterator[None]:
    """Context manager that excludes all other processes of the host from the same device.

    If the lock is not free within `LIMIT_S`, a warning is issued, and this process measures without the lock from then
    on.

    Args:
      device: the UUID of a GPU, or another name.
    """
    path = require(device)
    if path is None or path in _never_waited_for:
        yield
        return
    lock = _of(path)
    try:
        lock.acquire(timeout=LIMIT_S, poll_interval=POLL_S)
    except filelock.Timeout:
        _never_waited_for.add(path)
        safe_text.warn(f"{path} was locked for {LIMIT_S:.0f} s: this process measures without the lock")
        yield
        return
    try:
        yield
    finally:
        lock.release()


@functools.cache
def require(device: str) -> Path | None:
    """Returns the path of a device's lock; warns and returns None if none can be made. Does not wait for the lock."""
    name = f"tile-scheduler-{re.sub(r'[^A-Za-z0-9.-]', '_', device)}.lock"
    refused: list[str] = []
    for place in _places():
        try:
            place.mkdir(parents=True, exist_ok=True)
            with contextlib.suppress(filelock.Timeout), _of(place / name).acquire(timeout=0):
                pass
        except OSError as error:
            refused.append(f"{place / name}: {error.strerror or error}")
            continue
        if refused:
            safe_text.warn(f"measurements of other users are not waited for ({'; '.join(refused)})")
        return place / name
    safe_text.warn(f"measurements of other processes are not waited for ({'; '.join(refused)})")
    return None


def _of(path: Path) -> filelock.BaseFileLock:
    return filelock.FileLock(path, mode=MODE)


def _places() -> Iterator[Path]:
    """Yields directories for locks: first the shared one, then two of this user."""
    yield SHARED
    with contextlib.suppress(RuntimeError):  # the user has no home directory
        yield platformdirs.user_cache_path("tile-scheduler", False) / "locks"
    yield Path(tempfile.gettempdir())
