"""Old names of schedules and backends, still present in stores, records and sweeps: read here, never written.

Code that reads such names (`Space.decode`, `Operation.kernel`, the text of records and trials) converts them here, so
that all other code only knows the current names.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from search_spaces.space import Choice

_BACKENDS: Mapping[str, str] = MappingProxyType({"portable": "interpret"})


def backend(name: str) -> str:
    """Returns the current name of a backend."""
    return _BACKENDS.get(name, name)


def spellings(name: str) -> tuple[str, ...]:
    """Returns every name that a backend has had, given its current name; the current name comes first."""
    return name, *(old for old, today in _BACKENDS.items() if today == name)


@dataclasses.dataclass(frozen=True)
class OldSchedule:
    """An old format of schedules.

    Attributes:
      fields: field names that all schedules of this format have, and that no other schedule has together.
      today: converts the values to the current format; fields left out at their defaults stay left out.
    """

    fields: frozenset[str]
    today: Callable[[Mapping[str, Choice]], dict[str, Choice]]


def schedule(values: Mapping[str, Choice]) -> dict[str, Choice]:
    """Converts a schedule to the current format; a schedule already in that format is returned as it is."""
    for old in _SCHEDULES:
        if old.fields <= values.keys():
            return old.today(values)
    return dict(values)


_HOPPER_FIELDS = MappingProxyType(
    {
        "split": "consumers",
        "raster": "grid_minor_dim",
        "raster_width": "grid_tile_width",
        "epilogue_n": "epi_tile_n",
        "swap": "swap_ab",
        "in_flight": "delay_release",
    }
)
_HOPPER_VALUES: Mapping[str, Mapping[Choice, Choice]] = MappingProxyType(
    {
        "consumers": {"none": "one", "m": "cooperative_m", "n": "cooperative_n", "tiles": "ping_pong"},
        "cluster": {"k": "split_k"},
    }
)


def _hopper_matmul(values: Mapping[str, Choice]) -> dict[str, Choice]:
    renamed = {_HOPPER_FIELDS.get(name, name): value for name, value in values.items()}
    return {name: _HOPPER_VALUES.get(name, {}).get(value, value) for name, value in renamed.items()}


_ROW_FIELDS = MappingProxyType(
    {
        "hold": "residency",
        "pieces": "accesses",
        "slots": "stages",
        "ahead": "prefetch",
        "held": "register_chunks",
    }
)
_RESIDENCIES: Mapping[Choice, Choice] = MappingProxyType({"onchip": "smem", "flow": "pipeline"})
# Formerly written out even where a residency did not use them; now the defaults, which are left out.
_ROW_DEFAULTS: Mapping[str, Choice] = MappingProxyType(
    {"rows": 1, "accesses": 0, "stages": 0, "prefetch": 0, "register_chunks": 0, "cluster": 1}
)


def _rows(values: Mapping[str, Choice]) -> dict[str, Choice]:
    renamed = {_ROW_FIELDS.get(name, name): value for name, value in values.items()}
    renamed["residency"] = _RESIDENCIES.get(renamed["residency"], renamed["residency"])
    return {name: value for name, value in renamed.items() if value != _ROW_DEFAULTS.get(name)}


def _silu_and_mul(values: Mapping[str, Choice]) -> dict[str, Choice]:
    return {_ROW_FIELDS.get(name, name): value for name, value in values.items()}


_SCHEDULES = (
    OldSchedule(frozenset({"split", "cluster", "raster", "raster_width", "epilogue_n"}), _hopper_matmul),
    OldSchedule(frozenset({"hold", "warps", "vector", "rows", "pieces", "slots", "ahead", "held"}), _rows),
    OldSchedule(frozenset({"warps", "vector", "pieces", "rows"}), _silu_and_mul),
)
