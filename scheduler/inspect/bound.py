"""Names the bottleneck of a schedule: groups the cost model's terms by hardware resource."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

import numpy as np
import numpy.typing as npt

from scheduler.model.cost import Breakdown

# In the order of stacking and colours in plots.
GROUPS: Mapping[str, tuple[str, ...]] = MappingProxyType(
    {
        "matrix units": ("mma", "power", "smem", "wgmma_bubble", "step_bubble", "tile_bubble", "tile_end"),
        "FP32 lanes and MUFU": ("mufu", "fp32"),
        "L2 and TMA": ("l2", "tma_rows", "oob_fill"),
        "device memory": ("hbm",),
        "latency": ("latency",),
        "start and end": (
            "step",
            "pipeline_setup",
            "prologue",
            "epilogue",
            "copies",
            "cluster_sync",
            "dsmem",
            "tail_reduction",
            "launch",
        ),
    }
)


def group_of(term: str) -> str:
    """Returns the group of a term of the model.

    Raises:
      KeyError: The model has no such term.
    """
    return {name: group for group, names in GROUPS.items() for name in names}[term]


def bounds(parts: Breakdown, schedules: int) -> list[str]:
    """Returns the group of each schedule's longest overlapped term.

    The group is "start and end" if the serial terms together take longer.
    """
    names = list(parts.overlapped)

    def full(values: Any) -> npt.NDArray[np.float64]:
        return np.broadcast_to(np.asarray(values, dtype=np.float64), (schedules,))

    terms = np.stack([full(parts.overlapped[name]) for name in names])
    serial = full(sum(parts.serial.values()))
    longest = terms.argmax(axis=0)
    return [
        "start and end" if serial[index] > terms[longest[index], index] else group_of(names[longest[index]])
        for index in range(schedules)
    ]
