"""What an attack is: something hostile that is tried so many times, and what failed of it."""

from __future__ import annotations

import dataclasses
import random
import traceback
from collections.abc import Callable, Iterator


@dataclasses.dataclass
class Tried:
    """How often something was tried, and what failed, a line each.

    Attributes:
      notes: figures that belong to the result: seconds, counts.
    """

    tries: int = 0
    failures: list[str] = dataclasses.field(default_factory=list)
    notes: list[str] = dataclasses.field(default_factory=list)

    def expect(self, holds: bool, otherwise: str) -> None:
        """One more try, which failed unless `holds`."""
        self.tries += 1
        if not holds:
            self.failures.append(otherwise)

    def run(self, what: str, claim: Callable[[], str | None]) -> None:
        """One more try: `claim` says what is wrong, or None; whatever it raises is a failure."""
        try:
            wrong = claim()
        except Exception as error:
            place = traceback.extract_tb(error.__traceback__)[-1]
            said = (str(error) or "nothing said").splitlines()[0][:300]
            wrong = f"{type(error).__name__}: {said} ({place.filename}:{place.lineno})"
        self.expect(wrong is None, f"{what}: {wrong}")

    def add(self, other: Tried) -> None:
        self.tries += other.tries
        self.failures += other.failures
        self.notes += other.notes


# Tries it so often, from this seed.
Run = Callable[[int, int], Tried]


@dataclasses.dataclass(frozen=True)
class Attack:
    """One row of the table in docs/robustness.md.

    Attributes:
      claim: what holds although it is tried.
      quick: how often in every run of the tests.
      long: how often by ``python -m tests.hostile``.
      numbers: whether it compares numbers of operations, which each JAX computes; others run on one JAX.
    """

    name: str
    claim: str
    run: Run
    quick: int
    long: int
    numbers: bool = False


def seeded(seed: int, tries: int) -> Iterator[tuple[int, random.Random]]:
    """So many seeds from `seed` on, each with its own random numbers: a failure names the one to try again."""
    for number in range(seed, seed + tries):
        yield number, random.Random(number)
