"""Describes one GPU with data from NVIDIA's driver, and serializes the measurements on it with a file lock."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import importlib.util
import itertools
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Collection, Iterator
from pathlib import Path
from typing import Any

import filelock
import platformdirs

from scheduler.core import cuda_driver, text
from scheduler.core.chip_table import CPU
from scheduler.core.errors import WorkerError
from search_spaces.target import Target

# ------------------------------------------------------------------------------
# One file lock per device, which serializes the measurements of all processes and users of a host.

# All users of a host share this directory, regardless of TMPDIR, and no user can delete the lock of another.
SHARED = Path("/tmp")
# No measurement takes this long: compiling a library program is limited to twelve minutes (`conversation`). A process
# that holds the lock for longer hangs.
LIMIT_S = 900.0
POLL_S = 0.01
# All users may lock the file.
MODE = 0o666

_skipped_locks: set[Path] = set()


@contextlib.contextmanager
def device_lock(device: str) -> Iterator[None]:
    """Context manager that excludes all other processes of the host from the same device.

    If the lock is not free within `LIMIT_S`, a warning is issued, and this process measures without the lock from then
    on.

    Args:
      device: the UUID of a GPU, or another name.
    """
    path = require_device_lock(device)
    if path is None or path in _skipped_locks:
        yield
        return
    lock = _file_lock(path)
    try:
        lock.acquire(timeout=LIMIT_S, poll_interval=POLL_S)
    except filelock.Timeout:
        _skipped_locks.add(path)
        text.warn_safely(f"{path} was locked for {LIMIT_S:.0f} s: this process measures without the lock")
        yield
        return
    try:
        yield
    finally:
        lock.release()


@functools.cache
def require_device_lock(device: str) -> Path | None:
    """Returns the path of a device's lock; warns and returns None if none can be made. Does not wait for the lock."""
    name = f"tile-scheduler-{re.sub(r'[^A-Za-z0-9.-]', '_', device)}.lock"
    refused: list[str] = []
    for directory in _lock_directories():
        try:
            directory.mkdir(parents=True, exist_ok=True)
            with contextlib.suppress(filelock.Timeout), _file_lock(directory / name).acquire(timeout=0):
                pass
        except OSError as error:
            refused.append(f"{directory / name}: {error.strerror or error}")
            continue
        if refused:
            text.warn_safely(f"this process does not wait for measurements of other users ({'; '.join(refused)})")
        return directory / name
    text.warn_safely(f"this process does not wait for measurements of other processes ({'; '.join(refused)})")
    return None


def _file_lock(path: Path) -> filelock.BaseFileLock:
    return filelock.FileLock(path, mode=MODE)


def _lock_directories() -> Iterator[Path]:
    """Yields directories for locks: first the shared one, then two of this user."""
    yield SHARED
    with contextlib.suppress(RuntimeError):  # the user has no home directory
        yield platformdirs.user_cache_path("tile-scheduler", False) / "locks"
    yield Path(tempfile.gettempdir())


def cuda_wanted() -> bool:
    """Returns whether JAX would use an NVIDIA GPU if there is one, without initializing any device.

    Does not import JAX: nothing can have changed JAX's settings if JAX is not imported.
    """
    jax: Any = sys.modules.get("jax")
    platforms = (jax is not None and jax.config.jax_platforms) or os.environ.get("JAX_PLATFORMS") or ""
    if platforms and not {"cuda", "gpu"} & set(platforms.split(",")):
        return False
    return any(importlib.util.find_spec(f"jax_cuda{version}_plugin") for version in (12, 13))


def visible_gpus() -> list[str] | None:
    """Returns the GPUs in CUDA_VISIBLE_DEVICES, or None for all GPUs if the variable is not set."""
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    if visible is None:
        return None
    names = [name.strip() for name in visible.split(",")]
    return list(itertools.takewhile(lambda name: name not in ("", "-1"), names))  # as CUDA reads it


def query_driver(fields: str, index: str | None = None) -> list[list[str]]:
    """Returns one row of values per GPU, or only for the GPU `index`; empty if the driver does not answer."""
    if (smi := shutil.which("nvidia-smi")) is None:
        return []
    which = [] if index is None else [f"--id={index}"]
    command = [smi, *which, f"--query-gpu={fields}", "--format=csv,noheader,nounits"]
    result = subprocess.run(command, capture_output=True, text=True, check=False)
    if result.returncode and index is not None:
        return []
    rows = [[part.strip() for part in line.split(",")] for line in result.stdout.splitlines()]
    return [row for row in rows if len(row) == len(fields.split(","))]  # other lines are errors, for example a lost GPU


@dataclasses.dataclass(frozen=True)
class Gpu:
    """One GPU as NVIDIA's driver describes it; queries do not create a context on the GPU.

    Attributes:
      free_bytes, total_bytes: GPU memory; a total of 0 means that the memory of a process is not limited.
    """

    index: str
    uuid: str
    driver: str
    free_bytes: int
    total_bytes: int = 0

    @classmethod
    def wanted(cls, device: int = 0) -> Gpu | None:
        """Returns the GPU of this index, or None if JAX has no GPU to use and `device` is 0: the CPU is used.

        Raises:
          WorkerError: there is no GPU of this index.
        """
        wanted = cuda_wanted()
        gpu = cls.query(device) if wanted else None
        if gpu is None and device > 0:
            count = next(i for i in itertools.count() if cls.query(i) is None) if wanted else 0
            visible = "none is visible" if count == 0 else f"{count} {'is' if count == 1 else 'are'} visible"
            raise WorkerError(f"GPU {device} is not visible ({visible})")
        return gpu

    @classmethod
    def query(cls, device: int = 0) -> Gpu | None:
        """Returns the GPU of this index among the visible ones, or None if there is none."""
        names = visible_gpus()
        if names is not None and device >= len(names):
            return None
        index = names[device] if names is not None else str(device)
        found = query_driver("uuid,driver_version,memory.free,memory.total", index)
        if len(found) != 1 or len(parts := found[0]) != 4:
            return None
        return cls(index, parts[0], parts[1], int(parts[2]) * 1024**2, int(parts[3]) * 1024**2)

    @staticmethod
    def chips() -> dict[int, str]:
        """Returns the name of each visible GPU by its index; empty if JAX has no GPU to use."""
        if not cuda_wanted():
            return {}
        if (names := visible_gpus()) is None:
            return {int(index): name for index, name in query_driver("index,name")}
        found = ((number, query_driver("name", name)) for number, name in enumerate(names))
        return {number: rows[0][0] for number, rows in found if rows}

    @classmethod
    def none(cls) -> Gpu:
        """Represents the absence of a GPU: processes run on the CPU."""
        memory_bytes = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
        return cls("", "cpu", "", memory_bytes)

    @property
    def variables(self) -> dict[str, str]:
        """Environment variables that make only this GPU visible to a process."""
        return {"CUDA_VISIBLE_DEVICES": self.index, "CUDA_DEVICE_ORDER": "PCI_BUS_ID"}

    def target(self) -> Target | None:
        """Returns the chip as CUDA's driver describes it, queried in a separate process; None if the query fails."""
        if not self.index:
            return CPU.target
        command = [sys.executable, "-S", cuda_driver.__file__]
        result = subprocess.run(command, env=os.environ | self.variables, capture_output=True, text=True, check=False)
        return None if result.returncode else Target("cuda", **json.loads(result.stdout))

    def others(self, own: Collection[int]) -> int:
        """Returns how many processes other than those with the ids `own` compute on this GPU."""
        smi = shutil.which("nvidia-smi")
        if smi is None:
            return 0
        command = [smi, f"--id={self.uuid}", "--query-compute-apps=pid", "--format=csv,noheader"]
        result = subprocess.run(command, capture_output=True, text=True, check=False)
        found = {int(word) for word in result.stdout.split() if word.isdecimal()}
        # In a container the driver may list process ids of the host. Only their number can be used then.
        return len(found - set(own)) if found & set(own) else max(0, len(found) - len(own))

    def exclusive(self) -> contextlib.AbstractContextManager[None]:
        """Context manager that makes this process the only one to measure on the GPU (`device_lock`)."""
        return device_lock(self.uuid)
