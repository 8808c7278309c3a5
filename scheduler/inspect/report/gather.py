"""What a report tells of each record: where its schedules went, whether it holds, and how it is tuned again."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from scheduler.core import hints
from scheduler.core.hardware import CHIPS, Hardware
from scheduler.core.records import Entry, Key, Record, Trial
from scheduler.inspect.explain import Account, explain
from scheduler.inspect.verdict import Standing, against_library
from scheduler.model.cost import CostModel
from scheduler.prediction.validation import recheck
from search_spaces import OPERATIONS, load, spelled
from search_spaces.errors import DeclarationError
from search_spaces.operation import Operation
from search_spaces.problem import Problem


@dataclasses.dataclass(frozen=True)
class Told:
    """One record, with all that can be said of it here.

    Attributes:
      where: the store that keeps it.
      trials: those of its search, empty where they are not kept.
      operation, problem, hardware: None where they are not known here.
      accounts: of each kernel, where its schedules went; empty where that is `unexplained`, in words.
      held: the entry that a call gets, or why it gets none of this record.
      command: how it is tuned again; None where only whoever tuned it knows.
    """

    where: str
    record: Record
    trials: tuple[Trial, ...] = ()
    operation: Operation[Any] | None = None
    problem: Problem | None = None
    hardware: Hardware | None = None
    accounts: tuple[Account, ...] = ()
    unexplained: str = ""
    held: Entry | str = ""
    command: str | None = None

    @property
    def key(self) -> Key:
        return self.record.key

    @property
    def spelled(self) -> str:
        """The problem as it is typed."""
        return str(self.problem) if self.problem is not None else spelled(self.key.operation, self.key.problem)

    @property
    def dtype(self) -> str:
        """Of the operands, "" where the problem names none."""
        fields: Mapping[str, Any] = json.loads(self.key.problem)
        return str(getattr(self.problem, "dtype", fields.get("dtype", "")))

    @property
    def standing(self) -> Standing | None:
        """The winner beside the library, None where one of them did not run."""
        return against_library(self.record)

    @property
    def rated(self) -> bool:
        """Whether shares of a roofline say something: one constant row stands for every CPU."""
        return self.hardware is not None and not self.hardware.abilities.interpreted

    @property
    def roofline_s(self) -> float | None:
        """What arithmetic and compulsory traffic take at best, seconds."""
        if self.problem is None or self.hardware is None or not self.rated:
            return None
        return CostModel(self.hardware).lower_bound(self.problem)

    @property
    def bound(self) -> str:
        """Which roof that is: "compute" or "memory", "" where nobody knows."""
        if self.problem is None or self.hardware is None or self.roofline_s is None:
            return ""
        memory_s = self.problem.bytes_moved / self.hardware.hbm_bytes_per_s
        return "memory" if memory_s >= self.roofline_s else "compute"

    @property
    def rank(self) -> tuple[int, int] | None:
        """The winner's place in the model's order of its kernel's legal schedules, from 1, and how many these are."""
        for account in self.accounts:
            if account.backend == self.record.winner.backend:
                place = account.rank(self.record.winner.schedule)
                return None if place is None else (place, len(account.ranks))
        return None


def gather(
    kept: Iterable[tuple[str, Record, Iterable[Trial]]], own: Iterable[Operation[Any]] = (), *, top: int = 3
) -> Iterator[Told]:
    """Each record of a store, in its order, with its account.

    Args:
      kept: where it is kept, the record, and its trials.
      own: operations beside those of this package, whose records are explained, too.
      top: so many of the model's first choices are told.
    """
    operations = {operation.name: operation for operation in own}
    for where, record, trials in kept:
        yield _told(where, record, tuple(trials), operations, top)


def _told(
    where: str, record: Record, trials: tuple[Trial, ...], operations: dict[str, Operation[Any]], top: int
) -> Told:
    name = record.key.operation
    if name not in operations and name in OPERATIONS:
        operations[name] = load(name)
    told = Told(where, record, trials)
    if name not in operations:
        reason = "its operation is not of this package; name it, --operation package.module:NAME or file.py:NAME"
        return dataclasses.replace(told, unexplained=reason, held=reason)
    operation = operations[name]
    try:
        problem = operation.problem.from_canonical(record.key.problem)
    except ValueError as error:  # written by another version of the operation
        reason = f"{name} has no such problem: {error}"
        return dataclasses.replace(told, operation=operation, unexplained=reason, held=reason)
    command = f"{hints.tune(operation, problem)} --force"
    told = dataclasses.replace(told, operation=operation, problem=problem, command=command)
    chip = next((row for row in CHIPS if row.id == record.key.hardware), None)
    if chip is None:
        reason = "the table of chips has none of this name, cores and memory"
        return dataclasses.replace(told, unexplained=reason, held=reason)
    told = dataclasses.replace(told, hardware=chip)
    try:
        accounts = tuple(explain(operation, problem, chip, trials, top=top))
        held = recheck(operation, problem, chip, record)
    except DeclarationError as error:
        return dataclasses.replace(told, unexplained=str(error), held=str(error))
    return dataclasses.replace(told, accounts=accounts, held=held)
