"""Problems that cuDNN's attention supports, forward and backward, and its assumed footprint."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

import jax.numpy as jnp
import numpy as np

from search_spaces.attention.problem import AttentionProblem
from search_spaces.footprint import Footprint, Operand, Phase
from search_spaces.problem import nbytes
from search_spaces.space import Columns, Space
from search_spaces.target import Target

# Extents of a tile for the cost model: those of FlashAttention-3 at a head size of 128.
BLOCK_Q = BLOCK_KV = 128
LEAST_ROWS = 64  # rows of one instruction (PTX ISA, wgmma.mma_async)


@dataclasses.dataclass(frozen=True)
class CudnnSchedule:
    """The only schedule: XLA and cuDNN select the engine."""

    engine: str = "heuristic"


def space() -> Space[CudnnSchedule]:
    return Space(CudnnSchedule, {"engine": (CudnnSchedule.engine,)})


def refusal(p: AttentionProblem, target: Target) -> str | None:
    """Returns why cuDNN is not used for a problem, forward or backward; None if it is.

    Covers the checks of JAX's binding (`jax._src.cudnn.fused_attention_stablehlo`), and cases that are wrong or
    unverified in cuDNN.
    """
    if target.platform != "cuda":
        return f"runs on NVIDIA GPUs, not on {target.kind}"
    if p.dtype == "float32":
        return "takes bfloat16 and float16"
    if p.softcap:
        return "caps no logits"
    if p.head_dim_v:
        return "takes values as wide as keys (others from cuDNN 9.10 on, unchecked here)"
    widest = 256 if _generation(target) >= 90 else 128
    if p.head_dim % 8 or p.head_dim > widest:
        return f"needs a head_dim that 8 divides, of at most {widest} on {target.architecture}"
    return _mask_refusal(p)


def _mask_refusal(p: AttentionProblem) -> str | None:
    if p.left is not None and not p.causal:
        return "a window without a causal mask reaches into the future with it (jax-ml/jax#39576)"
    if p.right is not None and not p.causal:
        return "has no window to the right"
    if p.causal and p.q_len != p.kv_len:
        return "a causal mask of other than as many queries as keys has not been checked with it"
    if p.causal and p.q_len == 1:
        return "its result of a single query with a causal mask is defective (cuDNN 9.18.1, known issues)"
    if p.causal and (p.q_lengths or p.kv_lengths):
        return "a causal mask with lengths has not been checked with it"
    return None


def _generation(target: Target) -> int:
    digits = "".join(filter(str.isdigit, target.architecture))
    return int(digits or 0)


def checked(p: AttentionProblem) -> bool:
    """Returns whether results were verified on a device: full-length sequences, causal or not, grouped heads."""
    return p.left is None and not (p.q_lengths or p.kv_lengths)


def window(p: AttentionProblem) -> int | None:
    """Returns the number of keys a query sees, its own included, as cuDNN counts; None means all keys up to its own."""
    return None if p.left is None else p.left + 1


def footprint(p: AttentionProblem, schedules: Columns, target: Target) -> Footprint:
    """Returns the footprint of a forward pass as of FlashAttention-3: cuDNN's tiles are not public."""
    one = np.ones(len(schedules))
    itemsize = int(jnp.dtype(p.dtype).itemsize)
    # With few queries, the heads of a group share the rows of one instruction, and keys are divided among the cores.
    packed = p.q_len * p.group <= LEAST_ROWS
    heads = p.kv_heads if packed else p.heads
    rows = p.q_len * p.group if packed else min(BLOCK_Q, p.q_len)
    computed_rows, columns = LEAST_ROWS if packed else BLOCK_Q, min(BLOCK_KV, p.kv_len)
    tiles = 1 if packed else -(-p.q_len // rows)
    steps = max(1.0, p.visible_pairs / (p.q_len * columns))
    splits = max(1, min(int(steps), target.cores // (heads * p.batch))) if packed else 1
    blocks = tiles * splits
    head_bytes = (p.head_dim + p.value_dim) * itemsize
    written = float(sum(map(nbytes, p.results())))
    return Footprint(
        arithmetic=p.arithmetic,
        grid=(blocks * one, heads * one, p.batch * one),
        step=Phase(
            loads=(Operand(bytes=one * columns * head_bytes, axes=(0, 1, 2) if packed else (1, 2)),),
            flops=one * 2 * computed_rows * columns * float(p.head_dim + p.value_dim),
            mufu_ops=one * computed_rows * columns,
            fp32_ops=one * 4.0 * computed_rows * columns,
        ),
        tile=Phase(
            loads=(Operand(bytes=one * rows * head_bytes / 2, axes=(0, 1, 2)),),
            bytes_written=one * written / (blocks * heads * p.batch),
        ),
        onchip_bytes=np.zeros(len(schedules), dtype=np.int64),
        steps=one * steps / splits,
        stages=2,
        consumers=2,
        ping_pong=True,
        delay_release=1,
        threads=256,
        persistent=True,
    )


# ------------------------------------------------------------------------------
# Converts cuDNN attention, ``jax.nn.dot_product_attention(implementation="cudnn")``, to a problem.

# The parameters that are read here, a parameter only used by dropout, and the one that optimize adds. Any other
# parameter means a feature that is not supported: a function of logits, from JAX 0.12 on.
KNOWN = {"mask_type", "sliding_window_length", "variadic_args", "dropout_rate", "layout", "scale", "seed", "stored"}


@dataclasses.dataclass(frozen=True)
class Asked:
    """The attention that a cuDNN equation computes.

    Attributes:
      fields: of the problem, except those that shapes determine.
      lengths: of queries and of keys, ``int32[batch]`` each; () if sequences have full length.
      scale: of logits.
    """

    fields: Mapping[str, Any]
    lengths: tuple[Any, ...]
    scale: float


def cudnn_problem(q: Any, k: Any, rest: tuple[Any, ...], params: Mapping[str, Any]) -> Asked | str:
    """Returns the attention of an equation, or the reason why no problem describes it.

    Args:
      q, k: objects with a shape.
      rest: the equation's inputs after q, k and v: bias, lengths and offsets of queries and keys, two page tables, and
        operands of a function of logits.
      params: of the equation, as in `jax._src.cudnn.fused_attention_stablehlo`.
    """
    _, q_lengths, kv_lengths, q_offsets, _, pages, _, *more = rest
    mask, window = params["mask_type"].name, params["sliding_window_length"]
    causal, padded = "CAUSAL" in mask, "PADDING" in mask
    refused = {
        "a bias": any(params["variadic_args"]),
        "dropout": params["dropout_rate"] > 0,
        "several sequences in one row": q_offsets.size > 0 or (padded and (q_lengths.ndim, kv_lengths.ndim) != (1, 1)),
        "keys in pages": pages.size > 0,
        "a function of logits": bool(more) or any(params[name] is not None for name in params.keys() - KNOWN),
        "heads before tokens": params["layout"] != 0,
        f"the mask {mask}": mask not in ("NO_MASK", "PADDING", "CAUSAL", "PADDING_CAUSAL"),
        "a window without a causal mask": window is not None and not causal,
        "a causal mask of other than as many queries as keys": causal and q.shape[1] != k.shape[1],
    }
    for what, there in refused.items():
        if there:
            return f"attention by cuDNN with {what} is left to it"
    fields: dict[str, Any] = {"causal": causal, "q_lengths": padded, "kv_lengths": padded}
    if window is not None:
        fields["window_left"] = window - 1  # cuDNN counts the query's own key
    return Asked(fields, (q_lengths, kv_lengths) if padded else (), params["scale"])
