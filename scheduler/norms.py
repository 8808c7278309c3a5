"""The public function ``tuned_rms_norm``, with an optional residual."""

from __future__ import annotations

from typing import Any, Never, overload

import jax

from scheduler.dispatch import calls
from scheduler.dispatch.calls import Backends
from scheduler.dispatch.dispatch import OnMiss
from search_spaces.add_rms_norm import ADD_RMS_NORM
from search_spaces.rms_norm import RMS_NORM
from search_spaces.rms_norm.problem import EPS


@overload
def tuned_rms_norm(
    x: Any,
    weight: Any,
    *,
    eps: float = EPS,
    residual: None = None,
    on_miss: OnMiss | None = None,
    backends: Backends | None = None,
    schedule: Any = None,
) -> jax.Array: ...
@overload
def tuned_rms_norm(
    x: Any,
    weight: Any,
    *,
    eps: float = EPS,
    residual: Any,
    on_miss: OnMiss | None = None,
    backends: Backends | None = None,
    schedule: Any = None,
) -> tuple[jax.Array, jax.Array]: ...
def tuned_rms_norm(
    x: Any,
    weight: Any,
    *,
    eps: float = EPS,
    residual: Any = None,
    on_miss: OnMiss | None = None,
    backends: Backends | None = None,
    schedule: Any = None,
    **others: Never,
) -> jax.Array | tuple[jax.Array, jax.Array]:
    """Computes ``x / sqrt(mean(x^2) + eps) * weight`` along the last axis with the best known schedule.

    The computation is in float32 and the result is rounded once. With a residual, the function normalizes
    ``total = x + residual`` and also returns `total`, as vLLM's ``fused_add_rms_norm`` does. The sum is rounded to the
    dtype of `x` before it is normalized; XLA may skip that rounding if it fuses both steps.

    Works wherever `tuned_matmul` works. Derivatives in all operands are computed by XLA. The call falls back to XLA for
    a weight of a dtype other than float32 or that of `x`, for a residual of a dtype other than that of `x`, for arrays
    of a dtype other than float32, bfloat16 or float16, and for empty arrays.

    Args:
      x: ``[..., columns]``.
      weight: ``[columns]``, of the dtype of `x` or float32.
      eps: a number, not an array; keeps rows of zeros finite.
      residual: of the shape and dtype of `x`. This is a separate operation, "add_rms_norm", which is tuned separately.
      on_miss, backends, schedule: as in `tuned_matmul`.

    Returns:
      An array of the shape and dtype of `x`. With a residual, a pair of that array and the sum, of the same shape and
      dtype.

    Raises:
      ValueError: the length of `weight` is not that of a row, or `residual` does not have the shape of `x`.
      CacheMiss, NoCandidate, IllegalSchedule, TypeError: as in `tuned_matmul`.
    """
    if others:
        raise calls.unexpected(tuned_rms_norm, others)
    how = (on_miss, backends, schedule, calls.number("eps", eps))
    if residual is None:
        return calls.answer(_RMS_NORM, how, x, weight)
    return calls.answer(_ADD_RMS_NORM, how, x, residual, weight)


tuned_rms_norm.operation = RMS_NORM  # type: ignore[attr-defined]
_RMS_NORM, _ADD_RMS_NORM = calls.Signature(RMS_NORM, ("eps",)), calls.Signature(ADD_RMS_NORM, ("eps",))
