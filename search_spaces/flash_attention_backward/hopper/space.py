"""The search space of the attention gradients on Hopper, with a reason for each rule."""

from __future__ import annotations

import numpy as np

from search_spaces.flash_attention_backward.hopper.plan import BLOCK_KV, Plan
from search_spaces.flash_attention_backward.hopper.schedule import FlashAttentionBackwardSchedule
from search_spaces.flash_attention_backward.problem import FlashAttentionBackwardProblem
from search_spaces.space import Space, cdiv

# Maximum registers for dk, dv, S and dP, of the 240 per consumer thread. The rest suffices for everything else (ptxas).
MOST_ACCUMULATORS = 192
MOST_HEADS_OF_SECTION = 32


def space(p: FlashAttentionBackwardProblem, cores: int) -> Space[FlashAttentionBackwardSchedule]:
    heads, group = p.batch * p.kv_heads, p.group
    sections = [n for n in (1, 2, 4, 8, 16, MOST_HEADS_OF_SECTION) if heads % n == 0]
    # Sections whose blocks are not all resident at once, and the next larger one.
    blocks = cdiv(p.kv_len, BLOCK_KV)
    sections = [n for n in sections if n == 1 or n // 2 * blocks < cores]
    largest = sections[-1]
    if p.right is not None:  # The section closest to one wave of blocks comes first (H200: 4 heads of 4096 keys).
        sections.sort(key=lambda n: abs(n * blocks - cores))
    return Space(
        FlashAttentionBackwardSchedule,
        choices={
            "block_q": (64, 128),
            "q_stages": (2, 3),
            "do_stages": (2,),  # With one stage, a step waits for its load: never the fastest on an H200.
            "ds_stages": (2, 1),
            "overlap": (True, False),
            "section": tuple(sections),
            "block_kv": (BLOCK_KV,),
            "dq": ("separate",) if p.deterministic else ("reduce_add",),
            "rotate": (True, False),
        },
        rules={
            "dk, dv, S and dP of a consumer fit into registers": lambda s: (
                (p.head_dim + p.value_dim) // 2 + s.block_q <= MOST_ACCUMULATORS
            ),
            "overlap, which keeps dq beside S of the next step, takes steps of 64 queries, and no capped logits": (
                lambda s: np.logical_not(s.overlap) | ((s.block_q == 64) & (not p.softcap))
            ),
            "where steps differ, the longest come first among the blocks of many heads": lambda s: (
                (s.section == largest)
                | ((p.right is not None) & (4 * s.section * blocks > cores))
                | ((p.right is None) & (s.section == 1))
            ),
            "q is loaded in less than a step, and a third stage helps only where that is early": lambda s: (
                (s.q_stages == 2) | (s.overlap & (s.q_stages <= Plan(p, s).q_blocks * group))
            ),
            "consumers that exchange dS meet once in a step if it has two stages, and those that do not need one": (
                lambda s: s.ds_stages == np.where(Plan(p, s).separate_dq, 1, 2)
            ),
            "a diagonal has the blocks of keys start at different queries, and what is not added needs no rotation": (
                lambda s: np.logical_not(s.rotate) | ((p.right is None) & np.logical_not(Plan(p, s).separate_dq))
            ),
        },
    )
