"""Widths of the threads' accesses to rows, and the fraction of the touched sectors that is needed."""

from __future__ import annotations

from typing import Any

import numpy as np

from search_spaces.hopper.limits import ACCESS_BYTES, SECTOR_BYTES, WARP, WARPGROUP
from search_spaces.rowwise.problem import RowProblem


def vectors(p: RowProblem) -> tuple[int, ...]:
    """Returns elements per access, widest first: at most 16 bytes, and such that rows start at multiples of them.

    These are the widest for which a warp's 32 accesses fit a row, and half of it; for chunks, the widest for which a
    row is whole lines; and, for rows so short that a warpgroup's accesses may not fit, all narrower ones.
    """
    widest = int(np.gcd(p.columns, ACCESS_BYTES // p.itemsize))
    fitting = [vector for vector in (8, 4, 2, 1) if vector <= widest and WARP * vector <= p.columns]
    in_lines = int(np.gcd(p.columns, WARP * widest)) // WARP
    short = p.columns < WARPGROUP * widest
    return tuple(vector for vector in fitting if short or vector in (*fitting[:2], in_lines))


def coalescing(row_bytes: Any, access_bytes: Any) -> Any:
    """Returns the needed fraction of the sectors that warps' accesses touch, averaged over the starts of rows.

    A warp's 32 accesses are one run of bytes, of whole sectors in length. A run that starts within a sector touches one
    more. Rows start equally often at each multiple of the largest power of two that divides both.
    """
    run = WARP * access_bytes
    return run / (run + SECTOR_BYTES - np.gcd(row_bytes, SECTOR_BYTES))
