"""What a store tells of one problem: all that an answer to it may follow from, and no more."""

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
    """What `between.answer` and `predict` need of stores.

    Attributes:
      records: of the problem itself, of the most similar problems, and at the points of the ranges.
      ranges: those that the problem may lie in.
    """

    records: Sequence[Record] = ()
    ranges: Sequence[Range] = ()


def read(store: Store, operation: Operation[Any], problem: Problem, hardware: Hardware) -> Evidence:
    """What one store tells of a problem; malformed records are left out.

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
        with contextlib.suppress(MalformedRecord):  # whoever asks for this very record is told
            if (record := store.get(key)) is not None:
                found.append(record)
    return found


def merged(parts: Iterable[Evidence]) -> Evidence:
    """That of several stores, of which the first goes first."""
    several = list(parts)
    return Evidence([r for each in several for r in each.records], [r for each in several for r in each.ranges])
