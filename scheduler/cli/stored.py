"""Selection of records for `list` and `report`: the user's own first, then those shipped for the local chip."""

from __future__ import annotations

import collections
import contextlib
import dataclasses
import importlib.util
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from scheduler.cli.arguments import wanted_by
from scheduler.cli.stores import SHIPPED, ask_stores
from scheduler.core import nvidia_smi
from scheduler.core.errors import SchedulerError
from scheduler.core.records import Key
from scheduler.inspect.order import order_of

if TYPE_CHECKING:
    from scheduler.core.ranges import Range
    from scheduler.core.records import Record, Trial
    from scheduler.store.rows import Head
    from scheduler.store.store import Store

# Default limit on records. More are rarely read, and each takes a fraction of a second to explain and plot.
MOST = 100


@dataclasses.dataclass(frozen=True)
class Stored:
    """The selected records, ranges and unfinished searches, each with the location of its store.

    Attributes:
      stores: location -> store, for the readable stores.
      records: the records, sorted as in `_Here.order`: the user's own first, then those of local chips.
      ranges: the selected ranges.
      unfinished: the selected unfinished searches, with their trials.
      left: number of records left out by the limit `most`.
      elsewhere: for each shipped record left out because its chip is not local, the chip.
    """

    stores: Mapping[str, Store]
    records: Sequence[tuple[str, Record]]
    ranges: Sequence[tuple[str, Range]]
    unfinished: Sequence[tuple[str, Key, Sequence[Trial]]]
    left: int
    elsewhere: Sequence[str]

    def left_out_texts(self) -> list[str]:
        """Returns up to two lines about records left out, with the options to show them."""
        said = []
        if self.left:
            said.append(f"{self.left} more records are left out: --most 0 takes all, --operation and --hardware choose")
        if self.elsewhere:
            counts = collections.Counter(chip.partition(" (")[0] for chip in self.elsewhere)
            chips = ", ".join(f"{count} for {chip}" for chip, count in counts.most_common())
            said.append(f"{len(self.elsewhere)} more are shipped for other chips ({chips}): --all shows them, too")
        return said


def chosen(operation: str | None, hardware: str | None, *, everything: bool, most: int, fields: bool = True) -> Stored:
    """Returns the stored data that command-line options select.

    Args:
      operation, hardware: as in `wanted_by`. An explicit chip selects everything stored for it.
      everything: whether to include data shipped for chips other than the local ones.
      most: maximum number of records; 0 means no limit.
      fields: sort problems by their fields, in the order of their operation, which imports JAX; otherwise by name.
    """

    def ask(store: Store) -> tuple[Store, list[Head], dict[Key, list[Trial]], list[Range]]:
        return store, store.heads(), store.unfinished(), store.ranges.all()

    kept = list(ask_stores(ask))
    keys = [key for _, (_, heads, cut, _) in kept for key in (*(head.key for head in heads), *cut)]
    meant, here = wanted_by(keys, operation, hardware), _Here.now()

    def shown(where: str, key: Key) -> bool:
        return everything or hardware is not None or where != SHIPPED or here.has(key)

    found = [(where, head) for where, (_, heads, *_) in kept for head in heads if meant(head.key)]
    rows = [(where, head) for where, head in found if shown(where, head.key)]
    rows.sort(key=lambda row: here.order(*row, fields=fields))
    stores = {where: store for where, (store, *_) in kept}
    ranges = [(where, one, Key(one.operation, one.hardware, one.problem)) for where, (*_, all_) in kept for one in all_]
    return Stored(
        stores,
        _read(rows[:most] if most else rows, stores),
        [(where, one) for where, one, key in ranges if meant(key) and shown(where, key)],
        [(where, key, trials) for where, (_, _, cut, _) in kept for key, trials in cut.items() if meant(key)],
        max(0, len(rows) - most) if most else 0,
        [head.key.hardware for where, head in found if not shown(where, head.key)],
    )


def _read(rows: Sequence[tuple[str, Head]], stores: Mapping[str, Store]) -> list[tuple[str, Record]]:
    """Returns the records of these rows in the same order, without malformed ones."""
    found: dict[tuple[str, Key], Record] = {}
    for where, store in stores.items():
        keys = [head.key for place, head in rows if place == where]
        found |= {(where, record.key): record for record in store.read(keys)}
    return [(where, found[where, head.key]) for where, head in rows if (where, head.key) in found]


def _tpu_devices() -> bool:
    """Whether device files of TPUs exist."""
    return any(any(Path("/dev").glob(pattern)) for pattern in ("accel*", "vfio/[0-9]*"))


@dataclasses.dataclass(frozen=True)
class _Here:
    """The chips of this machine, by their drivers' names."""

    kinds: frozenset[str]

    @classmethod
    def now(cls) -> _Here:
        """Detects the chips of this machine.

        Imports JAX, which takes a second, only if a TPU may be present, as its kind has no other source.
        """
        platforms = {name for name in os.environ.get("JAX_PLATFORMS", "").split(",") if name}
        plugins = any(importlib.util.find_spec(f"jax_cuda{version}_plugin") for version in (12, 13))
        if plugins and (not platforms or platforms & {"cuda", "gpu"}):
            visible = nvidia_smi.visible()
            asked = [nvidia_smi.told("name", name) for name in ([None] if visible is None else visible)]
            if kinds := frozenset(kind for rows in asked for (kind,) in rows):
                return cls(kinds)
        if importlib.util.find_spec("libtpu") and (not platforms or "tpu" in platforms) and _tpu_devices():
            from scheduler.core import hardware

            with contextlib.suppress(SchedulerError):
                return cls(frozenset({hardware.detect().kind}))
        return cls(frozenset({"cpu"}))

    def has(self, key: Key) -> bool:
        """Whether a key belongs to a chip of this machine."""
        return key.hardware.partition(" (")[0] in self.kinds

    def order(self, where: str, head: Head, *, fields: bool) -> tuple[object, ...]:
        """Returns the sort key of a record: the user's own first, then local chips, then measured before estimated."""
        problem = order_of(head.key, fields=fields)
        return where == SHIPPED, not self.has(head.key), head.estimated, head.key.hardware, problem
