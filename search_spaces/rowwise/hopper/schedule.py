"""The schedule of a row-wise kernel: where a row resides while it is reduced, and the fields of that residency."""

from __future__ import annotations

import dataclasses


@dataclasses.dataclass(frozen=True)
class RowSchedule:
    """A union of three schedules, tagged by `residency`: fields of the others stay at their defaults.

    It is flat, as columns, stores and samplers want it; stores leave defaults out, so that what is written is the tag
    and the fields of its residency. Rules, footprints and kernels see the three as types of their own, with those
    fields alone: `RegisterResident`, `SmemResident` and `PersistentPipeline`.

    Attributes:
      residency: where a row resides until all of it has been seen: in "registers"; in "smem", with a CTA or a cluster
        to itself; or in the stages of a persistent "pipeline".
      warps: that share a row, or a CTA's part of it: in registers one or a warpgroup's four, else all of the CTA.
      vector: elements of one access of one thread.
      rows: of registers: rows that each thread loads a part of before it computes.
      accesses: of smem and pipeline: accesses of a thread to one chunk.
      stages: of a pipeline: chunks that a CTA has in SMEM at once.
      prefetch: of a pipeline: chunks of the next row that are reduced before statistics of this one are needed.
      register_chunks: of smem: chunks that threads keep in registers.
      cluster: of smem and pipeline: CTAs that share a row, each of which has a part of it.
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
