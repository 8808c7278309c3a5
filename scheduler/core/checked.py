"""Arguments and settings, checked: every public call refuses the same wrong numbers, flags and words alike.

NaN compares with nothing, so that a bound such as `x <= 0` lets it through; True is an integer to Python.
"""

from __future__ import annotations

import math
import numbers
import reprlib
from collections.abc import Sequence
from typing import Any, TypeVar

T = TypeVar("T", bound=str)

# Counts and seeds that every library takes.
MOST = 2**31 - 1
MOST_SEED = 2**32 - 1


def whole(name: str, value: Any, *, least: int = 1, most: int = MOST) -> int:
    """`value` as an integer from `least` to `most`.

    Raises:
      TypeError: it is no integer.
      ValueError: it is out of range.
    """
    wanted = f"an integer from {least} to {most}"
    if not isinstance(value, numbers.Integral) or isinstance(value, bool):
        raise _type_error(name, value, wanted)
    if not least <= (found := int(value)) <= most:
        raise _value_error(name, value, wanted)
    return found


def whole_or_none(name: str, value: Any, *, least: int = 1, most: int = MOST) -> int | None:
    """As `whole`; None stays."""
    return None if value is None else _or_none(whole, name, value, least=least, most=most)


def seed(value: Any) -> int:
    """`value` as the seed of a random draw, from 0 to 2^32 - 1; raises as `whole`."""
    return whole("seed", value, least=0, most=MOST_SEED)


def positive(name: str, value: Any) -> float:
    """`value` as a finite number above 0; raises as `number`."""
    return number(name, value, above=True)


def positive_or_none(name: str, value: Any) -> float | None:
    """As `positive`; None stays."""
    return None if value is None else _or_none(positive, name, value)


def number(name: str, value: Any, *, above: bool = False) -> float:
    """`value` as a finite number, 0 or more.

    Args:
      above: 0 is refused, too.

    Raises:
      TypeError: it is no number.
      ValueError: it is negative, NaN or infinite.
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
    """`value`, which is True or False: "no" is true to Python.

    Raises:
      TypeError: it is something else.
    """
    if not isinstance(value, bool):
        raise _type_error(name, value, "True or False")
    return value


def one_of(name: str, value: Any, words: Sequence[T]) -> T:
    """`value`, which is one of these words.

    Raises:
      ValueError: it is something else.
    """
    for word in words:
        if isinstance(value, str) and value == word:
            return word
    raise ValueError(f"{name}={reprlib.repr(value)} is not one of {', '.join(words)}")


def text(name: str, value: Any) -> str:
    """`value`, which is a text.

    Raises:
      TypeError: it is something else.
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
