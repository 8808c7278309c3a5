"""Messages between the driver of a fleet and its agents; records and trials are sent as text."""

from __future__ import annotations

import dataclasses
import hashlib
import importlib.metadata
import json
from collections.abc import Mapping
from typing import Any

import tile_scheduler
from scheduler.core.progress import Progress
from scheduler.search.task import SearchOptions
from search_spaces import OPERATIONS, load
from search_spaces.operation import Operation


@dataclasses.dataclass(frozen=True)
class Order:
    """One problem to search.

    Attributes:
      operation: the name under which an agent can `load` it.
      problem, reference: `Problem.canonical()` and `Problem.reference_text()`.
      options: the options of the search; the sampler is a name.
      versions: the kernel versions of the driver, by backend.
      near: records of similar problems.
      known: trials of an earlier run of this search.
    """

    operation: str
    problem: str
    options: SearchOptions
    versions: Mapping[str, int]
    near: tuple[str, ...]
    known: tuple[str, ...]
    reference: str = ""


@dataclasses.dataclass(frozen=True)
class TrialEnded:
    """A finished trial, or a new outcome of one that was found wrong later."""

    trial: str


@dataclasses.dataclass(frozen=True)
class SearchEnded:
    """The end of a search, with its record."""

    record: str


@dataclasses.dataclass(frozen=True)
class SearchFailed:
    """The end of a search without a record, with the reason.

    Attributes:
      finished: the search is complete, and another run does not need its trials.
      device: the device or its measuring process failed; another device may succeed.
    """

    reason: str
    finished: bool = False
    device: bool = False


Message = TrialEnded | Progress | SearchEnded | SearchFailed


def versions() -> dict[str, str]:
    """Returns the versions that all hosts of a job must share, by name."""
    kernels = {name: kernel_versions(load(name)) for name in OPERATIONS}
    return {
        "tile-scheduler": tile_scheduler.__version__,
        "kernels": hashlib.sha256(json.dumps(kernels, sort_keys=True).encode()).hexdigest()[:12],
        **{name: importlib.metadata.version(name) for name in ("jax", "jaxlib")},
    }


def kernel_versions(operation: Operation[Any]) -> dict[str, int]:
    """Returns the version of each kernel, by backend."""
    return {kernel.backend: kernel.version for kernel in operation.kernels}


def differences(local: Mapping[str, object], remote: Mapping[str, object]) -> str:
    """Describes the names in which two hosts differ; "" if there are none."""
    names = [name for name in dict.fromkeys([*local, *remote]) if local.get(name) != remote.get(name)]
    return ", ".join(f"{name} {remote.get(name, 'missing')} (here: {local.get(name, 'missing')})" for name in names)
