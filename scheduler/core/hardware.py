"""Finds chips in the hardware table, by platform or by name, and detects the local chip."""

from __future__ import annotations

import dataclasses
import itertools
import math
import os
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from types import MappingProxyType

import jax

from scheduler.core.chip_table import CPU, GIB, GPUS, KIB, MB, Abilities, Hardware
from scheduler.core.errors import SchedulerError, UnknownChip
from scheduler.core.records import Sweep
from search_spaces import value_of
from search_spaces.space import meant
from search_spaces.target import Target

__all__ = [
    "CPU", "GIB", "KIB", "MB", "Abilities", "Hardware",
    "describe", "detect", "find", "identified", "named", "rows", "siblings", "swept", "table", "target_of",
    "unknown_chip",
]  # fmt: skip

# The rows by platform, or where they are, if they are imported when they are first needed.
_TABLE: Mapping[str, Sequence[Hardware] | str] = MappingProxyType(
    {"cuda": GPUS, "cpu": (CPU,), "tpu": "scheduler.contrib.tpu.chips:TPUS"}
)


def rows(platform: str) -> Sequence[Hardware]:
    """Returns the rows of the chips of a platform; empty for a platform that is not in the table."""
    found = _TABLE.get(platform, ())
    return value_of(found) if isinstance(found, str) else found


def table() -> Iterator[Hardware]:
    """Yields the rows of all chips, platform by platform."""
    return itertools.chain.from_iterable(map(rows, _TABLE))


def find(kind: str) -> Hardware:
    """Returns the row of a chip by its driver's name, another name, or a part of one: "NVIDIA H200", "h200", "v6e".

    A whole name takes precedence over a part of one: "H200" is not a GH200.

    Raises:
      ValueError: no row matches, or several do; the message lists the candidates.
    """
    known = {row.kind: row for row in table()}
    exact = [row.kind for row in known.values() if kind.lower() in (name.lower() for name in (row.kind, *row.names))]
    found = exact or [row.kind for row in known.values() if named(kind, (row.kind, *row.names))]
    if len(found) == 1:
        return known[found[0]]
    if found:
        raise ValueError(f"hardware {kind!r} matches several chips: {', '.join(found)}")
    raise ValueError(f"no hardware {unknown_chip(kind, known)}")


def identified(identity: str) -> Hardware | None:
    """Returns the row with this `Hardware.id`, which record keys contain, or None."""
    return next((row for row in table() if row.id == identity), None)


def siblings(hardware: Hardware) -> list[Hardware]:
    """Returns the other chips of the same architecture, the most similar first.

    The similarity compares cores, peak arithmetic, bandwidth and capacity of the last-level cache, as logarithms of
    ratios.
    """

    def figures(row: Hardware) -> tuple[float, ...]:
        return row.cores, row.peak("bfloat16"), row.hbm_bytes_per_s, row.l2_bytes

    def difference(row: Hardware) -> float:
        # A chip without a last-level cache has 0 bytes of it.
        pairs = zip(figures(row), figures(hardware), strict=True)
        return sum(abs(math.log(max(there, 1) / max(here, 1))) for there, here in pairs)

    same = [row for row in rows(hardware.platform) if row.architecture == hardware.architecture]
    return sorted((row for row in same if row.id != hardware.id), key=difference)


def named(text: str, kinds: Iterable[str]) -> list[str]:
    """Returns the `kinds` that contain `text`, ignoring case."""
    return [kind for kind in kinds if text.lower() in kind.lower()]


def unknown_chip(text: str, kinds: Iterable[str]) -> str:
    """Returns the end of an error message about an unknown chip, with a suggestion and all known kinds."""
    kinds = list(kinds)
    # A word that several kinds share belongs to the first. The part after a bracket, cores and memory, is dropped.
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
    """Returns the row for a chip as its driver describes it.

    A chip without a row uses the figures of another chip of the same architecture, scaled by the number of cores, under
    its own name. Predictions are then rough, but measurements and keys are those of the chip itself.

    Raises:
      UnknownChip: no row has this architecture. Figures of another architecture would be meaningless.
    """
    if target.platform == CPU.platform:
        return CPU
    similar = [row for row in rows(target.platform) if row.architecture == target.architecture]
    if not similar:
        raise UnknownChip(
            f"{target.kind} ({target.architecture}) is not in the table of chips, and neither is another chip of this "
            "architecture: its memory and its speed are unknown, so no Pallas kernel is selected or tuned for it"
        )
    row = next((row for row in similar if row.kind == target.kind), similar[0])
    share = target.cores / row.cores
    rates = MappingProxyType({name: rate * share for name, rate in row.flops_per_s.items()})
    return dataclasses.replace(
        row, kind=target.kind, cores=target.cores, flops_per_s=rates, extrapolated=row.kind != target.kind
    )


def detect(device: jax.Device | None = None) -> Hardware:
    """Returns the chip of `device`; the default is JAX's default device.

    Raises:
      SchedulerError: JAX finds no device; `UnknownChip` if the architecture is not in the table.
    """
    return describe(target_of(device or _first_device()))


def swept(sweep: Sweep) -> Hardware:
    """Returns the chip of a recording; raises as `describe` does."""
    return describe(Target(sweep.platform, sweep.kind, sweep.architecture, sweep.cores))


def target_of(device: jax.Device) -> Target:
    """Returns the chip of `device` as its driver describes it."""
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
    except (RuntimeError, AssertionError) as error:  # on a second attempt, JAX raises an AssertionError
        wanted = os.environ.get("JAX_PLATFORMS")
        cause = f"of JAX_PLATFORMS={wanted}" if wanted else "at all"
        reason = str(error).partition("\n")[0].partition(" (you may need")[0]
        raise SchedulerError(
            f"JAX finds no device {cause}{f' ({reason})' if reason else ''}; unset JAX_PLATFORMS, or set "
            "JAX_PLATFORMS=cpu to rehearse"
        ) from error
