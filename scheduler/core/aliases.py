"""Old names that stores and recordings may still contain: they are read, never written.

Old names of schedules and backends are in the search spaces.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

STAGES: Mapping[str, str] = MappingProxyType({"suspect": "implausible"})

# Constants of the cost model. A stored name that is neither here nor a current constant was removed from the model.
CONSTANTS: Mapping[str, str] = MappingProxyType(
    {
        "alpha": "l2_share",
        "askew": "sector_misalignment",
        "cluster_s": "cluster_sync_s",
        "exchange_bytes_per_s": "dsmem_bytes_per_s",
        "exchange_s": "dsmem_s",
        "gap_s": "wgmma_bubble_s",
        "launched": "launch_share",
        "outside_s": "fill_row_s",
        "row_s": "tma_row_s",
        "slot_s": "stage_s",
    }
)
