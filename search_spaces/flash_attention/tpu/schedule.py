"""The schedule of flash attention forward on TPUs."""

from __future__ import annotations

import dataclasses


@dataclasses.dataclass(frozen=True)
class TpuFlashAttentionSchedule:
    """How attention is divided into grid steps, and a grid step into products.

    Attributes:
      heads: the query heads packed into the rows of a product. "one": one head. "group": all heads that share a key
        head. "all": all heads, multiplied with the keys of all heads; each row sees only the keys of its own head.
      block_q: rows of queries per grid step.
      block_kv: rows of keys and values per grid step; the next block loads during the computation.
      block_kv_compute: rows of keys and values per product.
      vmem_limit_mib: VMEM limit to request in MiB; 0 means the compiler's default.
    """

    heads: str
    block_q: int
    block_kv: int
    block_kv_compute: int
    vmem_limit_mib: int
