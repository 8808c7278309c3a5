"""The attention gradients on Hopper: the supported problems and the launch.

Before the kernel, XLA computes delta (the row sums of out * d_out), converts the log-sum-exp to base 2, and zeroes the
float32 sums of dq. After the kernel, XLA scales and rounds these sums.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp

from search_spaces.attention.problem import SOFTCAP, fill_statistics, zero_queries
from search_spaces.flash_attention_backward.hopper import kernel, separate_dq, space
from search_spaces.flash_attention_backward.hopper.kernel import LOG2_E, Cta, scratch
from search_spaces.flash_attention_backward.hopper.plan import CONSUMERS, DqPlan, FlashAttentionBackwardSchedule, Plan
from search_spaces.flash_attention_backward.hopper.wide_kernel import (
    WideCta,
    WidePlan,
    is_wide,
    plan_of,
    refusal,
    wide_scratch,
)
from search_spaces.flash_attention_backward.problem import FlashAttentionBackwardProblem
from search_spaces.footprint import Footprint
from search_spaces.hopper import not_hopper, padded
from search_spaces.jax_compat import HAS_GPU_INTERPRETER, plgpu
from search_spaces.kernel import INDICES_OF_32_BITS, Kernel, padded_elements
from search_spaces.space import Columns, Space, round_up
from search_spaces.target import Target

HEAD_DIMS = (64, 96, 128)
_COMMON: Any = {
    "num_threads": CONSUMERS + 1,
    "thread_name": "wg",
    "compiler_params": plgpu.CompilerParams(
        approx_math=True, reduction_scratch_bytes=0, lowering_semantics=plgpu.LoweringSemantics.Warpgroup
    ),
}


class MosaicGpuFlashAttentionBackward(Kernel[FlashAttentionBackwardProblem, FlashAttentionBackwardSchedule]):
    backend = "mosaic_gpu"
    version = 2
    most_elements = INDICES_OF_32_BITS
    verified_on = frozenset({"sm_90"})  # tests/device on an NVIDIA H200

    def supports(self, problem: FlashAttentionBackwardProblem, target: Target) -> str | None:
        p = problem
        if reason := not_hopper(target):
            return reason
        if not HAS_GPU_INTERPRETER:  # The same JAX release introduced `jax.new_ref` as an operand.
            return "adds dq up in place, in an array that kernels take from JAX 0.11 on"
        if jnp.dtype(p.dtype).itemsize != 2:
            return f"multiplies transposed operands, which wgmma takes of 16 bits, not {p.dtype}"
        if is_wide(p):
            return refusal(p)
        for name, columns in (("head_dim", p.head_dim), ("head_dim_v", p.value_dim)):
            if columns not in HEAD_DIMS:
                return f"keeps dk and dv in registers: {name}={columns} is not one of {', '.join(map(str, HEAD_DIMS))}"
        return None

    def largest_array(self, problem: FlashAttentionBackwardProblem) -> int:
        # Sequences are padded to whole tiles.
        return padded_elements((s for s in problem.operands() if len(s.shape) == 4), -3, 256)

    def space(self, problem: FlashAttentionBackwardProblem, target: Target) -> Space[FlashAttentionBackwardSchedule]:
        return (space.wide_space if is_wide(problem) else space.space)(problem, target.cores)

    def footprint(self, problem: FlashAttentionBackwardProblem, schedules: Columns, target: Target) -> Footprint:
        return space.footprint(problem, schedules, target.cores)

    def run(
        self,
        problem: FlashAttentionBackwardProblem,
        schedule: FlashAttentionBackwardSchedule,
        target: Target,
        /,
        *args: Any,
        scale: float | None = None,
        softcap: float = SOFTCAP,
        **params: Any,
    ) -> tuple[jax.Array, ...]:
        p, plan = problem, plan_of(problem, schedule)
        q, k, v, out, lse, d_out, *rest = args
        d_lse = rest[0] if p.lse_cotangent else 0.0
        scale = p.default_scale() if scale is None else scale
        rows = int(round_up(p.q_len, DqPlan.rows) if plan.separate_dq else plan.dq_rows)
        # With an infinite log-sum-exp, probabilities are 0: for padded queries, and for those that see no key.
        lse = padded(jnp.where(jnp.isneginf(lse), jnp.inf, lse * LOG2_E), (rows,), jnp.inf)
        delta = jnp.sum(out.astype(jnp.float32) * d_out.astype(jnp.float32), axis=-1).swapaxes(1, 2) - d_lse
        delta = padded(fill_statistics(p, p.lengths(args), delta), (rows,))
        q, d_out = (padded(x, (plan.q_rows, None, None)) for x in (q, d_out))
        k, v = (padded(x, (plan.kv_rows, None, None)) for x in (k, v))
        lengths = [x for x in p.lengths(args) if x is not None]
        # Indices must be 32 bits wide, even if the user enables x64.
        if plan.separate_dq:
            with jax.enable_x64(False):
                operands = (*lengths, q, k, v, d_out, lse, delta)
                dq = _launch_dq(DqPlan(p), scale, softcap, q)(*operands)
                dk, dv = _launch(plan, scale, softcap, k, v)(*operands)
            return dq[:, : p.q_len], dk[:, : p.kv_len], dv[:, : p.kv_len]
        with jax.enable_x64(False):
            shape = (p.heads, p.head_dim, rows) if plan.transposed else (rows, p.heads, p.head_dim)
            sums = jax.new_ref(jnp.zeros((p.batch, *shape), jnp.float32))
            dk, dv = _launch(plan, scale, softcap, k, v)(*lengths, q, k, v, d_out, lse, delta, sums)
            dq = sums[...]
        dq = dq.transpose(0, 3, 1, 2) if plan.transposed else dq
        (dq,) = zero_queries(p, p.lengths(args), dq[:, : p.q_len])
        return (dq * scale).astype(p.dtype), dk[:, : p.kv_len], dv[:, : p.kv_len]


def _launch(plan: Plan, scale: float, softcap: float, k: Any, v: Any) -> Any:
    s, heads = plan.schedule, plan.problem.batch * plan.problem.kv_heads
    of, shared = (WideCta, wide_scratch(plan)) if isinstance(plan, WidePlan) else (Cta, scratch(plan))
    if heads % s.section:
        raise ValueError(f"{heads} heads of keys are no multiple of section={s.section}")
    return plgpu.kernel(
        kernel.kernel(plan, scale=scale, softcap=softcap, of=of),
        out_type=(jax.ShapeDtypeStruct(k.shape, k.dtype), jax.ShapeDtypeStruct(v.shape, v.dtype)),
        scratch_types=(shared,),
        grid=(heads // s.section, plan.kv_blocks, s.section),
        grid_names=("section", "kv_block", "head"),
        **_COMMON,
    )


def _launch_dq(plan: DqPlan, scale: float, softcap: float, q: Any) -> Any:
    return plgpu.kernel(
        separate_dq.kernel(plan, scale=scale, softcap=softcap),
        out_type=jax.ShapeDtypeStruct(q.shape, q.dtype),
        scratch_types=(separate_dq.scratch(plan),),
        grid=(plan.problem.batch, plan.problem.heads, plan.q_blocks),
        grid_names=("batch", "head", "q_block"),
        **_COMMON,
    )


__all__ = ["FlashAttentionBackwardSchedule", "MosaicGpuFlashAttentionBackward"]
