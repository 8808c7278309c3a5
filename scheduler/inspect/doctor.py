"""Checks an installation: chip, backends, caches, versions."""

from __future__ import annotations

import collections
import contextlib
import dataclasses
import importlib.metadata
import os
import platform
import re
import sys
import tempfile
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

import tile_scheduler
from scheduler.core.errors import SchedulerError, StoreError, UnknownChip
from scheduler.core.hardware import CPU, GIB, Hardware, table
from scheduler.core.records import Keyed, preferred
from scheduler.dispatch import stored
from scheduler.dispatch.dispatch import ENVIRONMENT, ON_MISS, options
from scheduler.inspect.case import examples, refusal
from scheduler.inspect.provenance import stale_version
from scheduler.measure.gpu import Gpu, cuda_wanted
from scheduler.model.constants import calibrations, sibling_of
from scheduler.store.database import CACHE_VARIABLE
from scheduler.store.queries import Head
from scheduler.store.store import Store, default_url, shipped
from search_spaces import OPERATIONS, load, value_of
from search_spaces.jax_compat import NEEDS_JAX, PYTHON_OF_JAX
from search_spaces.operation import Operation

# ------------------------------------------------------------------------------
# Lists the support for each known chip: Pallas kernels, measured or estimated records, or XLA only.


@dataclasses.dataclass(frozen=True)
class Coverage:
    """The support for one chip.

    Attributes:
      kernels: Backend -> the operations that have a Pallas kernel of it for this chip.
      verified: Backends that are used on this chip without a record.
      measured, estimated: Number of problems with a measured or an estimated record.
      compiled: Whether the chip's compiler runs on hosts without the chip and estimates times (with the extra `tpu`).
      outdated: Why kernels for this chip need a newer JAX than the installed one.
    """

    hardware: Hardware
    kernels: Mapping[str, tuple[str, ...]]
    verified: frozenset[str]
    measured: int
    estimated: int
    compiled: bool
    outdated: tuple[str, ...] = ()

    @property
    def kernels_text(self) -> str:
        """The backends, and the number of operations of each."""
        return ", ".join(f"`{name}` ({len(of)} operation{'s' * (len(of) > 1)})" for name, of in self.kernels.items())

    @property
    def records_text(self) -> str:
        """The number of records of each kind; "" if there are none."""
        counts = {"measured": self.measured, "estimated": self.estimated}
        return ", ".join(f"{count} {kind}" for kind, count in counts.items() if count)

    @property
    def fallback_text(self) -> str:
        """The fallback for a call without a record."""
        if not self.kernels:
            return "XLA"
        return "the model's choice" if self.verified else "XLA"

    def __str__(self) -> str:
        if not self.kernels:
            return "; ".join(["XLA alone", *([self.records_text] if self.records_text else []), *self.outdated])
        missing = self.unverified_text or f"without a record, {self.fallback_text} answers"
        return f"{self.kernels_text}; {self.records_text or 'no record'}; {missing}"

    @property
    def unverified_text(self) -> str:
        """What answers if the chip has kernels and none is verified on it; else ""."""
        if self.verified or not self.kernels:
            return ""
        tune = "tile-scheduler tune, which verifies each candidate"
        return f"none is verified on {self.hardware.architecture}: XLA answers until the problem is tuned ({tune})"


def coverage(records: Iterable[Keyed]) -> list[Coverage]:
    """Returns one row for each chip of the table. Several records of the same problem count once.

    Kernels are those of the package's own operations, checked with typical problems of each operation.
    """
    counts: collections.Counter[tuple[str, bool]] = collections.Counter(
        (record.key.hardware, record.estimated) for record in preferred(records).values()
    )
    found = []
    for hardware in table():
        if hardware == CPU:
            continue
        kernels: dict[str, list[str]] = {}
        verified: set[str] = set()
        outdated: dict[str, None] = {}
        for name in OPERATIONS:
            operation = load(name)
            problems = examples(operation)
            for kernel in operation.kernels if problems else ():
                if kernel.library or kernel.vendor:
                    continue
                reason = refusal(kernel, problems, hardware.target)
                if reason is not None and reason.startswith(NEEDS_JAX):
                    outdated[f"a kernel {reason}"] = None
                if reason is None:
                    kernels.setdefault(kernel.backend, []).append(name)
                    verified |= {kernel.backend} if hardware.architecture in kernel.verified_on else set()
        found.append(
            Coverage(
                hardware,
                {backend: tuple(names) for backend, names in kernels.items()},
                frozenset(verified),
                counts[hardware.id, False],
                counts[hardware.id, True],
                hardware.static_cycles,
                tuple(outdated),
            )
        )
    return found


State = Literal["ok", "note", "warning", "broken"]


@dataclasses.dataclass(frozen=True)
class Finding:
    """The result of one check.

    A "note" limits what is available here. A "warning" means that a part works, but less well than with other versions.
    "broken" means that a part needs repair.
    """

    what: str
    state: State
    detail: str


def examine(detect: Callable[[], Hardware], device: int = 0) -> Iterator[Finding]:
    """Runs all checks, the fast ones first.

    Args:
      detect: Returns the current chip, or raises a SchedulerError.
      device: Index of the GPU among the visible ones.
    """
    versions = ", ".join(f"{name} {_version(name)}" for name in ("jax", "jaxlib", "optuna", "sqlalchemy", "numpy"))
    yield Finding("versions", "ok", f"tile-scheduler {tile_scheduler.__version__}, python {platform.python_version()}")
    if (reason := tile_scheduler.installation_problem()) is not None:
        yield Finding("package", "broken", reason)
    yield Finding("packages", "note" if "missing" in versions else "ok", versions)
    if (reason := tile_scheduler.untried_jax()) is not None:
        yield Finding("jax", "warning", reason)
    yield from _caches()
    yield from _on_miss()
    yield from _misses()
    rows = _rows()
    yield from _chips(rows)
    gpu = Gpu.query(device)
    if gpu is None:
        yield Finding(
            "GPU", "note", "none is visible (nvidia-smi lists none): kernels can only be interpreted on the CPU"
        )
    elif not cuda_wanted():
        reason = "JAX_PLATFORMS excludes it" if os.environ.get("JAX_PLATFORMS") else "install tile-scheduler[cuda13]"
        yield Finding("GPU", "note", f"a GPU is present, but jax does not use it: {reason}")
    else:
        yield Finding("GPU", "ok", f"driver {gpu.driver}, {gpu.free_bytes / GIB:.0f} GiB free")
    try:
        hardware = detect()
    except UnknownChip as unknown:
        yield Finding("hardware", "note", f"{unknown}: all calls use XLA")
        return
    except SchedulerError as error:
        yield Finding("hardware", "broken", str(error))
        return
    if hardware.extrapolated:
        detail = f"predictions use the figures of another {hardware.architecture} chip and are rough"
        yield Finding("hardware", "note", f"{hardware.id} is not in the table of chips: {detail}")
    else:
        yield Finding("hardware", "ok", hardware.id)
    yield from _constants(hardware)
    like = next((row for row in rows if row.hardware.architecture == hardware.architecture), None)
    if like is not None and like.unverified_text:
        tried = like.kernels_text.replace("`", "")
        yield Finding("Pallas kernels", "note", f"{like.unverified_text}; a search tries {tried}")
    for name in OPERATIONS:
        yield from _backends(load(name), hardware)


def _constants(hardware: Hardware) -> Iterator[Finding]:
    """Yields a note on a GPU without constants of its own."""
    found = calibrations("matmul", hardware).get(load("matmul").library.backend)
    if hardware.platform == "cuda" and (found is None or sibling_of(found, hardware)):
        source = f"those of {sibling_of(found, hardware)}" if found is not None else "defaults"
        detail = f"predictions of XLA's time use {source}; to measure a few here: tile-scheduler calibrate --quick"
        yield Finding("constants", "note", detail)


def _caches() -> Iterator[Finding]:
    again = "tile-scheduler verify"
    for what, opened, words in (("cache", _own, again), ("shipped cache", shipped, f"{again} --shipped")):
        try:
            if (store := opened()) is None:
                yield Finding(what, "broken", "this installation has no cache.db; install the package again")
                continue
            heads = store.heads()
            count, old = len(heads), _stale(heads, f"{words} --update")
            if opened is _own and (reason := _unwritable(store.location)):
                kept = f"{store.location} cannot be written ({reason}); set {CACHE_VARIABLE} to store tuned records"
                yield Finding(what, "note" if count else "broken", f"{count} records; {kept}")
            else:
                yield Finding(what, "warning" if old else "ok", f"{store.location}: {count} records{old}")
        except StoreError as error:
            yield Finding(what, "broken", str(error))


def _own() -> Store:
    return Store(default_url())


def _stale(records: Sequence[Head], again: str) -> str:
    """Describes how many records are malformed or of another minor version of JAX, and how to make them current."""
    sound = [record.jax for record in records if re.match(r"\d+\.\d+", record.jax)]
    bad = len(records) - len(sound)
    malformed = f", {bad} of them malformed: tile-scheduler list names them, and calls skip them" if bad else ""
    made = collections.Counter(filter(stale_version, sound))
    if not made:
        return malformed
    ((most, _),) = made.most_common(1)
    count = "all" if made.total() == len(records) else f"{made.total()}"
    return malformed + (
        f", {count} of them stale: made with jax {', '.join(sorted(made))}, and this is {_version('jax')}. Calls still "
        f"use them, but another compiler may favour other schedules. {upgrade(most)} to make them current, or time "
        f"them again: {again}"
    )


def upgrade(jax_version: str) -> str:
    """Describes how to install that version of JAX, and which Python it needs if the current one is too old."""
    minor = tuple(int(part) for part in jax_version.split(".")[:2])
    needed = next((python for since, python in PYTHON_OF_JAX if minor >= since), None)
    command = f"Install jax {jax_version} (pip install 'jax=={jax_version}'"
    if needed is None or sys.version_info >= needed:
        return f"{command})"
    wanted = ".".join(map(str, needed))
    return f"{command}) under Python {wanted} or newer, which it needs (this is {platform.python_version()})"


def _rows() -> list[Coverage]:
    """Returns the support for each chip of the table, with the records of the user's cache and the shipped one."""
    heads: list[Head] = []
    for opened in (_own, shipped):
        with contextlib.suppress(StoreError):  # already reported by `_caches`
            store = opened()
            heads += store.heads() if store is not None else ()
    return coverage(heads)


def _chips(rows: Sequence[Coverage]) -> Iterator[Finding]:
    """Reports the support for each chip of the table."""
    for row in rows:
        compiler = ""
        if row.compiled:
            unable = value_of("scheduler.contrib.tpu.ahead_of_time:unable")
            compiler = unable(row.hardware) or "its compiler is installed and estimates times (tune --hardware)"
        state: State = "warning" if row.outdated else "ok"
        yield Finding(
            f"chip {row.hardware.kind}", state, f"{row}{f'; {compiler}' if compiler else ''}".replace("`", "")
        )


def _unwritable(location: str) -> str:
    """Returns why no file can be written at `location`, or "". A database server's URL is not checked.

    The check creates a temporary file and removes it: permission bits are unreliable for root, mounts and /proc.
    """
    if "://" in location:
        return ""
    path = Path(location)
    place = path.parent
    while not place.exists():
        place = place.parent
    try:
        if path.exists():
            path.open("r+b").close()
        tempfile.TemporaryFile(dir=place).close()  # a journal, or the database itself, is created there
    except OSError as error:
        return error.strerror or str(error)
    return ""


def _on_miss() -> Iterator[Finding]:
    """Reports the policy for calls without a record, from the environment."""
    try:
        policy = options(load(OPERATIONS[0])).on_miss
    except ValueError as error:
        yield Finding("on a miss", "broken", f"{error}; every call fails")
    else:
        yield Finding("on a miss", "ok", f"{policy} (of {', '.join(ON_MISS)}; set {ENVIRONMENT} for another)")


def _misses() -> Iterator[Finding]:
    """Reports whether cache misses are recorded, and how many there are."""
    try:
        logged = stored.logs_misses()
    except ValueError as error:
        yield Finding("misses", "broken", f"{error}; every call without a record fails")
        return
    if not logged:
        yield Finding("misses", "ok", f"not logged: {stored.MISSES_ENVIRONMENT} disables logging")
        return
    with contextlib.suppress(StoreError):  # already reported by `_caches`
        count = len(_own().misses.all())
        yield Finding(
            "misses", "ok", f"{count} logged (tile-scheduler misses); {stored.MISSES_ENVIRONMENT}=off disables logging"
        )


def _backends(operation: Operation[Any], hardware: Hardware) -> Iterator[Finding]:
    problems = examples(operation)
    if not problems:
        return
    for kernel in operation.kernels:
        what = f"{operation.name}: {kernel.backend}"
        if reason := refusal(kernel, problems, hardware.target):
            yield Finding(what, "note", reason)
        elif kernel.library or hardware.architecture in kernel.verified_on:
            yield Finding(what, "ok", f"version {kernel.version}")
        else:
            unverified = f"not verified on {hardware.architecture}: used only if measured or requested"
            yield Finding(what, "note", f"version {kernel.version}, {unverified}")


def summary(findings: Sequence[Finding]) -> str:
    """Returns one line that lists broken parts and warnings."""
    named = {
        state: ", ".join(finding.what for finding in findings if finding.state == state)
        for state in ("broken", "warning")
    }
    if not any(named.values()):
        return "ok: nothing is broken or out of date"
    return "; ".join(f"{state}: {names}" for state, names in named.items() if names)


def _version(package: str) -> str:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return "missing"
