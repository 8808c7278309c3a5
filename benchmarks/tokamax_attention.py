"""tokamax's attention on Hopper as a rival, where tokamax is installed: a kernel with a space, timed as ours are.

It is the Mosaic GPU kernel of `tokamax.dot_product_attention`, forward, by the config that its heuristics name: tiles
of 64 queries for each of two warpgroups, two stages of the widest blocks of keys that shared memory has room for; and
persistent, which they say but for causal masks, or not.
"""

from __future__ import annotations

import dataclasses
import importlib
import importlib.util
from typing import Any

import jax

from search_spaces import Columns, Footprint, Kernel, Space, Target
from search_spaces.attention import cudnn
from search_spaces.flash_attention import FlashAttentionProblem

MODULE = "tokamax._src.ops.attention.pallas_mosaic_gpu"  # the public function takes its classes, and does not name them
BLOCK_Q, STAGES = 64, 2
MOST_BYTES = 227 * 1024  # of shared memory, that a CTA has on Hopper (CUDA C++ Programming Guide, compute capabilities)


@dataclasses.dataclass(frozen=True)
class TokamaxSchedule:
    """Fields of tokamax's `ConfigSM90`."""

    block_kv: int
    persistent: bool


class TokamaxAttention(Kernel[FlashAttentionProblem, TokamaxSchedule]):
    backend = "tokamax"

    def supports(self, problem: FlashAttentionProblem, target: Target) -> str | None:
        p = problem
        if importlib.util.find_spec("tokamax") is None:
            return "needs tokamax: pip install tokamax"
        if target.platform != "cuda" or target.architecture != "sm_90":
            return f"is timed on NVIDIA Hopper (sm_90), not on {target.kind} ({target.architecture})"
        if p.dtype not in ("bfloat16", "float16") or p.softcap or p.return_lse or p.q_lengths:
            return "is timed with 16-bit operands, without caps, statistics and lengths of queries"
        return None

    def space(self, problem: FlashAttentionProblem, target: Target) -> Space[TokamaxSchedule]:
        p = problem

        def onchip_bytes(block_kv: Any) -> Any:
            """Of queries and results, and of the stages of keys and values, 16-bit as they are."""
            return 2 * (2 * BLOCK_Q * (p.head_dim + p.value_dim) + STAGES * block_kv * (p.head_dim + p.value_dim))

        return Space(
            TokamaxSchedule,
            {"block_kv": (128, 64), "persistent": (True, False)},
            {"the widest block that fits on chip": lambda s: (s.block_kv == 128) == (onchip_bytes(128) <= MOST_BYTES)},
        )

    def footprint(self, problem: FlashAttentionProblem, schedules: Columns, target: Target) -> Footprint:
        return cudnn.footprint(problem, schedules, target, products=2)  # its space is tried whole

    def run(
        self, problem: FlashAttentionProblem, schedule: TokamaxSchedule, target: Target, /, *args: Any, **_: Any
    ) -> jax.Array:
        tokamax, theirs = importlib.import_module("tokamax"), importlib.import_module(MODULE)
        p, (q, k, v), of = problem, args[:3], problem.lengths(args)
        config = theirs.ConfigSM90(block_q=BLOCK_Q, num_stages=STAGES, **vars(schedule))
        bounded = p.left is not None or (p.right is not None and not p.causal)
        right = 0 if p.causal else p.kv_len if p.right is None else p.right
        out: jax.Array = tokamax.dot_product_attention(
            q,
            k,
            v,
            scale=p.default_scale(),
            is_causal=p.causal and not bounded,
            key_value_seq_lengths=of.kv,
            local_window_size=(p.q_len if p.left is None else p.left, right) if bounded else None,
            implementation=(theirs.PallasMosaicGpuFlashAttention(config=config),),
        )
        return out


TOKAMAX_ATTENTION = TokamaxAttention()
