"""The public call ``tuned_matmul``: as `jnp.matmul`, with an epilogue, and the columns in several arrays too."""

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
    """``activation(jnp.matmul(a, b) + bias) + residual`` by the best known schedule for its shapes on this chip.

    What is None is left out. Sums, bias, activation and residual are computed in float32 (in float64 and in complex
    numbers where operands are that, in integers where all are), and rounded once, to the dtype of the result.
    Where something follows the product, a search also times the program that users write, which rounds after each step;
    it answers where that was measured to be the fastest (``schedule={"program": "float32"}`` or ``backends="pallas"``
    leaves it out).

    Works eager and under `jax.jit`, `vmap`, `grad`, `jvp`, `lax.scan` and inside `shard_map`; backward products are
    tuned calls too. On arrays divided over a mesh each device's part is such a call, answered by the schedule of its
    own shapes. XLA answers for empty operands, where `precision` names an algorithm, and for operands other than two of
    one float32, bfloat16 or float16 dtype; or of one float8_e4m3fn, float8_e5m2 or int8 dtype where nothing follows the
    sums and `preferred_element_type` is one of the former (for int8: int32, bfloat16 or float32). Why, the logger
    `scheduler` says (DEBUG); whoever leaves XLA out by `backends`, or gives a `schedule`, gets an error that says it.
    Under a derivative an activation is a pass of its own over float32 sums, and the backward pass keeps its slope. To
    policies of `jax.checkpoint` a product is a dot.

    Args:
      a: ``[..., m, k]`` or ``[k]``.
      b: ``[..., k, n]`` or ``[k]``; leading axes broadcast.
      transpose_a: `a` is ``[..., k, m]``: read in that layout, not copied, where the hardware can.
      transpose_b: `b` is ``[..., n, k]``.
      precision: as in `jnp.matmul`; None follows `jax.default_matmul_precision`. At "high" NVIDIA GPUs multiply three
        products of bfloat16 (2^-16), whoever answers, where `jnp.matmul` takes TF32 (2^-11).
      preferred_element_type: dtype of the result; None is the operands'.
      bias: ``[n]`` (``[]`` where `b` is 1-D), added to each row. One for each element of a batch: `jax.vmap`.
      activation: "relu", "gelu" (its tanh form, the default of `jax.nn.gelu`) or "silu".
      residual: of the shape of the result.
      split_sizes: columns of each result, (4096, 1024, 1024) for queries, keys and values: the result then comes in
        several arrays side by side, which a kernel writes itself, where `jnp.split` copies. Not with a residual.
      on_miss: where no schedule is stored: "model" answers with the cost model's first choice, "tune" searches now and
        stores what it finds, "xla" answers with XLA, "error" raises. None is TILE_SCHEDULER_ON_MISS, or else "model".
        Where kernels cannot be asked at all there is nothing to store, and no miss.
      backends: "pallas" (all but XLA), a backend's name or several; None allows all.
      schedule: field -> value of the schedule to use, or an instance of a schedule type; overrides what is stored. It
        is one of the problem that remains when leading axes are folded into m, n or the batch; backward products do
        without it.

    Returns:
      ``[..., m, n]``, without the axes that a 1-D operand lacks; with `split_sizes` a tuple of ``[..., m, size]``.

    Raises:
      TypeError, ValueError: as `jnp.matmul`; an unknown policy, backend or activation; a bias or residual of another
        shape, or that the dtype of the result cannot hold; `split_sizes` that are no columns, or do not add up to n.
      CacheMiss: nothing is stored and `on_miss` is "error"; names the command that would fill the cache.
      NoCandidate: `backends` leaves XLA out and nothing else can answer, with the reason.
      IllegalSchedule: `schedule` cannot run, with the reason.
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
