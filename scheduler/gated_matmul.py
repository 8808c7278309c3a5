"""The public function ``tuned_gated_matmul``: a gated linear unit, tuned as one operation."""

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
    """Computes ``activation(x @ gate + gate_bias) * (x @ up + up_bias)`` with the best known schedule on this chip.

    One kernel reads `x` once and writes only the result. Sums, biases, activation and the product of both factors are
    float32, and the result is rounded once. An XLA program that rounds after each step, as users write it, is used if
    it was measured to be the fastest; ``schedule={"program": "float32"}`` or ``backends="pallas"`` excludes it.

    Works wherever `tuned_matmul` works. Under a derivative, the kernels of `tuned_matmul` compute both matmuls, whose
    results are rounded and saved, and the backward pass uses such matmuls, too. The call falls back to XLA for empty
    operands, and for real operands of 16 bits or more unless both are bfloat16 or both float16. Under `jax.vmap`, a
    batched `x` becomes more rows, and batched weights run one call each.

    Args:
      x: ``[..., k]``.
      w: ``[k, 2 * n]``, with the gate in the first half; or a pair ``(gate, up)`` of arrays ``[k, n]``, which are not
        concatenated.
      activation: "silu" (SwiGLU), "gelu" (the tanh form; GeGLU) or "relu" (ReGLU).
      bias: ``[2 * n]``, or a pair of ``[n]``.
      transpose_w: `w` is ``[2 * n, k]``, or a pair of ``[n, k]``. It is read in that layout without a copy.
      on_miss, backends, schedule: as in `tuned_matmul`.

    Returns:
      An array ``[..., n]`` of the dtype of the operands.

    Raises:
      TypeError, ValueError: weights or a bias of the wrong shape, an unknown activation, or integer, 8-bit or complex
        operands; otherwise as in `jnp.matmul`.
      CacheMiss, NoCandidate, IllegalSchedule: as in `tuned_matmul`.
    """
    if others:
        raise calls.unexpected(tuned_gated_matmul, others)
    gate, up = _apart(w, "w")
    gate_bias, up_bias = _apart(bias, "bias")
    how = (on_miss, backends, schedule, activation, calls.flag("transpose_w", transpose_w))
    return calls.answer(_CALLED, how, x, gate, up, gate_bias, up_bias)


def _apart(given: Any, name: str) -> tuple[Any, Any]:
    """Returns a pair unchanged, and a single array as a pair with None."""
    if not isinstance(given, tuple | list):
        return given, None
    if len(given) != 2:
        raise ValueError(f"{name} is one array or a pair of them, (gate, up), and not {len(given)}")
    return given[0], given[1]


tuned_gated_matmul.operation = GATED_MATMUL  # type: ignore[attr-defined]
_CALLED = calls.Signature(GATED_MATMUL, ("activation", "transpose_w"), last=("up", "bias", "up_bias"))
