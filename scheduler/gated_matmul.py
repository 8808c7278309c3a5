"""The public call ``tuned_gated_matmul``: both products of a gated linear unit and what joins them, tuned as one."""

from __future__ import annotations

from typing import Any, Never

import jax

from scheduler.dispatch import calls
from scheduler.dispatch.calls import Backends
from scheduler.dispatch.dispatch import OnMiss
from search_spaces.gated_matmul import GATED_MATMUL
from search_spaces.matmul.epilogue import Activation


def tuned_gated_matmul(
    x: Any,
    w: Any,
    *,
    activation: Activation = "silu",
    bias: Any = None,
    transpose_w: bool = False,
    on_miss: OnMiss | None = None,
    backends: Backends | None = None,
    schedule: Any = None,
    **others: Never,
) -> jax.Array:
    """``activation(x @ gate + gate_bias) * (x @ up + up_bias)`` by the best known schedule for its shapes on this chip.

    One kernel reads `x` once and writes the result alone. Sums, biases, activation and the product of both factors are
    float32, and rounded once; or, where that program of XLA's was measured to be the fastest, rounded after each step,
    as users write it (``schedule={"program": "float32"}`` or ``backends="pallas"`` leaves it out).

    Works where `tuned_matmul` works. Under a derivative both products, by `tuned_matmul`'s kernels, are rounded and
    kept, and the backward pass is of such products, too. XLA also answers for real operands of 16 bits or more
    that are not both bfloat16 or float16, and for empty ones. A vmapped `x` is more rows; of vmapped weights
    each takes a call of its own.

    Args:
      x: ``[..., k]``.
      w: ``[k, 2 * n]``, whose first half is the gate's; or a pair ``(gate, up)`` of arrays ``[k, n]``, which nothing
        joins.
      activation: "silu" (SwiGLU), "gelu" (in its tanh form; GeGLU) or "relu" (ReGLU).
      bias: ``[2 * n]``, or a pair of ``[n]``.
      transpose_w: `w` is ``[2 * n, k]``, or a pair of ``[n, k]``: read in that layout, not copied.
      on_miss, backends, schedule: as in `tuned_matmul`.

    Returns:
      ``[..., n]``, of the dtype of the operands.

    Raises:
      TypeError, ValueError: weights or a bias of another shape, an unknown activation; operands of integers, of 8 bits
        or complex; as `jnp.matmul`.
      CacheMiss, NoCandidate, IllegalSchedule: as `tuned_matmul`.
    """
    if others:
        raise calls.unexpected(tuned_gated_matmul, others)
    gate, up = _apart(w, "w")
    gate_bias, up_bias = _apart(bias, "bias")
    how = (on_miss, backends, schedule, activation, calls.flag("transpose_w", transpose_w))
    return calls.answer(_CALLED, how, x, gate, up, gate_bias, up_bias)


def _apart(given: Any, name: str) -> tuple[Any, Any]:
    """A pair as it is; an array as the first of a pair without a second."""
    if not isinstance(given, tuple | list):
        return given, None
    if len(given) != 2:
        raise ValueError(f"{name} is one array or a pair of them, (gate, up), and not {len(given)}")
    return given[0], given[1]


tuned_gated_matmul.operation = GATED_MATMUL  # type: ignore[attr-defined]
_CALLED = calls.Signature(GATED_MATMUL, ("activation", "transpose_w"), last=("up", "bias", "up_bias"))
