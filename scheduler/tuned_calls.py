"""The public functions of products and attention, and the arguments that all public functions share."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from typing import Any, Literal, TypedDict, TypeVar, Unpack, overload

import jax
import jax.numpy as jnp

from scheduler.dispatch import calls
from scheduler.dispatch.calls import Backends
from scheduler.dispatch.dispatch import OnMiss
from search_spaces.flash_attention import FLASH_ATTENTION, bounds
from search_spaces.gated_matmul import GATED_MATMUL
from search_spaces.matmul import MATMUL
from search_spaces.matmul.epilogue import Activation
from search_spaces.operation import Operation
from search_spaces.scaled_matmul import SCALED_MATMUL

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
      on_miss: what to do on a cache miss: "model" uses the cost model's top prediction, "learn" does the same and
        measures it in the background (`scheduler.learning_budget`), "tune" searches now and stores the result, "xla"
        uses XLA, "error" raises. None means the value of TILE_SCHEDULER_ON_MISS, or "model" if that is unset. A call
        that no kernel supports is not a cache miss.
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


class _AttentionOptions(Selection, total=False):
    causal: bool
    scale: float | None
    window: int | tuple[int | None, int | None] | None
    softcap: float | None
    q_lengths: Any
    kv_lengths: Any
    deterministic: bool


@overload
def tuned_flash_attention(
    q: Any, k: Any, v: Any, *, return_lse: Literal[False] = False, **options: Unpack[_AttentionOptions]
) -> jax.Array: ...
@overload
def tuned_flash_attention(
    q: Any, k: Any, v: Any, *, return_lse: Literal[True], **options: Unpack[_AttentionOptions]
) -> tuple[jax.Array, jax.Array]: ...
@public(FLASH_ATTENTION)
def tuned_flash_attention(
    q: Any,
    k: Any,
    v: Any,
    *,
    causal: bool = False,
    scale: float | None = None,
    window: int | tuple[int | None, int | None] | None = None,
    softcap: float | None = None,
    q_lengths: Any = None,
    kv_lengths: Any = None,
    return_lse: bool = False,
    deterministic: bool = False,
    **selection: Unpack[Selection],
) -> jax.Array | tuple[jax.Array, jax.Array]:
    """Computes ``softmax(q k^T * scale) v`` with the best known schedule on this chip.

    Layout and semantics are those of `jax.nn.dot_product_attention`: query head n uses key head
    ``n // (heads // kv_heads)``, and the causal mask is aligned at the top left, so that query i sees keys 0 to i for
    any number of keys. There is one difference. If the lengths or the window leave no key for a query, its result here
    is zeros, its log-sum-exp is minus infinity, and it contributes to no gradient. Logits, softmax and sums are
    float32. Probabilities are rounded to the dtype of the operands before they multiply values.

    Works wherever `tuned_matmul` works, but in reverse mode only: `jax.jvp` raises a TypeError, as for any
    `jax.custom_vjp`. The backward pass is a separate operation, "flash_attention_backward", which is tuned and cached
    separately. Under a derivative, the forward pass also returns the log-sum-exp, so for training tune
    ``return_lse=True`` and "flash_attention_backward". The call falls back to XLA for empty arrays, and unless q, k and
    v have the same dtype and it is bfloat16, float16 or float32.

    Args:
      q: ``[batch, q_len, heads, head_dim]`` or ``[q_len, heads, head_dim]``.
      k: ``[batch, kv_len, kv_heads, head_dim]`` or without `batch`; `heads` is a multiple of `kv_heads`.
      v: ``[batch, kv_len, kv_heads, head_dim_v]`` or without `batch`; `head_dim_v` may differ from `head_dim`.
      causal: query i sees no key beyond i.
      scale: factor of the logits, a number; None means ``1 / sqrt(head_dim)``.
      window: query i sees keys from ``i - left`` to ``i + right``, inclusive. One integer, 0 or more, sets both; a pair
        ``(left, right)`` sets each, and None in the pair means no limit.
      softcap: logits become ``softcap * tanh(logits / softcap)``; a finite number above 0.
      q_lengths: ``int32[batch]``: the number of valid queries of each sequence; results of the other queries are zeros.
      kv_lengths: ``int32[batch]``: the number of valid keys of each sequence.
      return_lse: also return the log-sum-exp of each query's logits.
      deterministic: gradients are bitwise reproducible between runs.
      on_miss, backends, schedule: as in `tuned_matmul`; "pallas" excludes cuDNN, too. A `schedule` applies to the
        forward pass of this call only, not to the passes of a derivative.

    Returns:
      An array ``[batch, q_len, heads, head_dim_v]`` or without `batch`. With `return_lse`, a pair of that array and the
      natural log-sum-exp in float32, ``[batch, heads, q_len]`` or without `batch`.

    Raises:
      CacheMiss, NoCandidate, IllegalSchedule, TypeError, ValueError: as in `tuned_matmul`, and for arguments that
        `jax.nn.dot_product_attention` rejects.
    """
    number = None if scale is None else calls.number("scale", scale)
    cap = None if softcap is None else calls.number("softcap", softcap)
    names = {"causal": causal, "return_lse": return_lse, "deterministic": deterministic}
    is_causal, with_lse, same_bits = (calls.flag(name, value) for name, value in names.items())
    sides = None if window is None else bounds(window)
    call_options = (*selected(tuned_flash_attention, selection), is_causal, number, sides, cap, with_lse, same_bits)
    return calls.answer(_ATTENTION_CALLED, call_options, q, k, v, q_lengths, kv_lengths)


_ATTENTION_CALLED = calls.Signature(
    FLASH_ATTENTION,
    ("causal", "scale", "window", "softcap", "return_lse", "deterministic"),
    last=("q_lengths", "kv_lengths"),
)
