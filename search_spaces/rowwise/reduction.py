"""The formula of a row-wise kernel as hooks: a reduction of a row, and a function of each element and the reduction.

The reduced row is `Reduction.prologue` of the operands that are rows; it may itself be a result.
"""

from __future__ import annotations

import abc
from collections.abc import Sequence
from typing import Protocol

import jax

Statistics = tuple[jax.Array, ...]


class Reducer(Protocol):
    """Reduces parts of a row: threads with their elements, or warps with a partial result each."""

    def max(self, parts: jax.Array, /) -> jax.Array: ...
    def sum(self, parts: jax.Array, /) -> jax.Array: ...
    def broadcast(self, reduced: jax.Array, /) -> jax.Array: ...


class Reduction(abc.ABC):
    """The formula, in float32, on fragments of a row: arrays of one shape, with elements distributed over threads.

    A row in registers is computed by `whole_row` at once. For a row that arrives in chunks, each thread keeps
    statistics. They start as `init`, and `update` adds fragments. `reduce` merges the statistics of several threads,
    `combine` those of two parts of a row, and `finalize` completes those of the whole row. When the chunks are read
    again, `apply` computes the results. A `shared` fragment holds the matching elements of an operand that all rows
    share, such as a weight; None if there is no such operand.

    Attributes:
      identity: an element that changes no statistic.
      init: initial value of each statistic.
    """

    identity: float
    init: tuple[float, ...]

    def prologue(self, *operands: jax.Array) -> jax.Array:
        """Returns the row to reduce, from fragments of the operands that are rows, in their dtype in memory.

        It may be computed again where it is needed again. By default it is the only operand.
        """
        (x,) = operands
        return x

    @abc.abstractmethod
    def whole_row(
        self,
        fragments: Sequence[jax.Array],
        masked: Sequence[jax.Array],
        shared: Sequence[jax.Array | None],
        reducer: Reducer,
    ) -> list[jax.Array]:
        """Returns the results of all `fragments` of a row.

        `masked` are the fragments with `identity` in place of elements that another fragment has, too.
        """

    @abc.abstractmethod
    def update(self, statistics: Statistics, fragments: Sequence[jax.Array]) -> Statistics:
        """Returns the statistics with the elements of `fragments` added."""

    @abc.abstractmethod
    def reduce(self, statistics: Statistics, reducer: Reducer) -> Statistics:
        """Merges the statistics of all threads or warps of the reducer."""

    @abc.abstractmethod
    def combine(self, one: Statistics, other: Statistics) -> Statistics:
        """Merges the statistics of two parts of a row."""

    @abc.abstractmethod
    def finalize(self, statistics: Statistics) -> Statistics:
        """Returns the values of the whole row that `apply` needs."""

    @abc.abstractmethod
    def apply(self, fragment: jax.Array, shared: jax.Array | None, final: Statistics) -> jax.Array:
        """Returns the results of one fragment."""
