"""How a product differentiates, transposes and batches, in terms of other products."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from search_spaces.matmul.problem import MatmulProblem

Call = Callable[..., jax.Array]


def jvp(call: Call, p: MatmulProblem, primals: Any, tangents: Any) -> tuple[jax.Array, jax.Array | None]:
    (a, b), (da, db) = primals, tangents
    parts = ([] if da is None else [call(p, da, b)]) + ([] if db is None else [call(p, a, db)])
    return call(p, a, b), sum(parts[1:], parts[0]) if parts else None


def transpose(call: Call, p: MatmulProblem, cotangent: jax.Array, args: Any) -> tuple[jax.Array | None, ...]:
    """``da = dc bᵀ`` and ``db = aᵀ dc``, written in the layout that the operand has: no operand is copied."""
    a, b = args
    other = b if a is None else a
    # A result wider than the operands has a wider cotangent: narrowing it here would lose what the caller asked for.
    dtype = jnp.promote_types(cotangent.dtype, other.dtype)
    dc, other = cotangent.astype(dtype), other.astype(dtype)

    def product(m: int, n: int, k: int, x: jax.Array, y: jax.Array, transpose_x: bool, transpose_y: bool) -> jax.Array:
        problem = dataclasses.replace(
            p, m=m, n=n, k=k, dtype=str(dtype), out_dtype=p.dtype, transpose_a=transpose_x, transpose_b=transpose_y
        )
        return call(problem, x, y)

    if a is None and not p.transpose_a:  # [m, k] = dc [m, n] @ bᵀ [n, k]
        return product(p.m, p.k, p.n, dc, other, False, not p.transpose_b), None
    if a is None:  # [k, m] = b [k, n] @ dcᵀ [n, m]
        return product(p.k, p.m, p.n, other, dc, p.transpose_b, True), None
    if not p.transpose_b:  # [k, n] = aᵀ [k, m] @ dc [m, n]
        return None, product(p.k, p.n, p.m, other, dc, not p.transpose_a, False)
    return None, product(p.n, p.k, p.m, dc, other, True, p.transpose_a)  # [n, k] = dcᵀ [n, m] @ a [m, k]


def batch(call: Call, p: MatmulProblem, args: Any, dims: Any) -> tuple[jax.Array, int]:
    """An operand that is not batched is read once: the other's new axis joins m or n. Two batched ones batch."""
    (a, b), (a_dim, b_dim) = args, dims
    lead = a.ndim - 2 - (a_dim is not None)  # axes that batch already
    if b_dim is None:  # next to m; free where it is there already, as in [v, m, k]
        size, place = a.shape[a_dim], lead + (1 if p.transpose_a else 0)
        a = _merge(jnp.moveaxis(a, a_dim, place), place)
        return _split(call(dataclasses.replace(p, m=size * p.m), a, b), lead, size), lead
    size = b.shape[b_dim]
    if a_dim is None:
        place = lead + (0 if p.transpose_b else 1)
        b = _merge(jnp.moveaxis(b, b_dim, place), place)
        return _split(call(dataclasses.replace(p, n=size * p.n), a, b), lead + 1, size), lead + 1
    a, b = jnp.moveaxis(a, a_dim, 0), jnp.moveaxis(b, b_dim, 0)
    batched = dataclasses.replace(p, batch=size * p.batch)
    c = call(batched, *(x.reshape(s.shape) for x, s in zip((a, b), batched.operands(), strict=True)))
    return c.reshape(size, *p.result().shape), 0


def _merge(x: jax.Array, axis: int) -> jax.Array:
    """Axes `axis` and the next one as one."""
    return x.reshape(*x.shape[:axis], x.shape[axis] * x.shape[axis + 1], *x.shape[axis + 2 :])


def _split(x: jax.Array, axis: int, size: int) -> jax.Array:
    """The inverse of `_merge`: the first of the two axes has `size` elements."""
    return x.reshape(*x.shape[:axis], size, x.shape[axis] // size, *x.shape[axis + 1 :])
