"""What a report tells of each record: where its schedules went, whether it holds, and how it is tuned again."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Iterable, Iterator
from typing import Any

from scheduler.core import hardware as chips
from scheduler.core import hints
from scheduler.core.identity import point_of
from scheduler.core.records import Entry, Record, Trial
from scheduler.inspect.case import Case
from scheduler.inspect.explain import Account, explain
from scheduler.model.cost import CostModel
from scheduler.prediction.validation import recheck
from search_spaces import OPERATIONS, load, spelled
from search_spaces.errors import DeclarationError
from search_spaces.operation import Operation


@dataclasses.dataclass(frozen=True)
class Told:
    """One record, with all that can be said of it here.

    Attributes:
      where: the store that keeps it.
      trials: those of its search, empty where they are not kept.
      case: None where its operation, problem or chip is not known here.
      accounts: of each kernel, where its schedules went; empty where that is `unexplained`, in words.
      held: the entry that a call gets, or why it gets none of this record.
      command: how it is tuned again; None where only whoever tuned it knows.
    """

    where: str
    record: Record
    trials: tuple[Trial, ...] = ()
    case: Case | None = None
    accounts: tuple[Account, ...] = ()
    unexplained: str = ""
    held: Entry | str = ""
    command: str | None = None

    @property
    def spelled(self) -> str:
        """The problem as it is typed."""
        return spelled(self.record.key.operation, self.record.key.problem)

    @property
    def dtype(self) -> str:
        """Of the operands, "" where the problem names none."""
        fields = json.loads(self.record.key.problem) if self.case is None else vars(self.case.problem)
        return str(fields.get("dtype", ""))

    @property
    def roofline_s(self) -> float | None:
        """What arithmetic and compulsory traffic take at best, seconds; None on a CPU: one row stands for all."""
        if self.case is None or self.case.hardware.abilities.interpreted:
            return None
        return CostModel(self.case.hardware).lower_bound(self.case.problem)

    @property
    def bound(self) -> str:
        """Which roof that is: "compute" or "memory", "" where there is none."""
        roofline_s = self.roofline_s
        if self.case is None or roofline_s is None:
            return ""
        memory_s = self.case.problem.bytes_moved / self.case.hardware.hbm_bytes_per_s
        return "memory" if memory_s >= roofline_s else "compute"

    @property
    def rank(self) -> tuple[int, int] | None:
        """The winner's place in the model's order of its kernel's legal schedules, from 1, and how many these are."""
        winner = self.record.winner
        account = next((account for account in self.accounts if account.backend == winner.backend), None)
        place = None if account is None else account.rank(winner.schedule)
        return None if account is None or place is None else (place, len(account.ranks))


def gather(
    kept: Iterable[tuple[str, Record, Iterable[Trial]]], own: Iterable[Operation[Any]] = (), *, top: int = 3
) -> Iterator[Told]:
    """Each record of these, in their order, with its account.

    Args:
      kept: where it is kept, the record, and its trials.
      own: operations beside those of this package, whose records are explained, too.
      top: so many of the model's first choices are told.
    """
    operations = {operation.name: operation for operation in own}
    for where, record, trials in kept:
        name = record.key.operation
        if name not in operations and name in OPERATIONS:
            operations[name] = load(name)
        yield _told(Told(where, record, tuple(trials)), operations.get(name), top)


def _told(told: Told, operation: Operation[Any] | None, top: int) -> Told:
    def unexplained(reason: str) -> Told:
        return dataclasses.replace(told, unexplained=reason, held=reason)

    key = told.record.key
    if operation is None:
        return unexplained(
            f"{key.operation} is no operation of this package: name it, --operation package.module:NAME or file.py:NAME"
        )
    try:
        problem = operation.problem.from_canonical(key.problem)
    except ValueError as error:  # written by another version of the operation
        return unexplained(f"{key.operation} has no such problem today: {error}")
    told = dataclasses.replace(told, command=f"{hints.tune(operation, problem)} --force")
    chip = chips.identified(key.hardware)
    if chip is None:
        return unexplained("the table of chips has none of this name, cores and memory")
    told = dataclasses.replace(told, case=Case(operation, problem, chip, told.record, told.trials))
    try:
        won = point_of(told.record.winner.backend, told.record.winner.schedule)
        accounts = tuple(explain(operation, problem, chip, told.trials, top=top, about=[won]))
        return dataclasses.replace(told, accounts=accounts, held=recheck(operation, problem, chip, told.record))
    except DeclarationError as error:
        return unexplained(str(error))
