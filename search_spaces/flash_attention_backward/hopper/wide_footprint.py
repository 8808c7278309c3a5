"""What a launch of the backward pass of wide heads demands of a Hopper GPU, where that is not what narrow heads do."""

from __future__ import annotations

import dataclasses

from search_spaces.flash_attention_backward.hopper.footprint import OTHER_REGISTERS
from search_spaces.flash_attention_backward.hopper.plan import CONSUMERS
from search_spaces.flash_attention_backward.hopper.wide_plan import BLOCK_KV, BLOCK_Q, WidePlan
from search_spaces.flash_attention_backward.problem import FlashAttentionBackwardProblem
from search_spaces.footprint import Footprint
from search_spaces.space import Columns


def of_wide(p: FlashAttentionBackwardProblem, s: Columns, found: Footprint) -> Footprint:
    """`found` of the same arithmetic and traffic, with the registers and on-chip reads of wide heads.

    Both consumers read all rows of k and v, and P^T and dS^T whole, the latter once for each part of dq. With one
    stage, too, d_out is loaded while others multiply: what arrives ahead of its use is the mean of both rings.
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
