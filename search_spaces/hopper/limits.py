"""Constants of Hopper, and of Mosaic GPU on it, each once and with its source.

What a chip has room for is not here: a kernel names no capacity (`Kernel.space`), the hardware table does.
"""

from __future__ import annotations

# Threads of a warp, warps and threads of a warpgroup (PTX ISA, wgmma).
WARP = 32
WARPS = 4
WARPGROUP = WARP * WARPS

WGMMA_ROWS = 64  # that one instruction multiplies (PTX ISA, wgmma.mma_async)
ACCUMULATOR_BYTES = 4  # of a float32, an int32
MAX_CLUSTER = 8  # CTAs (CUDA C++ Programming Guide, thread block clusters)
MAX_INDEX = 2**31 - 1  # 32-bit indices reach so many elements

ACCESS_BYTES = 16  # of the widest access of a thread
SECTOR_BYTES = 32  # the unit in which device memory and its caches move data (CUDA C++ Best Practices Guide, 13.2)
TMA_GMEM_ALIGNMENT = 16  # bytes at a multiple of which rows start in device memory (cuTensorMapEncodeTiled)
TMA_SMEM_ALIGNMENT = 128  # ... and a copy arrives in shared memory (CUDA C++ Programming Guide, tensor memory access)

# Of Mosaic GPU: an array in shared memory takes whole kibibytes, a barrier 8 bytes, and an array of them holds so many.
SMEM_ALIGNMENT = 1024
BARRIER_BYTES = 8
MAX_BARRIERS = 32
