"""Old spellings that stores and recordings still hold: read here, never written.

Those of schedules and backends are the search spaces' own.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

STAGES: Mapping[str, str] = MappingProxyType({"suspect": "implausible"})

# Of the cost model. What is neither here nor among today's constants is gone from the model.
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
