"""Flash attention forward on Hopper: the supported problems and the launch.

For lengths that are not multiples of 8, shared memory has the untiled layout from JAX 0.11 on
(hopper/smem_layout.py). With earlier versions, the arrays are copied into padded arrays, and the padding is masked or
dropped.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp

from search_spaces.attention.problem import SOFTCAP
from search_spaces.flash_attention.hopper.cta import results, scratch
from search_spaces.flash_attention.hopper.footprint import footprint
from search_spaces.flash_attention.hopper.kernel import kernel
from search_spaces.flash_attention.hopper.schedule import FlashAttentionSchedule
from search_spaces.flash_attention.hopper.softmax import OnlineSoftmax
from search_spaces.flash_attention.hopper.space import space
from search_spaces.flash_attention.hopper.tiling import Tiling
from search_spaces.flash_attention.problem import FlashAttentionProblem
from search_spaces.footprint import Footprint
from search_spaces.hopper.operands import not_hopper, padded
from search_spaces.jax_compat import plgpu
from search_spaces.kernel import INDICES_OF_32_BITS, Kernel, Target, padded_elements
from search_spaces.space import Column, Columns, Space

# Maximum columns of a wgmma result (PTX ISA, wgmma.mma_async). Registers hold this many as well.
MOST_HEAD_DIM = 256
# A swizzled row of operands has at least 32 bytes.
HEAD_DIM_STEP = 16


class MosaicGpuFlashAttention(Kernel[FlashAttentionProblem, FlashAttentionSchedule]):
    backend = "mosaic_gpu"
    version = 1
    most_elements = INDICES_OF_32_BITS
    verified_on = frozenset({"sm_90"})  # tests/device on an NVIDIA H200

    def verified(self, problem: FlashAttentionProblem, schedules: Columns, target: Target) -> Column | bool:
        if target.architecture not in self.verified_on:
            return False
        # "snake" with sections of more than one but not all heads has not run on a device yet.
        heads = problem.batch * problem.heads
        return (schedules.order != "snake") | (schedules.section == 1) | (schedules.section == heads)

    def supports(self, problem: FlashAttentionProblem, target: Target) -> str | None:
        p = problem
        if reason := not_hopper(target):
            return reason
        if jnp.dtype(p.dtype).itemsize != 2:
            return f"multiplies bfloat16 and float16, not {p.dtype}"
        for name, columns in (("head_dim", p.head_dim), ("head_dim_v", p.value_dim)):
            if columns % HEAD_DIM_STEP:
                return f"needs a {name} that is a multiple of {HEAD_DIM_STEP}, which {columns} is not"
            if columns > MOST_HEAD_DIM:
                return f"needs a {name} of at most {MOST_HEAD_DIM}, which {columns} is not"
        return None

    def largest_array(self, problem: FlashAttentionProblem) -> int:
        # Sequences are padded to whole tiles.
        return padded_elements((*problem.qkv(), problem.out()), -3, 256)

    def space(self, problem: FlashAttentionProblem, target: Target) -> Space[FlashAttentionSchedule]:
        return space(problem, target.cores)

    def footprint(self, problem: FlashAttentionProblem, schedules: Columns, target: Target) -> Footprint:
        return footprint(problem, schedules, target.cores)

    def run(
        self,
        problem: FlashAttentionProblem,
        schedule: FlashAttentionSchedule,
        target: Target,
        /,
        *args: Any,
        scale: float | None = None,
        softcap: float = SOFTCAP,
    ) -> Any:
        scale = problem.default_scale() if scale is None else scale
        softmax = OnlineSoftmax(float(scale), float(softcap) if problem.softcap else None)
        return _launch(problem, schedule, target, softmax, *args)


def _launch(
    p: FlashAttentionProblem, s: FlashAttentionSchedule, target: Target, softmax: OnlineSoftmax, *args: Any
) -> Any:
    t = Tiling(p, s)
    q, k, v, *lengths = args
    ctas = min(target.cores, t.tiles) if s.persistent else t.tiles
    launch = plgpu.kernel(
        kernel(p, s, softmax, ctas),
        out_type=results(t),
        scratch_types=tuple(scratch(t).values()),
        grid=(ctas,),
        grid_names=("cta",),
        num_threads=s.consumers + 1,
        thread_name="wg",
        # No scratch, because the lanes of one warp reduce each row.
        compiler_params=plgpu.CompilerParams(
            approx_math=True, reduction_scratch_bytes=0, lowering_semantics=plgpu.LoweringSemantics.Warpgroup
        ),
    )
    # Indices must be 32 bits wide, even if the user enables x64.
    with jax.enable_x64(False):
        rows = (t.q_rows, t.kv_rows, t.kv_rows)
        out, *lse = launch(*(padded(x, (n, None, None)) for x, n in zip((q, k, v), rows, strict=True)), *lengths)
    out = out[:, : p.q_len]
    return (out, lse[0][..., : p.q_len]) if p.return_lse else out
