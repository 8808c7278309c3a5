"""Sorts records for display: by operation and chip, then by the problem's extents as numbers."""

from __future__ import annotations

import dataclasses
import functools
import json
import re
from collections.abc import Sequence
from typing import Any

from scheduler.core.records import Key
from search_spaces import load_known

# Numbers such as the extents in "float32[200,256]". Digits within a dtype's name are not matched.
_NUMBER = re.compile(r"(?<![A-Za-z0-9_.])([0-9]+)")


def order_of(key: Key, *, fields: bool = True) -> tuple[object, ...]:
    """Returns the sort key of a record's key.

    Args:
      fields: Whether a problem's fields are ordered as in its operation, which is loaded for that. Otherwise they are
        ordered by name.
    """
    return key.operation, key.hardware, _problem_order(key, fields)


def _problem_order(key: Key, by_operation: bool) -> tuple[object, ...]:
    """Returns the sort key of a problem's fields: numbers before text, then undeclared fields by name."""
    try:
        values = json.loads(key.problem)
    except (ValueError, RecursionError):  # a store may contain any text
        values = key.problem
    if not isinstance(values, dict):
        return (_value_order(values),)
    named = {name: values.pop(name, default) for name, default in (_fields(key.operation) if by_operation else ())}
    return (*map(_value_order, named.values()), *((2, name, _value_order(value)) for name, value in values.items()))


def _value_order(value: object) -> tuple[object, ...]:
    return (0, value) if type(value) is int else _text_order(str(value))


@functools.lru_cache(maxsize=1024)
def _text_order(text: str) -> tuple[object, ...]:
    words = _NUMBER.split(text)
    return 1, tuple((word, 0) if place % 2 == 0 else ("", int(word[:4000])) for place, word in enumerate(words))


@functools.lru_cache(maxsize=64)
def _fields(operation: str) -> Sequence[tuple[str, Any]]:
    """Returns the fields of the operation's problems with their defaults; empty if the operation is unknown."""
    try:
        fields = dataclasses.fields(load_known(operation).problem)
    except ValueError:
        return ()
    return [(field.name, 0 if field.default is dataclasses.MISSING else field.default) for field in fields]
