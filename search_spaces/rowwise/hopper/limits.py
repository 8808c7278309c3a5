"""What hardware and Mosaic GPU set for the row-wise kernels."""

from __future__ import annotations

from typing import Any

LANES = 32  # threads of a warp
WARPS = 4  # of a warpgroup
THREADS = LANES * WARPS  # of a warpgroup
WIDEST_BYTES = 16  # of one access of a thread
SECTOR_BYTES = 32  # the unit in which device memory and its caches move data (CUDA C++ Best Practices Guide, 13.2)
MOST_ELEMENTS = 2**31 - 1  # that 32-bit indices reach
MOST_BARRIERS = 32  # of one array of them, in Mosaic GPU
MOST_CLUSTER = 8  # CTAs of a cluster (CUDA C++ Programming Guide, thread block clusters)
KIB = 1024
# Mosaic GPU gives each SMEM array whole kibibytes, a kernel that reduces two more, and each barrier 8 bytes.
SMEM_ALIGNMENT = 1024
REDUCTION_BYTES = 2048
BARRIER_BYTES = 8


def round_up(a: Any, b: int) -> Any:
    return -(-a // b) * b
