"""`scheduler.tuned_matmul`, and the arguments that all public functions share."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from typing import Any, TypedDict, TypeVar, Unpack, overload

import jax

from scheduler.dispatch import calls
from scheduler.dispatch.calls import Backends
from scheduler.dispatch.dispatch import OnMiss
from search_spaces.matmul import MATMUL
from search_spaces.matmul.epilogue import Activation
from search_spaces.operation import Operation

# ------------------------------------------------------------------------------
# The arguments that all public functions share. `tuned_matmul` documents them.

F = TypeVar("F", bound=Callable[..., Any])


class Selection(TypedDict, total=False):
    """Keyword arguments that decide how a call selects its schedule."""

    on_miss: OnMiss | None
    backends: Backends | None
    schedule: Any


SHARED = tuple(
    inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=None, annotation=kind.__forward_arg__)
    for name, kind in Selection.__annotations__.items()
)


def public(operation: Operation[Any]) -> Callable[[F], F]:
    """Marks a function that runs `operation`; its signature lists the arguments of `Selection` by name."""

    def mark(function: F) -> F:
        signature = inspect.signature(function)
        *own, _ = signature.parameters.values()
        function.__signature__ = signature.replace(parameters=[*own, *SHARED])  # type: ignore[attr-defined]
        function.operation = operation  # type: ignore[attr-defined]
        return function

    return mark


def selected(function: Callable[..., Any], given: Selection) -> tuple[Any, Any, Any]:
    """Returns `on_miss`, `backends` and `schedule`; raises a TypeError if the call has another keyword argument."""
    if others := {name: value for name, value in given.items() if name not in Selection.__optional_keys__}:
        raise calls.unexpected(function, others)
    return given.get("on_miss"), given.get("backends"), given.get("schedule")


class _MatmulOptions(Selection, total=False):
    transpose_a: bool
    transpose_b: bool
    precision: Any
    preferred_element_type: Any
    bias: Any
    activation: Activation | None
    residual: Any


@overload
def tuned_matmul(a: Any, b: Any, *, split_sizes: None = None, **options: Unpack[_MatmulOptions]) -> jax.Array: ...
@overload
def tuned_matmul(
    a: Any, b: Any, *, split_sizes: Sequence[int], **options: Unpack[_MatmulOptions]
) -> tuple[jax.Array, ...]: ...
@public(MATMUL)
def tuned_matmul(
    a: Any,
    b: Any,
    *,
    transpose_a: bool = False,
    transpose_b: bool = False,
    precision: Any = None,
    preferred_element_type: Any = None,
    bias: Any = None,
    activation: Activation | None = None,
    residual: Any = None,
    split_sizes: Sequence[int] | None = None,
    **selection: Unpack[Selection],
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
    transposes = calls.flag("transpose_a", transpose_a), calls.flag("transpose_b", transpose_b)
    options = (*transposes, precision, preferred_element_type, activation, split_sizes)
    return calls.answer(_CALLED, (*selected(tuned_matmul, selection), *options), a, b, bias, residual)


_CALLED = calls.Signature(
    MATMUL,
    ("transpose_a", "transpose_b", "precision", "preferred_element_type", "activation", "split_sizes"),
    last=("bias", "residual"),
)
