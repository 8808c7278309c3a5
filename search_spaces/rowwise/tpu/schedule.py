"""The schedule of a row-wise kernel on a TPU: the blocks of the grid, and the steps in which a block is computed."""

from __future__ import annotations

import dataclasses


@dataclasses.dataclass(frozen=True)
class RowSchedule:
    """The schedule of a reduction of each row.

    Attributes:
      residency: where a row resides until it has been read completely: in the "window" of a block that has all of it;
        in a "scratch" array, chunk by chunk, while the previous rows' results are written; or nowhere ("reread").
      rows: rows of a block.
      columns: columns of a block: all, or those of a chunk.
      step_rows: rows of a block that are computed at the same time.
      lanes: columns of one fragment, which has an array of statistics of the same size.
      fragments: fragments per step of the loop over a row.
      vmem_limit_mib: VMEM limit that the launch requests (`search_spaces.tpu.vmem`).
    """

    residency: str
    rows: int
    columns: int
    step_rows: int
    lanes: int
    fragments: int
    vmem_limit_mib: int = 0


@dataclasses.dataclass(frozen=True)
class HalvesSchedule:
    """The schedule for rows of two halves, whose blocks have all columns.

    Attributes:
      rows: rows of a block.
      step_rows: rows of a block that are computed at the same time.
      lanes: columns of each half per step of the loop over a row.
      vmem_limit_mib: VMEM limit that the launch requests (`search_spaces.tpu.vmem`).
    """

    rows: int
    step_rows: int
    lanes: int
    vmem_limit_mib: int = 0
