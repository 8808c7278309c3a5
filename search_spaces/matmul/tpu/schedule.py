"""One way to compute a matrix product on a TPU: the fields of a schedule."""

from __future__ import annotations

import dataclasses


@dataclasses.dataclass(frozen=True)
class TpuSchedule:
    """How a product is laid over the steps of a grid, which one core takes one after the other.

    Attributes:
      tile_m, tile_n: extents of the output tile, whose accumulators stay in VMEM while k is walked.
      tile_k: extent of k that one step multiplies; all of it where there is one step, which needs no accumulators.
      grid_minor_dim: the axis along which consecutive tiles are neighbours, "m" or "n": the operand that they share is
        not loaded again where one step takes all of k.
      vmem_limit_mib: the VMEM that the launch asks for at most, in MiB; 0 leaves it at the compiler's default.
    """

    tile_m: int
    tile_n: int
    tile_k: int
    grid_minor_dim: str
    vmem_limit_mib: int
