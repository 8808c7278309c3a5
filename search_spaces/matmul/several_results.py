"""Columns of a product in several arrays side by side: how many each has, as text and numbers, and how they are cut."""

from __future__ import annotations

import operator
from collections.abc import Sequence

import jax
from jax import lax


def spelled(sizes: Sequence[int] | str) -> str:
    """``"4096+1024+1024"``, as a problem and a command line have it, of numbers; a text as it is.

    Raises:
      TypeError: they are no integers.
    """
    if isinstance(sizes, str):
        return sizes
    try:
        return "+".join(str(operator.index(size)) for size in sizes)
    except TypeError:
        raise TypeError(f"split_sizes={sizes!r} is no sequence of integers, such as (4096, 1024, 1024)") from None


def numbers(text: str) -> tuple[int, ...]:
    """Those of what `spelled` returns.

    Raises:
      ValueError: there are none, or none that columns have.
    """
    each = text.split("+")
    if not all(number.isascii() and number.isdecimal() and int(number) > 0 for number in each):
        raise ValueError(f"split_sizes={text!r} wants the columns of each result, 1 or more, such as 4096+1024+1024")
    if len(each) == 1:
        raise ValueError(f"split_sizes={text} is a single result: leave it out")
    return tuple(map(int, each))


def check(sizes: tuple[int, ...], n: int) -> None:
    """Raises a ValueError where they do not divide `n` columns among them."""
    if sum(sizes) != n:
        raise ValueError(f"split_sizes={spelled(sizes)} adds up to {sum(sizes)} columns, and the product has {n}")


def cut(whole: jax.Array, sizes: tuple[int, ...]) -> tuple[jax.Array, ...]:
    """The columns of an array in arrays of so many."""
    return tuple(lax.split(whole, sizes, axis=whole.ndim - 1))
