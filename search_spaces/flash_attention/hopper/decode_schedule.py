"""One way to attend few queries to many keys on Hopper: the fields of a schedule."""

from __future__ import annotations

import dataclasses


@dataclasses.dataclass(frozen=True)
class FlashDecodingSchedule:
    """How the keys of a sequence are divided among CTAs, and loaded.

    Attributes:
      block_kv: keys, and values, that a pipeline stage holds.
      stages: of keys, and of values: loads run so many steps ahead.
      split_kv: CTAs among which the keys of a sequence are divided...
      cluster: ...of which so many are a cluster, which combines their results through DSMEM; a second kernel
        combines those of several clusters.
    """

    block_kv: int
    stages: int
    split_kv: int
    cluster: int
