"""The turns that processes take on a device: those of one user by a file of its own, those of several by the device's.

A file that several users may lock can be taken away by any of them where all may write, as in ``/tmp``. So each user
has locks in a directory that nobody else reaches, and whose GPU it is shared is told by a file that only the kernel
makes: the GPU's own in sysfs, which everybody may open, lock with flock(2), and nobody replace.
"""

from __future__ import annotations

import contextlib
import fcntl
import logging
import os
import stat
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Literal

import platformdirs

from scheduler.core.errors import WorkerError

PCI_DEVICES = Path("/sys/bus/pci/devices")
# No turn of anybody is as long: a library's compilation has twelve minutes (`limits.COMPILE_LIMITS_S` and, for its
# autotuner, `limits.AUTOTUNED_LIMIT_S`). Who holds a GPU for longer is not tuning, and is waited for no more.
OTHERS_LIMIT_S = 900.0
POLL_S = 0.01
# The driver makes one CUDA context after the other: 60 processes that ask for one at once have theirs all after 15 s,
# and those that ask a few at a time from the first second on. Who hangs over it keeps nobody waiting for longer.
AT_ONCE, AT_ONCE_LIMIT_S = 4, 20.0

# Who waits for a turn: for rounds of a run-off a whole problem waits, with all its workers ("soon"); a library's
# compilation takes as long as fifty turns of others ("last"). They queue in rows, one lock each, of which the first
# competes with those of the next row; "" is the device's own.
When = Literal["soon", "usual", "last"]
_ROWS: dict[When, tuple[str, ...]] = {"soon": ("",), "usual": (".row", ""), "last": (".last", ".row", "")}

_log = logging.getLogger("scheduler")
_not_waited_for: set[Path] = set()
_held: set[int] = set()


def _close_in_child() -> None:
    """A lock is that of all processes that have it open: one that a candidate forks must not keep it."""
    for lock in _held:
        with contextlib.suppress(OSError):
            os.close(lock)
    _held.clear()


os.register_at_fork(after_in_child=_close_in_child)


@contextlib.contextmanager
def turn(name: str, bus: str = "", when: When = "usual") -> Iterator[None]:
    """One process at a time is within, of those that say the same `name`, whoever started it.

    Args:
      name: of the device.
      bus: its PCI address as the driver writes it; "" where it has none: then only one user's processes take turns.
      when: before most of those that wait now, among them, or after most.

    Raises:
      WorkerError: there is no place for locks, or what is there is no lock; what to do.
    """
    with contextlib.ExitStack() as stack:
        before = contextlib.ExitStack()
        for row in _ROWS[when]:
            entered = stack.enter_context(contextlib.ExitStack())
            entered.enter_context(_locked(name + row))
            before.close()
            before = entered
        if bus and (shared := _of_device(bus)) is not None:
            stack.enter_context(_among_users(shared))
        yield


@contextlib.contextmanager
def few_at_once(name: str) -> Iterator[None]:
    """So few processes of this user's are within at a time, of those that say the same `name`, or that have waited
    long enough; raises as `turn` does.
    """
    until = time.monotonic() + AT_ONCE_LIMIT_S
    with contextlib.ExitStack() as stack:
        places = [stack.enter_context(_closing(_opened(f"{name}.{number}"))) for number in range(AT_ONCE)]
        while not any(map(_taken, places)) and time.monotonic() < until:
            time.sleep(POLL_S)
        yield


def require(name: str) -> None:
    """Asks for a lock of this name without waiting for it; raises as `turn` does."""
    os.close(_opened(name))


def _of_device(bus: str) -> Path | None:
    """The file of the kernel's that stands for a device, or None where it shows none."""
    domain, _, rest = bus.lower().partition(":")
    # The driver writes eight digits of a domain, the kernel four.
    file = PCI_DEVICES / f"{domain[-4:]}:{rest}" / "vendor"
    return file if file.is_file() else None


@contextlib.contextmanager
def _among_users(file: Path) -> Iterator[None]:
    if file in _not_waited_for:
        yield
        return
    try:
        lock = os.open(file, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK)
    except OSError as error:  # a sandbox that shows it and lets nobody in
        _log.debug("%s: %s; only this user's processes take turns", file, error)
        yield
        return
    with _closing(lock):
        _wait_for(lock, file)
        yield


@contextlib.contextmanager
def _closing(lock: int) -> Iterator[int]:
    _held.add(lock)
    try:
        yield lock
    finally:
        if lock in _held:
            _held.discard(lock)
            os.close(lock)


def _wait_for(lock: int, file: Path) -> None:
    until = time.monotonic() + OTHERS_LIMIT_S
    while not _taken(lock):
        if time.monotonic() > until:
            _not_waited_for.add(file)
            _log.warning("%s was locked for %.0f s; this process waits for it no more", file, OTHERS_LIMIT_S)
            return
        time.sleep(POLL_S)


def _taken(lock: int) -> bool:
    """Whether it is this process's now, which nobody else had."""
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


@contextlib.contextmanager
def _locked(name: str) -> Iterator[None]:
    with _closing(_opened(name)) as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield


def _opened(name: str) -> int:
    """The lock of this user's of this name, opened: a file in a directory that nobody else may enter."""
    refused = ""
    for place in _places():
        try:
            directory = _own(place)
        except OSError as error:
            refused += f"; {place}: {error.strerror or error}"
            continue
        try:
            # Whatever lies there: no link is followed, and a FIFO is not waited for.
            lock = os.open(
                f"{name}.lock", os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_NONBLOCK, 0o600, dir_fd=directory
            )
        except OSError as error:
            raise WorkerError(f"{place / name}.lock is no lock ({error.strerror}): remove it") from error
        finally:
            os.close(directory)
        if not stat.S_ISREG(os.fstat(lock).st_mode):
            os.close(lock)
            raise WorkerError(f"{place / name}.lock is no lock but another kind of file: remove it")
        return lock
    raise WorkerError(f"no directory is this user's alone, for locks: set XDG_RUNTIME_DIR to one{refused}")


def _places() -> Iterator[Path]:
    """Directories for locks, the first that can be had is taken."""
    if runtime := os.environ.get("XDG_RUNTIME_DIR"):
        yield Path(runtime) / "tile-scheduler"
    with contextlib.suppress(RuntimeError):  # of a user without a home
        yield platformdirs.user_cache_path("tile-scheduler", False) / "locks"
    yield Path(tempfile.gettempdir()) / f"tile-scheduler-{os.geteuid()}"


def _own(place: Path) -> int:
    """A directory that is made where it is missing, opened; it is of this user, and made one that others cannot enter.

    Raises:
      OSError: it cannot be made, is another's, or is none.
    """
    if not place.is_absolute():
        raise OSError("this user has no home")
    with contextlib.suppress(FileExistsError):
        place.parent.mkdir(parents=True, exist_ok=True)
        place.mkdir(mode=0o700)
    directory = os.open(place, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
    try:
        if os.fstat(directory).st_uid != os.geteuid():
            raise PermissionError(1, "it is another user's")
        os.fchmod(directory, 0o700)
    except OSError:
        os.close(directory)
        raise
    return directory
