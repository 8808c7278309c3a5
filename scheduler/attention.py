"""The public call ``tuned_flash_attention``: as `jax.nn.dot_product_attention`, and tuned as every other."""

from __future__ import annotations

from typing import Any, Literal, Never, overload

import jax

from scheduler.dispatch import calls
from scheduler.dispatch.calls import Backends
from scheduler.dispatch.dispatch import OnMiss
from search_spaces.flash_attention import FLASH_ATTENTION
from search_spaces.flash_attention.front_end import bounds


@overload
def tuned_flash_attention(
    q: Any,
    k: Any,
    v: Any,
    *,
    causal: bool = False,
    scale: float | None = None,
    window: int | tuple[int | None, int | None] | None = None,
    softcap: float | None = None,
    q_lengths: Any = None,
    kv_lengths: Any = None,
    return_lse: Literal[False] = False,
    deterministic: bool = False,
    on_miss: OnMiss | None = None,
    backends: Backends | None = None,
    schedule: Any = None,
) -> jax.Array: ...
@overload
def tuned_flash_attention(
    q: Any,
    k: Any,
    v: Any,
    *,
    causal: bool = False,
    scale: float | None = None,
    window: int | tuple[int | None, int | None] | None = None,
    softcap: float | None = None,
    q_lengths: Any = None,
    kv_lengths: Any = None,
    return_lse: Literal[True],
    deterministic: bool = False,
    on_miss: OnMiss | None = None,
    backends: Backends | None = None,
    schedule: Any = None,
) -> tuple[jax.Array, jax.Array]: ...
def tuned_flash_attention(
    q: Any,
    k: Any,
    v: Any,
    *,
    causal: bool = False,
    scale: float | None = None,
    window: int | tuple[int | None, int | None] | None = None,
    softcap: float | None = None,
    q_lengths: Any = None,
    kv_lengths: Any = None,
    return_lse: bool = False,
    deterministic: bool = False,
    on_miss: OnMiss | None = None,
    backends: Backends | None = None,
    schedule: Any = None,
    **others: Never,
) -> jax.Array | tuple[jax.Array, jax.Array]:
    """``softmax(q k^T * scale) v``, as `jax.nn.dot_product_attention`, by the best known schedule on this chip.

    Layout and meaning are that function's: query head n uses key head ``n // (heads // kv_heads)``, and a causal mask
    is aligned at the top left, so that query i sees keys 0 to i however many keys there are. In one thing they differ:
    a query that sees no key at all (its length or its window leaves none) has a result of zeros here, a log-sum-exp of
    minus infinity, and no part in any gradient. Logits, softmax and sums are float32; probabilities are rounded to the
    dtype of the operands before they multiply values.

    Works where `tuned_matmul` works, but in reverse mode alone: `jax.jvp` raises a TypeError, as of any
    `jax.custom_vjp`. The backward pass is an operation of its own, "flash_attention_backward", tuned and cached as
    such, and under a derivative the forward pass also returns the log-sum-exp: what is tuned for training is
    ``return_lse=True`` and that. XLA answers for q, k and v of another dtype than bfloat16, float16 or float32, which
    is one for all three, and for empty arrays.

    Args:
      q: ``[batch, q_len, heads, head_dim]`` or ``[q_len, heads, head_dim]``.
      k: ``[batch, kv_len, kv_heads, head_dim]`` or without `batch`; `heads` is a multiple of `kv_heads`.
      v: ``[batch, kv_len, kv_heads, head_dim_v]`` likewise; `head_dim_v` may differ from `head_dim`.
      causal: query i sees no key beyond i.
      scale: of logits, a number; None is ``1 / sqrt(head_dim)``.
      window: query i sees keys from ``i - left`` to ``i + right``, both included: an integer of 0 or more for both, or
        two, of which one may be None.
      softcap: logits become ``softcap * tanh(logits / softcap)``; a finite number above 0.
      q_lengths: ``int32[batch]``: the first so many queries of each sequence are there, the results of others zeros.
      kv_lengths: ``int32[batch]``: the first so many keys of each sequence are there.
      return_lse: return the log-sum-exp of each query's logits, too.
      deterministic: gradients are the same bits in every run.
      on_miss, backends, schedule: as in `tuned_matmul`; "pallas" leaves out cuDNN, too. A `schedule` is one of the
        forward pass as it is called, and the passes of a derivative do without it.

    Returns:
      ``[batch, q_len, heads, head_dim_v]`` or without `batch`; or that and the log-sum-exp, natural, in float32:
      ``[batch, heads, q_len]`` or without `batch`.

    Raises:
      CacheMiss, NoCandidate, IllegalSchedule, TypeError, ValueError: as `tuned_matmul`, and what
        `jax.nn.dot_product_attention` refuses.
    """
    if others:
        raise calls.unexpected(tuned_flash_attention, others)
    number = None if scale is None else calls.number("scale", scale)
    cap = None if softcap is None else calls.number("softcap", softcap)
    names = {"causal": causal, "return_lse": return_lse, "deterministic": deterministic}
    is_causal, with_lse, same_bits = (calls.flag(name, value) for name, value in names.items())
    sides = None if window is None else bounds(window)
    how = (on_miss, backends, schedule, is_causal, number, sides, cap, with_lse, same_bits)
    return calls.answer(_CALLED, how, q, k, v, q_lengths, kv_lengths)


tuned_flash_attention.operation = FLASH_ATTENTION  # type: ignore[attr-defined]
_CALLED = calls.Signature(
    FLASH_ATTENTION,
    ("causal", "scale", "window", "softcap", "return_lse", "deterministic"),
    last=("q_lengths", "kv_lengths"),
)
