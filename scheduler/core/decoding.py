"""Decoding of parsed JSON into frozen dataclasses: field types determine the checks, and errors name the field.

`msgspec` reads the same types, but its messages have the type of the value instead of the value, and do not list the
allowed values. In addition, old names, problems and outcomes would each need a separate class.
"""

from __future__ import annotations

import dataclasses
import math
import types
import typing
from collections.abc import Callable, Collection, Mapping
from typing import Any, Generic, TypeVar

T = TypeVar("T")
# Converts a parsed JSON value to a typed value, or raises a ValueError that says what is expected.
Check = Callable[[object], T]


# Limit for untrusted input: records, plans and jobs have only a few levels.
DEEPEST = 100


def require_shallow(value: object) -> None:
    """Raises a ValueError if `value` is nested deeper than `DEEPEST`; recursive code could overflow the stack."""
    level = [value]
    for _ in range(DEEPEST):
        level = [
            child
            for each in level
            if isinstance(each, dict | list)
            for child in (each.values() if isinstance(each, dict) else each)
        ]
        if not level:
            return
    raise ValueError(f"it is nested deeper than {DEEPEST} levels")


def maker(cls: type[T], by_name: Mapping[str, Check[Any]], *, optional: Collection[str] = ()) -> Check[T]:
    """Returns a check that converts a JSON object to the dataclass `cls`; unknown names are ignored.

    Args:
      by_name: checks by field name, for `cls` and nested dataclasses; these override the field types.
      optional: fields of `cls` that may be missing; they get their defaults.
    """
    hints = typing.get_type_hints(cls)
    names = [field.name for field in dataclasses.fields(cls)]  # type: ignore[arg-type]
    checks = {name: by_name.get(name) or _of_type(hints[name], name, by_name) for name in names}

    def make(value: object) -> T:
        fields = json_object(value)
        present = (name for name in checks if name in fields or name not in optional)
        return cls(**{name: field_of(fields, name, checks[name]) for name in present})

    return make


def field_of(fields: Mapping[str, object], name: str, check: Check[T]) -> T:
    if name not in fields:
        raise ValueError(f"{name} is missing")
    return _at(name, check, fields[name])


def list_of(check: Check[T]) -> Check[tuple[T, ...]]:
    numbers = isinstance(check, Scalar) and check.read is _finite

    def check_list(value: object) -> tuple[T, ...]:
        if not isinstance(value, list):
            raise _wanted("a list", value)
        if numbers and set(map(type, value)) == {float} and all(map(math.isfinite, value)):
            return tuple(value)  # fast path for samples, which are most of a record
        return tuple(_at(f"item {index}", check, item) for index, item in enumerate(value))

    return check_list


def map_of(check: Check[T]) -> Check[dict[str, T]]:
    return lambda value: {name: _at(name, check, item) for name, item in json_object(value).items()}


def one_of(literal: Any) -> Scalar[Any]:
    """Returns a check for the values of a `Literal`."""
    values = typing.get_args(literal)
    return Scalar(f"one of {', '.join(values)}", lambda value: value if value in values else None)


def json_object(value: object) -> Mapping[str, object]:
    if not isinstance(value, dict):
        raise _wanted("a JSON object", value)
    return value


def made_already(value: object) -> Any:
    return value


@dataclasses.dataclass(frozen=True)
class Scalar(Generic[T]):
    """A check of one value.

    Attributes:
      wanted: description of valid values.
      read: returns the typed value, or None if the value is invalid.
    """

    wanted: str
    read: Callable[[Any], T | None]

    def __call__(self, value: object) -> T:
        if (found := self.read(value)) is None:
            raise _wanted(self.wanted, value)
        return found

    def or_null(self) -> Check[T | None]:
        other = Scalar(f"{self.wanted} or null", self.read)
        return lambda value: None if value is None else other(value)


def _finite(value: object) -> float | None:
    """Returns a finite float, or None; `json` also parses NaN, Infinity and 1e999."""
    if isinstance(value, int) and not isinstance(value, bool) and abs(value) < 2**63:
        return float(value)
    return value if isinstance(value, float) and math.isfinite(value) else None


def _encodable(value: object) -> str | None:
    """Returns a string without lone surrogates, or None; JSON can contain them, but databases and terminals cannot."""
    if not isinstance(value, str):
        return None
    try:
        value.encode()
    except UnicodeEncodeError:
        return None
    return value


text = Scalar("text", _encodable)
whole = Scalar(
    "an integer from 0 to 2^63 - 1", lambda value: value if type(value) is int and 0 <= value < 2**63 else None
)
_SCALARS: Mapping[Any, Scalar[Any]] = {str: text, int: whole, float: Scalar("a finite number", _finite)}
_SECONDS = Scalar("a finite number of seconds", _finite)


def _of_type(hint: Any, name: str, by_name: Mapping[str, Check[Any]]) -> Check[Any]:
    """Returns the check for the type of a field; names that end in ``_s`` are seconds."""
    if hint in _SCALARS:
        return _SECONDS if hint is float and name.endswith("_s") else _SCALARS[hint]
    if dataclasses.is_dataclass(hint):
        return maker(hint, by_name)  # type: ignore[arg-type]
    origin, arguments = typing.get_origin(hint), typing.get_args(hint)
    if origin is typing.Literal:
        return one_of(hint)
    if origin is tuple:
        return list_of(_of_type(arguments[0], name, by_name))
    if origin is types.UnionType and arguments[1:] == (types.NoneType,):
        return _SCALARS[arguments[0]].or_null()
    if origin is not None and issubclass(origin, Mapping):
        return map_of(_of_type(arguments[1], name, by_name))
    raise TypeError(f"{name}: no check is known for a field of type {hint}")


def _at(place: str, check: Check[T], value: object) -> T:
    try:
        return check(value)
    except ValueError as error:
        raise ValueError(f"{place}: {error}") from None


def _wanted(wanted: str, found: object) -> ValueError:
    shown = repr(found)
    return ValueError(f"{wanted} is wanted, found {shown if len(shown) <= 60 else shown[:57] + '...'}")
