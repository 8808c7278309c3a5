"""One way to compute flash attention forward on a TPU: the fields of a schedule."""

from __future__ import annotations

import dataclasses


@dataclasses.dataclass(frozen=True)
class TpuFlashAttentionSchedule:
    """How attention is cut into steps of the grid, and a step into products.

    Attributes:
      heads: whose queries are the rows of a product. "one": of one head. "group": of all heads that share a head of
        keys. "all": of all heads, on the keys of all, of which each row sees those of its own head.
      block_q: rows of queries that a step of the grid holds...
      block_kv: ...and rows of keys and of values, the next of which load meanwhile.
      block_kv_compute: rows of keys and of values that a product takes.
      vmem_limit_mib: on-chip memory to ask for; 0 is the compiler's default.
    """

    heads: str
    block_q: int
    block_kv: int
    block_kv_compute: int
    vmem_limit_mib: int
