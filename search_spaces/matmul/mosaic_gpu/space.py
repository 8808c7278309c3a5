"""The schedules of a matrix product on Hopper that are worth considering, and why the others are not."""

from __future__ import annotations

import itertools
from typing import Any

import jax.numpy as jnp
import numpy as np

from search_spaces.matmul.mosaic_gpu.filling import MOST_RESULTS, filling
from search_spaces.matmul.mosaic_gpu.geometry import ATOM_M, cdiv, in_groups, round_up
from search_spaces.matmul.mosaic_gpu.schedule import HopperSchedule
from search_spaces.matmul.problem import MatmulProblem
from search_spaces.space import Space

# A part of k that is shorter is over before its ring is full.
FEWEST_STEPS = 4
# Of fewer stages none can be spared for a step that still runs, where two warpgroups share a tile: 1024 x 1024 x 2048
# takes 8.6 us with a step in flight and 9.1 without on an H200, with eight stages of 64; with four of 128 9.8 and 9.1.
LONG_RING = 6
PARTS_OF_K = (2, 3, 4, 5, 6, 8, 12, 16, 24, 32, 48, 64)


def space(p: MatmulProblem, cores: int) -> Space[HopperSchedule]:
    """The schedules for `p` on a chip of so many cores: some hundreds for small problems, 3,000 for large ones."""
    itemsize, out_itemsize = jnp.dtype(p.dtype).itemsize, p.result().dtype.itemsize

    def tiles(tile_m: Any, tile_n: Any) -> Any:
        return p.batch * cdiv(p.m, tile_m) * cdiv(p.n, tile_n)

    def parts(s: Any) -> Any:
        """Of k, in blocks of their own."""
        return s.split_k * (1 + (s.cluster == "split_k"))

    def shares(s: Any) -> Any:
        """Parts of tiles: what is dealt out to blocks."""
        return tiles(s.tile_m, s.tile_n) * parts(s)

    def turns(s: Any) -> Any:
        """Shares of the busiest block."""
        return cdiv(shares(s), cores)

    def bytes_of_ring(s: Any, slots: Any) -> Any:
        return slots * (s.tile_m + s.tile_n) * s.tile_k * itemsize

    def steps_of_share(s: Any) -> Any:
        return cdiv(cdiv(p.k, s.tile_k), parts(s))

    def steps(s: Any) -> Any:
        return steps_of_share(s) * turns(s)

    def clusters(s: Any, axis: str) -> Any:
        extent, tile = (p.m, s.tile_m) if axis == "m" else (p.n, s.tile_n)
        return cdiv(extent, tile * (1 + (s.cluster == axis)))

    def order_matters(s: Any) -> Any:
        return (turns(s) > 1) & (clusters(s, "m") > 1) & (clusters(s, "n") > 1)

    def rows(s: Any) -> Any:
        """Of one warpgroup, as wgmma sees them."""
        return np.where(
            s.swap_ab,
            s.tile_n // np.where(s.consumers == "cooperative_n", 2, 1),
            s.tile_m // np.where(s.consumers == "cooperative_m", 2, 1),
        )

    tile_m, tile_n = _up_to(p.m, (128, 256, 64)), _up_to(p.n, (256, 128, 64))
    most_parts = min(cores // tiles(256, 256), cdiv(p.k, 128 // itemsize) // FEWEST_STEPS)
    parts_of_k = (1, *(parts for parts in PARTS_OF_K if parts <= most_parts))
    idle_cores, few_rows = tiles(64, 64) < cores, p.m <= ATOM_M

    def busiest(tile_m: Any, tile_n: Any, parts: int) -> Any:
        """Results of the whole k that the busiest block multiplies."""
        whole = tiles(tile_m, tile_n)
        area = cdiv(whole * parts, cores) * tile_m * tile_n / parts
        return area if parts == 1 else np.where(whole * parts <= cores, area, np.inf)

    filled = [
        (m, n, parts, swap)
        for m, n, parts, swap in filling(p, list(itertools.product(tile_m, tile_n)), parts_of_k, busiest)
        if not (swap and few_rows)
    ]
    # All of m at once; where it lies along a's rows, as wide as a swizzled one.
    whole_m = ATOM_M if p.transpose_a else round_up(p.m, _columns_step(p))
    grouped = in_groups(p)
    # A residual's pieces take as much room again as the result's: narrow ones leave it to one more stage.
    least_piece_bytes, piece_widths = (64, "64, 128 or 256") if p.residual else (128, "128 or 256")

    return Space(
        HopperSchedule,
        choices={
            "epi_tile_n": (64, 128, 32, 16) if idle_cores else (64, 128, 32),
            "consumers": (
                ("cooperative_m", "cooperative_n", "ping_pong", "one")
                if idle_cores or few_rows
                else ("cooperative_m", "cooperative_n", "ping_pong")
            ),
            "swap_ab": (False, True) if few_rows or any(swap for *_, swap in filled) else (False,),
            "tile_m": _distinct(*tile_m, *(m for m, *_ in filled), *((whole_m,) if few_rows else ())),
            "tile_n": _distinct(*tile_n, *(n for _, n, *_ in filled), *((32,) if idle_cores else ())),
            "tile_k": _up_to(p.k, (128 // itemsize, 256 // itemsize, *((512 // itemsize,) if few_rows else ()))),
            "cluster": ("none", "m", "n", *(("split_k",) if 2 in parts_of_k else ())) if cores > 1 else ("none",),
            "split_k": parts_of_k,
            "stages": (4, 3, 5, 6, 2, 8, 12),
            "grid_minor_dim": ("n",) if idle_cores else ("n", "m"),
            "grid_tile_width": (1,) if idle_cores else (8, 4, 16, 1),
            "delay_release": (0,) if grouped else (0, 1),
        },
        rules={
            "each warpgroup multiplies a multiple of 64 rows": lambda s: (rows(s) > 0) & (rows(s) % ATOM_M == 0),
            "operands are swapped for all of m at once, or for tiles that fill the cores": lambda s: np.where(
                s.swap_ab, (s.tile_m == whole_m) | (not few_rows), s.tile_m % ATOM_M == 0
            ),
            "of swapped operands two warpgroups share the rows of n, or the columns of many rows of m": lambda s: (
                np.logical_not(s.swap_ab)
                | (s.consumers == "cooperative_n")
                | (s.consumers == ("one" if few_rows else "cooperative_m"))
            ),
            "steps of four swizzled rows serve swapped operands": lambda s: s.swap_ab | (s.tile_k * itemsize <= 256),
            "one warpgroup computes 64 rows, two compute more": lambda s: (
                (s.consumers != "one") | (np.where(s.swap_ab, s.tile_n, s.tile_m) == ATOM_M)
            ),
            "tiles taken in turns are the largest of one warpgroup, or half as large": lambda s: (
                (s.consumers != "ping_pong")
                | np.logical_not(s.swap_ab)
                & (2 * s.tile_m * s.tile_n >= MOST_RESULTS // 2)
                & (2 * s.tile_m * s.tile_n <= MOST_RESULTS)
            ),
            "pieces of the epilogue divide a warpgroup's columns": lambda s: (
                (_columns(s) % np.where(s.swap_ab, 8, s.epi_tile_n) == 0)
                & (np.logical_not(s.swap_ab) | (s.epi_tile_n == ATOM_M))
            ),
            f"pieces of the epilogue are {piece_widths} bytes wide where the columns allow it": lambda s: (
                s.swap_ab
                | (s.epi_tile_n * out_itemsize <= 256)
                & ((s.epi_tile_n * out_itemsize >= least_piece_bytes) | (_columns(s) % (2 * s.epi_tile_n) != 0))
            ),
            "tiles of no power of two fill the cores better than all that load no more": lambda s: (
                np.where(s.swap_ab, few_rows, _is_power_of_two(s.tile_m * s.tile_n))
                | _among(filled, s.tile_m, s.tile_n, parts(s), s.swap_ab)
            ),
            "a split of k gives work to idle cores, in parts of 4 steps or more": lambda s: (
                (parts(s) == 1) | (shares(s) <= cores) & (steps_of_share(s) >= FEWEST_STEPS)
            ),
            "a split of k is added up by a second launch, or by the blocks of a cluster": lambda s: (
                (s.split_k == 1) | (s.cluster != "split_k")
            ),
            "no part of k is empty": lambda s: (parts(s) - 1) * steps_of_share(s) * s.tile_k < p.k,
            "more parts of k would leave fewer cores idle": lambda s: (
                (parts(s) == 1) | (2 * shares(s) > cores) | (steps_of_share(s) < 2 * FEWEST_STEPS)
            ),
            "two warpgroups take tiles in turns where there are some for both": lambda s: (
                (s.consumers != "ping_pong") | (turns(s) > 1)
            ),
            "a step still runs beside the next where no other warpgroup multiplies, or on the only tile": lambda s: (
                np.where(
                    s.delay_release == 1,
                    (s.consumers == "one") | (s.consumers == "ping_pong") | (s.stages >= LONG_RING) & (turns(s) == 1),
                    (s.consumers != "ping_pong") | grouped,
                )
            ),
            "a step that still runs is followed by one, and keeps a slot of three or more": lambda s: (
                (s.delay_release == 0) | (steps_of_share(s) > 1) & (s.stages > 2)
            ),
            "more stages than steps stay empty": lambda s: (s.stages == 2) | (s.stages <= steps(s)),
            "with under 80 KiB in flight, and more to come, the tensor cores wait for memory": lambda s: (
                (bytes_of_ring(s, s.stages - s.delay_release) >= 80 * 1024) | (s.stages + 1 >= steps(s))
            ),
            "more than 256 KiB in flight hide no more latency": lambda s: bytes_of_ring(s, s.stages) <= 256 * 1024,
            "a cluster has a pair of tiles, and halves the loads of the larger operand": lambda s: (
                (s.cluster == "none")
                | (s.cluster == "split_k")
                | ((s.cluster == "m") & (p.m > s.tile_m) & (s.tile_n >= s.tile_m))
                | ((s.cluster == "n") & (p.n > s.tile_n) & (s.tile_m >= s.tile_n))
            ),
            "where the order changes nothing, one is enough": lambda s: (
                order_matters(s) | ((s.grid_minor_dim == "n") & (s.grid_tile_width == 1))
            ),
            "bands one tile wide load more than wider ones": lambda s: (
                (s.grid_tile_width > 1) | np.logical_not(order_matters(s))
            ),
            "bands wider than the grid are as wide as the grid": lambda s: (
                (s.grid_tile_width <= 4)
                | (s.grid_tile_width < 2 * np.where(s.grid_minor_dim == "m", clusters(s, "m"), clusters(s, "n")))
            ),
        },
    )


def _among(tiles: list[tuple[int, int, int, bool]], tile_m: Any, tile_n: Any, split_k: Any, swap: Any) -> Any:
    def code(m: Any, n: Any, parts: Any, swap: Any) -> Any:
        return ((parts * 2 + swap) * 512 + m) * 512 + n

    return np.isin(code(tile_m, tile_n, split_k, swap), [code(*each) for each in tiles])


def _columns_step(p: MatmulProblem) -> int:
    """Columns of wgmma come in eights, those of whole numbers beyond 32 in sixteens (PTX ISA, wgmma.mma_async)."""
    return 16 if p.dtype == "int8" and p.m > 32 else 8


def _columns(s: Any) -> Any:
    """Columns, as wgmma sees them, of what one warpgroup finishes."""
    columns, halved = (
        np.where(s.swap_ab, s.tile_m, s.tile_n),
        np.where(s.swap_ab, s.consumers == "cooperative_m", s.consumers == "cooperative_n"),
    )
    return columns // (1 + halved) // (1 + (s.cluster == "split_k"))


def _up_to(extent: int, tiles: tuple[int, ...]) -> tuple[int, ...]:
    """The tiles that `extent` fills by more than half, and the smallest in any case."""
    return tuple(tile for tile in tiles if tile == min(tiles) or tile < 2 * extent)


def _distinct(*values: int) -> tuple[int, ...]:
    return tuple(dict.fromkeys(values))


def _is_power_of_two(value: Any) -> Any:
    return value & (value - 1) == 0
