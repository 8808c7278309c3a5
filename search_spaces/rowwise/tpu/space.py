"""The schedules of row-wise kernels on TPUs."""

from __future__ import annotations

from search_spaces.rowwise.problem import RowProblem
from search_spaces.rowwise.tpu.schedule import HalvesSchedule, RowSchedule
from search_spaces.space import Space, round_up
from search_spaces.tpu.vmem import LANES, SUBLANES, VMEM_LIMITS_MIB

# Rows of a block: below these, the overhead of a grid step shows; above, the wait for the first block does.
ROWS = (8, 16, 32, 64, 128, 256, 512, 1024)
STEP_ROWS = (8, 16, 32, 64)
CHUNKS = (4096, 16384)
# From this length on, rows may be too long for windows that hold a whole row.
LONG = 2**16


def row_space(p: RowProblem) -> Space[RowSchedule]:
    """Returns the space of kernels that reduce a row."""
    rows = _rows(p)
    chunks = tuple(columns for columns in CHUNKS if p.columns >= LONG)
    return Space(
        RowSchedule,
        choices={
            "residency": ("window", "scratch", "reread") if chunks else ("window",),
            "rows": rows,
            "columns": (p.columns, *chunks),
            "step_rows": STEP_ROWS,
            "lanes": (128, 256, 512),
            "fragments": (2, 4, 8),
            "vmem_limit_mib": VMEM_LIMITS_MIB,
        },
        rules={
            "a window has all columns of a row, and other residencies have chunks": lambda s: (
                (s.residency == "window") == (s.columns == p.columns)
            ),
            "of chunks, more than 64 rows a block gain nothing": lambda s: (s.residency == "window") | (s.rows <= 64),
            "rows of a step divide those of a block": lambda s: s.rows % s.step_rows == 0,
            # TPU7x: "cannot statically prove that index in dimension 1 is a multiple of 16" (E2003).
            "steps through a scratch array of narrow elements are of whole tiles": lambda s: (
                (s.residency != "scratch") | (s.step_rows * p.itemsize >= SUBLANES * 4) | (s.rows == s.step_rows)
            ),
            "a step takes 8 to 16 registers": lambda s: (_registers(s) >= 8) & (_registers(s) <= 16),
            "a fragment is no wider than a row": lambda s: (s.lanes <= p.columns) | (s.lanes == 128),
        },
    )


def halves_space(p: RowProblem) -> Space[HalvesSchedule]:
    """Returns the space of kernels on rows of halves."""
    return Space(
        HalvesSchedule,
        choices={
            "rows": _rows(p),
            "step_rows": STEP_ROWS,
            "lanes": (128, 256, 512, 1024),
            "vmem_limit_mib": VMEM_LIMITS_MIB,
        },
        rules={
            "rows of a step divide those of a block": lambda s: s.rows % s.step_rows == 0,
            "a step takes 4 or 8 registers of each half": lambda s: (
                (_registers_of_half(s) >= 4) & (_registers_of_half(s) <= 8)
            ),
            "a step is no wider than a row": lambda s: (s.lanes <= p.columns) | (s.lanes == 128),
        },
    )


def _rows(p: RowProblem) -> tuple[int, ...]:
    return tuple(rows for rows in ROWS if rows <= round_up(p.rows, SUBLANES))


def _registers(s: RowSchedule) -> int:
    return _registers_of_half(s) * s.fragments


def _registers_of_half(s: RowSchedule | HalvesSchedule) -> int:
    return s.step_rows // SUBLANES * (s.lanes // LANES)
