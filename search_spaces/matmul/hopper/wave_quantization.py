"""Selects tiles by wave quantization: tiles that are not powers of two, and tiles whose last wave is split."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import jax.numpy as jnp
import numpy as np

from search_spaces.hopper.limits import WGMMA_ROWS
from search_spaces.matmul.problem import MatmulProblem

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
    """Returns tile_m, tile_n, tail_split_k and swap_ab of the tiles whose last wave is worth splitting.

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
