"""Chips: the table of them, with sources, and which one is here."""

from __future__ import annotations

import dataclasses
import os
import re
from collections.abc import Iterable
from types import MappingProxyType

import jax

from scheduler.core.chip import GIB, KIB, MB, Abilities, Hardware, peaks
from scheduler.core.errors import SchedulerError, UnknownChip
from scheduler.core.gpus import GPUS
from scheduler.core.records import Sweep
from scheduler.core.tpus import TPUS
from search_spaces.kernel import Target
from search_spaces.space import meant

__all__ = [
    "CHIPS", "CPU", "GIB", "KIB", "MB", "TABLE", "Abilities", "Hardware",
    "describe", "detect", "find", "identified", "named", "swept", "target_of", "unknown_chip",
]  # fmt: skip

TABLE: tuple[Hardware, ...] = (*GPUS, *TPUS)

# One constant row for every CPU: the interpreter only rehearses there. The rates are those of a large server, so that a
# lower bound is one everywhere; what an interpreted grid step costs is the cost model's matter.
CPU = Hardware(
    kind="cpu",
    platform="cpu",
    architecture="cpu",
    cores=1,
    memory_bytes=16 * GIB,
    flops_per_s=peaks(half=16e12, tf32=8e12, fp32=8e12),
    hbm_bytes_per_s=500e9,
    l2_bytes_per_s=5e12,
    l2_bytes=1 * MB,
    onchip_bytes=32 * MB,
    onchip_bytes_per_core=32 * MB,
    onchip_reserved_bytes=0,
    onchip_bytes_per_clock=64,
    registers_per_thread=10**9,
    registers_per_core=10**9,
    threads_per_core=10**9,
    blocks_per_core=1,
    clock_hz=2e9,
    special_per_clock=1,
    lanes_per_core=8,
    memory_latency_s=1e-7,
    l2_latency_s=2e-8,
    launch_s=1e-3,
    abilities=Abilities("wall", repetitions=(3, 2), cold=False, host_memory=True, interpreted=True),
)

CHIPS = (*TABLE, CPU)


def find(kind: str) -> Hardware:
    """The row of a chip by its driver's name, another of its names, or a part of one: "NVIDIA H200", "h200", "v6e".

    Raises:
      ValueError: no such row, or several; the message names those there are.
    """
    rows = {row.kind: row for row in CHIPS}
    found = [kind] if kind in rows else [row.kind for row in CHIPS if named(kind, (row.kind, *row.names))]
    if len(found) == 1:
        return rows[found[0]]
    if found:
        raise ValueError(f"hardware {kind!r} is several: {', '.join(found)}")
    raise ValueError(f"no hardware {unknown_chip(kind, rows)}")


def identified(identity: str) -> Hardware | None:
    """The row whose `id` this is, as keys of records have it; None where the table has no such chip."""
    return next((row for row in CHIPS if row.id == identity), None)


def named(text: str, kinds: Iterable[str]) -> list[str]:
    """Those of `kinds` that a person means by `text`: a part of the name, in any case."""
    return [kind for kind in kinds if text.lower() in kind.lower()]


def unknown_chip(text: str, kinds: Iterable[str]) -> str:
    """The end of a sentence about a chip that is none of `kinds`: it, the one that was meant, and all others."""
    kinds = list(kinds)
    # Of kinds that share a word the first; after a bracket stand cores and memory.
    words = {
        word: kind
        for kind in reversed(kinds)
        for word in re.split(r"[\s-]+", kind.partition(" (")[0])
        if any(c.isdigit() for c in word)
    }
    wanted = max(re.split(r"[\s-]+", text), key=lambda word: any(c.isdigit() for c in word), default=text)
    close = meant(wanted, words)
    hint = f"; did you mean {words[close]!r}?" if close else ""
    return f"{text!r}{hint} (known: {', '.join(kinds) or 'none'})"


def describe(target: Target) -> Hardware:
    """The row for a chip as its driver describes it.

    A chip without a row of its own borrows the figures of one of its architecture, scaled to its cores, under its own
    name: predictions are then rough, while measurements and keys are its own.

    Raises:
      UnknownChip: no row is of its architecture. Capacities of another one would be wrong in kind.
    """
    if target.platform == CPU.platform:
        return CPU
    kin = [row for row in TABLE if (row.platform, row.architecture) == (target.platform, target.architecture)]
    if not kin:
        raise UnknownChip(
            f"{target.kind} ({target.architecture}) is not in the table of chips, nor is another of its architecture: "
            "what it can hold and how fast it is are not known, so no Pallas kernel is chosen or tuned for it"
        )
    row = next((row for row in kin if row.kind == target.kind), kin[0])
    share = target.cores / row.cores
    rates = MappingProxyType({name: rate * share for name, rate in row.flops_per_s.items()})
    return dataclasses.replace(
        row, kind=target.kind, cores=target.cores, flops_per_s=rates, borrowed=row.kind != target.kind
    )


def detect(device: jax.Device | None = None) -> Hardware:
    """The chip of `device`, by default the one JAX would use.

    Raises:
      SchedulerError: JAX finds no device at all; an `UnknownChip` where the table tells nothing of the one it finds.
    """
    return describe(target_of(device or _first_device()))


def swept(sweep: Sweep) -> Hardware:
    """The chip of a recording; raises as `describe` does."""
    return describe(Target(sweep.platform, sweep.kind, sweep.architecture, sweep.cores))


def target_of(device: jax.Device) -> Target:
    """The chip of `device` as its driver describes it."""
    if device.platform == CPU.platform:
        return CPU.target
    platform = "cuda" if "NVIDIA" in device.device_kind else device.platform
    capability = str(getattr(device, "compute_capability", ""))
    architecture = f"sm_{capability.replace('.', '')}" if platform == "cuda" else device.device_kind
    cores = getattr(device, "core_count", None) or getattr(device, "num_cores", None) or 1
    return Target(platform, device.device_kind, architecture, int(cores))


def _first_device() -> jax.Device:
    try:
        return jax.devices()[0]
    except (RuntimeError, AssertionError) as error:  # an assertion of its own, where it is asked a second time
        wanted = os.environ.get("JAX_PLATFORMS")
        cause = f"of JAX_PLATFORMS={wanted}" if wanted else "at all"
        reason = str(error).partition("\n")[0].partition(" (you may need")[0]
        raise SchedulerError(
            f"JAX finds no device {cause}{f' ({reason})' if reason else ''}; unset JAX_PLATFORMS, or set "
            "JAX_PLATFORMS=cpu to rehearse"
        ) from error
