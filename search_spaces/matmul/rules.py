"""How a product differentiates, transposes, batches and divides over devices, in terms of other products."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from search_spaces.matmul.problem import RESULTS, MatmulProblem, as_rows
from search_spaces.problem import Arrays
from search_spaces.sharding import Sharding
from search_spaces.unfolded import axes_of

Call = Callable[..., Any]


def jvp(call: Call, p: MatmulProblem, primals: Any, tangents: Any) -> tuple[Arrays, Arrays | None]:
    """The tangent is ``slope (da b + a db + dbias) + dresidual``: products without epilogue, and the rest for XLA.

    The slope of an activation needs what goes into it. So the product ends with its accumulators in float32, and its
    epilogue is a pass of its own: 8 more bytes of traffic for each element. To accumulate again would take 2 k
    operations for each, which is longer from a k of some 800 on (an H200's 4.2 TB/s and 800 TFLOP/s). For the backward
    pass JAX keeps the slope, in the dtype of the result.

    The tangents of several results are several. Where the epilogue is a pass of its own, that reads all columns in one
    array, and cuts it.
    """
    if p.split_sizes and p.activation:
        whole, moved = jvp(call, p.joined, primals, tangents)
        return p.cut(whole), None if moved is None else p.cut(moved)
    a, b, *_ = p.named(primals)
    da, db, dbias, dresidual = p.named(tangents)
    dtype = p.whole.dtype
    moving = ([] if da is None else [call(p.plain, da, b)]) + ([] if db is None else [call(p.plain, a, db)])
    if dbias is not None:  # in float32, so that a backward pass sums it over the rows in float32
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
    """A bias gets the cotangent's sum over the rows, in float32, and a residual the cotangent.

    Cotangents of several results are joined, zeros where there is none: for results of m x n, of which s products in a
    row would otherwise each read and write what the one before it left of ``da``, m x k, that moves ``2 m n`` elements
    in place of ``2 (s - 1) m k`` and ``2 k n`` (parts of `b`), and serves ``db``, too.

    Raises:
      NotImplementedError: with an activation it is linear in nothing but the residual.
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
    """``da = dc bᵀ`` and ``db = aᵀ dc``, written in the layout that the operand has: no operand is copied."""
    other = b if a is None else a
    # A result wider than the operands has a wider cotangent: narrowing it here would lose what the caller asked for.
    # 8-bit floats, which JAX promotes to nothing, are exact in whatever the cotangent is.
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
    """What belongs to each result, side by side."""
    column = next(jnp.zeros_like(ct[..., :1]) for ct in cotangents if ct is not None)
    wanted = zip(cotangents, p.columns, strict=True)
    return jnp.concatenate(
        [jnp.broadcast_to(column, (*column.shape[:-1], n)) if ct is None else ct for ct, n in wanted], axis=-1
    )


def _axes(p: MatmulProblem, shapes: Sequence[tuple[int, ...] | None]) -> dict[str, tuple[int, ...]]:
    """The extents of what a letter of the sharding has in arrays of these shapes, operands and then the result."""
    plain = p.joined
    sharding = shard(plain)
    of_one = {letter: (extent,) for letter, extent in sharding.extents(plain).items()}
    return of_one | axes_of(sharding, plain, shapes)


def _result_shape(p: MatmulProblem, args: Sequence[Any]) -> tuple[int, ...]:
    """Of all columns in one array."""
    axes = _axes(p, [x.shape for x in args])
    return *axes.get("batch", ()), *axes["m"], *axes["n"]


def _row_axes(p: MatmulProblem, shape: tuple[int, ...]) -> tuple[int, ...]:
    """Of a result of this shape."""
    axes = _axes(p, [*(None for _ in p.operands()), shape])
    first = len(axes.get("batch", ()))
    return tuple(range(first, first + len(axes["m"])))


def batch(call: Call, p: MatmulProblem, args: Any, dims: Any) -> tuple[Arrays, int]:
    """As one larger product (see `widened`).

    Where biases differ along what would join m, or where neither operand is batched, the epilogue is for XLA to
    compute.
    """
    a_dim, b_dim, bias_dim, _ = p.named(dims)
    if b_dim is None and (a_dim is None or bias_dim is not None):
        return _batch_apart(call, p, args, dims)
    size = next(x.shape[dim] for x, dim in zip(args, dims, strict=True) if dim is not None)
    moved = [x if dim is None else jnp.moveaxis(x, dim, 0) for x, dim in zip(args, dims, strict=True)]
    wider = widened(p, moved, [dim is not None for dim in dims], (size,))
    return jax.tree.map(wider.split, call(wider.problem, *wider.operands)), wider.dim


class Widened(NamedTuple):
    """One product in place of several: its problem and operands, and where in each result, once split, they lie."""

    problem: MatmulProblem
    operands: tuple[jax.Array, ...]
    split: Callable[[jax.Array], jax.Array]
    dim: int


def widened(p: MatmulProblem, args: Sequence[jax.Array], mapped: Sequence[bool], sizes: tuple[int, ...]) -> Widened:
    """An operand that is not mapped is read once: the other's new axes join m or n. Two mapped ones batch.

    A residual goes with the result, repeated where it is not mapped, and so does a bias along n. One of `a` and `b` is
    mapped, and a bias only where `b` is. Along n several results of each would be many: they batch instead, and `a` is
    repeated.

    Args:
      args: those that are mapped have axes of these sizes in front.
    """
    new, count = len(sizes), math.prod(sizes)
    axes = _axes(p, [x.shape[new:] if is_mapped else x.shape for x, is_mapped in zip(args, mapped, strict=True)])
    lead, rows, steps = (len(axes.get(letter, ())) for letter in ("batch", "m", "k"))
    given, is_mapped = p.named(args), p.named(mapped)

    def at(name: str, place: int) -> jax.Array | None:
        """An operand with its new axes there; repeated along them where it is not mapped."""
        if (x := getattr(given, name)) is None:
            return None
        x = x if getattr(is_mapped, name) else jnp.broadcast_to(x, (*sizes, *x.shape))
        return jnp.moveaxis(x, range(new), range(place, place + new))

    def joined(name: str, place: int) -> jax.Array | None:
        """The same, of one axis with the one that was there."""
        x = at(name, place)
        return (
            x if x is None else x.reshape(*x.shape[:place], count * x.shape[place + new], *x.shape[place + new + 1 :])
        )

    if not is_mapped.b:  # in front of m
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
    """The accumulators by one product, in float32, and the epilogue as a pass over them."""
    a, b, *rest = args
    if dims[0] is None:
        acc, dim = call(p.unrounded, a, b), None
    else:
        acc, dim = batch(call, p.unrounded, (a, b), dims[:2])

    def finish(acc: jax.Array, *rest: jax.Array) -> Arrays:
        return p.cut(p.apply_epilogue(acc, (a, b, *rest)).astype(p.whole.dtype))

    return jax.vmap(finish, (dim, *dims[2:]))(acc, *rest), 0


def shard(p: MatmulProblem) -> Sharding[MatmulProblem]:
    """Where k is divided, devices sum products in the result's dtype, and the epilogue is a pass after that.

    As XLA does for a `dot_general`: a sum of accumulators would move twice the bytes of one in 16 bits. Columns that
    come in several arrays are not divided: each device would need some of each, which do not lie beside each other in
    `b`.
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
