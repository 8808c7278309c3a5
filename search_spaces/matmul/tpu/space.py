"""The search space of a matmul on a TPU: the schedules worth considering, and the rules that exclude the others."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from search_spaces.matmul.problem import MatmulProblem
from search_spaces.matmul.tpu.schedule import TpuSchedule
from search_spaces.space import Space, cdiv, round_up
from search_spaces.tpu.vmem import LANES, VMEM_LIMITS_MIB

# Results of one tile, over all factors: the compiler unrolls its code, and takes more than a minute for larger tiles.
MOST_RESULTS = 1024 * 1024
# Multiply-adds of one step, for the same reason.
MOST_PRODUCTS = 2**31
# Divisors of both limits for float32, which takes up to six passes of as much code, and spills the parts of operands
# (2048 x 457 x 512: 7 MiB on a v5e). Tiles of 256 x 128 already keep the MXU as busy as larger ones.
FLOAT32_RESULTS, FLOAT32_PRODUCTS = 2, 8
# A grid is a loop on one core, and a step costs as much as some hundred thousand multiply-adds: smaller tiles never pay
# off for larger problems (v5e, 2048^3: 256^3 takes 3.1 times as long as 512^3).
LEAST_TILE = 256
TILES = (1024, 512, 256, 2048)


def space(p: MatmulProblem, factors: int = 1) -> Space[TpuSchedule]:
    """Returns the schedules, some hundreds at most.

    `factors` is the number of products of one `a` that are multiplied; each has its own tile of `b` and accumulators.
    """

    most_results, most_products = MOST_RESULTS, MOST_PRODUCTS
    if p.dtype == "float32":
        most_results, most_products = MOST_RESULTS // FLOAT32_RESULTS, MOST_PRODUCTS // FLOAT32_PRODUCTS

    def steps(s: Any) -> Any:
        return cdiv(p.k, s.tile_k)

    return Space(
        TpuSchedule,
        choices={
            "tile_m": tile_extents(p.m, TILES),
            "tile_n": tile_extents(p.n, (*TILES, 4096) if p.m <= LEAST_TILE else TILES),
            "tile_k": tile_extents(p.k, (*TILES, 4096)),
            "grid_minor_dim": ("n", "m"),
            "vmem_limit_mib": VMEM_LIMITS_MIB,
        },
        rules={
            f"tiles of over {most_results} results take minutes to compile": lambda s: (
                factors * s.tile_m * s.tile_n <= most_results
            ),
            f"so do steps of over {most_products} products": lambda s: (
                factors * s.tile_m * s.tile_n * s.tile_k <= most_products
            ),
            "where several steps walk k, or all tiles lie in a row, one order is enough": lambda s: (
                (s.grid_minor_dim == "n") | (steps(s) == 1) & (s.tile_m < p.m) & (s.tile_n < p.n)
            ),
        },
    )


def tile_extents(extent: int, sizes: Iterable[int]) -> tuple[int, ...]:
    """Returns tile sizes near `sizes` that divide the extent evenly, in whole lanes.

    The extent itself if it is small.
    """
    if extent <= LEAST_TILE:
        return (extent,)
    even = (extent if size >= extent else round_up(cdiv(extent, cdiv(extent, size)), LANES) for size in sizes)
    return tuple(dict.fromkeys(even))
