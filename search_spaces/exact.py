"""Keys for constants of a program: those of 0.0 and -0.0 differ, as do those of 1, 1.0 and True."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Hashable
from typing import Any

import numpy as np

from search_spaces.fingerprint import is_of_tools


def exact(x: Any) -> Hashable:
    """Returns a key for a constant, and for those that tuples, frozen sets and dataclasses hold. NaN equals NaN."""
    kind: Any = type(x)
    if kind is int or kind is str or x is None:
        return x
    if kind is tuple:
        return tuple(map(exact, x))
    if isinstance(x, float):
        return kind, x.hex()
    if isinstance(x, complex):
        return kind, x.real.hex(), x.imag.hex()
    if isinstance(x, np.generic):
        return kind, x.tobytes()
    if isinstance(x, tuple):
        return kind, *map(exact, x)
    if isinstance(x, frozenset):
        return kind, frozenset(map(exact, x))
    if (names := _compared(kind)) is not None:
        return kind, *[exact(getattr(x, name)) for name in names]
    return kind, x


@functools.cache
def _compared(kind: Any) -> tuple[str, ...] | None:
    """Returns the fields by which objects of a user's dataclass are compared; None for other types."""
    made = getattr(kind, "__dataclass_params__", None)
    # Dataclasses of this package hold no floats, except in `Params`.
    if made is None or not made.eq or kind.__hash__ is None or is_of_tools(kind):
        return None
    return tuple(field.name for field in dataclasses.fields(kind) if field.compare)
