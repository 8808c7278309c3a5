"""The public functions of gated and of scaled products."""

from __future__ import annotations

from typing import Any, Unpack

import jax
import jax.numpy as jnp

from scheduler.dispatch import calls
from scheduler.tuned_calls import Selection, public, selected
from search_spaces.gated_matmul import GATED_MATMUL
from search_spaces.matmul.epilogue import Activation
from search_spaces.scaled_matmul import SCALED_MATMUL


@public(GATED_MATMUL)
def tuned_gated_matmul(
    x: Any,
    w: Any,
    *,
    activation: Activation = "silu",
    bias: Any = None,
    transpose_w: bool = False,
    **selection: Unpack[Selection],
) -> jax.Array:
    """Computes ``activation(x @ gate + gate_bias) * (x @ up + up_bias)`` with the best known schedule on this chip.

    One kernel reads `x` once and writes only the result. Sums, biases, activation and the product of both factors are
    float32, and the result is rounded once. An XLA program that rounds after each step, as users write it, is used if
    it was measured to be the fastest; ``schedule={"program": "float32"}`` or ``backends="pallas"`` excludes it.

    Works wherever `tuned_matmul` works. Under a derivative, the kernels of `tuned_matmul` compute both matmuls. Their
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
    gate, up = _gate_and_up(w, "w")
    gate_bias, up_bias = _gate_and_up(bias, "bias")
    call_options = (*selected(tuned_gated_matmul, selection), activation, calls.flag("transpose_w", transpose_w))
    return calls.answer(_GATED_CALLED, call_options, x, gate, up, gate_bias, up_bias)


def _gate_and_up(given: Any, name: str) -> tuple[Any, Any]:
    """Returns a pair unchanged, and a single array as a pair with None."""
    if not isinstance(given, tuple | list):
        return given, None
    if len(given) != 2:
        raise ValueError(f"{name} must be one array or a pair (gate, up), found {len(given)}")
    return given[0], given[1]


_GATED_CALLED = calls.Signature(GATED_MATMUL, ("activation", "transpose_w"), last=("up", "bias", "up_bias"))


@public(SCALED_MATMUL)
def tuned_scaled_matmul(
    a: Any,
    b: Any,
    a_scale: Any,
    b_scale: Any,
    *,
    transpose_b: bool = False,
    out_dtype: Any = jnp.bfloat16,
    **selection: Unpack[Selection],
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
    dtype = str(jnp.dtype(jnp.bfloat16 if out_dtype is None else out_dtype))
    call_options = (*selected(tuned_scaled_matmul, selection), calls.flag("transpose_b", transpose_b), dtype)
    return calls.answer(_SCALED_CALLED, call_options, a, b, a_scale, b_scale)


_SCALED_CALLED = calls.Signature(SCALED_MATMUL, ("transpose_b", "out_dtype"))
