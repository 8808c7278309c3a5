"""Counts what the devices of a compiled program send to each other."""

from __future__ import annotations

import collections
import math
import re
from typing import Any

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
