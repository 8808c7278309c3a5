"""One way to compute a matrix product by warp-level MMA."""

from __future__ import annotations

import dataclasses


@dataclasses.dataclass(frozen=True)
class MmaSchedule:
    """How a product is laid over CTAs and warps, and over time.

    Attributes:
      tile_m, tile_n: extents of the output tile that one CTA computes.
      tile_k: extent of k that one pipeline stage holds.
      stages: of the pipeline: copies run one less of steps ahead.
      warps_m, warps_n: warps of the CTA along each axis of its tile: four or eight in all.
      grid_minor_dim: the axis along which consecutive tiles are neighbours, "m" or "n" (grouped, planar-snake
        rasterization), in groups of...
      grid_tile_width: ...so many tiles.
      split_k: parts of k that different CTAs accumulate and leave in device memory; a reduction kernel adds them up,
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
