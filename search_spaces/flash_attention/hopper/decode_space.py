"""The search space of flash decoding on Hopper, with a reason for each rule."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from search_spaces.flash_attention.hopper.decode_plan import DecodePlan
from search_spaces.flash_attention.problem import FlashAttentionProblem
from search_spaces.hopper.limits import MAX_CLUSTER, WGMMA_ROWS
from search_spaces.kernel import Target
from search_spaces.space import Choice, Rule, cdiv

# Maximum tiles of 64 packed rows. Each further tile reads all keys again, from L2. The forward kernel supports more.
MOST_TILES = 4
# Bytes in flight per SM that hide the latency of device memory (H200: 4.3 TB/s for 1 us are 33 KB per SM, doubled).
LEAST_IN_FLIGHT = 80 * 1024
MOST_IN_FLIGHT = 200 * 1024
# CTAs per SM. Up to two run at a time. If neither one nor two waves balance the SMs, more waves do.
WAVES, FURTHER_WAVES = (1, 2), 6
# Waves for sequences of different lengths. These leave SMs idle at the end. The idle time grows with fewer splits, for
# any number of CTAs (H200, 64 sequences of up to 16384 keys: 8 splits in clusters of 8 take 254 us, 6 splits without
# clusters 268 us, 1 split 294 us).
LENGTHS_WAVES = (6, 12)
# Minimum balance relative to the best schedule; balance is the work of the mean SM over that of the busiest SM. Below
# this, schedules lose what they save (H200: 192 CTAs on 132 SMs take 1.08 times as long as 128 or 264)...
LEAST_EVEN = 0.85
# ...unless there is one split, or one cluster combines splits of at most SHORT_STEPS steps.
LEAST_EVEN_ALONE, LEAST_EVEN_CLUSTER = 0.7, 0.3
SHORT_STEPS = 16
# With clusters of more than two CTAs, at most one in GPC_SHARE cores may have a CTA. Times on an H200 relative to no
# clusters: 0.9 for 64 CTAs in clusters of 8, 1.4 to 1.6 for 128, 1.35 for 256; 1.24 in clusters of 4, 0.95 to 0.98 in
# clusters of 2.
GPC_SHARE = 2


def choices(p: FlashAttentionProblem, target: Target) -> dict[str, tuple[Choice, ...]]:
    """Returns the choices for each field of a schedule."""
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
    """Returns the fraction of the time for which the mean SM has work."""
    slots = np.where(ctas <= target.cores, target.cores, 2 * target.cores)
    return ctas / (slots * cdiv(ctas, slots))


def rules(p: FlashAttentionProblem, target: Target) -> Mapping[str, Rule]:
    def plan(s: Any) -> DecodePlan:
        return DecodePlan.of(p, s)

    def steps(s: Any) -> Any:
        """Steps of the longest split."""
        return cdiv(plan(s).blocks, s.split_kv)

    def bytes_ahead(s: Any) -> Any:
        """Bytes in flight per CTA."""
        return s.stages * s.block_kv * (p.head_dim + p.value_dim) * plan(s).dtype.itemsize

    def sharing(s: Any) -> Any:
        """CTAs that share an SM."""
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
    """Returns why there are too many packed rows for this kernel, or None."""
    if (rows := p.q_len * p.group) > MOST_TILES * WGMMA_ROWS:
        return f"packs up to {MOST_TILES * WGMMA_ROWS} queries of a head of keys, not {rows}"
    return None
