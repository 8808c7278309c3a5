"""The search space of a matmul on Hopper: the schedules worth considering, and the rules that exclude the others."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from typing import Any

import jax.numpy as jnp
import numpy as np

from search_spaces.hopper import ACCUMULATOR_BYTES, WGMMA_ROWS
from search_spaces.matmul.hopper.schedule import (
    PING_PONG,
    HopperSchedule,
    as_wgmma,
    clusters,
    k_splits,
    k_steps,
    untiled,
    wg_tile,
)
from search_spaces.matmul.problem import MatmulProblem
from search_spaces.matmul.tiles import rules
from search_spaces.space import Space, cdiv, round_up

# ------------------------------------------------------------------------------
# Selects tiles by wave quantization: tiles that are not powers of two, and tiles with a split last wave.

# Results of a tile: two consumers' registers hold at most this many accumulators (192 for each thread; ptxas).
MOST_RESULTS = 256 * 192
# Factor by which a tile that is not a power of two must beat those that are, which suit swizzles and subtiles best.
GAIN = 1.03
# Factor by which a split last wave must beat whole tiles: exchanging the partial sums took 2 to 6 us of the 30 to 450
# us of 15 randomly drawn matmuls (H200).
TAIL_GAIN = 1.03
# Tiles for ordered ping-pong only. A single consumer loses nothing at the end of a tile, so larger tiles are faster
# even if waves are not more even: 128 x 192 on six of twelve matmuls on an H200, 160 x 128 on one.
ORDERED = ((128, 192), (192, 128))
ORDERED_COLUMNS = (160,)


def quantizing(
    p: MatmulProblem,
    squares: Sequence[tuple[int, int]],
    splits_of_k: Sequence[int],
    busiest: Callable[[Any, Any, int], Any],
    factors: int = 1,
) -> list[tuple[int, int, int, bool]]:
    """Returns tile_m, tile_n, split_k and swap_ab of the tiles that quantize best.

    A tile is kept if no other tile with the same number of splits of k gives the busiest CTA less to compute and no
    more to load.

    wgmma's columns come in multiples of 8 and its rows in multiples of 64, so columns can be chosen finely. But if the
    columns are an operand's rows in memory, only whole rows of 128 bytes are loaded at full speed, and rows of 64 bytes
    at half of it (measured on an H200). In that case the other operand can provide the columns, by swap_ab, if its k
    lies along its rows.

    Args:
      p: the problem.
      squares: tile_m and tile_n of the tiles that are powers of two.
      splits_of_k: values of split_k.
      busiest: from arrays of tile_m and tile_n, and split_k: the work of the busiest CTA, in any unit; infinite if k
        must not be split this way.
      factors: number of products of one `a`; a CTA has a tile of each.
    """
    tile_m, tile_n = {m for m, _ in squares}, {n for _, n in squares}
    most = MOST_RESULTS // factors
    fine = range(80, 256, 16)
    plain = [(m, n, False) for m, n in squares if m * n <= most]
    others = [(m, n, False) for n in (fine if p.transpose_b else (96, 160, 192, 224)) for m in (*tile_m, 192)]
    others += [(192, n, False) for n in tile_n]
    if not p.transpose_a and not p.transpose_b:
        others += [(m, n, True) for m in fine if m % WGMMA_ROWS for n in (*tile_n, 192)]
    others = [(m, n, swap_ab) for m, n, swap_ab in others if m * n <= most and m < 2 * p.m and n < 2 * p.n]

    m, n, swap_ab = np.array(plain + others).T
    number = np.arange(len(m))
    square = number < len(plain)
    handicap = np.where(square, GAIN, 1)
    comparable = (swap_ab == swap_ab[:, None]) | square
    # Narrow rows load at half the speed. A cluster may compensate for that, so it only counts in favour of other tiles.
    narrow = np.logical_not(swap_ab | p.transpose_b) & (n * jnp.dtype(p.dtype).itemsize % 128 != 0)
    best: list[tuple[int, int, int, bool]] = []
    for splits in splits_of_k:
        work = busiest(m, n, splits)
        loads = work * (factors / m + 1 / n)
        better = (work / handicap < work[:, None]) & (loads * (1 + narrow) / handicap <= loads[:, None])
        alike = (work == work[:, None]) & (loads == loads[:, None]) & (number < number[:, None])
        kept = ~square & np.isfinite(work) & ~(comparable & (better | alike)).any(axis=1)
        best += [(int(m[i]), int(n[i]), splits, bool(swap_ab[i])) for i in np.flatnonzero(kept)]
    return best


def split_tails(
    p: MatmulProblem,
    squares: Sequence[tuple[int, int]],
    whole: Sequence[tuple[int, int, int, bool]],
    parts_of_tail: Sequence[int],
    busiest: Callable[[Any, Any, int], Any],
    busiest_split: Callable[[Any, Any, Any], Any],
) -> list[tuple[int, int, int, bool]]:
    """Returns tile_m, tile_n, tail_split_k and swap_ab of the tiles with a last wave that is worth splitting.

    The candidates are the tiles that are powers of two, and those that quantize best with a split last wave. A
    candidate is kept if no whole tile leaves the busiest CTA at most as much to compute and to load.

    Args:
      p, squares, busiest: see `quantizing`.
      whole: the result of `quantizing`, of which only tiles without splits of k are compared.
      parts_of_tail: values of tail_split_k.
      busiest_split: like `busiest`, by tail_split_k; infinite if the last wave must not be split this way.
    """
    found = quantizing(p, squares, parts_of_tail, busiest_split)
    found += [(m, n, parts, False) for m, n in squares for parts in parts_of_tail if m * n <= MOST_RESULTS]
    if not found:
        return []

    def demands(tiles: Sequence[tuple[int, int]], of: Callable[[Any, Any], Any], times: float = 1.0) -> tuple[Any, Any]:
        m, n = np.array(tiles).T
        work = times * of(m, n)
        return work, work * (1 / m + 1 / n)

    parts = np.array([parts for *_, parts, _ in found])
    work, loads = demands([(m, n) for m, n, *_ in found], lambda m, n: busiest_split(m, n, parts), TAIL_GAIN)
    rivals = [*squares, *((m, n) for m, n, splits, _ in whole if splits == 1)]
    least, loaded = demands(rivals, lambda m, n: busiest(m, n, 1))
    beaten = ((least <= work[:, None]) & (loaded <= loads[:, None])).any(axis=1)
    return [tile for tile, kept in zip(found, np.isfinite(work) & ~beaten, strict=True) if kept]


def ordered(p: MatmulProblem, factors: int = 1) -> list[tuple[int, int, int, bool]]:
    """Returns the tiles that only ordered ping-pong uses, in the format of `quantizing`, regardless of waves.

    As in `quantizing`, wgmma's columns are chosen finely if they are not an operand's rows in memory. With several
    `factors`, the rows of all factors, 64 each, form one tile with `swap_ab` (without it, a consumer of 192 x 64 each
    spills; ptxas).
    """
    tiles = [(m, n, False) for m, n in ORDERED]
    if p.transpose_b:
        tiles += [(128, n, False) for n in ORDERED_COLUMNS]
    elif not p.transpose_a:
        tiles += [(m, 128, True) for m in (*ORDERED_COLUMNS, 192)] + [(128, 192, True)]
    parts = [
        (m, n // factors, swap_ab)
        for m, n, swap_ab in tiles
        if factors == 1 or (swap_ab and n % (WGMMA_ROWS * factors) == 0)
    ]
    return [(m, n, 1, swap_ab) for m, n, swap_ab in parts if m < 2 * p.m and n < 2 * p.n]


# A shorter split of k ends before its pipeline is full.
FEWEST_STEPS = 4
# Splits of the last wave. Exchanging the partial sums takes as long as some steps, and after many waves the gain is
# small.
TAIL_SPLITS, FEWEST_STEPS_OF_TAIL, MOST_WAVES_BEFORE_TAIL = (2, 3, 4), 8, 6
# With fewer stages, and cooperative consumers, no stage can be spared for a pending wgmma: on an H200, 1024 x 1024 x
# 2048 takes 8.6 us with delay_release and 9.1 us without for eight stages of 64, but 9.8 and 9.1 us for four of 128.
LONG_PIPELINE = 6
# Columns of the narrowest epilogue subtile, except for tiles that leave SMs idle. Results of a split start at multiples
# of this.
LEAST_STEP = 32
SWAP_AB_RULE = "swap_ab is for all of m at once, or for tiles that quantize into even waves"
SPLITS = (2, 3, 4, 5, 6, 8, 12, 16, 24, 32, 48, 64)


def space(p: MatmulProblem, cores: int, factors: int = 1) -> Space[HopperSchedule]:
    """Returns the schedules for `p` on a chip with `cores` SMs: hundreds for small problems, thousands for large ones.

    `factors` is the number of products of one `a` that are multiplied; each has its own tile of `b` and accumulators.
    """
    itemsize, out_itemsize = jnp.dtype(p.dtype).itemsize, p.whole.dtype.itemsize

    def tiles(tile_m: Any, tile_n: Any) -> Any:
        return p.batch * cdiv(p.m, tile_m) * cdiv(p.n, tile_n)

    def work_tiles(s: Any) -> Any:
        """Returns the number of work tiles: tiles, times the parts of k."""
        return tiles(s.tile_m, s.tile_n) * k_splits(s)

    def waves(s: Any) -> Any:
        """Returns the number of work tiles of the busiest CTA."""
        return cdiv(work_tiles(s), cores)

    def pipeline_bytes(s: Any, stages: Any) -> Any:
        return stages * (s.tile_m + factors * s.tile_n) * s.tile_k * itemsize

    def steps(s: Any) -> Any:
        return k_steps(p, s) * waves(s)

    def order_matters(s: Any) -> Any:
        return (waves(s) > 1) & (clusters(p, s, "m") > 1) & (clusters(p, s, "n") > 1)

    def rows(s: Any) -> Any:
        """Returns the rows of one consumer, as wgmma sees them."""
        return as_wgmma(s, *wg_tile(s))[0]

    tile_m, tile_n = _up_to(p.m, (128, 256, 64)), _up_to(p.n, (256, 128, 64))
    most_splits = min(cores // tiles(256, 256), cdiv(p.k, 128 // itemsize) // FEWEST_STEPS)
    splits_of_k = (1, *(splits for splits in SPLITS if splits <= most_splits))
    idle_cores, few_rows = tiles(64, 64) < cores, p.m <= WGMMA_ROWS

    def busiest(tile_m: Any, tile_n: Any, splits: int) -> Any:
        """Returns the work of the busiest CTA, as the number of results with the whole k."""
        whole = tiles(tile_m, tile_n)
        area = cdiv(whole * splits, cores) * tile_m * tile_n / splits
        return area if splits == 1 else np.where(whole * splits <= cores, area, np.inf)

    squares = list(itertools.product(tile_m, tile_n))
    even = [
        (m, n, splits, swap_ab)
        for m, n, splits, swap_ab in quantizing(p, squares, splits_of_k, busiest, factors)
        if not (swap_ab and few_rows)
    ]

    def busiest_split(tile_m: Any, tile_n: Any, splits: Any) -> Any:
        """Returns the same if only the last wave is split, by tail_split_k."""
        whole = tiles(tile_m, tile_n)
        work = (whole // cores + 1 / splits) * tile_m * tile_n
        return np.where(_parts_fit(cores, whole, splits), work, np.inf)

    def wave(s: Any) -> tuple[Any, Any]:
        """Returns how many clusters (or single CTAs) run at once, and how many there are in total."""
        return cores // (1 + ((s.cluster == "m") | (s.cluster == "n"))), p.batch * clusters(p, s, "m") * clusters(
            p, s, "n"
        )

    several_waves = p.batch * cdiv(p.m, 128) * cdiv(p.n, 128) > cores
    in_order = ordered(p, factors) if several_waves else []
    # Several factors would each need partial sums.
    tail_splits = TAIL_SPLITS if several_waves and factors == 1 and not few_rows else ()
    split_tail = split_tails(p, squares, even, tail_splits, busiest, busiest_split)
    unusual = (*even, *in_order, *split_tail)
    # All of m at once; where m lies along a's rows, as wide as a swizzled row.
    whole_m = WGMMA_ROWS if p.transpose_a else round_up(p.m, _columns_step(p))
    # A residual's subtiles double the space of the subtiles: narrow ones leave room for one more stage.
    least_subtile_bytes, subtile_widths = (64, "64, 128 or 256") if p.residual else (128, "128 or 256")

    return Space(
        HopperSchedule,
        choices={
            "epi_tile_n": (64, 128, 32, 16) if idle_cores or factors > 1 else (64, 128, 32),
            "consumers": ("cooperative_m", "cooperative_n", *PING_PONG, *(("one",) if idle_cores or few_rows else ())),
            "swap_ab": (False, True) if few_rows or any(swap_ab for *_, swap_ab in unusual) else (False,),
            "tile_m": _distinct(*tile_m, *(m for m, *_ in unusual), *((whole_m,) if few_rows else ())),
            "tile_n": _distinct(*tile_n, *(n for _, n, *_ in unusual), *((32,) if idle_cores else ())),
            "tile_k": _up_to(p.k, (128 // itemsize, 256 // itemsize, *((512 // itemsize,) if few_rows else ()))),
            "cluster": ("none", "m", "n", *(("split_k",) if 2 in splits_of_k else ())) if cores > 1 else ("none",),
            "split_k": splits_of_k,
            "stages": (4, 3, 5, 6, 2, 8, 12),
            "grid_minor_dim": ("n",) if idle_cores else ("n", "m"),
            "grid_tile_width": (1,) if idle_cores else (8, 4, 16, 1),
            "delay_release": (0, 1),
            "tail_split_k": (1, *tail_splits),
        },
        rules={
            "each consumer multiplies a multiple of 64 rows": lambda s: (rows(s) > 0) & (rows(s) % WGMMA_ROWS == 0),
            SWAP_AB_RULE: lambda s: np.where(
                s.swap_ab, (s.tile_m == whole_m) | (not few_rows), s.tile_m % WGMMA_ROWS == 0
            ),
            "with swap_ab consumers cooperate along n, or with many rows along m or in ordered ping-pong": lambda s: (
                np.logical_not(s.swap_ab)
                | (s.consumers == "cooperative_n")
                | np.isin(s.consumers, ("one",) if few_rows else ("cooperative_m", "ordered_ping_pong"))
            ),
            "steps of four swizzled rows serve swap_ab": lambda s: s.swap_ab | (s.tile_k * itemsize <= 256),
            "one consumer computes 64 rows, two compute more": lambda s: (
                (s.consumers != "one") | (np.where(s.swap_ab, s.tile_n, s.tile_m) == WGMMA_ROWS)
            ),
            "ping-pong tiles are the largest of one consumer, or half as large": lambda s: (
                np.logical_not(np.isin(s.consumers, PING_PONG))
                | (np.logical_not(s.swap_ab) | (s.consumers == "ordered_ping_pong"))
                & (2 * factors * s.tile_m * s.tile_n >= MOST_RESULTS // 2)
                & (2 * factors * s.tile_m * s.tile_n <= MOST_RESULTS)
            ),
            "epilogue subtiles divide a consumer's columns": lambda s: (
                (_columns(s) % np.where(s.swap_ab, 8, s.epi_tile_n) == 0)
                & (np.logical_not(s.swap_ab) | (s.epi_tile_n == WGMMA_ROWS))
            ),
            f"epilogue subtiles are {subtile_widths} bytes wide where the columns allow it": lambda s: (
                s.swap_ab
                | (s.epi_tile_n * out_itemsize <= 256)
                & (
                    (s.epi_tile_n * out_itemsize >= least_subtile_bytes)
                    | (np.gcd(_columns(s), p.results_start) % (2 * s.epi_tile_n) != 0)
                )
            ),
            **_of_several_results(p),
            "tiles of no power of two quantize into more even waves than all that load no more": lambda s: (
                np.where(s.swap_ab, few_rows, _is_power_of_two(s.tile_m * s.tile_n))
                | _among(even, s.tile_m, s.tile_n, k_splits(s), s.swap_ab)
                | (s.consumers == "ordered_ping_pong") & _among(in_order, s.tile_m, s.tile_n, k_splits(s), s.swap_ab)
                | (s.tail_split_k > 1)
            ),
            "split-K gives work to idle SMs, in splits of 4 steps or more": lambda s: (
                (k_splits(s) == 1) | (work_tiles(s) <= cores) & (k_steps(p, s) >= FEWEST_STEPS)
            ),
            "split-K is reduced by a second kernel, or within a cluster": lambda s: (
                (s.split_k == 1) | (s.cluster != "split_k")
            ),
            "what a CTA of a cluster in split-K gets from the other one fits the operands' stages": lambda s: (
                (s.cluster != "split_k")
                | (ACCUMULATOR_BYTES // 2 * np.minimum(s.tile_m, s.tile_n) <= s.stages * s.tile_k * itemsize)
            ),
            f"a last wave alone is split in parts of {FEWEST_STEPS_OF_TAIL} steps or more": lambda s: (
                (s.tail_split_k == 1) | (k_splits(s) == 1) & (k_steps(p, s) >= FEWEST_STEPS_OF_TAIL * s.tail_split_k)
            ),
            "a last wave is split where whole tiles would leave the busiest CTA more": lambda s: (
                (s.tail_split_k == 1) | _among(split_tail, s.tile_m, s.tile_n, s.tail_split_k, s.swap_ab)
            ),
            f"a last wave after 1 to {MOST_WAVES_BEFORE_TAIL} is split where all parts have SMs": lambda s: (
                (s.tail_split_k == 1) | _parts_fit(*wave(s), s.tail_split_k)
            ),
            "more parts of the last wave would leave fewer SMs idle": lambda s: (
                np.isin(s.tail_split_k, (1, max(TAIL_SPLITS)))
                | np.logical_not(_parts_fit(*wave(s), s.tail_split_k + 1))
                | (k_steps(p, s) < FEWEST_STEPS_OF_TAIL * (s.tail_split_k + 1))
            ),
            "no split of k is empty": lambda s: (k_splits(s) - 1) * k_steps(p, s) * s.tile_k < p.k,
            "more splits of k would leave fewer SMs idle": lambda s: (
                (k_splits(s) == 1) | (2 * work_tiles(s) > cores) | (k_steps(p, s) < 2 * FEWEST_STEPS)
            ),
            "ping-pong is for CTAs that compute several tiles": lambda s: (
                np.logical_not(np.isin(s.consumers, PING_PONG)) | (waves(s) > 1)
            ),
            # In the untiled layout, either consumer can keep the tensor cores busy while the other one waits.
            "delay_release is for one consumer a tile, or for the only wave": lambda s: np.where(
                s.delay_release == 1,
                np.isin(s.consumers, ("one", *PING_PONG)) | (s.stages >= LONG_PIPELINE) & (waves(s) == 1),
                np.logical_not(np.isin(s.consumers, PING_PONG)) | untiled(p) & (s.consumers == "ping_pong"),
            ),
            "delay_release takes two steps or more, and keeps one stage of three or more": lambda s: (
                (s.delay_release == 0) | (k_steps(p, s) > 1) & (s.stages > 2)
            ),
            "more stages than steps stay empty": lambda s: (s.stages == 2) | (s.stages <= steps(s)),
            "with under 80 KiB in flight, and more to come, the tensor cores wait for memory": lambda s: (
                (pipeline_bytes(s, s.stages - s.delay_release) >= 80 * 1024) | (s.stages + 1 >= steps(s))
            ),
            "more than 256 KiB in flight hide no more latency": lambda s: pipeline_bytes(s, s.stages) <= 256 * 1024,
            "a cluster has two tiles, and halves the loads of the larger operand": lambda s: (
                (s.cluster == "none")
                | (s.cluster == "split_k")
                | ((s.cluster == "m") & (p.m > s.tile_m) & (factors * s.tile_n >= s.tile_m))
                | ((s.cluster == "n") & (p.n > s.tile_n) & (s.tile_m >= factors * s.tile_n))
            ),
            **rules(order_matters, lambda s: (clusters(p, s, "m"), clusters(p, s, "n"))),
        },
    )


def _parts_fit(at_once: Any, tiles: Any, parts: Any) -> Any:
    """Returns whether all parts of the tiles of a last wave run at once, after whole waves."""
    waves, tail = np.divmod(tiles, at_once)
    return (waves > 0) & (waves <= MOST_WAVES_BEFORE_TAIL) & (tail > 0) & (tail * parts <= at_once)


def _of_several_results(p: MatmulProblem) -> dict[str, Any]:
    """Returns the rules for several results: a subtile's first column selects its result (kernel.py)."""
    if not p.split_sizes:
        return {}
    return {
        f"epilogue subtiles end where results do, at multiples of {p.results_start} columns": lambda s: (
            (s.split_k > 1) | (p.results_start % np.where(s.swap_ab, WGMMA_ROWS, s.epi_tile_n) == 0)
        )
    }


def _among(tiles: list[tuple[int, int, int, bool]], tile_m: Any, tile_n: Any, splits: Any, swap_ab: Any) -> Any:
    def code(m: Any, n: Any, splits: Any, swap_ab: Any) -> Any:
        return ((splits * 2 + swap_ab) * 512 + m) * 512 + n

    return np.isin(code(tile_m, tile_n, splits, swap_ab), [code(*each) for each in tiles])


def _columns_step(p: MatmulProblem) -> int:
    """Returns the step of wgmma's columns: 8, or 16 for integers beyond 32 columns (PTX ISA, wgmma.mma_async)."""
    return 16 if p.dtype == "int8" and p.m > 32 else 8


def _columns(s: Any) -> Any:
    """Returns the columns, as wgmma sees them, that one consumer finishes."""
    return as_wgmma(s, *wg_tile(s))[1] // (1 + (s.cluster == "split_k"))


def _up_to(extent: int, tiles: tuple[int, ...]) -> tuple[int, ...]:
    """Returns the tiles that `extent` fills by more than half, and always the smallest tile."""
    return tuple(tile for tile in tiles if tile == min(tiles) or tile < 2 * extent)


def _distinct(*values: int) -> tuple[int, ...]:
    return tuple(dict.fromkeys(values))


def _is_power_of_two(value: Any) -> Any:
    return value & (value - 1) == 0
