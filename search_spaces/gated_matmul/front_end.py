"""The user-facing gated matmul call: leading axes become m; unsupported calls go to XLA."""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp

from search_spaces.front_end import unposed, weakly_typed
from search_spaces.gated_matmul import xla
from search_spaces.gated_matmul.problem import DTYPES, GatedMatmulProblem
from search_spaces.operation import Bound, Unbound
from search_spaces.unfolded import lead


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
) -> Bound[GatedMatmulProblem] | Unbound:
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
        return Bound(p, (x, w, *others))
    weights = (w,) if up is None else (w, up)
    biases = () if bias is None else (bias,) if up_bias is None else (bias, up_bias)
    columns = _columns(x, weights, transpose_w)
    jnp.result_type(x, *weights)  # Raises if `jax.numpy_dtype_promotion` forbids the mixture.
    biases = _as_weights(biases, len(weights), columns)
    posed = _problem(x, weights, biases, transpose_w, activation)
    if isinstance(posed, str):
        answer = functools.partial(
            xla.formula, x, weights, biases, transpose_w=bool(transpose_w), activation=activation
        )
        return Unbound(posed, answer)
    shape = (*x.shape[:-1], posed.n)
    return Bound(posed, (x.reshape(*lead(x.shape[:-1]), posed.k), *weights, *biases), lambda out: out.reshape(shape))


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
    if reason := unposed(given):
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
