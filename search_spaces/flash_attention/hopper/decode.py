"""Flash decoding on Hopper: attention of few queries to many keys, with packed rows and keys split over CTAs.

The queries of all heads that share a key head are the rows of one product (`pack_gqa`), so that each key is read once.
If there are fewer key heads than SMs, several CTAs share the keys of a head (`split_kv`). The results of the CTAs of a
cluster are combined in the same launch. A second kernel combines the results of several clusters (combine.py).

If the number of keys is not a multiple of 8, shared memory has the untiled layout from JAX 0.11 on
(hopper/smem_layout.py). With earlier versions, keys and values are copied into padded arrays.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from search_spaces.attention.problem import SOFTCAP
from search_spaces.flash_attention.hopper.combine import (
    CONSUMER_REGISTERS,
    PRODUCER_REGISTERS,
    RANK,
    DecodePlan,
    SplitCombine,
    combine,
    natural,
)
from search_spaces.flash_attention.hopper.decode_kernel import kernel
from search_spaces.flash_attention.problem import FlashAttentionProblem
from search_spaces.footprint import Footprint, Operand, Phase
from search_spaces.hopper import (
    ACCUMULATOR_BYTES,
    BARRIER_BYTES,
    MAX_CLUSTER,
    SMEM_ALIGNMENT,
    WARPGROUP,
    WGMMA_ROWS,
    not_hopper,
    padded,
)
from search_spaces.jax_compat import plgpu
from search_spaces.kernel import INDICES_OF_32_BITS, Kernel, padded_elements
from search_spaces.space import Choice, Columns, Rule, Space, cdiv, round_up
from search_spaces.target import Target

# ------------------------------------------------------------------------------
# The schedule of flash decoding on Hopper.


@dataclasses.dataclass(frozen=True)
class FlashDecodingSchedule:
    """How the keys of a sequence are divided among CTAs, and loaded.

    Attributes:
      block_kv: keys and values per pipeline stage.
      stages: stages of the pipeline of keys, and of the pipeline of values. Loads run up to this many steps ahead.
      split_kv: number of CTAs that share the keys of a sequence.
      cluster: CTAs per cluster. A cluster combines the results of its CTAs through DSMEM. A second kernel combines the
        results of several clusters.
    """

    block_kv: int
    stages: int
    split_kv: int
    cluster: int


# ------------------------------------------------------------------------------
# The search space of flash decoding on Hopper, with a reason for each rule.

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


# ------------------------------------------------------------------------------
# The footprint of flash decoding on Hopper.

# FP32 operations per logit: scale, maximum, difference, sum, conversion.
LOGIT_OPERATIONS = 6
# In a memory-bound launch, only a few CTAs still read at the end, for the longest sequences. Each of them then reads
# faster than when all CTAs read, as if LAST_CTAS CTAs per SM shared the memory (H200, eight schedules, 64 sequences of
# up to 16384 keys).
LAST_CTAS = 0.8


def footprint(p: FlashAttentionProblem, s: Columns, cores: int) -> Footprint:
    """Returns the footprint; a block is a split of the keys of one head.

    The traffic of the second kernel is part of `copied_bytes`.
    """
    plan = DecodePlan.of(p, s)
    itemsize, heads = plan.dtype.itemsize, p.batch * p.kv_heads
    key_bytes, value_bytes = p.head_dim * itemsize, p.value_dim * itemsize
    # Keys that any query of a sequence sees. A left bound does not reduce them, as the first query sees the first key.
    visible = p.kv_share * (p.kv_len if p.right is None else min(p.kv_len, p.q_len + p.right))
    blocks = cdiv(visible, s.block_kv)
    steps = np.maximum(blocks / s.split_kv, 1.0)
    at_once = np.minimum(plan.ctas, np.where(plan.two_ctas, 2, 1) * cores)
    longest = steps * (1 + p.longest_beyond_mean * np.minimum(LAST_CTAS * cores / at_once, 1.0))
    keys = visible / s.split_kv / steps  # per step
    results = p.batch * p.heads * p.q_len
    written = heads * plan.tiles * plan.tile_rows * p.value_dim
    second = plan.second_launch
    # Partial results have one log-sum-exp per element instead.
    lse_bytes = WGMMA_ROWS * ACCUMULATOR_BYTES * p.return_lse * np.logical_not(second)
    out_bytes = plan.tile_rows * p.value_dim * np.where(second, 2 * ACCUMULATOR_BYTES, itemsize)
    padded = p.batch * p.kv_heads * (p.kv_len + plan.kv_rows) * (key_bytes + value_bytes) * (plan.kv_rows > p.kv_len)
    packed = 2 * results * key_bytes * (p.q_len > 1)
    combined = second * (plan.partials * written * 2 * ACCUMULATOR_BYTES + results * value_bytes)
    unpacked = np.logical_not(second) * 2 * results * value_bytes * (p.q_len > 1)
    logits = WGMMA_ROWS * s.block_kv
    copies = [padded, packed, combined, unpacked]
    return Footprint(
        arithmetic=p.arithmetic,
        grid=(np.full(len(s), heads), np.full(len(s), plan.tiles), s.split_kv),
        step=Phase(
            loads=(
                Operand(bytes=keys * key_bytes, axes=(0, 2), filled_bytes=s.block_kv * key_bytes, name="k"),
                Operand(bytes=keys * value_bytes, axes=(0, 2), filled_bytes=s.block_kv * value_bytes, name="v"),
            ),
            flops=2.0 * logits * (p.head_dim + p.value_dim),
            fp32_ops=logits * LOGIT_OPERATIONS + WGMMA_ROWS * p.value_dim,
            mufu_ops=logits * (1 + p.softcap) + WGMMA_ROWS,
            onchip_bytes_read=WGMMA_ROWS * key_bytes + s.block_kv * (key_bytes + value_bytes),
        ),
        tile=Phase(
            loads=(Operand(bytes=plan.rows / plan.tiles * key_bytes, axes=(0, 1), name="q"),),
            bytes_written=(out_bytes + lse_bytes) / s.cluster,
        ),
        steps=steps,
        step_range=(np.ones(len(s)), longest) if p.kv_lengths else None,
        minor=0,
        axes=("kv heads of all sequences", "packed queries", "splits of the keys"),
        stages=s.stages,
        consumers=1,
        onchip_bytes=smem_bytes(plan),
        threads=WARPGROUP,
        registers=plan.registers,
        registers_per_block=WARPGROUP
        * np.where(plan.two_ctas, CONSUMER_REGISTERS + PRODUCER_REGISTERS, 2 * round_up(plan.registers, 8)),
        cluster=s.cluster,
        dsmem_bytes=(s.cluster > 1) * (plan.tile_rows * p.value_dim * ACCUMULATOR_BYTES),
        copied_bytes=sum(copies),
        launches=1 + sum(np.where(np.asarray(copy) > 0, 1, 0) for copy in copies),
    )


def smem_bytes(plan: DecodePlan) -> np.ndarray[tuple[int, ...], np.dtype[np.int64]]:
    """Returns the shared memory of a CTA, exact to the byte."""
    p, itemsize = plan.p, plan.dtype.itemsize
    arrays = (
        WGMMA_ROWS * p.head_dim * itemsize,
        plan.stages * plan.block_kv * p.head_dim * itemsize,
        plan.stages * plan.block_kv * p.value_dim * itemsize,
        plan.smem_rows * p.value_dim * ACCUMULATOR_BYTES,
        2 * WGMMA_ROWS * ACCUMULATOR_BYTES,
    )
    whole = sum(round_up(np.asarray(array), SMEM_ALIGNMENT) for array in arrays)
    total: np.ndarray[tuple[int, ...], np.dtype[np.int64]] = whole + (1 + 4 * plan.stages) * BARRIER_BYTES
    return total


def supports(p: FlashAttentionProblem, target: Target) -> str | None:
    """Returns why the kernel does not support `p` on `target`, or None."""
    if reason := not_hopper(target):
        return reason
    if p.dtype not in ("bfloat16", "float16"):
        return f"multiplies bfloat16 and float16, not {p.dtype}"
    if p.head_dim % 16 or p.value_dim % 16 or max(p.head_dim, p.value_dim) > 256:
        return f"wants heads of multiples of 16, up to 256, not of {p.head_dim} and {p.value_dim}"
    return too_many_rows(p)


def run(
    p: FlashAttentionProblem,
    schedule: Any,
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    *lengths: jax.Array,
    scale: float | None = None,
    softcap: float = SOFTCAP,
) -> Any:
    """Returns the result, and the log-sum-exp with `return_lse`."""
    plan = DecodePlan.of(p, schedule)
    # Indices must be 32 bits wide, even if the user enables x64.
    with jax.enable_x64(False):
        k, v = (padded(x, (plan.kv_rows, None, None)) for x in (k, v))
        scale = p.default_scale() if scale is None else scale
        out, *lse = _launch(plan, scale, softcap, _packed(plan, q), k, v, *lengths)
        out = out.reshape(-1, *_places(plan), plan.tile_rows, p.value_dim)
        by_row: Any = None
        if plan.second_launch:
            out, logarithm = combine(out, lse[0].reshape(out.shape))
            by_row = natural(logarithm[..., :1])
        else:
            out = out[0]
            if lse:
                by_row = lse[0].reshape(*_places(plan), WGMMA_ROWS, 1)[..., : plan.tile_rows, :]
        unpacked = _unpacked(plan, out).astype(p.dtype)
        if not p.return_lse:
            return unpacked
        return unpacked, _unpacked(plan, by_row)[..., 0].transpose(0, 2, 1)


def _launch(plan: DecodePlan, scale: float, softcap: float, *operands: jax.Array) -> tuple[jax.Array, ...]:
    """Returns the flat results of the kernel: outputs (partial ones with a second kernel), and log-sum-exps if any."""
    p = plan.p
    clusters, each = plan.partials * plan.groups, plan.tile_rows * p.value_dim
    if plan.second_launch:
        results = [jax.ShapeDtypeStruct((clusters * each,), jnp.float32)] * 2
    else:
        results = [jax.ShapeDtypeStruct((clusters * each,), plan.dtype)]
        if p.return_lse:
            results.append(jax.ShapeDtypeStruct((clusters * WGMMA_ROWS,), jnp.float32))
    mailbox = SplitCombine(plan.cluster, plan.smem_rows, p.value_dim).mailbox(clusters)
    made = plgpu.kernel(
        kernel(plan, scale, softcap),
        out_type=(*results, *mailbox),
        # CTAs that start together read all heads of the same keys, which are adjacent in memory.
        grid=(p.batch, plan.tiles, plan.partials, p.kv_heads),
        grid_names=("batch", "tile", "partial", "kv_head"),
        cluster=(plan.cluster,),
        cluster_names=(RANK,),
        num_threads=2,
        thread_name="wg",
        compiler_params=plgpu.CompilerParams(
            approx_math=True, reduction_scratch_bytes=0, lowering_semantics=plgpu.LoweringSemantics.Warpgroup
        ),
    )(*operands)
    return tuple(made[: len(results)])


def _places(plan: DecodePlan) -> tuple[int, int, int]:
    return plan.p.batch, plan.p.kv_heads, plan.tiles


def _packed(plan: DecodePlan, q: jax.Array) -> jax.Array:
    """Returns q as ``[batch, kv_heads, rows, head_dim]``, without a copy if there is one query."""
    p = plan.p
    q = q.reshape(p.batch, p.q_len, p.kv_heads, p.group, p.head_dim).transpose(0, 2, 1, 3, 4)
    return padded(q.reshape(p.batch, p.kv_heads, plan.rows, p.head_dim), (plan.q_rows, None))


def _unpacked(plan: DecodePlan, rows: jax.Array) -> jax.Array:
    """Converts ``[batch, kv_heads, tiles, tile_rows, columns]`` to ``[batch, q_len, heads, columns]``."""
    p, columns = plan.p, rows.shape[-1]
    rows = rows.reshape(p.batch, p.kv_heads, -1, columns)[:, :, : plan.rows]
    rows = rows.reshape(p.batch, p.kv_heads, p.q_len, p.group, columns).transpose(0, 2, 1, 3, 4)
    return rows.reshape(p.batch, p.q_len, p.heads, columns)


class MosaicGpuFlashDecoding(Kernel[FlashAttentionProblem, FlashDecodingSchedule]):
    backend = "mosaic_gpu_decode"
    version = 1
    most_elements = INDICES_OF_32_BITS
    verified_on = frozenset({"sm_90"})  # tests/device on an NVIDIA H200

    def supports(self, problem: FlashAttentionProblem, target: Target) -> str | None:
        return supports(problem, target)

    def largest_array(self, problem: FlashAttentionProblem) -> int:
        # Keys and values are padded to whole tiles.
        return padded_elements(problem.qkv()[1:], -3, 256)

    def space(self, problem: FlashAttentionProblem, target: Target) -> Space[FlashDecodingSchedule]:
        return Space(FlashDecodingSchedule, choices(problem, target), rules(problem, target))

    def footprint(self, problem: FlashAttentionProblem, schedules: Columns, target: Target) -> Footprint:
        return footprint(problem, schedules, target.cores)

    def run(
        self,
        problem: FlashAttentionProblem,
        schedule: FlashDecodingSchedule,
        target: Target,
        /,
        *args: Any,
        scale: float | None = None,
        softcap: float = SOFTCAP,
    ) -> Any:
        return run(problem, schedule, *args, scale=scale, softcap=softcap)
