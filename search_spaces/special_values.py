"""Operands with values that typical ones lack: magnitudes, ties, NaN, infinities, and the extremes of integers."""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from search_spaces import reference_programs

# The changes to typical operands. Floating-point numbers: up to 2^20 times as large (as far as the dtype holds their
# squares), or 2^30 times as small, with zeros of both signs; small multiples of 1/2 with rows of equal elements and of
# zeros; one NaN in every fourth row; one infinity in every fourth row, and every eighth row all infinite. Integers: the
# extremes of their dtype; -1, 0 and 1; small ones. Complex numbers have no infinities, because there are several
# definitions of their products.
FINITE = ("large", "tiny", "halves")
KINDS = (*FINITE, "nan", "inf", "-inf")

LARGE, TINY = 20, 30


def kinds_of(dtypes: Sequence[Any]) -> tuple[str, ...]:
    """Returns the kinds that change operands of these dtypes."""
    if any(jnp.issubdtype(dtype, jnp.floating) for dtype in dtypes):
        return KINDS
    if any(jnp.issubdtype(dtype, jnp.complexfloating) for dtype in dtypes):
        return (*FINITE, "nan")
    return FINITE if any(jnp.issubdtype(dtype, jnp.integer) for dtype in dtypes) else ()


def altered(operands: Sequence[jax.Array], kind: str, *, integers: bool = True) -> tuple[jax.Array, ...]:
    """Changes typical operands to special ones of this kind.

    Args:
      kind: one of `KINDS`.
      integers: whether integers are changed, too: they may be lengths or indices.
    """
    made, first = [], True
    for x in operands:
        floats = jnp.issubdtype(x.dtype, jnp.inexact)
        if floats or (integers and jnp.issubdtype(x.dtype, jnp.integer)):
            x = reference_programs.run(_altered, x, jnp.int32(KINDS.index(kind)), first=first)
        # With a NaN in each row of a product's second factor, all results would be NaN.
        first = first and not floats
        made.append(x)
    return tuple(made)


@functools.partial(jax.jit, static_argnames="first")
def _altered(x: jax.Array, kind: jax.Array, *, first: bool) -> jax.Array:
    if not x.size:
        return x
    columns = x.shape[-1] if x.ndim else 1
    flat = x.reshape(-1, columns)
    row, column = (lax.broadcasted_iota(jnp.uint32, flat.shape, axis) for axis in (0, 1))
    drawn = _mixed(row * np.uint32(0x9E3779B9) + column)
    made = _integers if jnp.issubdtype(x.dtype, jnp.integer) else _floats
    return lax.switch(kind, made(flat, row, column, drawn, first)).reshape(x.shape)


def _integers(x: jax.Array, row: jax.Array, column: jax.Array, drawn: jax.Array, first: bool) -> list[Any]:
    info = jnp.iinfo(x.dtype)
    signed = int(info.min) < 0
    extremes = (int(info.min), int(info.max), 0, 1, -1 if signed else int(info.max) - 1)

    def large() -> jax.Array:
        which, result = drawn % np.uint32(8), x
        for number, value in enumerate(extremes):
            result = jnp.where(which == np.uint32(number), jnp.asarray(value, x.dtype), result)
        return result

    def among(least: int, most: int) -> jax.Array:
        least, most = max(least, int(info.min)), min(most, int(info.max))
        return ((drawn % np.uint32(most - least + 1)).astype(jnp.int32) + np.int32(least)).astype(x.dtype)

    return [large, lambda: among(-1, 1), lambda: _with_equal_rows(among(-8, 8), row, 3), *[lambda: x] * 3]


def _floats(x: jax.Array, row: jax.Array, column: jax.Array, drawn: jax.Array, first: bool) -> list[Any]:
    info = jnp.finfo(x.dtype)
    wide = jnp.promote_types(x.dtype, jnp.float32) if info.dtype.itemsize >= 4 else jnp.dtype(jnp.float32)
    real = jnp.finfo(wide).dtype
    # Squares still fit the dtype, or float32.
    up = min(LARGE, math.floor(math.log2(float(info.max)) / 2))
    down = min(TINY, math.floor(-math.log2(float(info.smallest_subnormal)) / 2))
    values = x.astype(wide)

    def with_zeros(values: jax.Array) -> jax.Array:
        zero = jnp.where(drawn & np.uint32(16), jnp.asarray(-0.0, real), jnp.asarray(0.0, real)).astype(wide)
        return jnp.where(drawn % np.uint32(16) == np.uint32(0), zero, values)

    def large() -> jax.Array:
        power = ((drawn >> np.uint32(8)) % np.uint32(up + 1)).astype(real)
        return with_zeros(values * jnp.exp2(power).astype(wide))

    def tiny() -> jax.Array:
        return with_zeros(values * jnp.asarray(2.0**-down, wide))

    def halves() -> jax.Array:
        half = ((drawn % np.uint32(17)).astype(real) - jnp.asarray(8, real)) * jnp.asarray(0.5, real)
        if jnp.issubdtype(wide, jnp.complexfloating):
            other = ((drawn >> np.uint32(8)) % np.uint32(17)).astype(real) - jnp.asarray(8, real)
            half = lax.complex(half, other * jnp.asarray(0.5, real))
        return with_zeros(_with_equal_rows(half, row, 1.5))

    def holding(value: float) -> jax.Array:
        rows, columns = x.shape
        place = _mixed(row + np.uint32(77)) % np.uint32(columns)
        chosen = row % np.uint32(4) == np.uint32(0) if first else row == np.uint32(rows // 3)
        there = chosen & (column == place)
        if first and math.isinf(value):
            there = there | (row % np.uint32(8) == np.uint32(4))
        return jnp.where(there, jnp.asarray(value, wide), values)

    def made(values: jax.Array) -> jax.Array:
        return values.astype(x.dtype)

    return [
        lambda: made(large()),
        lambda: made(tiny()),
        lambda: made(halves()),
        *[lambda value=value: made(holding(value)) for value in (math.nan, math.inf, -math.inf)],
    ]


def _with_equal_rows(values: jax.Array, row: jax.Array, equal: float) -> jax.Array:
    """Sets every eighth row to equal elements, and another eighth to zeros."""
    which = row % np.uint32(8)
    some = jnp.where(which == np.uint32(3), jnp.asarray(equal, values.dtype), values)
    return jnp.where(which == np.uint32(5), jnp.zeros_like(values), some)


def _mixed(bits: jax.Array) -> jax.Array:
    """Mixes bits so that each input bit counts (Chris Wellons, "Prospecting for Hash Functions", lowbias32)."""
    bits = (bits ^ (bits >> np.uint32(16))) * np.uint32(0x7FEB352D)
    bits = (bits ^ (bits >> np.uint32(15))) * np.uint32(0x846CA68B)
    return bits ^ (bits >> np.uint32(16))
