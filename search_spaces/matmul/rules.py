"""The derivative, transpose, batching and sharding rules of a matmul, in terms of other matmuls."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from search_spaces.front_end import axes_of
from search_spaces.matmul.problem import RESULTS, MatmulProblem, as_rows
from search_spaces.problem import Arrays
from search_spaces.sharding import Sharding

Call = Callable[..., Any]


def jvp(call: Call, p: MatmulProblem, primals: Any, tangents: Any) -> tuple[Arrays, Arrays | None]:
    """Computes the tangent ``slope (da b + a db + dbias) + dresidual``: matmuls without epilogue; XLA does the rest.

    The slope of an activation needs its input. Therefore the matmul returns its accumulators in float32, and its
    epilogue is a separate pass, which moves 8 more bytes per element. Recomputing the accumulators would take 2 k
    operations per element, which is slower from k of about 800 on (an H200's 4.2 TB/s and 800 TFLOP/s). For the
    backward pass JAX saves the slope, in the dtype of the result.

    Several results have several tangents. A separate epilogue pass reads all columns in one array and splits it.
    """
    if p.split_sizes and p.activation:
        whole, moved = jvp(call, p.joined, primals, tangents)
        return p.cut(whole), None if moved is None else p.cut(moved)
    a, b, *_ = p.named(primals)
    da, db, dbias, dresidual = p.named(tangents)
    dtype = p.whole.dtype
    moving = ([] if da is None else [call(p.plain, da, b)]) + ([] if db is None else [call(p.plain, a, db)])
    if dbias is not None:  # float32, so that a backward pass sums it over the rows in float32
        shape = _result_shape(p, primals)
        rows = as_rows(dbias.astype(jnp.float32), len(shape))
        moving.append(p.cut(jnp.broadcast_to(rows, shape).astype(dtype)))
    if p.activation and moving:
        acc = call(p.unrounded, a, b)
        result, slope = (
            x.astype(dtype) for x in jax.jvp(lambda x: p.apply_epilogue(x, primals), (acc,), (jnp.ones_like(acc),))
        )
        moving = [slope * sum(moving[1:], moving[0])]
    else:
        result = call(p, *primals)
    if dresidual is not None:
        moving.append(dresidual.astype(dtype))
    return result, jax.tree.map(lambda *xs: sum(xs[1:], xs[0]), *moving) if moving else None


def transpose(call: Call, p: MatmulProblem, cotangent: Any, args: Any) -> tuple[jax.Array | None, ...]:
    """Computes the cotangents: the bias gets the sum over the rows, in float32, and the residual the cotangent itself.

    Cotangents of several results are concatenated, with zeros for those that are None. That moves ``2 m n`` elements,
    and serves ``db`` as well. With s separate matmuls, each would read and write the partial ``da``, m x k, of the one
    before it, which moves ``2 (s - 1) m k`` elements, and ``2 k n`` for the parts of `b`.

    Raises:
      NotImplementedError: with an activation, the matmul is linear in the residual only.
    """
    if p.split_sizes:
        return transpose(call, p.joined, _joined(p, cotangent), args)
    a, b, bias, residual = p.named(args)
    if p.activation and any(x is None for x in (a, b, *([bias] if p.bias else []))):
        raise NotImplementedError(f"matmul {p} is linear in its residual alone: it has no transpose in other operands")
    cotangents: list[jax.Array | None] = [None, None]
    if a is None or b is None:
        cotangents = [*_transpose(call, p.plain, cotangent, a, b)]
    if p.bias:
        rows = cotangent.astype(jnp.float32).sum(axis=_row_axes(p, cotangent.shape))
        cotangents.append(rows.astype(p.bias) if bias is None else None)
    if p.residual:
        cotangents.append(cotangent.astype(p.residual) if residual is None else None)
    return tuple(cotangents)


def _transpose(call: Call, p: MatmulProblem, cotangent: jax.Array, a: Any, b: Any) -> tuple[jax.Array | None, ...]:
    """Computes ``da = dc bᵀ`` and ``db = aᵀ dc`` in the layout of the operand, so that no operand is copied."""
    other = b if a is None else a
    # A result wider than the operands has a wider cotangent; narrowing it here would lose the requested precision.
    # 8-bit floats, which JAX does not promote, are exact in any dtype of the cotangent.
    narrow = other.dtype.itemsize == 1
    dtype = cotangent.dtype if narrow else jnp.promote_types(cotangent.dtype, other.dtype)
    dc, other = cotangent.astype(dtype), other.astype(dtype)

    def product(m: int, n: int, k: int, x: jax.Array, y: jax.Array, transpose_x: bool, transpose_y: bool) -> jax.Array:
        out = p.dtype if p.dtype in RESULTS[str(dtype)] else ""  # an 8-bit cotangent is rounded afterwards
        problem = dataclasses.replace(
            p, m=m, n=n, k=k, dtype=str(dtype), out_dtype=out, transpose_a=transpose_x, transpose_b=transpose_y
        )
        return call(problem, x, y).astype(p.dtype)

    if a is None and not p.transpose_a:  # [m, k] = dc [m, n] @ bᵀ [n, k]
        return product(p.m, p.k, p.n, dc, other, False, not p.transpose_b), None
    if a is None:  # [k, m] = b [k, n] @ dcᵀ [n, m]
        return product(p.k, p.m, p.n, other, dc, p.transpose_b, True), None
    if not p.transpose_b:  # [k, n] = aᵀ [k, m] @ dc [m, n]
        return None, product(p.k, p.n, p.m, other, dc, not p.transpose_a, False)
    return None, product(p.n, p.k, p.m, dc, other, True, p.transpose_a)  # [n, k] = dcᵀ [n, m] @ a [m, k]


def _joined(p: MatmulProblem, cotangents: Sequence[jax.Array | None]) -> jax.Array:
    """Concatenates the cotangents of the results along the columns."""
    column = next(jnp.zeros_like(ct[..., :1]) for ct in cotangents if ct is not None)
    wanted = zip(cotangents, p.columns, strict=True)
    return jnp.concatenate(
        [jnp.broadcast_to(column, (*column.shape[:-1], n)) if ct is None else ct for ct, n in wanted], axis=-1
    )


def _axes(p: MatmulProblem, shapes: Sequence[tuple[int, ...] | None]) -> dict[str, tuple[int, ...]]:
    """Maps each letter of the sharding rule to its extents in arrays of these shapes (operands, then the result)."""
    plain = p.joined
    sharding = shard(plain)
    of_one = {letter: (extent,) for letter, extent in sharding.extents(plain).items()}
    return of_one | axes_of(sharding, plain, shapes)


def _result_shape(p: MatmulProblem, args: Sequence[Any]) -> tuple[int, ...]:
    """Returns the shape of the result with all columns in one array."""
    axes = _axes(p, [x.shape for x in args])
    return *axes.get("batch", ()), *axes["m"], *axes["n"]


def _row_axes(p: MatmulProblem, shape: tuple[int, ...]) -> tuple[int, ...]:
    """Returns the row axes of a result of this shape."""
    axes = _axes(p, [*(None for _ in p.operands()), shape])
    first = len(axes.get("batch", ()))
    return tuple(range(first, first + len(axes["m"])))


def batch(call: Call, p: MatmulProblem, args: Any, dims: Any) -> tuple[Arrays, int]:
    """Batches as one larger matmul (see `widened`).

    XLA computes the epilogue if neither operand is batched, or if biases differ along an axis that would join m.
    """
    a_dim, b_dim, bias_dim, _ = p.named(dims)
    if b_dim is None and (a_dim is None or bias_dim is not None):
        return _batch_apart(call, p, args, dims)
    size = next(x.shape[dim] for x, dim in zip(args, dims, strict=True) if dim is not None)
    moved = [x if dim is None else jnp.moveaxis(x, dim, 0) for x, dim in zip(args, dims, strict=True)]
    wider = widened(p, moved, [dim is not None for dim in dims], (size,))
    return jax.tree.map(wider.split, call(wider.problem, *wider.operands)), wider.dim


class Widened(NamedTuple):
    """One matmul in place of several: its problem and operands, and the new axis `dim` of each result after `split`."""

    problem: MatmulProblem
    operands: tuple[jax.Array, ...]
    split: Callable[[jax.Array], jax.Array]
    dim: int


def widened(p: MatmulProblem, args: Sequence[jax.Array], mapped: Sequence[bool], sizes: tuple[int, ...]) -> Widened:
    """Combines several matmuls into one: if one of `a` and `b` is not mapped, the new axes join m or n; else the batch.

    An operand that is not mapped is then read once. A residual follows the result, and a bias follows n; both are
    repeated if not mapped. At least one of `a` and `b` is mapped, and a bias only if `b` is. Several results cannot be
    joined along n, because each would become many; these are batched, and `a` is repeated.

    Args:
      args: mapped operands have leading axes of these sizes.
    """
    new, count = len(sizes), math.prod(sizes)
    axes = _axes(p, [x.shape[new:] if is_mapped else x.shape for x, is_mapped in zip(args, mapped, strict=True)])
    lead, rows, steps = (len(axes.get(letter, ())) for letter in ("batch", "m", "k"))
    given, is_mapped = p.named(args), p.named(mapped)

    def at(name: str, place: int) -> jax.Array | None:
        """Moves the new axes of an operand to `place`; repeats an operand that is not mapped."""
        if (x := getattr(given, name)) is None:
            return None
        x = x if getattr(is_mapped, name) else jnp.broadcast_to(x, (*sizes, *x.shape))
        return jnp.moveaxis(x, range(new), range(place, place + new))

    def joined(name: str, place: int) -> jax.Array | None:
        """Does the same as `at`, with the new axes merged into the axis at `place`."""
        x = at(name, place)
        return (
            x if x is None else x.reshape(*x.shape[:place], count * x.shape[place + new], *x.shape[place + new + 1 :])
        )

    if not is_mapped.b:  # new axes before m
        wider = dataclasses.replace(p, m=count * p.m)
        a, residual = at("a", lead + (steps if p.transpose_a else 0)), at("residual", lead)
        return Widened(wider, _present(a, given.b, given.bias, residual), lambda c: c, lead)
    if not is_mapped.a and not p.split_sizes:
        wider, place = dataclasses.replace(p, n=count * p.n), lead + rows
        b, bias = joined("b", lead + (0 if p.transpose_b else steps)), joined("bias", lead)

        def split(c: jax.Array) -> jax.Array:
            return c.reshape(*c.shape[:place], *sizes, c.shape[place] // count, *c.shape[place + 1 :])

        return Widened(wider, _present(given.a, b, bias, joined("residual", place)), split, place)
    batched = dataclasses.replace(p, batch=count * p.batch)
    return Widened(batched, _present(*(at(name, 0) for name in given._fields)), lambda c: c, 0)


def _batch_apart(call: Call, p: MatmulProblem, args: Any, dims: Any) -> tuple[Arrays, int]:
    """Computes the accumulators by one matmul, in float32, and the epilogue as a pass over them."""
    a, b, *rest = args
    if dims[0] is None:
        acc, dim = call(p.unrounded, a, b), None
    else:
        acc, dim = batch(call, p.unrounded, (a, b), dims[:2])

    def finish(acc: jax.Array, *rest: jax.Array) -> Arrays:
        return p.cut(p.apply_epilogue(acc, (a, b, *rest)).astype(p.whole.dtype))

    return jax.vmap(finish, (dim, *dims[2:]))(acc, *rest), 0


def shard(p: MatmulProblem) -> Sharding[MatmulProblem]:
    """Returns the sharding rule: if k is sharded, devices sum products in the result's dtype, then apply the epilogue.

    XLA does the same for a `dot_general`: a sum of float32 accumulators would move twice the bytes of a 16-bit sum.
    Columns that are split into several arrays are not sharded: each device would need some columns of each array, and
    these are not adjacent in `b`.
    """
    lead = "batch " if p.batch > 1 else ""
    columns = [f"n{i}" for i in range(len(p.columns))] if p.split_sizes else ["n"]
    operands = ["k m" if p.transpose_a else "m k", "n k" if p.transpose_b else "k n"]
    operands += ["n"] * bool(p.bias) + ["m n"] * bool(p.residual)
    arrows = ", ".join(lead + x for x in operands), ", ".join(f"{lead}m {x}" for x in columns)
    return Sharding(
        rule=" -> ".join(arrows),
        divided=(*lead.split(), "m", *([] if p.split_sizes else ["n"])),
        summed=("k",),
        partial=lambda local: local.plain.joined,
        finish=_finish,
    )


def _finish(local: MatmulProblem, sums: Sequence[Any], args: Sequence[Any]) -> Arrays:
    (total,) = sums
    if local.fused:
        total = local.apply_epilogue(total.astype(local.acc_dtype), args).astype(local.whole.dtype)
    return local.cut(total)


def _present(*operands: jax.Array | None) -> tuple[jax.Array, ...]:
    return tuple(x for x in operands if x is not None)
