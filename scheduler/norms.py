"""The public call ``tuned_rms_norm``, with a residual or without."""

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
    """``x / sqrt(mean(x^2) + eps) * weight`` along the last axis by the best known schedule.

    It is computed in float32, and rounded once. With a residual it is the norm of ``total = x + residual``, and `total`
    is returned, too: a step of a residual stream, as vLLM's ``fused_add_rms_norm``. The sum is rounded to the dtype of
    `x`, and the norm is that of the rounded sum (where XLA fuses both, it may leave that rounding out).

    Works where `tuned_matmul` works; derivatives are XLA's, in all operands. XLA also answers for a weight that is
    neither of the dtype of `x` nor float32, for a residual of another dtype than `x`, for arrays other than float32,
    bfloat16 or float16, and for empty ones.

    Args:
      x: ``[..., columns]``.
      weight: ``[columns]``, of the dtype of `x` or float32.
      eps: keeps rows of zeros finite; a number, no array.
      residual: of the shape and dtype of `x`. It is an operation of its own, "add_rms_norm", tuned as such.
      on_miss, backends, schedule: as in `tuned_matmul`.

    Returns:
      An array of the shape and dtype of `x`; with a residual that, and the sum, of the same shape and dtype.

    Raises:
      ValueError: `weight` is not as long as a row, or `residual` is not of the shape of `x`.
      CacheMiss, NoCandidate, IllegalSchedule, TypeError: as `tuned_matmul`.
    """
    if others:
        raise calls.unexpected(tuned_rms_norm, others)
    how = (on_miss, backends, schedule, calls.number("eps", eps))
    if residual is None:
        return calls.answer(_RMS_NORM, how, x, weight)
    return calls.answer(_ADD_RMS_NORM, how, x, residual, weight)


tuned_rms_norm.operation = RMS_NORM  # type: ignore[attr-defined]
_RMS_NORM, _ADD_RMS_NORM = calls.Signature(RMS_NORM, ("eps",)), calls.Signature(ADD_RMS_NORM, ("eps",))
