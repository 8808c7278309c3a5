"""The search space of the attention gradients on Hopper, with a reason for each rule."""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np

from search_spaces.flash_attention_backward.hopper.kernel import CONSUMER_REGISTERS, PRODUCER_REGISTERS
from search_spaces.flash_attention_backward.hopper.plan import (
    BLOCK_KV,
    CONSUMERS,
    DqPlan,
    FlashAttentionBackwardSchedule,
    Plan,
)
from search_spaces.flash_attention_backward.hopper.wide_kernel import BLOCK_KV as WIDE_BLOCK_KV
from search_spaces.flash_attention_backward.hopper.wide_kernel import BLOCK_Q as WIDE_BLOCK_Q
from search_spaces.flash_attention_backward.hopper.wide_kernel import WidePlan, is_wide, plan_of
from search_spaces.flash_attention_backward.problem import FlashAttentionBackwardProblem
from search_spaces.footprint import Footprint, Operand, Phase
from search_spaces.hopper import ACCUMULATOR_BYTES, WARPGROUP, WGMMA_ROWS
from search_spaces.problem import nbytes
from search_spaces.space import Columns, Space, cdiv

# Maximum registers for dk, dv, S and dP, of the 240 per consumer thread. The rest suffices for everything else (ptxas).
MOST_ACCUMULATORS = 192
MOST_HEADS_OF_SECTION = 32


def space(p: FlashAttentionBackwardProblem, cores: int) -> Space[FlashAttentionBackwardSchedule]:
    heads, group = p.batch * p.kv_heads, p.group
    sections = [n for n in (1, 2, 4, 8, 16, MOST_HEADS_OF_SECTION) if heads % n == 0]
    # Sections with fewer blocks than cores, and the next larger one.
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


# ------------------------------------------------------------------------------
# The footprint of the attention gradients on Hopper.

# Registers of a consumer thread besides dk, dv, S and dP (ptxas: 231 registers in total if these take 192).
OTHER_REGISTERS = 39
# FP32 operations per pair of a query and a key: scaling, dP - delta, its product with P, and two casts.
PAIR_OPERATIONS = 5
# The same per element of dq, which a step stores to SMEM and adds to the sums in memory: fitted to 21 problems on an
# H200. Their times then deviate by 3 % from the model's. A step with `overlap` takes no less time than one without.
DQ_OPERATIONS = 20


def steps(p: FlashAttentionBackwardProblem, block_q: int, block_kv: int) -> Any:
    """Returns the steps of each block of keys: blocks of queries that see it (at least one), times the group size."""
    first_key = np.arange(-(-p.kv_len // block_kv)) * block_kv
    blocks = -(-p.q_len // block_q)
    first, end = np.zeros_like(first_key), np.full_like(first_key, blocks)
    if p.right is not None:
        first = np.minimum(np.maximum(first_key - p.right, 0) // block_q, blocks - 1)
    if p.left is not None:
        end = np.minimum((first_key + block_kv - 1 + p.left) // block_q + 1, blocks)
    return np.maximum(end - first, 1) * p.group


def footprint(p: FlashAttentionBackwardProblem, s: Columns, cores: int) -> Footprint:
    """Returns the footprint; a tile is a block of keys of one head, and a step is a block of queries of one query head.

    The sums of dq are in the last-level cache while the steps of a head add to them, so the memory is written and read
    once. The longest tiles of a head start first, so that shorter ones balance them in later waves.

    Wide heads have registers, on-chip reads and stages of their own. A separate dq kernel counts as part of these
    steps: it recomputes two of the five products, and doubles the loads.
    """
    plan, h, hv = plan_of(p, s), p.head_dim, p.value_dim
    b = plan.itemsize
    of_block = {int(block_q): steps(p, int(block_q), plan.block_kv) for block_q in np.unique(s.block_q)}

    def each(value: Any) -> Any:
        return np.array([value(of_block[int(block_q)]) for block_q in s.block_q], dtype=np.float64)

    mean = np.maximum(each(np.mean) * p.q_share * p.kv_share, 1.0)
    separate = np.asarray(plan.separate_dq)
    again = np.where(separate, 2.0, 1.0)
    pairs = s.block_q * plan.block_kv
    rows = p.q_len / plan.q_blocks
    keys = p.kv_len / plan.kv_blocks
    tiles = p.batch * p.kv_heads * plan.kv_blocks
    longest = np.maximum(each(np.max) - (cdiv(tiles, cores) - 1) * mean, mean)
    sums = p.batch * p.heads * plan.dq_rows * h * ACCUMULATOR_BYTES
    statistics = p.batch * p.heads * plan.dq_rows * ACCUMULATOR_BYTES
    q, k, v = p.qkv()
    padded = 2 * (nbytes(q) + nbytes(p.out())) * (plan.q_rows > p.q_len)
    padded += 4 * (nbytes(k) + nbytes(v)) * (plan.kv_rows > p.kv_len)
    # wgmma reads 64 rows of the left operand, unless it is in registers, and all columns of the right operand.
    per_consumer = (
        (WGMMA_ROWS + s.block_q) * (h + hv) + s.block_q * (hv + h + WGMMA_ROWS) + plan.block_kv * (s.block_q + h) // 2
    )
    found = Footprint(
        arithmetic=p.arithmetic,
        grid=(np.full(len(s), p.batch * p.kv_heads), np.full(len(s), plan.kv_blocks)),
        step=Phase(
            loads=(
                Operand(bytes=again * rows * h * b, axes=(0,), filled_bytes=again * s.block_q * h * b, name="q"),
                Operand(bytes=again * rows * hv * b, axes=(0,), filled_bytes=again * s.block_q * hv * b, name="do"),
                Operand(bytes=2.0 * s.block_q * ACCUMULATOR_BYTES, axes=(0,), name="lse, delta"),
            ),
            flops=2.0 * pairs * (3 * h + 2 * hv + separate * (h + hv)),
            fp32_ops=again * pairs * PAIR_OPERATIONS + ~separate * s.block_q * h * DQ_OPERATIONS,
            mufu_ops=again * pairs * (3 if p.softcap else 1),
            onchip_bytes_read=CONSUMERS * per_consumer * b * np.where(separate, 7 / 5, 1.0),
            bytes_written=~separate * 2.0 * sums / (tiles * mean),
        ),
        tile=Phase(
            loads=(Operand(bytes=np.full(len(s), keys * (h + hv) * b), axes=(0, 1), name="k, v"),),
            bytes_written=keys * (h + hv) * b,
        ),
        steps=mean,
        step_range=(np.minimum(each(np.min), mean), longest),
        minor=1,
        axes=("kv heads of all sequences", "keys"),
        onchip_bytes=np.where(separate, np.maximum(plan.onchip_bytes, DqPlan(p).onchip_bytes), plan.onchip_bytes),
        stages=np.minimum(s.q_stages, s.do_stages),
        consumers=CONSUMERS,
        threads=CONSUMERS * WARPGROUP,
        registers=(h + hv) // 2 + s.block_q + OTHER_REGISTERS,
        registers_per_block=WARPGROUP * (CONSUMERS * CONSUMER_REGISTERS + PRODUCER_REGISTERS),
        # dq is zeroed, then read and rounded. delta is computed from the result and its cotangent.
        copied_bytes=~separate * (2.0 * sums + nbytes(q)) + 2 * nbytes(p.out()) + 3 * statistics + padded,
        launches=np.where(separate, 4, 5),
    )
    return _of_wide(p, s, found) if is_wide(p) else found


# ------------------------------------------------------------------------------
# The search space of the attention gradients of wide heads on Hopper, with a reason for each rule.

MOST_HEADS_OF_WIDE_SECTION = 16


def wide_space(p: FlashAttentionBackwardProblem, cores: int) -> Space[FlashAttentionBackwardSchedule]:
    heads = p.batch * p.kv_heads
    return Space(
        FlashAttentionBackwardSchedule,
        choices={
            "block_q": (WIDE_BLOCK_Q,),
            "q_stages": (2,),
            "do_stages": (1, 2),
            "ds_stages": (2, 1),
            "overlap": (True, False),
            "section": tuple(n for n in (1, 2, 4, 8, MOST_HEADS_OF_WIDE_SECTION) if heads % n == 0),
            "block_kv": (WIDE_BLOCK_KV,),
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


def _of_wide(p: FlashAttentionBackwardProblem, s: Columns, found: Footprint) -> Footprint:
    """Returns `found`, the footprint for narrow heads, with the registers, on-chip reads and stages of wide heads.

    Both consumers read all rows of k and v, all of P^T, and all of dS^T once for dk and once for each part of dq. Even
    with one stage, d_out is loaded during other products; the effective number of stages is the mean of both pipelines.
    """
    plan, pairs = WidePlan(p, s), WIDE_BLOCK_KV * WIDE_BLOCK_Q
    own_h, own_hv = plan.own_columns
    parts = own_h // plan.dq_columns
    logits = (WIDE_BLOCK_KV + plan.own_queries) * (p.head_dim + p.value_dim)
    gradients = (2 + parts) * pairs + WIDE_BLOCK_Q * (own_h + own_hv) + WIDE_BLOCK_KV * own_h
    return dataclasses.replace(
        found,
        step=dataclasses.replace(found.step, onchip_bytes_read=CONSUMERS * (logits + gradients) * plan.itemsize),
        stages=(s.q_stages + s.do_stages) / 2,
        registers=(own_h + own_hv + plan.dq_columns) // 2 + plan.own_queries + OTHER_REGISTERS,
    )
