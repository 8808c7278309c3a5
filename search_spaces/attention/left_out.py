"""Zeros the keys that no query sees, and the queries that see no key.

A probability of 0 is not enough: 0 times NaN is NaN, and a cache of keys and values, or padding, may hold anything.
With zeros there, products of masked elements are 0. Keys that only some queries do not see are kept.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp

from search_spaces.attention.problem import Bounds, Lengths


def keys(p: Bounds, of: Lengths, *arrays: Any) -> tuple[Any, ...]:
    """Zeros keys that no query sees, in arrays ``[batch, kv_len, ...]``."""
    return arrays if p.every_key_is_seen else tuple(_first(x, p.counted(of).kv) for x in arrays)


def queries(p: Bounds, of: Lengths, *arrays: Any) -> tuple[Any, ...]:
    """Zeros queries that see no key, in arrays ``[batch, q_len, ...]``."""
    return arrays if p.every_query_sees else tuple(_first(x, p.counted(of).q) for x in arrays)


def statistics(p: Bounds, of: Lengths, x: Any, value: float = 0.0) -> Any:
    """Sets ``[batch, heads, q_len]`` to `value` for queries that see no key."""
    if p.every_query_sees:
        return x
    return jnp.where(_there(p.counted(of).q, x.shape[2])[:, None], x, jnp.asarray(value, x.dtype))


def _first(x: Any, count: Any) -> jax.Array:
    there = _there(count, x.shape[1])
    return jnp.where(there.reshape(*there.shape, *(1,) * (x.ndim - 2)), x, jnp.zeros((), x.dtype))


def _there(count: Any, length: Any) -> jax.Array:
    """Returns a mask ``[batch or 1, length]`` of the first `count` elements."""
    return jnp.arange(length)[None] < jnp.atleast_1d(count)[:, None]
