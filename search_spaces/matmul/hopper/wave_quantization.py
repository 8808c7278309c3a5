"""Tiles worth considering by their waves: those of no power of two that quantize best, and whose last wave splits."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import jax.numpy as jnp
import numpy as np

from search_spaces.hopper.limits import WGMMA_ROWS
from search_spaces.matmul.problem import MatmulProblem

# Results of a tile: two consumers' registers hold the accumulators of no more (192 for each thread; ptxas).
MOST_RESULTS = 256 * 192
# By which a tile of no power of two must beat those of powers of two, which suit swizzles and epilogue subtiles best.
GAIN = 1.03
# By which a last wave that is split must beat whole ones: what its parts leave in device memory took 2 to 6 us of the
# 30 to 450 us of 15 products that were drawn (H200).
TAIL_GAIN = 1.03
# Tiles of ordered ping-pong alone: one consumer's, which loses nothing at the end of a tile, so that larger ones are
# faster also where waves are no more even: 128 x 192 on six of twelve products on an H200, 160 x 128 on one.
ORDERED = ((128, 192), (192, 128))
ORDERED_COLUMNS = (160,)


def quantizing(
    p: MatmulProblem,
    squares: Sequence[tuple[int, int]],
    splits_of_k: Sequence[int],
    busiest: Callable[[Any, Any, int], Any],
    factors: int = 1,
) -> list[tuple[int, int, int, bool]]:
    """tile_m, tile_n, split_k and swap_ab of the tiles that quantize best.

    Those are the ones for which no other, with as many splits of k, leaves less to compute and no more to load to the
    busiest CTA.

    The columns of wgmma come in eights, its rows in 64s: columns are what can be chosen finely. But where these are an
    operand's rows in memory, only whole rows of 128 bytes are loaded at full speed, those of 64 bytes at half of it
    (measured on an H200). There the other operand can give the columns, by swap_ab, if its k lies along its rows.

    Args:
      p: the problem.
      squares: tile_m and tile_n of the tiles of powers of two.
      splits_of_k: values of split_k.
      busiest: of arrays of tile_m and tile_n, and split_k: what the busiest CTA computes, in any unit; infinite where k
        is not to be split so.
      factors: products of one `a`, of each of which a CTA has a tile.
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
    # At half the speed; which a cluster may make good, so that it counts in favour of others' loads alone.
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
    """tile_m, tile_n, tail_split_k and swap_ab of the tiles whose last wave is worth splitting.

    Those are the ones of powers of two, and those that then quantize best, for which no whole tiles leave as little to
    compute and to load to the busiest CTA.

    Args:
      p, squares, busiest: as `quantizing` has them.
      whole: what it found, of which those without splits of k are asked.
      parts_of_tail: values of tail_split_k.
      busiest_split: what `busiest` is by tail_split_k; infinite where the last wave is not to be split so.
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
    """The tiles of no power of two that are for ordered ping-pong alone, as `quantizing` has them, whatever the waves.

    As there, columns of wgmma are chosen finely where they are not an operand's rows in memory. Of several `factors`
    the rows of all, 64 each, are one tile's, with `swap_ab` (without it, a consumer of 192 x 64 each spills; ptxas).
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
