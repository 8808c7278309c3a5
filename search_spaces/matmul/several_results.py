"""The column counts of a matmul with several results, as text and as numbers, and the split of the columns."""

from __future__ import annotations

import operator
from collections.abc import Sequence

import jax
from jax import lax


def spelled(sizes: Sequence[int] | str) -> str:
    """Formats column counts as in a problem or on a command line, ``"4096+1024+1024"``; returns text unchanged.

    Raises:
      TypeError: the sizes are not integers.
    """
    if isinstance(sizes, str):
        return sizes
    try:
        return "+".join(str(operator.index(size)) for size in sizes)
    except TypeError:
        raise TypeError(f"split_sizes={sizes!r} is no sequence of integers, such as (4096, 1024, 1024)") from None


def numbers(text: str) -> tuple[int, ...]:
    """Parses the text that `spelled` returns.

    Raises:
      ValueError: a number is not positive, or there is only one.
    """
    each = text.split("+")
    if not all(number.isascii() and number.isdecimal() and int(number) > 0 for number in each):
        raise ValueError(f"split_sizes={text!r} wants the columns of each result, 1 or more, such as 4096+1024+1024")
    if len(each) == 1:
        raise ValueError(f"split_sizes={text} is a single result: leave it out")
    return tuple(map(int, each))


def check(sizes: tuple[int, ...], n: int) -> None:
    """Raises a ValueError if the sizes do not add up to `n` columns."""
    if sum(sizes) != n:
        raise ValueError(f"split_sizes={spelled(sizes)} adds up to {sum(sizes)} columns, and the product has {n}")


def cut(whole: jax.Array, sizes: tuple[int, ...]) -> tuple[jax.Array, ...]:
    """Splits the columns of an array into arrays of these sizes."""
    return tuple(lax.split(whole, sizes, axis=whole.ndim - 1))
