"""The schedule of a matmul by warp-level MMA."""

from __future__ import annotations

import dataclasses


@dataclasses.dataclass(frozen=True)
class MmaSchedule:
    """Maps a matmul to CTAs, warps and pipeline steps.

    Attributes:
      tile_m, tile_n: extents of the output tile that one CTA computes.
      tile_k: extent of k that one pipeline stage holds.
      stages: number of pipeline stages; copies run ``stages - 1`` steps ahead.
      warps_m, warps_n: warps of the CTA along each axis of its tile: four or eight in all.
      grid_minor_dim: the axis, "m" or "n", along which consecutive tiles are adjacent (grouped, planar-snake
        rasterization).
      grid_tile_width: width of a group of the rasterization, in tiles.
      split_k: parts of k that different CTAs accumulate and leave in device memory; a reduction kernel adds them,
        always in the same order.
    """

    tile_m: int
    tile_n: int
    tile_k: int
    stages: int
    warps_m: int
    warps_n: int
    grid_minor_dim: str
    grid_tile_width: int
    split_k: int = 1
