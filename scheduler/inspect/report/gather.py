"""Collects the data of a report on each record: its schedules, whether it is valid, and how to tune it again."""

from __future__ import annotations

import dataclasses
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
    """One record with all information available here.

    Attributes:
      where: The store that contains it.
      trials: The trials of its search; empty if they are not stored.
      case: None if its operation, problem or chip is unknown here.
      accounts: One account of the schedules per kernel; empty if `unexplained` gives a reason.
      held: The entry that a call uses, or why it uses none of this record.
      command: The command that tunes it again; None if unknown, for a user's own operation.
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
        """The problem in command line syntax."""
        return spelled(self.record.key.operation, self.record.key.problem)

    @property
    def dtype(self) -> str:
        """The dtype of the operands; "" if the problem has none."""
        text = self.spelled if self.case is None else str(self.case.problem)
        return next((word.partition("=")[2] for word in text.split() if word.startswith("dtype=")), "")

    @property
    def roofline_s(self) -> float | None:
        """Lower bound by arithmetic and compulsory traffic, in seconds; None on a CPU.

        One row of the table stands for all CPUs, so it gives no bound.
        """
        if self.case is None or self.case.hardware.abilities.interpreted:
            return None
        return CostModel(self.case.hardware).lower_bound(self.case.problem)

    @property
    def bound(self) -> str:
        """The roof that applies: "compute" or "memory", or "" if there is none."""
        roofline_s = self.roofline_s
        if self.case is None or roofline_s is None:
            return ""
        memory_s = self.case.problem.bytes_moved / self.case.hardware.hbm_bytes_per_s
        return "memory" if memory_s >= roofline_s else "compute"

    @property
    def rank(self) -> tuple[int, int] | None:
        """The winner's rank in the model's order of its kernel's legal schedules, from 1, and their number."""
        winner = self.record.winner
        account = next((account for account in self.accounts if account.backend == winner.backend), None)
        place = None if account is None else account.rank(winner.schedule)
        return None if account is None or place is None else (place, len(account.ranks))


def gather(
    kept: Iterable[tuple[str, Record, Iterable[Trial]]], own: Iterable[Operation[Any]] = (), *, top: int = 3
) -> Iterator[Told]:
    """Yields each record with its accounts, in order.

    Args:
      kept: The store's name, the record, and its trials.
      own: Additional operations, besides the package's own, to explain records of.
      top: Number of top predictions to include.
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
    except ValueError as error:  # from another version of the operation
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
