"""The public function ``tuned_matmul``: `jnp.matmul` with an optional epilogue and optional split columns."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Never, overload

import jax

from scheduler.dispatch import calls
from scheduler.dispatch.calls import Backends
from scheduler.dispatch.dispatch import OnMiss
from search_spaces.matmul import MATMUL, epilogue


@overload
def tuned_matmul(
    a: Any,
    b: Any,
    *,
    transpose_a: bool = False,
    transpose_b: bool = False,
    precision: Any = None,
    preferred_element_type: Any = None,
    bias: Any = None,
    activation: epilogue.Activation | None = None,
    residual: Any = None,
    split_sizes: None = None,
    on_miss: OnMiss | None = None,
    backends: Backends | None = None,
    schedule: Any = None,
) -> jax.Array: ...
@overload
def tuned_matmul(
    a: Any,
    b: Any,
    *,
    transpose_a: bool = False,
    transpose_b: bool = False,
    precision: Any = None,
    preferred_element_type: Any = None,
    bias: Any = None,
    activation: epilogue.Activation | None = None,
    residual: Any = None,
    split_sizes: Sequence[int],
    on_miss: OnMiss | None = None,
    backends: Backends | None = None,
    schedule: Any = None,
) -> tuple[jax.Array, ...]: ...
def tuned_matmul(
    a: Any,
    b: Any,
    *,
    transpose_a: bool = False,
    transpose_b: bool = False,
    precision: Any = None,
    preferred_element_type: Any = None,
    bias: Any = None,
    activation: epilogue.Activation | None = None,
    residual: Any = None,
    split_sizes: Sequence[int] | None = None,
    on_miss: OnMiss | None = None,
    backends: Backends | None = None,
    schedule: Any = None,
    **others: Never,
) -> jax.Array | tuple[jax.Array, ...]:
    """Computes ``activation(jnp.matmul(a, b) + bias) + residual`` with the best known schedule on this chip.

    Terms that are None are skipped. Sums, bias, activation and residual are computed in float32 and rounded once, to
    the dtype of the result. They are computed in float64 or complex if an operand is float64 or complex, and in
    integers if all operands are integers. With an epilogue, a search also times an XLA program that rounds after each
    step, as users write it. That program is used if it was measured to be the fastest;
    ``schedule={"program": "float32"}`` or ``backends="pallas"`` excludes it.

    Works in eager mode and under `jax.jit`, `vmap`, `grad`, `jvp`, `lax.scan` and inside `shard_map`. Matmuls of the
    backward pass are tuned calls, too. For arrays sharded over a mesh, each device runs such a call on its shard, with
    the schedule for the shapes of that shard.

    The call falls back to XLA for empty operands and if `precision` names an algorithm. Otherwise, kernels support two
    operands of the same dtype, float32, bfloat16 or float16. Kernels also support two operands of the same dtype
    float8_e4m3fn, float8_e5m2 or int8, without an epilogue and with a `preferred_element_type` that is float32,
    bfloat16 or float16 (for int8: int32, bfloat16 or float32). The logger `scheduler` reports the reason for a fallback
    at level DEBUG. If `backends` excludes XLA or a `schedule` is given, the call raises an error with the reason
    instead.

    Under a derivative, the activation is a separate pass over float32 sums, and the backward pass saves its slope. For
    policies of `jax.checkpoint`, the matmul counts as a dot.

    Args:
      a: ``[..., m, k]`` or ``[k]``.
      b: ``[..., k, n]`` or ``[k]``; leading axes broadcast.
      transpose_a: `a` is ``[..., k, m]``. It is read in that layout without a copy if the hardware supports it.
      transpose_b: `b` is ``[..., n, k]``.
      precision: as in `jnp.matmul`; None follows `jax.default_matmul_precision`. At "high", all backends on NVIDIA GPUs
        compute three bfloat16 products (2^-16), whereas `jnp.matmul` uses TF32 (2^-11).
      preferred_element_type: dtype of the result; None means the dtype of the operands.
      bias: ``[n]`` (``[]`` if `b` is 1-D), added to each row. For a bias per batch element, use `jax.vmap`.
      activation: "relu", "gelu" (the tanh form, the default of `jax.nn.gelu`) or "silu".
      residual: of the shape of the result.
      split_sizes: number of columns of each result, for example (4096, 1024, 1024) for queries, keys and values. The
        result is then a tuple of arrays, which a kernel writes directly, whereas `jnp.split` copies. It cannot be
        combined with a residual.
      on_miss: what to do on a cache miss: "model" uses the cost model's top prediction, "tune" searches now and stores
        the result, "xla" uses XLA, "error" raises. None means the value of TILE_SCHEDULER_ON_MISS, or "model" if that
        is unset. A call that no kernel supports is not a cache miss.
      backends: "pallas" (all but XLA), the name of a backend, or several names; None allows all.
      schedule: a dict from field to value, or an instance of a schedule type; overrides stored schedules. It applies to
        the problem that remains after leading axes are folded into m, n or the batch. The backward pass does not
        use it.

    Returns:
      An array ``[..., m, n]``, without the axes that a 1-D operand lacks. With `split_sizes`, a tuple of arrays
      ``[..., m, size]``.

    Raises:
      TypeError, ValueError: as in `jnp.matmul`; unknown policy, backend or activation; a bias or residual of the wrong
        shape or of a dtype that the result cannot hold; `split_sizes` that are not column counts or do not add up to n.
      CacheMiss: no schedule is stored and `on_miss` is "error"; the message has the command that fills the cache.
      NoCandidate: `backends` excludes XLA and no other backend can run; the message has the reason.
      IllegalSchedule: `schedule` cannot run; the message has the reason.
    """
    if others:
        raise calls.unexpected(tuned_matmul, others)
    transposes = calls.flag("transpose_a", transpose_a), calls.flag("transpose_b", transpose_b)
    as_asked = (*transposes, precision, preferred_element_type, activation, split_sizes)
    return calls.answer(_CALLED, (on_miss, backends, schedule, *as_asked), a, b, bias, residual)


tuned_matmul.operation = MATMUL  # type: ignore[attr-defined]
_CALLED = calls.Signature(
    MATMUL,
    ("transpose_a", "transpose_b", "precision", "preferred_element_type", "activation", "split_sizes"),
    last=("bias", "residual"),
)
