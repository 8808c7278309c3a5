"""How wide the accesses of threads to rows are, and what of the sectors that they touch is wanted."""

from __future__ import annotations

from typing import Any

import numpy as np

from search_spaces.hopper.limits import ACCESS_BYTES, SECTOR_BYTES, WARP, WARPGROUP
from search_spaces.rowwise.problem import RowProblem


def vectors(p: RowProblem) -> tuple[int, ...]:
    """Elements of one access, widest first: at most 16 bytes, such that rows start at multiples of it.

    The widest that a warp's 32 fit a row with, and half of it; the widest of which a row is whole lines, for chunks; of
    rows so short that a warpgroup's accesses may not fit, all narrower ones.
    """
    widest = int(np.gcd(p.columns, ACCESS_BYTES // p.itemsize))
    fitting = [vector for vector in (8, 4, 2, 1) if vector <= widest and WARP * vector <= p.columns]
    in_lines = int(np.gcd(p.columns, WARP * widest)) // WARP
    short = p.columns < WARPGROUP * widest
    return tuple(vector for vector in fitting if short or vector in (*fitting[:2], in_lines))


def coalescing(row_bytes: Any, access_bytes: Any) -> Any:
    """Share of the sectors that warps' accesses touch which they want, on average over where rows may start.

    A warp's 32 accesses are one run of bytes, whole sectors long. Where it starts within a sector it reaches into one
    more: rows start at each multiple of the largest power of two that divides both, equally often.
    """
    run = WARP * access_bytes
    return run / (run + SECTOR_BYTES - np.gcd(row_bytes, SECTOR_BYTES))
