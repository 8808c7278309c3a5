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
# Bytes in flight for each SM that hide the latency of device memory (H200: 4.3 TB/s for 1 us are 33 KB, twice).
LEAST_IN_FLIGHT = 80 * 1024
MOST_IN_FLIGHT = 200 * 1024
# CTAs for each SM: two are there at a time, and where neither one nor two fill all SMs, further ones even it out.
WAVES, FURTHER_WAVES = (1, 2), 6
# Sequences of other lengths than each other leave SMs idle at the end, the longer the fewer splits there are, however
# many CTAs (H200, 64 sequences of up to 16384 keys: 8 splits in clusters of 8 take 254 us, 6 without one 268, 1 294).
LENGTHS_WAVES = (6, 12)
# Of the time of the busiest SM, what the mean one has work for: schedules with less than this part of the best lose
# what they save (H200: 192 CTAs on 132 SMs take 1.08 times as long as 128 or 264)...
LEAST_EVEN = 0.85
# ...unless there is nothing to combine, or a cluster combines results of so few steps.
LEAST_EVEN_ALONE, LEAST_EVEN_CLUSTER = 0.7, 0.3
SHORT_STEPS = 16
# Of the chip's cores, one in so many has a CTA of a cluster of more than two, at most (H200: 64 CTAs in clusters of 8
# take 0.9 of the time of single ones, 128 take 1.4 to 1.6, 256 1.35; in clusters of 4 1.24, of 2 0.95 to 0.98).
GPC_SHARE = 2


def choices(p: FlashAttentionProblem, target: Target) -> dict[str, tuple[Choice, ...]]:
    """Of the fields of a schedule."""
    splits = _splits(p, target)
    return {
        "block_kv": tuple(n for n in (64, 128) if n == 64 or n < 2 * p.kv_len),
        "stages": (2, 3, 4, 6, 8),
        "split_kv": splits,
        "cluster": tuple(n for n in (1, 2, 4, MAX_CLUSTER) if any(split % n == 0 for split in splits)),
    }


def _splits(p: FlashAttentionProblem, target: Target) -> tuple[int, ...]:
    one, blocks = int(DecodePlan(p, 64, 2, 1, 1).ctas), int(DecodePlan(p, 64, 2, 1, 1).blocks)

    def filling(waves: int) -> int:
        return max(1, min(waves * target.cores // one, blocks))

    def even(split: int) -> float:
        return 1.0 if p.kv_lengths else float(_even(one * split, target))

    full = {filling(waves) for waves in WAVES + LENGTHS_WAVES * p.kv_lengths}
    if max(map(even, full)) < LEAST_EVEN:
        full.add(filling(FURTHER_WAVES))
    full |= {1 << (split.bit_length() - 1) for split in full}
    most = blocks if p.kv_lengths else min(blocks, 2 * target.cores // one)
    clusters = {n for n in (2, 4, MAX_CLUSTER) if n <= most}
    best = max(map(even, full | {1}))
    return tuple(
        sorted(
            {split for split in full if even(split) >= LEAST_EVEN * best}
            | {split for split in clusters if even(split) >= LEAST_EVEN_CLUSTER * best}
            | ({1} if even(1) >= LEAST_EVEN_ALONE * best else set())
        )
    )


def _even(ctas: Any, target: Target) -> Any:
    """Part of the time for which the mean SM has work."""
    slots = np.where(ctas <= target.cores, target.cores, 2 * target.cores)
    return ctas / (slots * cdiv(ctas, slots))


def rules(p: FlashAttentionProblem, target: Target) -> Mapping[str, Rule]:
    def plan(s: Any) -> DecodePlan:
        return DecodePlan.of(p, s)

    def steps(s: Any) -> Any:
        """Of the longest split."""
        return cdiv(plan(s).blocks, s.split_kv)

    def bytes_ahead(s: Any) -> Any:
        """Of a CTA, bytes."""
        return s.stages * s.block_kv * (p.head_dim + p.value_dim) * plan(s).dtype.itemsize

    def sharing(s: Any) -> Any:
        """CTAs of an SM."""
        return np.minimum(np.where(plan(s).two_ctas, 2, 1), cdiv(plan(s).ctas, target.cores))

    one = int(DecodePlan(p, 64, 2, 1, 1).ctas)
    most_even = max(float(_even(one * split, target)) for split in _splits(p, target))
    return {
        "CTAs of a cluster are splits of the same keys": lambda s: s.split_kv % s.cluster == 0,
        "a cluster combines all splits, or eight of them": lambda s: (
            (s.cluster == 1) | (s.cluster == s.split_kv) | (s.cluster == MAX_CLUSTER)
        ),
        "clusters of more than two wait for room in one GPC, where they are to fill most of the chip": lambda s: (
            p.kv_lengths | (s.cluster <= 2) | (GPC_SHARE * plan(s).ctas <= target.cores)
        ),
        "no split is without a block of keys": lambda s: s.split_kv <= plan(s).blocks,
        "CTAs that leave SMs idle are one cluster for a short time": lambda s: (
            p.kv_lengths
            | (s.split_kv == 1)
            | ((s.cluster == s.split_kv) & (steps(s) <= SHORT_STEPS))
            | (_even(plan(s).ctas, target) >= LEAST_EVEN * most_even)
        ),
        "logits and output of a consumer fit its registers": lambda s: s.block_kv + p.value_dim <= 320,
        "more stages than steps stay empty": lambda s: (s.stages == 2) | (s.stages <= steps(s)),
        "with less in flight, and more to come, device memory waits": lambda s: (
            (sharing(s) * bytes_ahead(s) >= LEAST_IN_FLIGHT) | (s.stages >= steps(s))
        ),
        "more in flight hides no more latency": lambda s: bytes_ahead(s) <= MOST_IN_FLIGHT,
    }


def too_many_rows(p: FlashAttentionProblem) -> str | None:
    """Why there are too many packed rows for this kernel, or None."""
    if (rows := p.q_len * p.group) > MOST_TILES * WGMMA_ROWS:
        return f"packs up to {MOST_TILES * WGMMA_ROWS} queries of a head of keys, not {rows}"
    return None
