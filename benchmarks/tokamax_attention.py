"""tokamax's attention on Hopper as a rival, where tokamax is installed: kernels with spaces, timed as ours are.

These are the Mosaic GPU kernels of `tokamax.dot_product_attention`, forward and backward, asked for by name, so that no
other takes their place: by the config that its heuristics choose, and by some that tokamax 0.0.17 brings along as the
fastest of a problem on an H100. It brings none for an H200, so that its heuristics answer there, and none for one
query: there it is given what its config has for that, the heads of a group as rows of one tile, and keys divided among
blocks.
"""

from __future__ import annotations

import ast
import dataclasses
import importlib
from typing import Any

import jax
import jax.numpy as jnp

from search_spaces import Columns, Footprint, Kernel, Space, Target
from search_spaces.attention import cudnn
from search_spaces.attention.problem import AttentionProblem
from search_spaces.flash_attention import FlashAttentionProblem
from search_spaces.flash_attention_backward import FlashAttentionBackwardProblem

MODULE = "tokamax._src.ops.attention.pallas_mosaic_gpu"  # the public function takes its classes, and does not name them
MOST_BYTES = 227 * 1024  # of shared memory, that a CTA has on Hopper (CUDA C++ Programming Guide, compute capabilities)
BARRIER_BYTES = 1024  # for barriers, and rounding: more than any of these configs asks for
DEFAULT = "default"
# Each of two warpgroups computes block_q rows; all are of grids that are not persistent.
FORWARD = [
    {"block_q": block_q, "block_kv": block_kv, "num_stages": num_stages}
    for block_q, block_kv, num_stages in ((64, 128, 2), (64, 128, 3), (64, 64, 2), (64, 256, 3), (128, 128, 3))
]
DECODE = [
    {"block_q": 64, "block_kv": 128, "num_stages": 3, "fold_q_sequence_heads": True, "split_k": split_k}
    for split_k in (1, 2, 8, 32)
]
# What the default is, but for more stages, twice the queries, or one warpgroup.
BACKWARD = [
    {
        "block_q_dkv": block_q,
        "block_kv_dkv": 64,
        "block_q_dq": block_q,
        "block_kv_dq": 64,
        "num_stages": num_stages,
        "compute_wgs": warpgroups,
    }
    for block_q, num_stages, warpgroups in ((64, 3, 2), (128, 2, 2), (128, 3, 2), (64, 2, 1))
]


@dataclasses.dataclass(frozen=True)
class TokamaxSchedule:
    """A config of tokamax's.

    Attributes:
      config: fields and values of its class, or "default": what its heuristics choose.
    """

    config: str


def fields(config: str) -> dict[str, Any] | None:
    """Those of tokamax's class; None is the default."""
    if config == DEFAULT:
        return None
    return {name: ast.literal_eval(value) for name, value in (field.split("=") for field in config.split())}


def _space(configs: list[dict[str, Any]]) -> Space[TokamaxSchedule]:
    spelled = (" ".join(f"{name}={value}" for name, value in config.items()) for config in configs)
    return Space(TokamaxSchedule, {"config": (DEFAULT, *spelled)})


def _refusal(p: AttentionProblem, target: Target) -> str | None:
    """Why the kernels of either pass are not asked; None where they are."""
    if target.platform != "cuda" or target.architecture != "sm_90":
        return f"is timed on NVIDIA Hopper (sm_90), not on {target.kind} ({target.architecture})"
    if p.dtype not in ("bfloat16", "float16") or p.softcap or p.q_lengths or p.head_dim_v:
        return "is timed with 16-bit operands, values as wide as keys, and without caps and lengths of queries"
    if p.head_dim > 256:
        return "has no config for a head_dim beyond 256 that fits on chip"
    return _missing()


def _missing() -> str | None:
    try:
        importlib.import_module(MODULE)
    except ImportError as error:
        return f"needs tokamax (pip install tokamax): {error}"
    return None


class TokamaxAttention(Kernel[FlashAttentionProblem, TokamaxSchedule]):
    backend = "tokamax"

    def supports(self, problem: FlashAttentionProblem, target: Target) -> str | None:
        if problem.return_lse:
            return "is timed without the log-sum-exp, which it returns as two arrays"
        return _refusal(problem, target)

    def space(self, problem: FlashAttentionProblem, target: Target) -> Space[TokamaxSchedule]:
        p = problem

        def fits(block_q: int, block_kv: int, num_stages: int, **_: Any) -> bool:
            stage_bytes = 2 * block_kv * (p.head_dim + p.value_dim)
            return 4 * block_q * p.head_dim + num_stages * stage_bytes + BARRIER_BYTES <= MOST_BYTES

        def divides(block_kv: int, split_k: int = 1, **_: Any) -> bool:
            """Of all keys and no others: a part that sees fewer is refused."""
            whole = not p.kv_lengths and p.left is None and p.right is None and p.kv_len % (split_k * block_kv) == 0
            return split_k == 1 or whole

        configs = DECODE if p.q_len == 1 else FORWARD
        return _space([config for config in configs if fits(**config) and divides(**config)])

    def footprint(self, problem: FlashAttentionProblem, schedules: Columns, target: Target) -> Footprint:
        return cudnn.footprint(problem, schedules, target, products=2)  # its space is tried whole

    def run(
        self, problem: FlashAttentionProblem, schedule: TokamaxSchedule, target: Target, /, *args: Any, **_: Any
    ) -> jax.Array:
        tokamax, theirs = importlib.import_module("tokamax"), importlib.import_module(MODULE)
        p, (q, k, v), of = problem, args[:3], problem.lengths(args)
        named = fields(schedule.config)
        config = named and theirs.ConfigSM90(**named)
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


class TokamaxAttentionBackward(Kernel[FlashAttentionBackwardProblem, TokamaxSchedule]):
    """The kernels of its derivative, two: of the queries, and of keys and values."""

    backend = "tokamax"

    def supports(self, problem: FlashAttentionBackwardProblem, target: Target) -> str | None:
        p = problem
        if p.lse_cotangent or p.kv_lengths or p.left is not None or (p.right is not None and not p.causal):
            return "is timed without a cotangent of the log-sum-exp, lengths and windows"
        return _refusal(p, target)

    def space(self, problem: FlashAttentionBackwardProblem, target: Target) -> Space[TokamaxSchedule]:
        width = 2 * (problem.head_dim + problem.value_dim)

        def fits(
            block_q_dkv: int, block_kv_dkv: int, block_q_dq: int, block_kv_dq: int, num_stages: int, compute_wgs: int
        ) -> bool:
            dq = compute_wgs * block_q_dq + num_stages * block_kv_dq
            dkv = compute_wgs * block_kv_dkv + num_stages * block_q_dkv
            return width * max(dq, dkv) + 12 * num_stages * block_q_dkv + BARRIER_BYTES <= MOST_BYTES

        return _space([config for config in BACKWARD if fits(**config)])

    def footprint(self, problem: FlashAttentionBackwardProblem, schedules: Columns, target: Target) -> Footprint:
        return cudnn.footprint(problem, schedules, target, products=5)  # its space is tried whole

    def run(
        self, problem: FlashAttentionBackwardProblem, schedule: TokamaxSchedule, target: Target, /, *args: Any, **_: Any
    ) -> tuple[jax.Array, ...]:
        theirs = importlib.import_module(MODULE)
        q, k, v, out, lse, d_out = args
        forward = theirs.PallasMosaicGpuFlashAttention()
        named = fields(schedule.config)
        backward = forward.vjp.replace(config=theirs.vjp.Config(**named)) if named else forward.vjp
        bound = forward.bind(q, k, v, is_causal=problem.causal, logits_scale=problem.default_scale())
        # Its residuals are the largest logit and the sum of exponentials beyond it: lse and 1 mean the same.
        gradients = backward((lse, jnp.ones_like(lse)), out, d_out, *bound.args, **bound.kwargs)
        return tuple(gradients[name] for name in ("q", "k", "v"))


TOKAMAX_ATTENTION = TokamaxAttention()
TOKAMAX_ATTENTION_BACKWARD = TokamaxAttentionBackward()
