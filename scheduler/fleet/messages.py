"""What the driver of a fleet and the agents that search for it say to each other: records and trials travel as text."""

from __future__ import annotations

import dataclasses
import hashlib
import importlib.metadata
import json
from collections.abc import Mapping
from typing import Any

import tile_scheduler
from scheduler.core.identity import Point
from scheduler.core.records import L2
from scheduler.search.named_samplers import MODEL
from search_spaces import OPERATIONS, load
from search_spaces.operation import Operation


@dataclasses.dataclass(frozen=True)
class Order:
    """One problem to search.

    Attributes:
      operation: the name under which an agent can `load` it.
      problem: `Problem.canonical()`.
      budget, seconds, seed, l2, sampler: as in `tuner.tune`.
      backends: kernels to try beside the library; none stand for all.
      versions: backend -> kernel version, as the driver has them.
      near: records of similar problems.
      known: trials of an earlier run of this search.
      first, brief: as in `task.Task`.
    """

    operation: str
    problem: str
    budget: int
    seconds: float | None
    seed: int
    l2: L2
    backends: tuple[str, ...]
    versions: Mapping[str, int]
    near: tuple[str, ...]
    known: tuple[str, ...]
    first: tuple[Point, ...] = ()
    brief: bool = False
    sampler: str = MODEL


@dataclasses.dataclass(frozen=True)
class Tried:
    """A trial ended; a `refuted` one had a time, and was found wrong."""

    trial: str
    refuted: bool = False


@dataclasses.dataclass(frozen=True)
class Reached:
    """How far the search is: a `Progress`, its trials as text."""

    done: int
    budget: int
    best: str | None
    last: str | None
    elapsed_s: float
    eta_s: float | None
    resumed: int


@dataclasses.dataclass(frozen=True)
class Found:
    """The end of a search: its record."""

    record: str


@dataclasses.dataclass(frozen=True)
class Failed:
    """The end of a search without a record: why.

    Attributes:
      finished: it came to its end, and another run need not take over its trials.
      device: the device, or what measures on it, is at fault: another may do better.
    """

    reason: str
    finished: bool = False
    device: bool = False


Message = Tried | Reached | Found | Failed


def versions() -> dict[str, str]:
    """What must be the same wherever one job is searched, by name."""
    kernels = {name: kernel_versions(load(name)) for name in OPERATIONS}
    return {
        "tile-scheduler": tile_scheduler.__version__,
        "kernels": hashlib.sha256(json.dumps(kernels, sort_keys=True).encode()).hexdigest()[:12],
        **{name: importlib.metadata.version(name) for name in ("jax", "jaxlib")},
    }


def kernel_versions(operation: Operation[Any]) -> dict[str, int]:
    """The version of each kernel, by backend."""
    return {kernel.backend: kernel.version for kernel in operation.kernels}


def differences(here: Mapping[str, object], there: Mapping[str, object]) -> str:
    """In which names two hosts differ, in words; "" where in none."""
    names = [name for name in dict.fromkeys([*here, *there]) if here.get(name) != there.get(name)]
    return ", ".join(f"{name} {there.get(name, 'missing')} (here: {here.get(name, 'missing')})" for name in names)
