"""The public call ``tuned_scaled_matmul``: a product of 8-bit operands by their scales, tuned."""

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
    """``(a * a_scale) @ (b * b_scale)`` of 8-bit operands by the best known schedule for its shapes on this chip.

    Scales belong to rows of `a` and columns of `b` (as Qwix and MaxText quantize), or to blocks of 128 along k: of each
    row of `a`, and of 128 x 128 of `b` (DeepSeek-V3, arXiv:2412.19437, 3.3.2); each operand has its own kind. Sums are
    float32, and rounded once; or, where that program of XLA's was measured to be the fastest, those of operands that
    were scaled in bfloat16, as users write it (``schedule={"program": "float32"}`` or ``backends="pallas"`` leaves it
    out).

    Works where `tuned_matmul` works. The operands are quantized: a derivative is that of XLA's program for them. XLA
    also answers where they are not both float8_e4m3fn or both float8_e5m2, or a scale is not float32. A vmapped `a` is
    more rows.

    Args:
      a: ``[..., k]``.
      b: ``[k, n]``. The Hopper kernel reads ``[n, k]`` alone (`transpose_b`).
      a_scale: float32, ``[...]`` or ``[..., 1]``, one for each row; or ``[..., ceil(k / 128)]``; or one number.
      b_scale: float32, ``[n]`` or ``[1, n]``, one for each column; or ``[ceil(k / 128), ceil(n / 128)]``; or one
        number. With `transpose_b` turned as `b` is.
      transpose_b: `b` is ``[n, k]``.
      out_dtype: of the result: bfloat16, float16 or float32.
      on_miss, backends, schedule: as in `tuned_matmul`.

    Returns:
      ``[..., n]``.

    Raises:
      TypeError, ValueError: operands that do not multiply, or are complex; a result of another dtype; a scale of
        another shape, with those that it may have.
      CacheMiss, NoCandidate, IllegalSchedule: as `tuned_matmul`.
    """
    if others:
        raise calls.unexpected(tuned_scaled_matmul, others)
    dtype = str(jnp.dtype(jnp.bfloat16 if out_dtype is None else out_dtype))
    how = (on_miss, backends, schedule, calls.flag("transpose_b", transpose_b), dtype)
    return calls.answer(_CALLED, how, a, b, a_scale, b_scale)


tuned_scaled_matmul.operation = SCALED_MATMUL  # type: ignore[attr-defined]
_CALLED = calls.Signature(SCALED_MATMUL, ("transpose_b", "out_dtype"))
