"""Equinox support: detects functions of `filter_jit`, their donated arguments, and static numbers.

Equinox is never imported here, only used if the user's program imported it.
"""

from __future__ import annotations

import contextlib
import inspect
import sys
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any


def is_module(x: Any) -> bool:
    """Returns whether `x` is an Equinox module. Numbers among its leaves are static, as for `filter_jit`."""
    equinox = sys.modules.get("equinox")
    module = getattr(equinox, "Module", None)  # None while it is being imported
    return module is not None and isinstance(x, module)


def is_jitted(fn: Any) -> bool:
    """Returns whether `filter_jit` made `fn`. Then everything except arrays is static."""
    return is_module(fn) and hasattr(fn, "donate_first") and hasattr(fn, "donate_rest")


def donated(
    fn: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]
) -> tuple[tuple[int, ...], tuple[str, ...]]:
    """Returns the indices and names of the arguments that a `filter_jit` function donates."""
    given: Any = fn
    bound = inspect.signature(fn).bind(*args, **kwargs)
    first_is_named = not args and bool(bound.args)
    numbers = tuple(i for i in range(len(args)) if (given.donate_rest if i else given.donate_first))
    first = next(iter(bound.arguments)) if first_is_named else None
    names = tuple(name for name in kwargs if (given.donate_first if name == first else given.donate_rest))
    return numbers, names


@contextlib.contextmanager
def donating_as(fn: Any) -> Iterator[None]:
    """Ignores JAX's warnings of unusable donated buffers if `filter_jit` does so for `fn`."""
    if not (is_jitted(fn) and getattr(fn, "filter_warning", False)):
        yield
        return
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="Some donated buffers were not usable")
        yield
