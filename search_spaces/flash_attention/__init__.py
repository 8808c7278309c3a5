"""Flash attention forward: ``FLASH_ATTENTION``, its problem and its kernels."""

from __future__ import annotations

import dataclasses
import math
import operator
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from search_spaces import jax_compat
from search_spaces.attention import xla
from search_spaces.attention.problem import (
    DTYPES,
    Bounds,
    Lengths,
    sharding_by_heads,
    zero_keys,
    zero_queries,
)
from search_spaces.flash_attention import kernels, pattern
from search_spaces.flash_attention.kernels import CudnnFlashAttention, InterpretedFlashAttention, XlaFlashAttention
from search_spaces.flash_attention.problem import FlashAttentionProblem
from search_spaces.flash_attention_backward import FLASH_ATTENTION_BACKWARD, FlashAttentionBackwardProblem
from search_spaces.front_end import in_front, unsupported_reason, weakly_typed
from search_spaces.operation import BoundCall, KernelName, Kernels, Operation, Unsupported
from search_spaces.sharding import Sharding

# ------------------------------------------------------------------------------
# Binds calls of `scheduler.tuned_flash_attention`, with the operands of `jax.nn.dot_product_attention`.
#
# Calls that `FlashAttentionProblem` cannot express run in XLA.


class CallOptions(NamedTuple):
    """Options of a call of `scheduler.tuned_flash_attention`.

    `left` and `right` are the bounds of the window; None means no bound.
    """

    causal: bool
    scale: float | None
    left: int | None
    right: int | None
    softcap: float | None
    return_lse: bool


def bind(
    q: Any,
    k: Any,
    v: Any,
    *,
    causal: bool = False,
    scale: float | None = None,
    window: Any = None,
    softcap: float | None = None,
    q_lengths: Any = None,
    kv_lengths: Any = None,
    return_lse: bool = False,
    deterministic: bool = False,
) -> BoundCall[FlashAttentionProblem] | Unsupported:
    """Binds the arguments of `scheduler.tuned_flash_attention` to a problem and its operands.

    Returns:
      `Unsupported`, with the reason and a fallback in plain JAX, if no problem expresses the call.

    Raises:
      ValueError: if the window or the softcap is invalid.
    """
    if softcap is not None and not 0 < softcap < math.inf:
        raise ValueError(f"softcap={softcap!r} is no finite number above 0")
    q_lengths, kv_lengths = (jnp.asarray(x) if isinstance(x, list | tuple) else x for x in (q_lengths, kv_lengths))
    how = CallOptions(bool(causal), scale, *bounds(window), softcap, bool(return_lse))
    of = Lengths(q_lengths, kv_lengths)
    posed = _problem(q, k, v, of, how)
    if isinstance(posed, str):
        return Unsupported(posed, lambda: answer(q, k, v, of, how))
    params: dict[str, Any] = {"scale": scale, "softcap": softcap, "deterministic": bool(deterministic) or None}
    given = tuple((name, value) for name, value in params.items() if value is not None)
    operands = tuple(x if x.ndim == 4 else x[None] for x in (q, k, v)) + tuple(x for x in of if x is not None)
    if q.ndim == 4:
        return BoundCall(posed, operands, params=given)

    def restore(*results: jax.Array) -> Any:
        return posed.pack([x[0] for x in results])

    return BoundCall(posed, operands, restore, given)


def answer(q: Any, k: Any, v: Any, of: Lengths, how: CallOptions) -> Any:
    """Computes attention in plain JAX, in float64 for float64 operands.

    Invalid operands raise the error of `jax.nn.dot_product_attention` if that function supports the options.
    """
    narrow = jax.nn.dot_product_attention
    if any(jnp.ndim(x) in (3, 4) and not jnp.shape(x)[-2] for x in (k, v)):
        raise ValueError(f"k {jnp.shape(k)} and v {jnp.shape(v)} have no heads")
    if how.softcap is None and not how.return_lse and jnp.shape(v)[-1:] == jnp.shape(k)[-1:]:
        # Only for JAX's checks of the operands. The results below also cover rows without keys and empty arrays.
        jax.eval_shape(
            lambda q, k, v, of: narrow(q, k, v, query_seq_lengths=of.q, key_value_seq_lengths=of.kv), q, k, v, of
        )
    q, k, v = (jnp.asarray(x) for x in (q, k, v))
    # A narrower dtype may overflow: lengths are compared with numbers of keys.
    of = Lengths(*(None if x is None else jnp.asarray(x, jnp.promote_types(x.dtype, jnp.int32)) for x in of))
    if len({x.dtype for x in (q, k, v)}) > 1:
        raise ValueError(f"q is {q.dtype}, k is {k.dtype} and v is {v.dtype}; attention is of one dtype: use .astype")
    dtype = q.dtype
    flat = q.ndim == 3
    q, k, v = (x[None] if flat else x for x in (q, k, v))
    p: Any = _Unposed(q, k, v, of, how)
    if any(extent == 0 for x in (q, k, v) for extent in x.shape):
        out, lse = jnp.zeros(p.out_shape, dtype), jnp.full(p.lse_shape, -jnp.inf, xla.wide(q))
    else:
        scale = p.head_dim**-0.5 if how.scale is None else how.scale
        (q,), (k, v) = (
            zero_queries(p, of, q),
            zero_keys(p, of, k, v),
        )  # avoids NaN in JAX's derivative
        out, lse = xla.forward(p, q, k, v, of, scale=scale, softcap=how.softcap or 1.0)
    out, lse = (out[0], lse[0]) if flat else (out, lse)
    return (out, lse) if how.return_lse else out


class _Unposed(Bounds):
    """The fields of a problem that `xla.forward` reads, for operands that no problem allows.

    Extents may be 0, and any dtype is allowed.
    """

    def __init__(self, q: Any, k: Any, v: Any, of: Lengths, how: CallOptions) -> None:
        if any(x.ndim != 4 for x in (q, k, v)):
            raise ValueError(f"q {q.shape}, k {k.shape} and v {v.shape} are not [batch, length, heads, head_dim]")
        (self.batch, self.q_len, self.heads, self.head_dim), (_, self.kv_len, self.kv_heads, _) = q.shape, k.shape
        self.value_dim = v.shape[-1]
        if k.shape[::3] != q.shape[::3] or v.shape[:-1] != k.shape[:-1]:
            raise ValueError(f"k {k.shape} and v {v.shape} do not belong to q {q.shape}")
        if self.kv_heads and self.heads % self.kv_heads:
            raise ValueError(f"{self.heads} query heads are no multiple of {self.kv_heads} key heads")
        self.group = self.heads // (self.kv_heads or 1)
        self._left, self._right = how.left, 0 if how.causal else how.right
        self.q_lengths, self.kv_lengths = of.q is not None, of.kv is not None
        self.softcap = how.softcap is not None
        self.out_shape = (self.batch, self.q_len, self.heads, self.value_dim)
        self.lse_shape = (self.batch, self.heads, self.q_len)

    @property
    def left(self) -> int | None:
        return self._left

    @property
    def right(self) -> int | None:
        return self._right


def _problem(q: Any, k: Any, v: Any, of: Lengths, how: CallOptions) -> FlashAttentionProblem | str:
    given = {"q": q, "k": k, "v": v} | {f"{name}_lengths": x for name, x in of._asdict().items() if x is not None}
    if reason := unsupported_reason(given):
        return reason
    if (axes := {x.ndim for x in (q, k, v)}) not in ({3}, {4}):
        return f"q, k and v have {' or '.join(map(str, sorted(axes)))} axes, where 3 or 4 are wanted of each"
    if reason := weakly_typed(q, k, v):
        return reason
    if str(q.dtype) not in DTYPES:
        return f"q is {q.dtype}; kernels take {', '.join(DTYPES)}"
    structs = [jax.ShapeDtypeStruct(x.shape if x.ndim == 4 else (1, *x.shape), x.dtype) for x in (q, k, v)]
    try:
        return FlashAttentionProblem.of(
            *structs,
            *(x for x in of if x is not None),
            causal=how.causal,
            window_left=-1 if how.left is None else how.left,
            window_right=-1 if how.right is None else how.right,
            q_lengths=of.q is not None,
            kv_lengths=of.kv is not None,
            softcap=how.softcap is not None,
            return_lse=how.return_lse,
        )
    except (TypeError, ValueError) as error:
        return str(error)


def bounds(window: Any) -> tuple[int | None, int | None]:
    """Returns the left and right bounds of `window`; None means no bound.

    Raises:
      ValueError: if `window` is neither a non-negative integer nor a pair of these or None.
    """
    try:
        if isinstance(window, np.ndarray) and window.ndim:
            window = window.tolist()
        given = tuple(window) if isinstance(window, list | tuple) else (window, window)
        left, right = (None if side is None else operator.index(side) for side in given)
        if min(left or 0, right or 0) < 0:
            raise ValueError(window)
    except (TypeError, ValueError, jax.errors.ConcretizationTypeError):
        raise ValueError(
            f"window={window!r} is neither a number of keys nor two, to the left and to the right"
        ) from None
    return left, right


# ------------------------------------------------------------------------------
# Differentiation, batching and sharding rules of attention.
#
# The derivative is a separate operation. Attention is sharded over sequences and heads.

Call = Callable[..., Any]


def vjp_fwd(call: Call, p: FlashAttentionProblem, args: Any) -> tuple[Any, Any]:
    """Runs the forward pass with `return_lse`, because the backward pass needs the log-sum-exp.

    Without `return_lse` in `p`, this is a different problem from `p`.
    """
    q, k, v, *lengths = args
    out, lse = call(dataclasses.replace(p, return_lse=True), *args)
    return (out, lse) if p.return_lse else out, (q, k, v, out, lse, *lengths)


def vjp_bwd(call: Call, p: FlashAttentionProblem, residuals: Any, cotangent: Any) -> tuple[Any, ...]:
    """Calls the backward operation once; lengths have no cotangent."""
    q, k, v, out, lse, *lengths = residuals
    d_out, d_lse = cotangent if p.return_lse else (cotangent, None)
    params = dict(call.params)  # type: ignore[attr-defined]
    posed = FlashAttentionBackwardProblem.of_forward(
        p, lse_cotangent=d_lse is not None, deterministic=params.pop("deterministic", False)
    )
    d_out = jnp.zeros(out.shape, out.dtype) if d_out is None else d_out
    cotangents = (d_out,) if d_lse is None else (d_out, d_lse)
    dqkv = call(FLASH_ATTENTION_BACKWARD, posed, q, k, v, out, lse, *cotangents, *lengths, **params)
    return *dqkv, *(None for _ in lengths)


def batch(call: Call, p: FlashAttentionProblem, args: Any, dims: Any) -> tuple[Any, Any]:
    """Batches a call by adding sequences, or heads if only the queries are batched.

    Queries that share keys, values and lengths become additional query heads of each group.
    """
    size = next(x.shape[dim] for x, dim in zip(args, dims, strict=True) if dim is not None)
    if dims[0] is not None and all(dim is None for dim in dims[1:]):
        return _as_heads(call, p, args, dims[0], size)
    many = dataclasses.replace(p, batch=size * p.batch)
    return call(many, *(in_front(x, each, size) for x, each in zip(args, dims, strict=True))), 0


def _as_heads(call: Call, p: FlashAttentionProblem, args: Any, dim: int, size: int) -> tuple[Any, Any]:
    """Folds the new axis of q into its heads, between key head and group: query head n uses key head n // group."""
    q, *shared = args
    q = jnp.moveaxis(q, dim, 0)
    *sequences, q_len, _, head_dim = q.shape[1:]
    q = q.reshape(size, *sequences, q_len, p.kv_heads, p.group, head_dim)
    q = jnp.moveaxis(q, 0, -3).reshape(*sequences, q_len, size * p.heads, head_dim)
    results = call(dataclasses.replace(p, heads=size * p.heads), q, *shared)

    def apart(x: jax.Array, before: tuple[int, ...]) -> jax.Array:
        x = jnp.moveaxis(x.reshape(*before, p.kv_heads, size, p.group, -1), -3, 0)
        return x.reshape(size, *before, p.heads, -1)

    if not p.return_lse:
        return apart(results, (*sequences, q_len)), 0
    out, lse = results
    return (apart(out, (*sequences, q_len)), apart(lse, tuple(sequences))), 0


def shard(p: FlashAttentionProblem) -> Sharding[FlashAttentionProblem]:
    lengths = ["lengths"] * len(p.length_operands())
    return sharding_by_heads(p, ["q", "k", "v", *lengths], ["out", "lse"] if p.return_lse else ["out"])


FLASH_ATTENTION = Operation[FlashAttentionProblem](
    name="flash_attention",
    problem=FlashAttentionProblem,
    kernels=Kernels(
        KernelName("mosaic_gpu", "cuda", "search_spaces.flash_attention.hopper:MosaicGpuFlashAttention"),
        KernelName("mosaic_gpu_decode", "cuda", "search_spaces.flash_attention.hopper:MosaicGpuFlashDecoding"),
        CudnnFlashAttention(),
        KernelName("mosaic_tpu", "tpu", "search_spaces.contrib.tpu.flash_attention:MosaicTpuFlashAttention"),
        InterpretedFlashAttention(),
        XlaFlashAttention(),
    ),
    params=("scale", "softcap"),
    vjp_params=("deterministic",),
    batch=batch,
    vjp_fwd=vjp_fwd,
    vjp_bwd=vjp_bwd,
    front_end=bind,
    equations={jax_compat.CUDNN_ATTENTION: kernels.problem_of_equation},
    regions=pattern.find,
    shard=shard,
)

__all__ = ["FLASH_ATTENTION", "FlashAttentionProblem"]
