"""JAX's own Hopper attention as a rival: a kernel with a space, timed by the same workers as ours.

The kernel is `jax.experimental.pallas.ops.gpu.attention_mgpu`: float16 alone, whatever it says of bfloat16, for its
scratch memory is of float16; forward here, since its backward pass refuses causal masks.
"""

from __future__ import annotations

import dataclasses
import importlib
from typing import Any

import jax

from search_spaces import Columns, Footprint, Kernel, Space, Target
from search_spaces.attention import cudnn
from search_spaces.flash_attention import FlashAttentionProblem


@dataclasses.dataclass(frozen=True)
class JaxAttentionSchedule:
    """The fields of that kernel's `TuningConfig`; each of two warpgroups computes `block_q` rows."""

    block_q: int
    block_kv: int
    max_concurrent_steps: int


class JaxAttention(Kernel[FlashAttentionProblem, JaxAttentionSchedule]):
    backend = "jax_attention"

    def supports(self, problem: FlashAttentionProblem, target: Target) -> str | None:
        p = problem
        if target.platform != "cuda" or target.architecture != "sm_90":
            return f"is written for NVIDIA Hopper (sm_90), not for {target.kind} ({target.architecture})"
        plain = FlashAttentionProblem(
            p.batch, p.q_len, p.kv_len, p.heads, p.kv_heads, p.head_dim, causal=p.causal, dtype="float16"
        )
        if p != plain:
            return "computes float16, and no window, lengths, caps or statistics"
        if p.q_len % 128 or p.kv_len % 64 or p.head_dim % 64:
            return "needs blocks that divide the lengths"
        return None

    def space(self, problem: FlashAttentionProblem, target: Target) -> Space[JaxAttentionSchedule]:
        p = problem
        return Space(
            JaxAttentionSchedule,
            {"block_q": (64,), "block_kv": (64, 128, 256), "max_concurrent_steps": (2, 3, 4)},
            {
                "blocks divide the lengths": lambda s: (p.q_len % (2 * s.block_q) == 0) & (p.kv_len % s.block_kv == 0),
                "fits on chip": lambda s: (
                    2 * p.head_dim * (2 * s.block_q + 2 * s.max_concurrent_steps * s.block_kv) <= 225 * 1024
                ),
                "fits in registers": lambda s: p.head_dim + s.block_kv <= 384,
            },
        )

    def footprint(self, problem: FlashAttentionProblem, schedules: Columns, target: Target) -> Footprint:
        return cudnn.footprint(problem, schedules, target, products=2)  # its space is tried whole

    def run(
        self, problem: FlashAttentionProblem, schedule: JaxAttentionSchedule, target: Target, /, *args: Any, **_: Any
    ) -> jax.Array:
        theirs = importlib.import_module("jax.experimental.pallas.ops.gpu.attention_mgpu")
        q, k, v = args
        config = theirs.TuningConfig(**vars(schedule), causal=problem.causal)
        out: jax.Array = theirs.attention(q * q.dtype.type(problem.default_scale()), k, v, config)
        return out


JAX_ATTENTION = JaxAttention()
