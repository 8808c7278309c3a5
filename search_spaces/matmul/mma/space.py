"""The search space of a matmul by warp-level MMA: the schedules worth considering, and rules for the others."""

from __future__ import annotations

from typing import Any

import jax.numpy as jnp
import numpy as np

from search_spaces.hopper.limits import ACCESS_BYTES, WARP
from search_spaces.matmul import rasterization
from search_spaces.matmul.mma.schedule import MmaSchedule
from search_spaces.matmul.mma.tiling import Tiling
from search_spaces.matmul.problem import MatmulProblem
from search_spaces.mma.cp_async import SWIZZLE_RUNS
from search_spaces.mma.fragments import MMA_COLUMNS, MMA_ROWS
from search_spaces.space import Space, cdiv

# A shorter split of k ends before its pipeline is full.
FEWEST_STEPS = 4
SPLITS = (2, 3, 4, 6, 8, 12, 16, 24, 32)
MOST_ACCUMULATORS = 128  # per thread: half of its registers
WARPS = ((2, 2), (2, 4), (4, 2), (1, 4), (4, 1))
LINE_BYTES = SWIZZLE_RUNS * ACCESS_BYTES


def space(p: MatmulProblem, cores: int) -> Space[MmaSchedule]:
    """Returns the schedules for `p` on a chip with `cores` SMs."""
    itemsize = jnp.dtype(p.dtype).itemsize

    def tiles(tile_m: Any, tile_n: Any) -> Any:
        return p.batch * cdiv(p.m, tile_m) * cdiv(p.n, tile_n)

    def work_tiles(s: Any) -> Any:
        return tiles(s.tile_m, s.tile_n) * s.split_k

    def tiling(s: Any) -> Tiling:
        return Tiling(p, s)

    def order_matters(s: Any) -> Any:
        t = tiling(s)
        return (work_tiles(s) > cores) & (t.grid_m > 1) & (t.grid_n > 1)

    def copied_whole(s: Any, tile: tuple[Any, Any]) -> Any:
        """Returns whether all threads copy equally much of each 128 bytes of rows, the unit of a swizzle."""
        rows, row_bytes = tile[0], tile[1] * itemsize
        runs = np.minimum(SWIZZLE_RUNS, row_bytes // ACCESS_BYTES)
        at_once = s.warps_m * s.warps_n * WARP // np.maximum(runs, 1)
        return (rows % at_once == 0) & ((row_bytes % LINE_BYTES == 0) | (LINE_BYTES % row_bytes == 0))

    def starts_a_line(wg: Any, tile: Any) -> Any:
        """Returns whether a warpgroup's part of rows begins at one of these 128-byte units, or is the whole row."""
        return (wg == tile) | (wg * itemsize % LINE_BYTES == 0)

    most_splits = min(2 * cores // tiles(128, 128), cdiv(p.k, 64 // itemsize) // FEWEST_STEPS)
    splits_of_k = (1, *(splits for splits in SPLITS if splits <= most_splits))
    return Space(
        MmaSchedule,
        choices={
            "tile_m": _up_to(p.m, (128, 64, 256, 192, 96, 32, 16), 16),
            "tile_n": _up_to(p.n, (128, 64, 256, 32), 64),
            "tile_k": (64 // itemsize, 128 // itemsize),
            "stages": (3, 4, 2, 5, 6, 8),
            "warps_m": (2, 4, 1),
            "warps_n": (2, 4, 1),
            "split_k": splits_of_k,
            "grid_minor_dim": ("m", "n"),
            "grid_tile_width": (8, 4, 16, 1),
        },
        rules={
            "a CTA has four warps, or eight in rows of two or four": lambda s: np.any(
                [(s.warps_m == m) & (s.warps_n == n) for m, n in WARPS], axis=0
            ),
            "each warp multiplies whole instructions, two of 8 columns at a time": lambda s: (
                (s.tile_m % (MMA_ROWS * s.warps_m) == 0) & (s.tile_n % (2 * MMA_COLUMNS * s.warps_n) == 0)
            ),
            "a thread has half of its registers for accumulators at most": lambda s: (
                s.tile_m * s.tile_n <= MOST_ACCUMULATORS * s.warps_m * s.warps_n * WARP
            ),
            "eight warps compute 32 accumulators a thread, or more": lambda s: (
                (s.warps_m * s.warps_n == 4) | (s.tile_m * s.tile_n >= 32 * 8 * WARP)
            ),
            "threads copy equally many runs of 16 bytes, and rows are whole runs of 128 or fit into these": lambda s: (
                copied_whole(s, tiling(s).a_tile) & copied_whole(s, tiling(s).b_tile)
            ),
            "where rows of a stage lie along m or n, a warpgroup's part of them starts at 128 bytes": lambda s: (
                (starts_a_line(tiling(s).wg_m, s.tile_m) | (not p.transpose_a))
                & (starts_a_line(tiling(s).wg_n, s.tile_n) | p.transpose_b)
            ),
            "warps multiply parts of a tile as wide as high, or up to four times that": lambda s: (
                (s.tile_m * s.warps_n <= 4 * s.tile_n * s.warps_m) & (s.tile_n * s.warps_m <= 4 * s.tile_m * s.warps_n)
            ),
            "the rows that warpgroups finish at a time fit where the stages were": lambda s: (
                tiling(s).warpgroups * tiling(s).staging_bytes <= tiling(s).pipeline_bytes
            ),
            "more stages than steps stay empty": lambda s: (s.stages == 2) | (s.stages <= tiling(s).steps + 1),
            "with under 16 KiB in flight the tensor cores wait for memory": lambda s: (
                ((s.stages - 1) * (s.tile_m + s.tile_n) * s.tile_k * itemsize >= 16 * 1024)
                | (s.stages >= tiling(s).steps)
                | (s.stages >= 6)
            ),
            "split-K gives work to idle SMs, in splits of 4 steps or more": lambda s: (
                (s.split_k == 1) | (work_tiles(s) <= 2 * cores) & (tiling(s).steps >= FEWEST_STEPS)
            ),
            "no split of k is empty": lambda s: (s.split_k - 1) * tiling(s).steps * s.tile_k < p.k,
            **rasterization.rules(order_matters, lambda s: (tiling(s).grid_m, tiling(s).grid_n)),
        },
    )


def _up_to(extent: int, tiles: tuple[int, ...], always: int) -> tuple[int, ...]:
    """Returns the tiles that `extent` fills by more than half, and always those up to `always`."""
    return tuple(tile for tile in tiles if tile <= always or tile < 2 * extent)
