"""The search space of flash attention forward on TPUs, with a reason for each rule."""

from __future__ import annotations

from search_spaces.flash_attention.problem import FlashAttentionProblem
from search_spaces.flash_attention.tpu.footprint import onchip_bytes, spill_bytes
from search_spaces.flash_attention.tpu.rows import Rows
from search_spaces.flash_attention.tpu.schedule import TpuFlashAttentionSchedule
from search_spaces.space import Space
from search_spaces.tpu.vmem import LANES, VMEM_LIMITS_MIB

# Powers of two, so that divisions of grid indices are shifts.
BLOCKS_Q = (1024, 512, 2048, 256, 128)
BLOCKS_KV = (2048, 1024, 4096, 512, 8192, 256, 128)
BLOCKS_KV_COMPUTE = (1024, 512, 2048, 4096, 256, 128)
# Bounds of the logits per product. The compiler unrolls a product; above the maximum, compilation takes minutes.
MOST_LOGITS = 2**20
LEAST_LOGITS = 2**17
# VMEM in bytes that every chip provides without a request.
LEAST_TO_ASK = 8 * 2**20
# Query rows of all heads. With more rows, products with the keys of other heads cost more than a copy of the keys.
MOST_ROWS_OF_ALL = 256


def space(p: FlashAttentionProblem) -> Space[TpuFlashAttentionSchedule]:
    """Returns the search space for `p`, about a hundred schedules."""
    heads = ["one"]
    if p.group > 1:
        heads.insert(0, "group")
    if p.kv_heads > 1 and p.kv_heads & (p.kv_heads - 1) == 0 and p.q_len * p.heads <= MOST_ROWS_OF_ALL:
        heads.insert(0, "all")
    return Space(
        TpuFlashAttentionSchedule,
        choices={
            "heads": tuple(heads),
            "block_q": BLOCKS_Q,
            "block_kv": BLOCKS_KV,
            "block_kv_compute": BLOCKS_KV_COMPUTE,
            "vmem_limit_mib": VMEM_LIMITS_MIB,
        },
        rules={
            "blocks of queries have fewer rows beyond the array than in it": lambda s: (
                (s.block_q == LANES) | (s.block_q < 2 * Rows.of(p, s.heads).q_rows)
            ),
            "blocks of keys have fewer rows beyond the array than in it": lambda s: (
                (s.block_kv == LANES) | (s.block_kv < 2 * Rows.of(p, s.heads).kv_rows)
            ),
            "a product takes a block of keys, or part of it": lambda s: s.block_kv_compute <= s.block_kv,
            "the compiler takes minutes for more logits of a product": lambda s: (
                s.block_q * s.block_kv_compute <= MOST_LOGITS
            ),
            "the compiler's default is enough for small blocks": lambda s: (
                (s.vmem_limit_mib == 0) | (onchip_bytes(p, s) + spill_bytes(s) > LEAST_TO_ASK)
            ),
            "what waits for a product costs as much as small ones": lambda s: (
                (s.block_q * s.block_kv_compute >= LEAST_LOGITS)
                | (s.block_q * 2 > Rows.of(p, s.heads).q_rows)
                | (s.block_kv_compute * 2 > Rows.of(p, s.heads).kv_rows)
            ),
        },
    )
