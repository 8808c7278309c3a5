"""The order in which records are shown: by operation and chip, and problems by their extents as numbers."""

from __future__ import annotations

import dataclasses
import functools
import json
import re
from collections.abc import Sequence
from typing import Any

from scheduler.core.records import Key
from search_spaces import load_known

# The extents of an array, as in "float32[200,256]"; the numbers within a dtype's name are part of the name.
_NUMBER = re.compile(r"(?<![A-Za-z0-9_.])([0-9]+)")


def order_of(key: Key, *, fields: bool = True) -> tuple[object, ...]:
    """What keys are sorted by.

    Args:
      fields: the fields of a problem in the order of its operation, which is loaded for that; else by their names.
    """
    return key.operation, key.hardware, _problem_order(key, fields)


def _problem_order(key: Key, by_operation: bool) -> tuple[object, ...]:
    """Its fields: numbers as numbers, before text, which is sorted by name."""
    try:
        values = json.loads(key.problem)
    except (ValueError, RecursionError):  # a store may hold any text
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
    """The fields of its problems with their defaults; none where nobody here knows the operation."""
    try:
        fields = dataclasses.fields(load_known(operation).problem)
    except ValueError:
        return ()
    return [(field.name, 0 if field.default is dataclasses.MISSING else field.default) for field in fields]
