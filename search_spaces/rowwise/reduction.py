"""The formula of a row-wise kernel as hooks: a reduction of a row, and a function of each element and its result.

What is reduced is one row, `Reduction.prologue` of the operands that are rows; it may itself be a result.
"""

from __future__ import annotations

import abc
from collections.abc import Sequence
from typing import Protocol

import jax

Statistics = tuple[jax.Array, ...]


class Reducer(Protocol):
    """Those who have parts of a row: threads with their elements, or warps with a partial result each."""

    def max(self, parts: jax.Array, /) -> jax.Array: ...
    def sum(self, parts: jax.Array, /) -> jax.Array: ...
    def broadcast(self, reduced: jax.Array, /) -> jax.Array: ...


class Reduction(abc.ABC):
    """The formula, in float32, on fragments of a row: arrays of one shape, of which each thread has its elements.

    A row that is in registers is computed by `whole_row` at once. Of a row that arrives in chunks each thread keeps
    statistics: they start as `init`, and `update` adds fragments. `reduce` makes those of several threads one, and
    `combine` those of two parts of a row; `finalize` follows for the whole row. When the chunks come by again, `apply`
    computes the results. A `shared` fragment is what all rows share, such as a weight, in the place of the elements it
    belongs to; None where there is nothing.

    Attributes:
      identity: an element that changes no statistic.
      init: of each statistic.
    """

    identity: float
    init: tuple[float, ...]

    def prologue(self, *operands: jax.Array) -> jax.Array:
        """The row that is reduced, of fragments of the operands that are rows: in the dtype that they have in memory.

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
        """The results of all `fragments` of a row; `masked` is `identity` where an element is in another one, too."""

    @abc.abstractmethod
    def update(self, statistics: Statistics, fragments: Sequence[jax.Array]) -> Statistics:
        """With the elements of `fragments`."""

    @abc.abstractmethod
    def reduce(self, statistics: Statistics, reducer: Reducer) -> Statistics:
        """Those of all that the reducer stands for, as one."""

    @abc.abstractmethod
    def combine(self, one: Statistics, other: Statistics) -> Statistics:
        """Those of two parts of a row, as one."""

    @abc.abstractmethod
    def finalize(self, statistics: Statistics) -> Statistics:
        """What `apply` needs of the whole row."""

    @abc.abstractmethod
    def apply(self, fragment: jax.Array, shared: jax.Array | None, final: Statistics) -> jax.Array:
        """The results of one fragment."""
