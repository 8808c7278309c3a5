"""Constants of Hopper, and of Mosaic GPU on it, with their sources.

Capacities of a chip are in the hardware table instead: a kernel does not depend on a capacity (`Kernel.space`).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp

from search_spaces.target import Target

# Threads of a warp, warps and threads of a warpgroup (PTX ISA, wgmma).
WARP = 32
WARPS = 4
WARPGROUP = WARP * WARPS

WGMMA_ROWS = 64  # rows of one instruction (PTX ISA, wgmma.mma_async)
ACCUMULATOR_BYTES = 4  # of a float32, an int32
MAX_CLUSTER = 8  # CTAs (CUDA C++ Programming Guide, thread block clusters)
MAX_INDEX = 2**31 - 1  # number of elements that 32-bit indices reach

ACCESS_BYTES = 16  # widest access of a thread
SECTOR_BYTES = 32  # the unit in which device memory and its caches move data (CUDA C++ Best Practices Guide, 13.2)
TMA_GMEM_ALIGNMENT = 16  # alignment of rows in device memory (cuTensorMapEncodeTiled)
MAX_TMA_BOX = 256  # elements along each axis of a copy (CUDA Driver API, cuTensorMapEncodeTiled)
TMA_SMEM_ALIGNMENT = 128  # alignment in shared memory (CUDA C++ Programming Guide, tensor memory access)

# Mosaic GPU: an array in shared memory takes whole kibibytes, a barrier 8 bytes, and an array of barriers at most 32 of
# them.
SMEM_ALIGNMENT = 1024
BARRIER_BYTES = 8
MAX_BARRIERS = 32


# ------------------------------------------------------------------------------
# Requirements of Hopper kernels on the chip, and padding of their operands before a launch.


def not_hopper(target: Target) -> str | None:
    """Returns why Hopper kernels do not run on `target`, or None."""
    if target.platform == "cuda" and target.architecture == "sm_90":
        return None
    return f"is written for NVIDIA Hopper (sm_90), not for {target.kind} ({target.architecture})"


def padded(x: jax.Array, extents: Sequence[Any], value: float = 0.0) -> jax.Array:
    """Pads the last axes of `x` with `value` up to `extents`; None leaves an axis unchanged."""
    lead = x.ndim - len(extents)
    after = [0 if extent is None else int(extent) - size for extent, size in zip(extents, x.shape[lead:], strict=True)]
    return jnp.pad(x, [(0, 0)] * lead + [(0, n) for n in after], constant_values=value) if any(after) else x
