"""A decision of `optimize`, and its words."""

from __future__ import annotations

import collections
import dataclasses
import math
import re
from collections.abc import Mapping, Sequence
from typing import Any

import jax

from scheduler.core.text import seconds_text
from scheduler.rewriting import interleaved
from scheduler.rewriting.interleaved import Seconds
from scheduler.rewriting.lowering import Replaced

# Reasons to keep a version without timing.
XLA_IS_USED = "XLA's version is used"
SEVERAL_PROCESSES = (
    f"{XLA_IS_USED}: each process of a job would decide for itself, and processes could differ: give them one plan "
    "(scheduler.plan)"
)
NOTHING_REPLACED = f"{XLA_IS_USED}: no kernel can be used for its matmuls, grouped products, attention or row programs"
NONE_ON_A_CPU = f"{XLA_IS_USED}: there is no kernel for a CPU, and other changes are not tried there"
PLANNED = "those of the plan"
NOT_PLANNED = f"{XLA_IS_USED}: the plan has no kernel for it"
UNTIMED = "not timed"
# What a report says of equations on a CPU, in the form of `Lowered.left`.
LEFT_ON_A_CPU = "products: no kernel for a CPU"


@dataclasses.dataclass(frozen=True)
class Decided:
    """The version used for some arguments, and the reason.

    Attributes:
      function, arguments: The function's name, and its arguments as text.
      compiled: The tuned version (`jax.stages.Compiled`) if it is kept; None if XLA's version is kept.
      reason: The decision as a sentence: what is used, and what it gains or why.
      replaced: Kernels of the tuned version, whichever version was kept, without those that were dropped.
      dropped: Kernels that are left out of the tuned version, with the reasons.
      left: Why other equations are left to XLA -> number of kinds of such equations.
      changes: Other changes of the tuned version, which need no kernel, as text.
      groups: Groups of kernels without which the function was timed: how fast it is, and whether the group is kept.
      plain, tuned: Seconds per call, from the same rounds; None if nothing was timed.
      plain_bytes, tuned_bytes: Peak device memory of each version; None if nothing was compared, or if XLA does not
        report it.
      plain_exchanged, tuned_exchanged: Bytes that collectives of each version return to a device, those in a loop
        once; None if nothing was compared, or on one device.
      device: The first device that runs it.
    """

    function: str
    arguments: str
    compiled: Any
    reason: str
    replaced: tuple[Replaced, ...] = ()
    dropped: tuple[Replaced, ...] = ()
    left: Mapping[str, int] = dataclasses.field(default_factory=dict)
    plain: Seconds | None = None
    tuned: Seconds | None = None
    plain_bytes: int | None = None
    tuned_bytes: int | None = None
    plain_exchanged: int | None = None
    tuned_exchanged: int | None = None
    changes: tuple[str, ...] = ()
    groups: tuple[str, ...] = ()
    device: jax.Device | None = None

    @property
    def kept(self) -> str:
        """The version used: "tuned" or "plain"."""
        return "plain" if self.compiled is None else "tuned"

    def __str__(self) -> str:
        lines = [f"{self.function}({self.arguments})", f"  {self.reason}"]
        used = "by a kernel" if self.kept == "tuned" else "tried, and not used"
        changed = "by XLA, changed" if self.kept == "tuned" else "tried, and not used"
        if self.plain is not None and self.tuned is not None:
            tuned, plain = (seconds_text(each.median_s) for each in (self.tuned, self.plain))
            interval = interleaved.interval_text(self.tuned, self.plain)
            lines.append(f"  time of a call: {self._tried} {tuned}, XLA {plain}; {interval}")
        if self.plain_bytes is not None and self.tuned_bytes is not None:
            lines.append(f"  peak memory: {self._tried} {_mib(self.tuned_bytes)}, XLA {_mib(self.plain_bytes)}")
        lines += [f"  group: {each}" for each in self.groups]
        if self.plain_exchanged is not None and self.tuned_exchanged is not None:
            exchanged = f"{self._tried} {_mib(self.tuned_exchanged)}, XLA {_mib(self.plain_exchanged)}"
            lines.append(f"  between devices: {exchanged}")
        lines += [f"  {used}: {each}" for each in self.replaced]
        lines += [f"  {changed}: {each}" for each in self.changes]
        return "\n".join(lines + [f"  {each}" for each in _left_texts(self.left)])

    @property
    def _tried(self) -> str:
        return f"with {used_text(self.replaced, self.changes)}"


def used_text(replaced: Sequence[Replaced], changes: Sequence[str]) -> str:
    """Returns "14 kernels", "1 kernel and 2 other changes" or "2 changes without a kernel"."""
    counted = {"kernel": len(replaced), "other change" if replaced else "change": len(changes)}
    used = " and ".join(f"{n} {name}{'s' if n > 1 else ''}" for name, n in counted.items() if n)
    return used if replaced else f"{used} without a kernel"


def share_text(plain: int | None, tuned: int | None, what: str) -> str:
    """Returns ", 40 % less memory"; "" if the difference is below 1 %, or unknown."""
    share = share_percent(plain, tuned)
    return f", {abs(share)} % {'less' if share < 0 else 'more'} {what}" if share else ""


def share_percent(plain: int | None, tuned: int | None) -> int:
    """Returns how much more the tuned version needs, in percent; 0 if unknown."""
    return round(100 * (tuned / plain - 1)) if plain and tuned else 0


def _left_texts(left: Mapping[str, int]) -> list[str]:
    """Returns a line for all reasons that differ in numbers alone."""
    groups: dict[str, list[tuple[str, int]]] = {}
    for reason, kinds in left.items():
        groups.setdefault(re.sub(r"\d+(\.\d+)?", "#", reason), []).append((reason, kinds))
    lines = []
    for group in groups.values():
        what, _, why = group[0][0].partition(": ")
        kinds = sum(kinds for _, kinds in group)
        stay = f"{kinds} kinds of {what} stay" if kinds > 1 else f"1 kind of {what} stays"
        lines.append(f"{stay} with XLA: {'for example, ' if len(group) > 1 else ''}{why}")
    return lines


def peak_bytes(compiled: Any) -> int | None:
    """Returns the peak device memory of a compiled function, arguments and results included; None if not reported."""
    found = compiled.memory_analysis()
    if found is None:
        return None
    given, made = found.argument_size_in_bytes, found.output_size_in_bytes - found.alias_size_in_bytes
    return int(given + made + found.temp_size_in_bytes)


def _mib(size: int) -> str:
    return f"{size / 2**20:.0f} MiB"


# ------------------------------------------------------------------------------
# Counts the bytes that the devices of a mesh exchange.

COLLECTIVE = re.compile(
    r"= (?P<type>.*?) (?P<kind>all-reduce|all-gather|reduce-scatter|all-to-all|collective-permute)(-start)?\("
)
SHAPE = re.compile(r"\b([a-z]+\d+)\w*\[([\d,]*)\]")


def collectives(text: str) -> dict[str, dict[str, int]]:
    """Returns the number of collectives of each kind in a compiled program, and the bytes of their results on a device.

    Those in a loop count once.
    """
    found: dict[str, dict[str, int]] = collections.defaultdict(lambda: {"count": 0, "bytes": 0})
    for match in COLLECTIVE.finditer(text):
        each = found[match["kind"]]
        each["count"] += 1
        each["bytes"] += _bytes(match["type"], started=match[3] is not None and match["kind"] != "all-reduce")
    return dict(found)


def exchanged_bytes(compiled: Any) -> int:
    """Returns the bytes of the results of all collectives of a compiled function, on one device."""
    return sum(each["bytes"] for each in collectives(compiled.as_text()).values())


def _bytes(type_text: str, started: bool) -> int:
    """Returns the bytes of a result. A collective that is only started returns its operand before it, too."""
    shapes = [(kind, [int(n) for n in extents.split(",") if n]) for kind, extents in SHAPE.findall(type_text)]
    sizes = [math.prod(extents) * int(re.sub(r"\D", "", kind)) // 8 for kind, extents in shapes]
    return max(sizes) if started and sizes else sum(sizes)
