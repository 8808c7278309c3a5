"""What a row-wise kernel computes: a formula for each element that asks for something of its whole row first."""

from __future__ import annotations

import abc
from collections.abc import Sequence
from typing import Protocol

import jax

Statistics = tuple[jax.Array, ...]


class Together(Protocol):
    """Those who have parts of a row: threads with their elements, or warps with what theirs came to."""

    def largest(self, parts: jax.Array, /) -> jax.Array: ...
    def total(self, parts: jax.Array, /) -> jax.Array: ...
    def spread(self, joint: jax.Array, /) -> jax.Array: ...


class Reduction(abc.ABC):
    """The formula, in float32, on pieces of a row: arrays of one shape, each thread with its elements.

    Where the row is at hand, `whole` does it all. Where it arrives in chunks, each thread keeps statistics of what it
    has seen, begun by `start` and updated by `absorb`; `join` makes those of several threads one, `merge` those of two
    parts of a row; `settle` follows for the whole row, and `finish` computes the results when the chunks come by again.
    A `shared` piece is what all rows share, such as a weight, in the place of the elements it belongs to; None where
    there is nothing.

    Attributes:
      outside: an element that changes no statistic.
      start: of each statistic.
    """

    outside: float
    start: tuple[float, ...]

    @abc.abstractmethod
    def whole(
        self,
        pieces: Sequence[jax.Array],
        counted: Sequence[jax.Array],
        shared: Sequence[jax.Array | None],
        together: Together,
    ) -> list[jax.Array]:
        """The results of all `pieces` of a row; `counted` is `outside` where an element is in another piece, too."""

    @abc.abstractmethod
    def absorb(self, statistics: Statistics, pieces: Sequence[jax.Array]) -> Statistics:
        """With `pieces` seen."""

    @abc.abstractmethod
    def join(self, statistics: Statistics, together: Together) -> Statistics:
        """Those of everyone, reduced."""

    @abc.abstractmethod
    def merge(self, one: Statistics, other: Statistics) -> Statistics:
        """Those of two parts of a row, as one."""

    @abc.abstractmethod
    def settle(self, statistics: Statistics) -> Statistics:
        """What `finish` needs of the whole row."""

    @abc.abstractmethod
    def finish(self, piece: jax.Array, shared: jax.Array | None, settled: Statistics) -> jax.Array:
        """The results of one piece."""
