"""The tiles of no power of two that are worth considering: those that give all cores of a chip as much to do."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import numpy as np

from search_spaces.matmul.mosaic_gpu.geometry import ATOM_M
from search_spaces.matmul.problem import MatmulProblem

# (tile_m, tile_n, swap)
Tile = tuple[int, int, bool]
# Results of a tile: more are more sums than the registers of two warpgroups hold. Tests say so of 192 for a thread.
MOST_RESULTS = 256 * 192
# By which a tile of no power of two must beat those of powers of two, which copies, swizzles and pieces suit best.
GAIN = 1.03


def filling(p: MatmulProblem, squares: Iterable[tuple[int, int]], busiest: Callable[[Any, Any], Any]) -> list[Tile]:
    """Those tiles for which no other loads as little for each result while its busiest block multiplies less.

    The columns of wgmma come in eights, its rows in 64s. So columns are what can fill; but where they are an operand's
    rows in memory, only whole rows of 128 bytes are copied at full speed, those of 64 bytes at half of it (measured on
    an H200). There the other operand gives the columns, swapped, if its k lies along its rows.

    Args:
      p: the problem.
      squares: tile_m and tile_n of the tiles of powers of two.
      busiest: of arrays of tile_m and tile_n: what the busiest block multiplies, in units of its own.
    """
    plain = [(m, n, False) for m, n in squares if m * n <= MOST_RESULTS]
    tile_m, tile_n = {m for m, _ in squares}, {n for _, n in squares}
    fine = range(80, 256, 16)
    others = [(m, n, False) for n in (fine if p.transpose_b else (96, 160, 192, 224)) for m in (*tile_m, 192)]
    others += [(192, n, False) for n in tile_n]
    if not p.transpose_a and not p.transpose_b:
        others += [(m, n, True) for m in fine if m % ATOM_M for n in (*tile_n, 192)]
    pairs = plain + [(m, n, swap) for m, n, swap in others if m * n <= MOST_RESULTS and m < 2 * p.m and n < 2 * p.n]
    m, n, swap = np.array(pairs).T
    number = np.arange(len(pairs))
    loads, work = 1 / m + 1 / n, busiest(m, n) / np.where(number < len(plain), GAIN, 1)
    alike = (loads == loads[:, None]) & (work == work[:, None]) & (number < number[:, None])
    better = (loads <= loads[:, None]) & (work < work[:, None])
    comparable = (swap == swap[:, None]) | (number < len(plain))
    best = np.flatnonzero(~(comparable & (alike | better)).any(axis=1) & (number >= len(plain)))
    return [pairs[index] for index in best]
