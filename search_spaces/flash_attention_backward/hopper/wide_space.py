"""The search space of the attention gradients of wide heads on Hopper, with a reason for each rule."""

from __future__ import annotations

import dataclasses

from search_spaces.flash_attention_backward.hopper.plan import CONSUMERS, FlashAttentionBackwardSchedule
from search_spaces.flash_attention_backward.hopper.space import OTHER_REGISTERS
from search_spaces.flash_attention_backward.hopper.wide_kernel import BLOCK_KV, BLOCK_Q, WidePlan
from search_spaces.flash_attention_backward.problem import FlashAttentionBackwardProblem
from search_spaces.footprint import Footprint
from search_spaces.space import Columns, Space, cdiv

MOST_HEADS_OF_SECTION = 16


def wide_space(p: FlashAttentionBackwardProblem, cores: int) -> Space[FlashAttentionBackwardSchedule]:
    heads = p.batch * p.kv_heads
    return Space(
        FlashAttentionBackwardSchedule,
        choices={
            "block_q": (BLOCK_Q,),
            "q_stages": (2,),
            "do_stages": (1, 2),
            "ds_stages": (2, 1),
            "overlap": (True, False),
            "section": tuple(n for n in (1, 2, 4, 8, MOST_HEADS_OF_SECTION) if heads % n == 0),
            "block_kv": (BLOCK_KV,),
            "dq": ("reduce_add",),
            "rotate": (False, True) if p.right is None else (False,),
        },
        rules={
            "a section whose blocks are all launched at once makes a larger one the same": lambda s: (
                (s.section == 1) | (s.section // 2 * cdiv(p.kv_len, s.block_kv) < cores)
            ),
            "more stages than steps stay empty": lambda s: (
                (s.do_stages == 1) | (s.do_stages <= WidePlan(p, s).q_blocks * p.group)
            ),
        },
    )


# ------------------------------------------------------------------------------
# The footprint of the attention gradients of wide heads on Hopper, as changes to that of narrow heads.


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
