"""The schedules of attention of few queries that are worth considering, and why the others are not."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from search_spaces.flash_attention.hopper.decode_plan import DecodePlan
from search_spaces.flash_attention.problem import FlashAttentionProblem
from search_spaces.hopper.limits import MAX_CLUSTER, WGMMA_ROWS
from search_spaces.kernel import Target
from search_spaces.space import Choice, Rule, cdiv

# Each further tile of 64 packed rows reads all keys again, from L2: beyond so many the forward kernel serves.
MOST_TILES = 4
SPLITS = (2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64)
# Bytes in flight that hide the latency of device memory: 4.3 TB/s for 0.8 us, by 132 SMs, twice.
LEAST_IN_FLIGHT = 48 * 1024
MOST_IN_FLIGHT = 256 * 1024
# CTAs for each SM, where keys are split: two are there at a time.
MOST_WAVES = 4
# A split that is shorter is over before its pipeline is full.
FEWEST_STEPS = 4


def choices(p: FlashAttentionProblem, target: Target) -> dict[str, tuple[Choice, ...]]:
    """Of the fields of a schedule that this kernel reads, and those by which it is chosen."""
    one = DecodePlan(p, 64, 2, 1, 1)
    # Those that fill all SMs once, or twice.
    even = {max(1, waves * target.cores // int(one.ctas)) for waves in (1, 2)}
    most = min(MOST_WAVES * target.cores // int(one.ctas), int(one.blocks))
    splits = sorted({n for n in (*SPLITS, *even) if n <= most} | {1})
    clusters = [n for n in (1, 2, 4, MAX_CLUSTER) if n <= max(splits)]
    return {
        "block_kv": tuple(n for n in (64, 128, 256) if n == 64 or n < 2 * p.kv_len),
        "stages": (2, 3, 4, 6, 8),
        "split_kv": tuple(splits),
        "cluster": tuple(clusters),
    }


def rules(p: FlashAttentionProblem, target: Target) -> Mapping[str, Rule]:
    def plan(s: Any) -> DecodePlan:
        return DecodePlan.of(p, s)

    def steps(s: Any) -> Any:
        """Of the longest split."""
        return cdiv(plan(s).blocks, s.split_kv)

    def in_flight(s: Any) -> Any:
        """Of a CTA, bytes."""
        return s.stages * s.block_kv * (p.head_dim + p.value_dim) * plan(s).dtype.itemsize

    def sharing(s: Any) -> Any:
        """CTAs of an SM."""
        return np.minimum(np.where(plan(s).two_ctas, 2, 1), cdiv(plan(s).ctas, target.cores))

    return {
        "CTAs of a cluster are splits of the same keys": lambda s: s.split_kv % s.cluster == 0,
        "a cluster combines all splits, or saves no launch": lambda s: (s.cluster == 1) | (s.cluster == s.split_kv),
        "no split is without a block of keys": lambda s: s.split_kv <= plan(s).blocks,
        "splits are for SMs without work": lambda s: (s.split_kv == 1) | (plan(s).ctas <= MOST_WAVES * target.cores),
        "more splits would leave fewer SMs idle": lambda s: (
            (3 * plan(s).ctas > target.cores) | (steps(s) <= FEWEST_STEPS)
        ),
        "logits and output of a consumer fit its registers": lambda s: s.block_kv + p.value_dim <= 320,
        "more stages than steps stay empty": lambda s: (s.stages == 2) | (s.stages <= steps(s)),
        "with less in flight, and more to come, device memory waits": lambda s: (
            (sharing(s) * in_flight(s) >= LEAST_IN_FLIGHT) | (s.stages >= steps(s))
        ),
        "more in flight hides no more latency": lambda s: in_flight(s) <= MOST_IN_FLIGHT,
    }


def too_many_rows(p: FlashAttentionProblem) -> str | None:
    """Why there are too many packed rows for this kernel, or None."""
    if (rows := p.q_len * p.group) > MOST_TILES * WGMMA_ROWS:
        return f"packs up to {MOST_TILES * WGMMA_ROWS} queries of a head of keys, not {rows}"
    return None
