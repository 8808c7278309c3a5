"""The schedule of a row-wise kernel on a TPU: the blocks that a grid brings, and the steps in which one is computed."""

from __future__ import annotations

import dataclasses


@dataclasses.dataclass(frozen=True)
class RowSchedule:
    """Of one reduction a row.

    Attributes:
      residency: where a row is until all of it has been seen: in the "window" of a block that has all of it; in a
        "scratch" array, chunk by chunk, while the results of the rows before are written; or nowhere ("reread").
      rows: of a block.
      columns: of a block: all, or those of a chunk.
      step_rows: rows of a block that are computed at the same time.
      lanes: columns of one fragment, which has an array of statistics of its own size.
      fragments: that a step of the loop over a row takes.
      vmem_limit_mib: what the launch asks for (`search_spaces.tpu.vmem`).
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
    """Of rows of two halves, of which a block has all columns.

    Attributes:
      rows: of a block.
      step_rows: rows of a block that are computed at the same time.
      lanes: columns of each half that a step of the loop over a row takes.
      vmem_limit_mib: what the launch asks for (`search_spaces.tpu.vmem`).
    """

    rows: int
    step_rows: int
    lanes: int
    vmem_limit_mib: int = 0
