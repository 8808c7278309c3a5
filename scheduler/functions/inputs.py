"""A function of its arrays alone: whatever else is among its arguments is part of the function."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType
from typing import Any

import jax
import numpy as np

_ARRAYS = (jax.Array, np.ndarray, np.generic, jax.ShapeDtypeStruct)


def of_arrays(
    fn: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any] = MappingProxyType({})
) -> tuple[Callable[..., Any], tuple[Any, ...]]:
    """``fn(*args, **kwargs)`` as a function of the arrays in it, or of their shapes, and these."""
    leaves, tree = jax.tree.flatten((tuple(args), dict(kwargs)))
    places = [i for i, leaf in enumerate(leaves) if isinstance(leaf, _ARRAYS)]

    def call(*arrays: Any) -> Any:
        given = dict(zip(places, arrays, strict=True))
        positional, named = jax.tree.unflatten(tree, [given.get(i, leaf) for i, leaf in enumerate(leaves)])
        return fn(*positional, **named)

    return call, tuple(leaves[i] for i in places)
