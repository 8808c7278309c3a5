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
      cluster: ...of which so many are a cluster, which combines their results through DSMEM.
      last_combines: what clusters leave, the last of them to finish combines; else a second kernel does.
    """

    block_kv: int
    stages: int
    split_kv: int
    cluster: int
    last_combines: bool = False
