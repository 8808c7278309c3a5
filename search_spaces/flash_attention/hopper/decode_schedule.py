"""The schedule of flash decoding on Hopper."""

from __future__ import annotations

import dataclasses


@dataclasses.dataclass(frozen=True)
class FlashDecodingSchedule:
    """How the keys of a sequence are divided among CTAs, and loaded.

    Attributes:
      block_kv: keys and values per pipeline stage.
      stages: stages of the pipeline of keys, and of the pipeline of values. Loads run up to this many steps ahead.
      split_kv: number of CTAs that share the keys of a sequence.
      cluster: CTAs per cluster. A cluster combines the results of its CTAs through DSMEM. A second kernel combines the
        results of several clusters.
    """

    block_kv: int
    stages: int
    split_kv: int
    cluster: int
