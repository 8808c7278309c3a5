"""Reads the data for a prediction about one problem from a store."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any

from scheduler.core.errors import MalformedRecord
from scheduler.core.hardware import Hardware
from scheduler.core.identity import families_of, key_of
from scheduler.core.ranges import Range
from scheduler.core.records import Key, Record
from scheduler.prediction.between import point_keys
from scheduler.prediction.transfer import TELLING, near
from search_spaces.operation import Operation
from search_spaces.problem import Problem

if TYPE_CHECKING:
    from scheduler.store.store import Store


@dataclasses.dataclass(frozen=True)
class Evidence:
    """The stored data that `between.answer` and `predict` need.

    Attributes:
      records: records of the problem itself, of the most similar problems, and at the points of the ranges.
      ranges: the ranges that may contain the problem.
    """

    records: Sequence[Record] = ()
    ranges: Sequence[Range] = ()


def read(store: Store, operation: Operation[Any], problem: Problem, hardware: Hardware) -> Evidence:
    """Reads one store's data for a problem; malformed records are skipped.

    Raises:
      StoreError: the store cannot be read.
    """
    question = near(operation, problem, hardware, within=TELLING)
    similar = store.nearest(question, estimated=False) or store.nearest(question, estimated=True)
    ranges = store.ranges.all(operation=operation.name, hardware=hardware.id, problems=families_of(problem))
    keys = [key_of(operation, problem, hardware), *point_keys(operation, problem, hardware, ranges)]
    return Evidence([*_held(store, keys), *similar], ranges)


def _held(store: Store, keys: Iterable[Key]) -> list[Record]:
    found = []
    for key in dict.fromkeys(keys):
        with contextlib.suppress(MalformedRecord):  # a direct request for this record reports the error
            if (record := store.get(key)) is not None:
                found.append(record)
    return found


def merged(parts: Iterable[Evidence]) -> Evidence:
    """Merges the evidence of several stores; the first store takes precedence."""
    several = list(parts)
    return Evidence([r for each in several for r in each.records], [r for each in several for r in each.ranges])
