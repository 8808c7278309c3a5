"""Grouped products, rows times the matrix of their group: ``RAGGED_DOT``, ``GATED_RAGGED_DOT``, ``RAGGED_DOT_WEIGHTS``.

Their last operand has the *boundaries* of groups, of which kernels need two for each tile; calls have sizes.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from search_spaces import jax_compat
from search_spaces.front_end import in_front, require_array, unsupported_reason, weakly_typed
from search_spaces.matmul import epilogue
from search_spaces.matmul.problem import RESULTS, rounding
from search_spaces.operation import BoundCall, KernelName, Kernels, Operation, Unsupported
from search_spaces.ragged_dot import kernels
from search_spaces.ragged_dot.equations import boundaries_of_sizes, equation_of
from search_spaces.ragged_dot.kernels import (
    InterpretGatedRaggedDot,
    InterpretRaggedDot,
    InterpretRaggedDotWeights,
    XlaGatedRaggedDot,
    XlaRaggedDot,
    XlaRaggedDotWeights,
)
from search_spaces.ragged_dot.problem import (
    GatedRaggedDotProblem,
    GroupedProblem,
    RaggedDotProblem,
    RaggedDotWeightsProblem,
    sizes_of,
)
from search_spaces.ragged_dot.problem import group_sizes as sizes_of_distribution
from search_spaces.sharding import Sharding

# ------------------------------------------------------------------------------
# The user-facing calls: sizes of groups become boundaries; unsupported calls go to XLA.


def bind(
    lhs: Any,
    rhs: Any,
    group_sizes: Any,
    *,
    group_offset: Any = None,
    transpose_rhs: bool = False,
    precision: Any = None,
    preferred_element_type: Any = None,
    distribution: str = "",
    out_dtype: Any = None,
    boundaries: bool = False,
) -> BoundCall[RaggedDotProblem] | Unsupported:
    """Binds a call of `scheduler.tuned_ragged_dot` to a problem; the arguments are those of the call.

    Args:
      out_dtype: the problem's name for `preferred_element_type`.
      boundaries: `group_sizes` are boundaries, as `RaggedDotProblem.of` takes them.

    Raises:
      TypeError: an operand is a list. Shapes that do not fit, and other calls that `jax.lax.ragged_dot` rejects, raise
        in `Unsupported.answer`.
      ValueError: `distribution` has no name of a distribution, and no sizes of these groups.
    """
    wanted = out_dtype if preferred_element_type is None else preferred_element_type
    pose = functools.partial(
        RaggedDotProblem.of, transpose_rhs=transpose_rhs, out_dtype=wanted or "", distribution=distribution
    )
    if boundaries:
        return BoundCall(pose(lhs, rhs, group_sizes), (lhs, rhs, group_sizes))
    posed = _bound(pose, {"lhs": lhs, "rhs": rhs}, group_sizes, group_offset, precision, distribution)
    if isinstance(posed, BoundCall):
        return posed
    answer = functools.partial(_formula, lhs, rhs, group_sizes, group_offset, transpose_rhs, precision, wanted)
    return Unsupported(posed, answer)


def bind_gated(
    x: Any,
    w_gate: Any,
    w_up: Any,
    group_sizes: Any,
    *,
    group_offset: Any = None,
    transpose_rhs: bool = False,
    activation: str = "silu",
    preferred_element_type: Any = None,
    distribution: str = "",
    out_dtype: Any = None,
    boundaries: bool = False,
) -> BoundCall[GatedRaggedDotProblem] | Unsupported:
    """Binds a call of `scheduler.tuned_gated_ragged_dot` to a problem; the arguments are those of the call.

    Args:
      out_dtype, boundaries: as in `bind`.

    Raises:
      TypeError, ValueError: as `bind`, or for an unknown activation.
    """
    wanted = out_dtype if preferred_element_type is None else preferred_element_type
    pose = functools.partial(
        GatedRaggedDotProblem.of,
        transpose_rhs=transpose_rhs,
        activation=activation,
        out_dtype=wanted or "",
        distribution=distribution,
    )
    if boundaries:
        return BoundCall(pose(x, w_gate, w_up, group_sizes), (x, w_gate, w_up, group_sizes))
    if activation not in epilogue.ACTIVATIONS:
        raise ValueError(f"activation={activation!r} is not one of {', '.join(epilogue.ACTIVATIONS)}")
    posed = _bound(pose, {"x": x, "w_gate": w_gate, "w_up": w_up}, group_sizes, group_offset, None, distribution)
    if isinstance(posed, BoundCall):
        return posed
    answer = functools.partial(
        _gated_formula, x, (w_gate, w_up), group_sizes, group_offset, transpose_rhs, activation, wanted
    )
    return Unsupported(posed, answer)


def _bound(
    pose: Callable[..., Any], operands: dict[str, Any], sizes: Any, offset: Any, precision: Any, distribution: str
) -> BoundCall[Any] | str:
    """Returns the call of operands and sizes, or the reason why there is none."""
    given = {**operands, "group_sizes": sizes} | ({} if offset is None else {"group_offset": offset})
    for name, x in given.items():
        require_array(name, x)
    if reason := unsupported_reason(given) or weakly_typed(*operands.values()):
        return reason
    lhs, rhs, *_ = operands.values()
    if str(lhs.dtype) not in RESULTS:
        return f"operands are {lhs.dtype}; kernels take {', '.join(RESULTS)}"
    asked = rounding(precision)
    if asked is None or (asked != "default" and lhs.dtype == jnp.float32):
        return f"precision={(asked or precision)!r} is not the default one"
    if reason := _wrong_sizes(sizes, offset):
        return reason
    groups = sizes.shape[0] if offset is None or rhs.ndim == 0 else rhs.shape[0]
    if distribution and lhs.ndim:
        sizes_of_distribution(distribution, lhs.shape[0], groups)
    try:
        problem = pose(*operands.values(), jax.ShapeDtypeStruct((groups + 1,), jnp.int32))
    except (TypeError, ValueError) as error:
        return str(error)
    return BoundCall(problem, (*operands.values(), _boundaries(sizes, offset, groups, problem.rows)))


def _wrong_sizes(sizes: Any, offset: Any) -> str | None:
    """Returns what is wrong with sizes and an offset, if anything is."""
    if jnp.ndim(sizes) != 1 or not jnp.issubdtype(jnp.result_type(sizes), jnp.integer):
        return f"group_sizes must be integers of one axis, not {jnp.result_type(sizes)}{list(jnp.shape(sizes))}"
    if offset is None:
        return None
    if jnp.shape(offset) != (1,) or not jnp.issubdtype(jnp.result_type(offset), jnp.integer):
        return f"group_offset must be one integer in an array, not {jnp.result_type(offset)}{list(jnp.shape(offset))}"
    return None


def _boundaries(sizes: jax.Array, offset: Any, groups: int, rows: int) -> jax.Array:
    """Returns the boundaries of the `groups` groups from `offset` on; groups that `sizes` lacks are empty."""
    every = boundaries_of_sizes(sizes, rows)
    if offset is None:
        return every
    number = offset.astype(jnp.int32) + jnp.arange(groups + 1, dtype=jnp.int32)
    return every[jnp.clip(number, 0, sizes.shape[0])]


def _formula(
    lhs: Any, rhs: Any, sizes: Any, offset: Any, transpose_rhs: bool, precision: Any, preferred_element_type: Any
) -> jax.Array:
    """Computes a call that no problem describes by `jax.lax.ragged_dot_general`, and raises its errors."""
    if reason := _wrong_sizes(sizes, offset):
        raise TypeError(reason)
    dimensions = kernels.numbers((1, 2 if transpose_rhs else 1), (0,))
    product = functools.partial(
        lax.ragged_dot_general,
        ragged_dot_dimension_numbers=dimensions,
        precision=precision,
        preferred_element_type=preferred_element_type,
    )
    lhs, rhs, sizes = jnp.asarray(lhs), jnp.asarray(rhs), jnp.asarray(sizes)
    fits = lhs.ndim == 2 and rhs.ndim == 3 and lhs.shape[1] == rhs.shape[2 if transpose_rhs else 1]
    if not fits or (offset is None and sizes.shape[0] != rhs.shape[0]):
        matrices = "[groups, n, k]" if transpose_rhs else "[groups, k, n]"
        raise TypeError(
            f"rows of shape {lhs.shape}, matrices of shape {rhs.shape} and {sizes.shape[0]} group sizes do not fit: "
            f"[rows, k], {matrices} and a size for each group are needed"
        )
    if offset is None or 0 in (*rhs.shape, *sizes.shape):
        sizes = sizes if offset is None else jnp.zeros(rhs.shape[:1], jnp.int32)
        return product(lhs, rhs, sizes)
    bounds = _boundaries(sizes, jnp.asarray(offset), rhs.shape[0], lhs.shape[0])
    found = product(lhs, rhs, sizes_of(bounds))
    return jnp.where(kernels.of_a_group(bounds, lhs.shape[0]), found, jnp.zeros_like(found))


def _gated_formula(
    x: Any,
    weights: Sequence[Any],
    sizes: Any,
    offset: Any,
    transpose_rhs: bool,
    activation: str,
    preferred_element_type: Any,
) -> jax.Array:
    if jnp.shape(weights[0]) != jnp.shape(weights[1]):
        raise ValueError(f"w_gate {jnp.shape(weights[0])} and w_up {jnp.shape(weights[1])} have two shapes")
    out = jnp.result_type(x, *weights)
    if not jnp.issubdtype(out, jnp.floating) or out.itemsize == 1:
        raise TypeError(f"products of {out} take no activation: give real numbers of 16 bits or more (.astype)")
    wide = jnp.promote_types(out, jnp.float32)
    gate, up = (_formula(x, w, sizes, offset, transpose_rhs, None, wide) for w in weights)
    result: jax.Array = epilogue.apply(gate, activation=activation) * up
    return result.astype(out if preferred_element_type is None else preferred_element_type)


# ------------------------------------------------------------------------------
# Derivatives. A grouped product is linear in its rows and in its matrices, and so is the gradient of the matrices.

Call = Callable[..., Any]


def jvp(call: Call, p: GroupedProblem, primals: Any, tangents: Any) -> tuple[jax.Array, jax.Array | None]:
    lhs, rhs, boundaries = primals
    dlhs, drhs, _ = tangents
    moving = [] if dlhs is None else [call(p, dlhs, rhs, boundaries)]
    moving += [] if drhs is None else [call(p, lhs, drhs, boundaries)]
    return call(p, *primals), sum(moving[1:], moving[0]) if moving else None


def transpose(call: Call, p: RaggedDotProblem, cotangent: jax.Array, args: Any) -> tuple[jax.Array | None, ...]:
    """Computes ``dlhs[row] = dout[row] @ rhs[g].T``, or ``drhs[g] = lhs[rows of g].T @ dout[rows of g]``."""
    lhs, rhs, boundaries = args
    dout, other = _of_one_dtype(cotangent, rhs if lhs is None else lhs)
    dtype = str(dout.dtype)
    # An 8-bit cotangent is rounded afterwards.
    wide = dataclasses.replace(p, dtype=dtype, out_dtype=p.dtype if p.dtype in RESULTS[dtype] else "")
    if lhs is None:
        flipped = dataclasses.replace(wide, k=p.n, n=p.k, transpose_rhs=not p.transpose_rhs)
        return call(flipped, dout, other, boundaries).astype(p.dtype), None, None
    both = (dout, other) if p.transpose_rhs else (other, dout)
    k, n = (p.n, p.k) if p.transpose_rhs else (p.k, p.n)
    weights = RaggedDotWeightsProblem(p.rows, p.groups, k, n, wide.dtype, wide.out_dtype)
    return None, call(RAGGED_DOT_WEIGHTS, weights, *both, boundaries).astype(p.dtype), None


def transpose_weights(
    call: Call, p: RaggedDotWeightsProblem, cotangent: jax.Array, args: Any
) -> tuple[jax.Array | None, ...]:
    """Computes ``dlhs[row] = rhs[row] @ dout[g].T``, or ``drhs[row] = lhs[row] @ dout[g]``."""
    lhs, rhs, boundaries = args
    dout, other = _of_one_dtype(cotangent, rhs if lhs is None else lhs)
    k, n = (p.n, p.k) if lhs is None else (p.k, p.n)
    rows = RaggedDotProblem(p.rows, p.groups, k, n, str(dout.dtype), out_dtype=p.dtype, transpose_rhs=lhs is None)
    found = call(RAGGED_DOT, rows, other, dout, boundaries)
    return (found, None, None) if lhs is None else (None, found, None)


def _of_one_dtype(cotangent: jax.Array, other: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Widens the narrower of both; narrowing the cotangent of a wide result would lose the requested precision.

    8-bit floats, which JAX does not promote, are exact in any dtype of the cotangent.
    """
    narrow = other.dtype.itemsize == 1
    dtype = cotangent.dtype if narrow else jnp.promote_types(cotangent.dtype, other.dtype)
    return cotangent.astype(dtype), other.astype(dtype)


def jvp_gated(call: Call, p: GatedRaggedDotProblem, primals: Any, tangents: Any) -> tuple[jax.Array, jax.Array | None]:
    """Computes the tangent ``activation'(g) u dg + activation(g) du``, with both products rounded and saved.

    As for the gated matmul, recomputing the products in a backward pass would take longer than writing and reading
    them. XLA computes the elementwise pass.
    """
    lhs, *weights, boundaries = primals
    dlhs, *dweights, _ = tangents
    if dlhs is None and all(dw is None for dw in dweights):
        return call(p, *primals), None
    products = [call(RAGGED_DOT, p.one, lhs, w, boundaries) for w in weights]
    moving = []
    for w, dw in zip(weights, dweights, strict=True):
        of_rows = [] if dlhs is None else [call(RAGGED_DOT, p.one, dlhs, w, boundaries)]
        of_matrices = [] if dw is None else [call(RAGGED_DOT, p.one, lhs, dw, boundaries)]
        moving.append(of_rows + of_matrices)
    out = p.result().dtype
    gate, up = (x.astype(jnp.float32) for x in products)
    active, slope = jax.jvp(lambda g: epilogue.apply(g, activation=p.activation), (gate,), (jnp.ones_like(gate),))
    slopes = (slope * up).astype(out), active.astype(out)
    terms = [by * sum(each[1:], each[0]) for by, each in zip(slopes, moving, strict=True) if each]
    return (active * up).astype(out), sum(terms[1:], terms[0])


# ------------------------------------------------------------------------------
# Batching: one call if each element of the batch has its own groups, or if only one operand differs.


def batch(call: Call, p: RaggedDotProblem, args: Any, dims: Any) -> tuple[jax.Array, int] | None:
    """Joins batched rows to the rows, batched matrices to n, and a batch of all operands to the groups."""
    lhs, rhs, boundaries = args
    if dims[1:] == (None, None):
        return _batch_rows(call, p, args, dims[0])
    if (dims[0], dims[2]) == (None, None):
        size, column = rhs.shape[dims[1]], 1 if p.transpose_rhs else 2
        matrices = jnp.moveaxis(rhs, dims[1], column)
        matrices = matrices.reshape(*matrices.shape[:column], size * p.n, *matrices.shape[column + 2 :])
        found = call(dataclasses.replace(p, n=size * p.n), lhs, matrices, boundaries)
        return found.reshape(p.rows, size, p.n), 1
    return _batch_groups(call, p, args, dims)


def batch_gated(call: Call, p: GatedRaggedDotProblem, args: Any, dims: Any) -> tuple[jax.Array, int] | None:
    """Joins batched rows to the rows, and a batch of all operands to the groups."""
    if dims[1:] == (None, None, None):
        return _batch_rows(call, p, args, dims[0])
    return _batch_groups(call, p, args, dims)


def batch_weights(call: Call, p: RaggedDotWeightsProblem, args: Any, dims: Any) -> tuple[jax.Array, int] | None:
    """Joins a batch of one matrix of rows to its columns, and a batch of all operands to the groups."""
    if dims[2] is not None or None not in dims[:2]:
        return _batch_groups(call, p, args, dims)
    which = 1 if dims[0] is None else 0
    size, name = args[which].shape[dims[which]], "n" if which else "k"
    columns = jnp.moveaxis(args[which], dims[which], 1).reshape(p.rows, -1)
    wider = dataclasses.replace(p, **{name: size * getattr(p, name)})
    found = call(wider, *(columns if i == which else x for i, x in enumerate(args)))
    shape = (p.groups, p.k, size, p.n) if which else (p.groups, size, p.k, p.n)
    return found.reshape(shape), 2 if which else 1


def _batch_rows(call: Call, p: Any, args: Any, dim: int) -> tuple[jax.Array, int] | None:
    """Repeats each row of each group once for each element of the batch."""
    lhs, *matrices, boundaries = args
    size = lhs.shape[dim]
    if size * p.rows > jnp.iinfo(jnp.int32).max:
        return None
    rows = jnp.moveaxis(lhs, dim, 1).reshape(p.rows * size, p.k)
    found = call(dataclasses.replace(p, rows=size * p.rows), rows, *matrices, size * boundaries)
    return found.reshape(p.rows, size, p.n), 1


def _batch_groups(call: Call, p: Any, args: Any, dims: Any) -> tuple[jax.Array, int] | None:
    """Puts the groups of one element of the batch after those of another.

    The last group of each then takes the rows of no group after it, up to the first group of the next. A mask removes
    these rows: from the operands if the groups are contracted, else from the result.
    """
    *operands, boundaries = args
    size = next(x.shape[dim] for x, dim in zip(args, dims, strict=True) if dim is not None)
    if any(dim is None for dim in dims[:-1]) or size * p.rows > jnp.iinfo(jnp.int32).max:
        return None
    operands = [in_front(x, dim, size) for x, dim in zip(operands, dims[:-1], strict=True)]
    bounds = in_front(boundaries, dims[-1], size)
    row = lax.broadcasted_iota(jnp.int32, (1, p.rows), 1)
    inside = ((row >= bounds[:, :1]) & (row < bounds[:, -1:]))[..., None]

    def masked(x: jax.Array) -> jax.Array:
        return jnp.where(inside, x, jnp.zeros_like(x))

    contracted = isinstance(p, RaggedDotWeightsProblem)
    operands = [masked(x) for x in operands] if contracted else operands
    bounds += p.rows * jnp.arange(size, dtype=jnp.int32)[:, None]
    joined = jnp.concatenate([bounds[:, :-1].ravel(), bounds[-1, -1:]])
    wider = dataclasses.replace(p, rows=size * p.rows, groups=size * p.groups)
    found = call(wider, *(x.reshape(size * x.shape[1], *x.shape[2:]) for x in operands), joined)
    found = found.reshape(size, *p.result().shape)
    return found if contracted else masked(found), 0


# ------------------------------------------------------------------------------
# Sharding. Rows are whole on each device, because boundaries count all rows, and so are groups: devices that divide
# experts give each call its own, with `group_offset`.


def shard(p: RaggedDotProblem) -> Sharding[RaggedDotProblem]:
    """Returns the sharding rule; if k is sharded, devices sum products in the result's dtype, as for a matmul."""
    matrices = "groups n k" if p.transpose_rhs else "groups k n"
    return Sharding(f"rows k, {matrices}, boundaries -> rows n", divided=("n",), summed=("k",))


def shard_gated(p: GatedRaggedDotProblem) -> Sharding[GatedRaggedDotProblem]:
    """Returns the sharding rule; a sum over devices would need both accumulators, which the kernel does not return."""
    matrices = "groups n k" if p.transpose_rhs else "groups k n"
    return Sharding(f"rows k, {matrices}, {matrices}, boundaries -> rows n", divided=("n",))


def shard_weights(p: RaggedDotWeightsProblem) -> Sharding[RaggedDotWeightsProblem]:
    return Sharding("rows k, rows n, boundaries -> groups k n", divided=("k", "n"))


RAGGED_DOT = Operation[RaggedDotProblem](
    name="ragged_dot",
    problem=RaggedDotProblem,
    kernels=Kernels(
        KernelName("mosaic_gpu", "cuda", "search_spaces.ragged_dot.hopper:MosaicGpuRaggedDot"),
        KernelName("jax_mosaic_gpu", "cuda", "search_spaces.ragged_dot.jax_kernels:JaxRaggedDot"),
        KernelName("jax_blackwell", "cuda", "search_spaces.contrib.jax_blackwell:JaxBlackwellRaggedDot"),
        KernelName("mosaic_tpu", "tpu", "search_spaces.contrib.tpu.ragged_dot:MosaicTpuRaggedDot"),
        InterpretRaggedDot(),
        XlaRaggedDot(),
    ),
    jvp=jvp,
    transpose=transpose,
    batch=batch,
    front_end=bind,
    equations={jax_compat.RAGGED_DOT_GENERAL: equation_of(RaggedDotProblem)},
    shard=shard,
)

GATED_RAGGED_DOT = Operation[GatedRaggedDotProblem](
    name="gated_ragged_dot",
    problem=GatedRaggedDotProblem,
    kernels=Kernels(
        KernelName("mosaic_gpu", "cuda", "search_spaces.ragged_dot.hopper:MosaicGpuGatedRaggedDot"),
        KernelName("mosaic_tpu", "tpu", "search_spaces.contrib.tpu.ragged_dot:MosaicTpuGatedRaggedDot"),
        InterpretGatedRaggedDot(),
        XlaGatedRaggedDot(),
    ),
    jvp=jvp_gated,
    batch=batch_gated,
    front_end=bind_gated,
    shard=shard_gated,
)

RAGGED_DOT_WEIGHTS = Operation[RaggedDotWeightsProblem](
    name="ragged_dot_weights",
    problem=RaggedDotWeightsProblem,
    kernels=Kernels(
        KernelName("mosaic_gpu", "cuda", "search_spaces.ragged_dot.hopper:MosaicGpuRaggedDotWeights"),
        KernelName("mosaic_tpu", "tpu", "search_spaces.contrib.tpu.ragged_dot:MosaicTpuRaggedDotWeights"),
        InterpretRaggedDotWeights(),
        XlaRaggedDotWeights(),
    ),
    jvp=jvp,
    transpose=transpose_weights,
    batch=batch_weights,
    equations={jax_compat.RAGGED_DOT_GENERAL: equation_of(RaggedDotWeightsProblem)},
    shard=shard_weights,
)

__all__ = [
    "GATED_RAGGED_DOT",
    "RAGGED_DOT",
    "RAGGED_DOT_WEIGHTS",
    "GatedRaggedDotProblem",
    "RaggedDotProblem",
    "RaggedDotWeightsProblem",
]
