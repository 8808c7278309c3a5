"""The schedule of the attention gradients on Hopper."""

from __future__ import annotations

import dataclasses


@dataclasses.dataclass(frozen=True)
class FlashAttentionBackwardSchedule:
    """How the gradients are divided among CTAs, warpgroups and pipeline steps.

    A CTA owns `block_kv` rows of k and v, 64 per consumer warpgroup, and iterates over q and d_out. For heads wider
    than 128, it owns 64 rows, and each consumer computes half of the columns of their gradients.

    Attributes:
      block_q: rows of q and d_out per step.
      q_stages, do_stages: pipeline stages of q and of d_out in SMEM.
      ds_stages: stages of dS in SMEM; with one stage, consumers synchronize twice per step.
      overlap: whether q k^T of a step is issued before dS^T q of the previous step, so that exponentials overlap
        products.
      section: heads of k and v whose CTAs are launched together. In a section, the CTAs with the most steps come first.
      rotate: whether each block of keys starts at a different block of queries, and wraps around. Otherwise all CTAs of
        a head load the same blocks and add to the same rows of dq at the same time.
      dq: how dq is summed over CTAs. "reduce_add": TMA adds float32 partial sums in the order of arrival. "separate": a
        second kernel computes dq without a sum over CTAs, so that every run returns the same bits.
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
