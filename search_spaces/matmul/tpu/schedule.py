"""The schedule of a matmul on a TPU."""

from __future__ import annotations

import dataclasses


@dataclasses.dataclass(frozen=True)
class TpuSchedule:
    """Maps a matmul to the steps of a grid, which one core runs in sequence.

    Attributes:
      tile_m, tile_n: extents of the output tile; its accumulators stay in VMEM during the loop over k.
      tile_k: extent of k that one step multiplies. If it is all of k, there is one step, which needs no accumulators.
      grid_minor_dim: the axis, "m" or "n", along which consecutive tiles are adjacent. The operand that they share is
        not loaded again if one step takes all of k.
      vmem_limit_mib: the VMEM that the launch requests at most, in MiB; 0 means the compiler's default.
    """

    tile_m: int
    tile_n: int
    tile_k: int
    grid_minor_dim: str
    vmem_limit_mib: int
