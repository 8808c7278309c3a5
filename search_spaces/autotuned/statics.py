"""Static parameters as text, with one form per value: part of a key, and of a command line."""

from __future__ import annotations

import ast
import dataclasses
import math
import reprlib
from typing import Any

import numpy as np

Static = int | float | bool | str | tuple[Any, ...] | None

WANTED = "int, float, bool, str, None, a dtype, or a tuple of these"


@dataclasses.dataclass(frozen=True)
class Spelled:
    """A static parameter as text, which distinguishes 1 from True, although Python treats them as equal."""

    text: str


def spelled(name: str, value: Any) -> str:
    """Returns the text of a static parameter; a dtype becomes its name, which the function then gets.

    Raises:
      TypeError: the value has another type, or is NaN, which never equals itself.
    """
    if isinstance(value, Spelled):
        return value.text
    text = value if isinstance(value, str) else _dtype_name(value)
    if text is not None:
        return text if _is_own_text(text) else repr(text)
    return _literal(name, value)


def value_of(text: str) -> Static:
    """Returns the inverse of `spelled`; also reads `true` and `(1,2)`. Text that is no literal is unchanged."""
    if text.lower() in ("true", "false"):
        return text.lower() == "true"
    try:
        value = ast.literal_eval(text)
    except (ValueError, SyntaxError, MemoryError, RecursionError):
        return text
    return value if isinstance(value, int | float | str | tuple | None) else text


def _is_own_text(text: str) -> bool:
    value = value_of(text)
    return isinstance(value, str) and value == text


def _literal(name: str, value: Any) -> str:
    if isinstance(value, np.generic):
        value = value.item()
    if isinstance(value, float) and not math.isfinite(value):
        if math.isnan(value):
            raise TypeError(f"{name}=nan is never equal to itself, so no schedule could be stored for it")
        return "1e999" if value > 0 else "-1e999"  # Python parses it as an infinity
    if isinstance(value, bool | int | float | None):
        return repr(value)
    if isinstance(value, tuple):
        items = [repr(text) if (text := _text(item)) is not None else _literal(name, item) for item in value]
        return f"({', '.join(items)}{',' * (len(items) == 1)})"
    instead = ": give a tuple" if isinstance(value, list) else ""
    raise TypeError(
        f"{name}={reprlib.repr(value)} is a {type(value).__name__}{instead}; a static parameter is part of the key "
        f"that schedules are stored under: {WANTED}"
    )


def _text(value: Any) -> str | None:
    return value if isinstance(value, str) else _dtype_name(value)


def _dtype_name(value: Any) -> str | None:
    """Returns the name of a NumPy or JAX dtype; None for any other value."""
    if isinstance(value, type):
        value = np.dtype(value) if issubclass(value, np.generic) else getattr(value, "dtype", None)
    return value.name if isinstance(value, np.dtype) else None
