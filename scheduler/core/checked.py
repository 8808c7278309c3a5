"""Validation of arguments and settings, with the same checks and messages in every public call.

Two traps are handled here: comparisons with NaN are false, so a check such as `x <= 0` accepts NaN; and True is an
integer in Python.
"""

from __future__ import annotations

import math
import numbers
import reprlib
from collections.abc import Sequence
from typing import Any, TypeVar

T = TypeVar("T", bound=str)

# The largest count and the largest seed that all libraries accept.
MOST = 2**31 - 1
MOST_SEED = 2**32 - 1


def whole(name: str, value: Any, *, least: int = 1, most: int = MOST) -> int:
    """Returns `value` as an integer from `least` to `most`.

    Raises:
      TypeError: `value` is not an integer.
      ValueError: `value` is out of range.
    """
    wanted = f"an integer from {least} to {most}"
    if not isinstance(value, numbers.Integral) or isinstance(value, bool):
        raise _type_error(name, value, wanted)
    if not least <= (found := int(value)) <= most:
        raise _value_error(name, value, wanted)
    return found


def whole_or_none(name: str, value: Any, *, least: int = 1, most: int = MOST) -> int | None:
    """Returns None for None, otherwise the result of `whole`."""
    return None if value is None else _or_none(whole, name, value, least=least, most=most)


def seed(value: Any) -> int:
    """Returns `value` as the seed of a random draw, from 0 to 2^32 - 1; raises as `whole` does."""
    return whole("seed", value, least=0, most=MOST_SEED)


def positive(name: str, value: Any) -> float:
    """Returns `value` as a finite number above 0; raises as `number` does."""
    return number(name, value, above=True)


def positive_or_none(name: str, value: Any) -> float | None:
    """Returns None for None, otherwise the result of `positive`."""
    return None if value is None else _or_none(positive, name, value)


def number(name: str, value: Any, *, above: bool = False) -> float:
    """Returns `value` as a finite number, 0 or more.

    Args:
      above: also reject 0.

    Raises:
      TypeError: `value` is not a number.
      ValueError: `value` is negative, NaN or infinite.
    """
    wanted = "a finite number above 0" if above else "a finite number, 0 or more"
    if not isinstance(value, numbers.Real) or isinstance(value, bool):
        raise _type_error(name, value, wanted)
    try:
        found = float(value)
    except OverflowError:
        found = math.inf
    if not (found > 0 if above else found >= 0) or not math.isfinite(found):
        raise _value_error(name, value, wanted)
    return found


def flag(name: str, value: Any) -> bool:
    """Returns `value` if it is True or False; other truthy values, such as "no", are rejected.

    Raises:
      TypeError: `value` is not a bool.
    """
    if not isinstance(value, bool):
        raise _type_error(name, value, "True or False")
    return value


def one_of(name: str, value: Any, words: Sequence[T]) -> T:
    """Returns `value` if it is one of `words`.

    Raises:
      ValueError: `value` is not one of `words`.
    """
    for word in words:
        if isinstance(value, str) and value == word:
            return word
    raise ValueError(f"{name}={reprlib.repr(value)} is not one of {', '.join(words)}")


def text(name: str, value: Any) -> str:
    """Returns `value` if it is a string.

    Raises:
      TypeError: `value` is not a string.
    """
    if not isinstance(value, str):
        raise _type_error(name, value, "a text")
    return value


def _or_none(check: Any, name: str, value: Any, **bounds: int) -> Any:
    try:
        return check(name, value, **bounds)
    except (TypeError, ValueError) as error:
        raise type(error)(f"{error}, or None") from None


def _type_error(name: str, value: Any, wanted: str) -> TypeError:
    return TypeError(f"{name}={reprlib.repr(value)} is a {type(value).__name__}; give {wanted}")


def _value_error(name: str, value: Any, wanted: str) -> ValueError:
    return ValueError(f"{name}={reprlib.repr(value)} is out of range; give {wanted}")
