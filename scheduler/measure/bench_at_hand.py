"""The bench of the problem at hand, made anew where a candidate may have damaged it, so that no other one pays."""

from __future__ import annotations

from collections.abc import Callable, Hashable
from typing import Generic, TypeVar

from scheduler.core.records import Failure, Outcome
from scheduler.measure.bench import Bench

What = TypeVar("What", bound=Hashable)
O = TypeVar("O", bound=Outcome | None)  # noqa: E741


class BenchAtHand(Generic[What]):
    """One bench at a time.

    Args:
      make: the bench of an operation, a problem and what operands meet, however these are named.
    """

    def __init__(self, make: Callable[[What], Bench]) -> None:
        self._make = make
        self._bench: Bench | None = None
        self._what: What | None = None
        self._used = False

    def ask(self, what: What, question: Callable[[Bench], O]) -> O:
        """The answer of the bench of `what`.

        A candidate is wrong only if it is so on operands and a reference that nobody damaged: one before it may have
        written where it should not.
        """
        bench = self._of(what)
        answer = question(bench)
        if isinstance(answer, Failure) and answer.stage == "verify" and self._used and not bench.intact():
            del bench
            self.drop()
            answer = question(self._of(what))
        self._used = True
        return answer

    def drop(self) -> None:
        """Frees what the bench holds of the device."""
        self._bench, self._used = None, False

    def _of(self, what: What) -> Bench:
        if self._bench is None or self._what != what:
            self.drop()  # frees the operands of the one before
            self._bench, self._what = self._make(what), what
        return self._bench
