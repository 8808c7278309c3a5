"""The public function of attention."""

from __future__ import annotations

from typing import Any, Literal, Unpack, overload

import jax

from scheduler.dispatch import calls
from scheduler.tuned_calls import Selection, public, selected
from search_spaces.flash_attention import FLASH_ATTENTION, bounds


class _AttentionOptions(Selection, total=False):
    causal: bool
    scale: float | None
    window: int | tuple[int | None, int | None] | None
    softcap: float | None
    q_lengths: Any
    kv_lengths: Any
    deterministic: bool


@overload
def tuned_flash_attention(
    q: Any, k: Any, v: Any, *, return_lse: Literal[False] = False, **options: Unpack[_AttentionOptions]
) -> jax.Array: ...
@overload
def tuned_flash_attention(
    q: Any, k: Any, v: Any, *, return_lse: Literal[True], **options: Unpack[_AttentionOptions]
) -> tuple[jax.Array, jax.Array]: ...
@public(FLASH_ATTENTION)
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
    **selection: Unpack[Selection],
) -> jax.Array | tuple[jax.Array, jax.Array]:
    """Computes ``softmax(q k^T * scale) v`` with the best known schedule on this chip.

    Layout and semantics are those of `jax.nn.dot_product_attention`: query head n uses key head
    ``n // (heads // kv_heads)``, and the causal mask is aligned at the top left, so that query i sees keys 0 to i for
    any number of keys. There is one difference. If the lengths or the window leave no key for a query, its result here
    is zeros, its log-sum-exp is minus infinity, and it contributes to no gradient. Logits, softmax and sums are
    float32. Probabilities are rounded to the dtype of the operands before they multiply values.

    Works wherever `tuned_matmul` works, but in reverse mode only: `jax.jvp` raises a TypeError, as for any
    `jax.custom_vjp`. The backward pass is a separate operation, "flash_attention_backward", which is tuned and cached
    separately. Under a derivative, the forward pass also returns the log-sum-exp, so for training tune
    ``return_lse=True`` and "flash_attention_backward". The call falls back to XLA for empty arrays, and unless q, k and
    v have the same dtype and it is bfloat16, float16 or float32.

    Args:
      q: ``[batch, q_len, heads, head_dim]`` or ``[q_len, heads, head_dim]``.
      k: ``[batch, kv_len, kv_heads, head_dim]`` or without `batch`; `heads` is a multiple of `kv_heads`.
      v: ``[batch, kv_len, kv_heads, head_dim_v]`` or without `batch`; `head_dim_v` may differ from `head_dim`.
      causal: query i sees no key beyond i.
      scale: factor of the logits, a number; None means ``1 / sqrt(head_dim)``.
      window: query i sees keys from ``i - left`` to ``i + right``, inclusive. One integer, 0 or more, sets both; a pair
        ``(left, right)`` sets each, and None in the pair means no limit.
      softcap: logits become ``softcap * tanh(logits / softcap)``; a finite number above 0.
      q_lengths: ``int32[batch]``: the number of valid queries of each sequence; results of the other queries are zeros.
      kv_lengths: ``int32[batch]``: the number of valid keys of each sequence.
      return_lse: also return the log-sum-exp of each query's logits.
      deterministic: gradients are bitwise reproducible between runs.
      on_miss, backends, schedule: as in `tuned_matmul`; "pallas" excludes cuDNN, too. A `schedule` applies to the
        forward pass of this call only, not to the passes of a derivative.

    Returns:
      An array ``[batch, q_len, heads, head_dim_v]`` or without `batch`. With `return_lse`, a pair of that array and the
      natural log-sum-exp in float32, ``[batch, heads, q_len]`` or without `batch`.

    Raises:
      CacheMiss, NoCandidate, IllegalSchedule, TypeError, ValueError: as in `tuned_matmul`, and for arguments that
        `jax.nn.dot_product_attention` rejects.
    """
    number = None if scale is None else calls.number("scale", scale)
    cap = None if softcap is None else calls.number("softcap", softcap)
    names = {"causal": causal, "return_lse": return_lse, "deterministic": deterministic}
    is_causal, with_lse, same_bits = (calls.flag(name, value) for name, value in names.items())
    sides = None if window is None else bounds(window)
    call_options = (*selected(tuned_flash_attention, selection), is_causal, number, sides, cap, with_lse, same_bits)
    return calls.answer(_ATTENTION_CALLED, call_options, q, k, v, q_lengths, kv_lengths)


_ATTENTION_CALLED = calls.Signature(
    FLASH_ATTENTION,
    ("causal", "scale", "window", "softcap", "return_lse", "deterministic"),
    last=("q_lengths", "kv_lengths"),
)
