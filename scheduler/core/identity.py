"""By what stores know a question."""

from __future__ import annotations

from typing import Any

from scheduler.core.hardware import Hardware
from scheduler.core.records import Key
from search_spaces.kernel import Operation, Problem


def key_of(operation: Operation[Any], problem: Problem, hardware: Hardware) -> Key:
    """What stores know the question by."""
    return Key(operation.name, hardware.id, problem.canonical())
