"""The schedule of a row-wise kernel: where a row resides while it is reduced, and the fields of that residency."""

from __future__ import annotations

import dataclasses


@dataclasses.dataclass(frozen=True)
class RowSchedule:
    """A union of three schedules, tagged by `residency`: fields of the other residencies stay at their defaults.

    The dataclass is flat because columns, stores and samplers need it. Stores omit defaults, so a stored schedule has
    the tag and the fields of its residency. Rules, footprints and kernels use separate types with only those fields:
    `RegisterResident`, `SmemResident` and `PersistentPipeline`.

    Attributes:
      residency: where a row resides until it has been read completely: in "registers"; in "smem", with a CTA or a
        cluster per row; or in the stages of a persistent "pipeline".
      warps: warps that share a row, or a CTA's part of it: one or four (a warpgroup) in registers, else all of the CTA.
      vector: elements of one access of one thread.
      rows: (registers) rows of which each thread loads a part before it computes.
      accesses: (smem, pipeline) accesses of a thread to one chunk.
      stages: (pipeline) chunks that a CTA has in SMEM at once.
      prefetch: (pipeline) chunks of the next row that are reduced before statistics of this one are needed.
      register_chunks: (smem) chunks that threads keep in registers.
      cluster: (smem, pipeline) CTAs that share a row, each with a part of it.
    """

    residency: str
    warps: int
    vector: int
    rows: int = 1
    accesses: int = 0
    stages: int = 0
    prefetch: int = 0
    register_chunks: int = 0
    cluster: int = 1
