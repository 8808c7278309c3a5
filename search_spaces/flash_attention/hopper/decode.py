"""Flash decoding on Hopper: attention of few queries to many keys, with packed rows and keys split over CTAs.

The queries of all heads that share a key head are the rows of one product (`pack_gqa`), so that each key is read once.
If there are fewer key heads than SMs, several CTAs share the keys of a head (`split_kv`). The results of the CTAs of a
cluster are combined in the same launch. A second kernel combines the results of several clusters (combine.py).

If the number of keys is not a multiple of 8, shared memory has the untiled layout from JAX 0.11 on
(hopper/smem_layout.py). With earlier versions, keys and values are copied into padded arrays.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp

from search_spaces.attention.problem import SOFTCAP
from search_spaces.flash_attention.hopper.combine import RANK, SplitCombine, combine, natural
from search_spaces.flash_attention.hopper.decode_footprint import footprint
from search_spaces.flash_attention.hopper.decode_kernel import kernel
from search_spaces.flash_attention.hopper.decode_plan import DecodePlan
from search_spaces.flash_attention.hopper.decode_schedule import FlashDecodingSchedule
from search_spaces.flash_attention.hopper.decode_space import choices, rules, too_many_rows
from search_spaces.flash_attention.problem import FlashAttentionProblem
from search_spaces.footprint import Footprint
from search_spaces.hopper.limits import WGMMA_ROWS
from search_spaces.hopper.operands import not_hopper, padded
from search_spaces.jax_compat import plgpu
from search_spaces.kernel import INDICES_OF_32_BITS, Kernel, Target, padded_elements
from search_spaces.space import Columns, Space


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
