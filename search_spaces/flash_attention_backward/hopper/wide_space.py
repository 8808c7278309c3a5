"""The search space of the attention gradients of wide heads on Hopper, with a reason for each rule."""

from __future__ import annotations

from search_spaces.flash_attention_backward.hopper.schedule import FlashAttentionBackwardSchedule
from search_spaces.flash_attention_backward.hopper.wide_plan import BLOCK_KV, BLOCK_Q, WidePlan
from search_spaces.flash_attention_backward.problem import FlashAttentionBackwardProblem
from search_spaces.space import Space, cdiv

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
