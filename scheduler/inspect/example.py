"""Makes a typical problem of an operation, for checking backends and for showing how to name a problem."""

from __future__ import annotations

import dataclasses
from typing import Any

from search_spaces.operation import Operation
from search_spaces.problem import Problem

# The value of every extent without a default, in the problem used to check backends.
EXTENT = 128  # the product of four stays within 32-bit indices


def example(operation: Operation[Any], extent: int) -> Problem | None:
    """Returns a problem of the operation; None if a field without a default is not an extent."""
    needed = [f.name for f in dataclasses.fields(operation.problem) if f.default is dataclasses.MISSING]
    try:
        return operation.problem.parse({name: str(extent) for name in needed})
    except ValueError:
        return None
