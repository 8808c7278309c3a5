"""One problem of an operation, of no special kind: for whoever asks what there is for it, or shows how to name one."""

from __future__ import annotations

import dataclasses
from typing import Any

from search_spaces.operation import Operation
from search_spaces.problem import Problem

# Of every extent that has no default, in the problem that backends are asked about.
EXTENT = 128  # of which four multiply to an array that 32-bit indices reach


def example(operation: Operation[Any], extent: int) -> Problem | None:
    """A problem of that operation, or None where its fields are not all extents or have defaults."""
    needed = [f.name for f in dataclasses.fields(operation.problem) if f.default is dataclasses.MISSING]
    try:
        return operation.problem.parse({name: str(extent) for name in needed})
    except ValueError:
        return None
