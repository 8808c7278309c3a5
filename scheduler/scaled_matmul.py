"""The public function ``tuned_scaled_matmul``: a tuned matmul of scaled 8-bit operands."""

from __future__ import annotations

from typing import Any, Never

import jax
import jax.numpy as jnp

from scheduler.dispatch import calls
from scheduler.dispatch.calls import Backends
from scheduler.dispatch.dispatch import OnMiss
from search_spaces.scaled_matmul import SCALED_MATMUL


def tuned_scaled_matmul(
    a: Any,
    b: Any,
    a_scale: Any,
    b_scale: Any,
    *,
    transpose_b: bool = False,
    out_dtype: Any = jnp.bfloat16,
    on_miss: OnMiss | None = None,
    backends: Backends | None = None,
    schedule: Any = None,
    **others: Never,
) -> jax.Array:
    """Computes ``(a * a_scale) @ (b * b_scale)`` for 8-bit operands with the best known schedule on this chip.

    Scales are per row of `a` and per column of `b` (as in Qwix and MaxText), or per block of 128 along k: for each row
    of `a`, and for blocks of 128 x 128 of `b` (DeepSeek-V3, arXiv:2412.19437, 3.3.2). Each operand has its own kind of
    scale. Sums are float32 and the result is rounded once. An XLA program that scales the operands in bfloat16, as
    users write it, is used if it was measured to be the fastest; ``schedule={"program": "float32"}`` or
    ``backends="pallas"`` excludes it.

    Works wherever `tuned_matmul` works. The operands are quantized, so the derivative is that of the XLA program. The
    call falls back to XLA unless both operands are float8_e4m3fn or both are float8_e5m2, and unless all scales are
    float32. Under `jax.vmap`, a batched `a` becomes more rows.

    Args:
      a: ``[..., k]``.
      b: ``[k, n]``. The Hopper kernel supports only ``[n, k]`` (`transpose_b`).
      a_scale: float32, ``[...]`` or ``[..., 1]``, one per row; or ``[..., ceil(k / 128)]``; or one number.
      b_scale: float32, ``[n]`` or ``[1, n]``, one per column; or ``[ceil(k / 128), ceil(n / 128)]``; or one number.
        With `transpose_b`, transposed like `b`.
      transpose_b: `b` is ``[n, k]``.
      out_dtype: dtype of the result: bfloat16, float16 or float32.
      on_miss, backends, schedule: as in `tuned_matmul`.

    Returns:
      An array ``[..., n]``.

    Raises:
      TypeError, ValueError: operands that cannot be multiplied or are complex, an unsupported result dtype, or a scale
        of the wrong shape; the message lists the supported shapes.
      CacheMiss, NoCandidate, IllegalSchedule: as in `tuned_matmul`.
    """
    if others:
        raise calls.unexpected(tuned_scaled_matmul, others)
    dtype = str(jnp.dtype(jnp.bfloat16 if out_dtype is None else out_dtype))
    how = (on_miss, backends, schedule, calls.flag("transpose_b", transpose_b), dtype)
    return calls.answer(_CALLED, how, a, b, a_scale, b_scale)


tuned_scaled_matmul.operation = SCALED_MATMUL  # type: ignore[attr-defined]
_CALLED = calls.Signature(SCALED_MATMUL, ("transpose_b", "out_dtype"))
