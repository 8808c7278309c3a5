"""The footprint of the attention gradients of wide heads on Hopper, as changes to that of narrow heads."""

from __future__ import annotations

import dataclasses

from search_spaces.flash_attention_backward.hopper.footprint import OTHER_REGISTERS
from search_spaces.flash_attention_backward.hopper.plan import CONSUMERS
from search_spaces.flash_attention_backward.hopper.wide_plan import BLOCK_KV, BLOCK_Q, WidePlan
from search_spaces.flash_attention_backward.problem import FlashAttentionBackwardProblem
from search_spaces.footprint import Footprint
from search_spaces.space import Columns


def of_wide(p: FlashAttentionBackwardProblem, s: Columns, found: Footprint) -> Footprint:
    """Returns `found`, the footprint for narrow heads, with the registers, on-chip reads and stages of wide heads.

    Both consumers read all rows of k and v, all of P^T, and all of dS^T once for dk and once for each part of dq. Even
    with one stage, d_out is loaded during other products; the effective number of stages is the mean of both pipelines.
    """
    plan, pairs = WidePlan(p, s), BLOCK_KV * BLOCK_Q
    own_h, own_hv = plan.own_columns
    parts = own_h // plan.dq_columns
    logits = (BLOCK_KV + plan.own_queries) * (p.head_dim + p.value_dim)
    gradients = (2 + parts) * pairs + BLOCK_Q * (own_h + own_hv) + BLOCK_KV * own_h
    return dataclasses.replace(
        found,
        step=dataclasses.replace(found.step, onchip_bytes_read=CONSUMERS * (logits + gradients) * plan.itemsize),
        stages=(s.q_stages + s.do_stages) / 2,
        registers=(own_h + own_hv + plan.dq_columns) // 2 + plan.own_queries + OTHER_REGISTERS,
    )
