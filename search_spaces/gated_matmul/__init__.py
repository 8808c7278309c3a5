"""The gated matmul, a product times the activation of another one: ``GATED_MATMUL``, its problem and its kernels."""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from search_spaces.front_end import lead, unsupported_reason, weakly_typed
from search_spaces.gated_matmul import kernels
from search_spaces.gated_matmul.kernels import InterpretGatedMatmul, XlaGatedMatmul
from search_spaces.gated_matmul.problem import DTYPES, GatedMatmulProblem
from search_spaces.matmul import MATMUL, epilogue
from search_spaces.matmul.problem import MatmulProblem
from search_spaces.operation import BoundCall, KernelName, Kernels, Operation, Unsupported
from search_spaces.rows.formulas import SILU_AND_MUL, SILU_AND_MUL_JVP, SiluAndMulJvpProblem, SiluAndMulProblem
from search_spaces.sharding import Sharding

# ------------------------------------------------------------------------------
# The user-facing gated matmul call: leading axes become m; unsupported calls go to XLA.


def bind(
    x: Any,
    w: Any,
    *others: Any,
    bias: Any = None,
    up_bias: Any = None,
    up: Any = None,
    transpose_w: bool = False,
    activation: str = "silu",
    pair: bool = False,
) -> BoundCall[GatedMatmulProblem] | Unsupported:
    """Binds a call of `scheduler.tuned_gated_matmul` to a problem; a pair's arrays are separate arguments.

    Args:
      others: further operands as `GatedMatmulProblem.of` takes them; all operands then have the axes of the problem.
      up: the weights of the other factor, if `w` holds only the gate's.
      up_bias: the bias of the other factor; if given, `bias` is the gate's.
      pair: whether `others` begins with `up`.

    Raises:
      TypeError, ValueError: for calls that `jnp.matmul` rejects, an unknown activation, or weights or a bias of another
        shape.
    """
    if others or pair:
        p = GatedMatmulProblem.of(x, w, *others, transpose_w=transpose_w, pair=pair, activation=activation)
        return BoundCall(p, (x, w, *others))
    weights = (w,) if up is None else (w, up)
    biases = () if bias is None else (bias,) if up_bias is None else (bias, up_bias)
    columns = _columns(x, weights, transpose_w)
    jnp.result_type(x, *weights)  # Raises if `jax.numpy_dtype_promotion` forbids the mixture.
    biases = _as_weights(biases, len(weights), columns)
    posed = _problem(x, weights, biases, transpose_w, activation)
    if isinstance(posed, str):
        answer = functools.partial(
            kernels.formula, x, weights, biases, transpose_w=bool(transpose_w), activation=activation
        )
        return Unsupported(posed, answer)
    shape = (*x.shape[:-1], posed.n)
    return BoundCall(
        posed, (x.reshape(*lead(x.shape[:-1]), posed.k), *weights, *biases), lambda out: out.reshape(shape)
    )


def _columns(x: Any, weights: Sequence[Any], transpose_w: bool) -> int:
    """Returns the columns of the weights; checks that these have one shape and multiply `x`."""
    shapes = [jnp.shape(w) for w in weights]
    if any(len(shape) != 2 for shape in shapes) or len(set(shapes)) > 1:
        raise ValueError(f"weights have 2 axes, and those of a pair one shape, not {' and '.join(map(str, shapes))}")
    k, columns = shapes[0][:: -1 if transpose_w else 1]
    if not jnp.shape(x) or jnp.shape(x)[-1] != k:
        raise ValueError(f"x {jnp.shape(x)} and w {shapes[0]} do not multiply ({transpose_w=})")
    if len(weights) == 1 and columns % 2:
        raise ValueError(f"w {shapes[0]} has {columns} columns: gate and up are halves of it, so their number is even")
    return columns


def _as_weights(biases: Sequence[Any], count: int, columns: int) -> tuple[Any, ...]:
    """Joins or splits biases to match the weights, which copies a few kilobytes if the caller's do not match."""
    if not biases:
        return ()
    n = columns if count == 2 else columns // 2
    wanted = (2 * n,) if len(biases) == 1 else (n,)
    for x in biases:
        if jnp.shape(x) != wanted:
            which = "the bias" if len(biases) == 1 else "each bias of a pair"
            raise ValueError(f"{which} has shape {wanted}, not {jnp.shape(x)}")
    if len(biases) == count:
        return tuple(biases)
    if count == 1:
        return (jnp.concatenate(biases),)
    (bias,) = biases
    return bias[:n], bias[n:]


def _problem(
    x: Any, weights: Sequence[Any], biases: Sequence[Any], transpose_w: bool, activation: str
) -> GatedMatmulProblem | str:
    """Returns the problem of all rows, or the reason why there is none."""
    names = ("x", "w", "up") if len(weights) == 2 else ("x", "w")
    given = dict(zip((*names, "bias", "up_bias"), (x, *weights, *biases), strict=False))
    if reason := unsupported_reason(given):
        return reason
    if reason := weakly_typed(x, *weights, *biases):
        return reason
    if str(x.dtype) not in DTYPES:
        return f"x is {x.dtype}; kernels take {', '.join(DTYPES)}"
    rows = jax.ShapeDtypeStruct((math.prod(x.shape[:-1]), x.shape[-1]), x.dtype)
    try:
        return GatedMatmulProblem.of(
            rows, *weights, *biases, transpose_w=bool(transpose_w), pair=len(weights) == 2, activation=activation
        )
    except (TypeError, ValueError) as error:
        return str(error)


# ------------------------------------------------------------------------------
# The derivative, batching and sharding rules of a gated matmul; the derivative is in terms of matmuls.
#
# The backward pass needs both products. Recomputing them takes ``4 m n k`` operations. Writing and reading them takes
# ``8 m n`` bytes in 16 bits, which is faster from a k of about 400 on (an H200's 4.2 TB/s and 800 TFLOP/s). Under a
# derivative, the forward pass is therefore one matmul, ``2 n`` wide (two matmuls for a pair), rounded to 16 bits as in
# most training, and an elementwise pass. The backward pass is another such pass, and the transposed matmuls. For
# joined weights and SiLU these passes are `silu_and_mul` and its gradient, which are tuned too. Otherwise XLA runs
# them, and joins the halves of the second one in a separate pass (4096 x 14336 on an H200: 289 us, where its bytes
# take 136).

Call = Callable[..., Any]


def jvp(call: Call, p: GatedMatmulProblem, primals: Any, tangents: Any) -> tuple[jax.Array, jax.Array | None]:
    """Computes the tangent ``activation'(g) u dg + activation(g) du``, with ``g = x @ gate + bias``, `u` likewise."""
    x, weights, biases = p.named(primals)
    dx, dweights, dbiases = p.named(tangents)
    if dx is None and not any(t is not None for t in (*dweights, *dbiases)):
        return call(p, *primals), None
    product = _product(p)
    none = (None,) * len(weights)
    with_bias = dataclasses.replace(product, bias=p.bias)
    values: list[Any] = [
        call(MATMUL, with_bias, x, w, *(() if b is None else (b,)))
        for w, b in zip(weights, biases or none, strict=True)
    ]
    moving: list[Any] = [
        _sum(
            None if dx is None else call(MATMUL, product, dx, w),
            None if dw is None else call(MATMUL, product, x, dw),
            None
            if db is None
            else jnp.broadcast_to(db.astype(jnp.float32), (*x.shape[:-1], product.n)).astype(p.dtype),
        )
        for w, dw, db in zip(weights, dweights, dbiases or none, strict=True)
    ]
    if not p.pair and p.activation == "silu":
        (h,), (dh,) = values, moving
        tangent = call(SILU_AND_MUL_JVP, SiluAndMulJvpProblem(p.m, p.n, p.dtype), h, dh)
        return call(SILU_AND_MUL, SiluAndMulProblem(p.m, p.n, p.dtype), h), tangent
    if not p.pair:
        values, moving = _halves(values[0], p.n), _halves(moving[0], p.n)
    gate, up = (v.astype(jnp.float32) for v in values)
    active, slope = jax.jvp(lambda g: epilogue.apply(g, activation=p.activation), (gate,), (jnp.ones_like(gate),))
    slopes = [(slope * up).astype(p.dtype), active.astype(p.dtype)]
    tangent = _sum(*(None if t is None else s * t for s, t in zip(slopes, moving, strict=True)))
    return (active * up).astype(p.dtype), tangent


def batch(call: Call, p: GatedMatmulProblem, args: Any, dims: Any) -> tuple[jax.Array, int] | None:
    """Merges batched rows into m; returns None if weights or biases are batched."""
    if any(dim is not None for dim in dims[1:]):
        return None
    many = dataclasses.replace(p, m=args[0].shape[dims[0]] * p.m)
    return call(many, jnp.moveaxis(args[0], dims[0], 0), *args[1:]), 0


def shard(p: GatedMatmulProblem) -> Sharding[GatedMatmulProblem]:
    """Returns the sharding rule; columns are sharded only for a pair, because a device needs both factors' columns.

    k is not sharded: the sum over devices needs both accumulators, which the kernel does not return.
    """
    columns, count = ("n", 2) if p.pair else ("columns", 1)
    weights = [f"{columns} k" if p.transpose_w else f"k {columns}"] * count
    operands = ["m k", *weights, *[columns] * (count if p.bias else 0)]
    return Sharding(f"{', '.join(operands)} -> m n", divided=("m", "n") if p.pair else ("m",))


def _product(p: GatedMatmulProblem) -> MatmulProblem:
    """Returns the matmul with one array of weights."""
    columns = p.n if p.pair else 2 * p.n
    return MatmulProblem(p.m, columns, p.k, p.dtype, transpose_b=p.transpose_w)


def _halves(x: jax.Array | None, n: int) -> list[Any]:
    return [None, None] if x is None else [x[..., :n], x[..., n:]]


def _sum(*terms: jax.Array | None) -> jax.Array | None:
    """Sums the terms that are not None."""
    there = [x for x in terms if x is not None]
    return sum(there[1:], start=there[0]) if there else None


GATED_MATMUL = Operation[GatedMatmulProblem](
    name="gated_matmul",
    problem=GatedMatmulProblem,
    kernels=Kernels(
        KernelName("mosaic_gpu", "cuda", "search_spaces.gated_matmul.hopper:MosaicGpuGatedMatmul"),
        KernelName("mosaic_tpu", "tpu", "search_spaces.contrib.tpu.gated_matmul:MosaicTpuGatedMatmul"),
        InterpretGatedMatmul(),
        XlaGatedMatmul(),
    ),
    jvp=jvp,
    batch=batch,
    front_end=bind,
    shard=shard,
)

__all__ = ["GATED_MATMUL", "GatedMatmulProblem"]
