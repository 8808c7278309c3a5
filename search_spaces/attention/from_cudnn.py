"""Converts cuDNN attention, ``jax.nn.dot_product_attention(implementation="cudnn")``, to a problem."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

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


def asked(q: Any, k: Any, rest: tuple[Any, ...], params: Mapping[str, Any]) -> Asked | str:
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
