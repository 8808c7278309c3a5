"""One way to compute the gradients of attention on Hopper: the fields of a schedule."""

from __future__ import annotations

import dataclasses


@dataclasses.dataclass(frozen=True)
class FlashAttentionBackwardSchedule:
    """How the gradients are laid over CTAs and warpgroups, and over time.

    A CTA owns `block_kv` rows of k and v, of which each consumer warpgroup has 64, and walks over q and d_out. Of heads
    wider than 128 it owns 64 rows, of whose gradients each consumer has half of the columns.

    Attributes:
      block_q: rows of q and d_out of a step.
      q_stages, do_stages: steps whose q, whose d_out are in SMEM.
      ds_stages: steps whose dS is in SMEM: with one, consumers meet twice in a step.
      overlap: q k^T of a step is issued before dS^T q of the one before, so that exponentials overlap products.
      section: heads of k and v whose CTAs are launched side by side; within them those with the most steps come first.
      rotate: each block of keys starts at another block of queries, and comes round to those before it at last: else
        all CTAs of a head load the same blocks at once, and add to the same rows of dq.
      dq: how the sum over CTAs comes about. In "reduce_add" TMA adds them up in float32, in the order of arrival; in
        "separate" a second kernel computes dq alone, and there is none: the same bits in every run.
    """

    block_q: int
    q_stages: int
    do_stages: int
    ds_stages: int
    overlap: bool
    section: int
    block_kv: int = 128
    dq: str = "reduce_add"
    rotate: bool = False
