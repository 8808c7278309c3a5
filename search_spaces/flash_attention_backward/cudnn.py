"""The gradients of flash attention by cuDNN: the vendor's baseline on NVIDIA GPUs, which may also be selected."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import numpy as np

from search_spaces import jax_compat
from search_spaces.attention import cudnn
from search_spaces.attention.cudnn import CudnnSchedule
from search_spaces.attention.problem import SOFTCAP
from search_spaces.flash_attention_backward.hopper.plan import BLOCK_KV, FlashAttentionBackwardSchedule
from search_spaces.flash_attention_backward.hopper.space import footprint
from search_spaces.flash_attention_backward.hopper.wide_kernel import BLOCK_KV as WIDE_BLOCK_KV
from search_spaces.flash_attention_backward.hopper.wide_kernel import is_wide
from search_spaces.flash_attention_backward.problem import FlashAttentionBackwardProblem
from search_spaces.footprint import Footprint
from search_spaces.kernel import Kernel
from search_spaces.space import Columns, Space
from search_spaces.target import Target

# Lane operations of cuDNN's kernel for heads wider than 128, relative to this package's (fitted to four problems).
WIDE_LANES = 1.5


class CudnnFlashAttentionBackward(Kernel[FlashAttentionBackwardProblem, CudnnSchedule]):
    """The kernel of the derivative of ``jax.nn.dot_product_attention(implementation="cudnn")``."""

    backend = "cudnn"
    version = 1
    vendor = "cuDNN"
    verified_on = frozenset({"sm_90"})  # tests/device on an NVIDIA H200

    def supports(self, problem: FlashAttentionBackwardProblem, target: Target) -> str | None:
        p = problem
        if p.lse_cotangent:
            return "takes no cotangent of the log-sum-exp"
        if p.deterministic:
            return "sums dq in any order, unless all of XLA is told to be deterministic"
        if p.q_lengths or p.kv_lengths:
            return "its gradients beyond a length have not been checked"
        return cudnn.refusal(p, target)

    def space(self, problem: FlashAttentionBackwardProblem, target: Target) -> Space[CudnnSchedule]:
        return cudnn.space()

    def footprint(self, problem: FlashAttentionBackwardProblem, schedules: Columns, target: Target) -> Footprint:
        """Returns the footprint of this package's kernel, as an approximation: cuDNN's is not public.

        The ratio of the times of both kernels deviates by 4 % (21 problems on an H200).
        """
        wide = is_wide(problem)
        schedule = FlashAttentionBackwardSchedule(
            block_q=128 if problem.head_dim <= 64 else 64,
            q_stages=2,
            do_stages=2,
            ds_stages=2,
            overlap=False,
            section=1,
            block_kv=WIDE_BLOCK_KV if wide else BLOCK_KV,
        )
        like = footprint(problem, Columns.of([schedule] * len(schedules)), target.cores)
        step = dataclasses.replace(like.step, fp32_ops=like.step.fp32_ops * (WIDE_LANES if wide else 1.0))
        return dataclasses.replace(like, step=step, onchip_bytes=np.zeros(len(schedules), np.int64))

    def verified(self, problem: FlashAttentionBackwardProblem, schedules: Columns, target: Target) -> bool:
        return target.architecture in self.verified_on and cudnn.checked(problem)

    def run(
        self,
        problem: FlashAttentionBackwardProblem,
        schedule: CudnnSchedule,
        target: Target,
        /,
        *args: Any,
        scale: float | None = None,
        softcap: float = SOFTCAP,
    ) -> tuple[jax.Array, ...]:
        p = problem
        q, k, v, out, lse, d_out = args
        return jax_compat.cudnn_attention_backward(
            q,
            k,
            v,
            out,
            lse,
            d_out,
            scale=p.default_scale() if scale is None else scale,
            causal=p.causal,
            window=cudnn.window(p),
        )
