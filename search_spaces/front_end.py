"""Reasons why no kernel supports given arrays, common to all operations."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

import jax

from search_spaces import jax_compat

# The reason if a call on such a mesh is not sharded explicitly. The reason why it is not may follow.
EXPLICIT_AXES = "an array is on a mesh with explicit axes (inside `jax.shard_map` kernels are asked)"
_posing: ContextVar[bool] = ContextVar("posing", default=False)


@contextmanager
def posing_explicit() -> Iterator[None]:
    """Context in which arrays on a mesh with explicit axes pose problems, too: problems of the whole arrays."""
    before = _posing.set(True)
    try:
        yield
    finally:
        _posing.reset(before)


def unposed(arrays: Mapping[str, Any]) -> str | None:
    """Returns why no operation supports these arrays, keyed by the caller's names; None if they are supported."""
    for name, x in arrays.items():
        if not isinstance(x, jax.Array):
            return f"{name} is no array but {type(x).__name__}"
        if not all(isinstance(extent, int) for extent in x.shape):
            return f"{name} has symbols for extents: {x.shape}"
        if not all(x.shape):
            return f"{name} is empty: {x.shape}"
    return EXPLICIT_AXES if jax_compat.has_explicit_axes(list(arrays.values())) and not _posing.get() else None


def require_array(name: str, x: Any) -> None:
    """Raises a TypeError if `x` is neither an array nor a number, as `jnp` does for a list."""
    if x is None or isinstance(x, list | tuple):
        raise TypeError(f"{name} must be an array, not {type(x).__name__}: give it as jnp.asarray({name})")


def weakly_typed(*arrays: jax.Array) -> str | None:
    """Returns why arrays have no dtype of their own to define a problem by; None if they have."""
    if any(x.weak_type for x in arrays):
        return "an array is weakly typed, as Python's numbers are: give it a dtype with .astype"
    return None
