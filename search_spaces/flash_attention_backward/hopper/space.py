"""The schedules of the backward pass of attention on Hopper that are worth considering, and why the others are not."""

from __future__ import annotations

import numpy as np

from search_spaces.flash_attention_backward.hopper.plan import BLOCK_KV, Plan
from search_spaces.flash_attention_backward.hopper.schedule import FlashAttentionBackwardSchedule
from search_spaces.flash_attention_backward.problem import FlashAttentionBackwardProblem
from search_spaces.space import Space, cdiv

# Of the 240 registers of a consumer's thread, those that dk, dv, S and dP leave are enough for all else (ptxas).
MOST_ACCUMULATORS = 192
MOST_HEADS_OF_SECTION = 32


def space(p: FlashAttentionBackwardProblem, cores: int) -> Space[FlashAttentionBackwardSchedule]:
    heads, group = p.batch * p.kv_heads, p.group
    sections = [n for n in (1, 2, 4, 8, 16, MOST_HEADS_OF_SECTION) if heads % n == 0]
    return Space(
        FlashAttentionBackwardSchedule,
        choices={
            "block_q": (64, 128),
            "q_stages": (2, 3),
            "do_stages": (2, 1),
            "ds_stages": (2, 1),
            "overlap": (True, False),
            "section": tuple(sections),
            "block_kv": (BLOCK_KV,),
            "dq": ("reduce_add",),
        },
        rules={
            "dk, dv, S and dP of a consumer fit into registers": lambda s: (
                (p.head_dim + p.value_dim) // 2 + s.block_q <= MOST_ACCUMULATORS
            ),
            "overlap, which keeps dq beside S of the next step, takes steps of 64 queries, and no capped logits": (
                lambda s: np.logical_not(s.overlap) | ((s.block_q == 64) & (not p.softcap))
            ),
            "a section whose blocks are all launched at once makes a larger one the same": lambda s: (
                (s.section == 1) | (s.section // 2 * cdiv(p.kv_len, s.block_kv) < cores)
            ),
            "more stages than steps stay empty": lambda s: (
                (s.q_stages == 2) | (s.q_stages <= Plan(p, s).q_blocks * group)
            ),
        },
    )
