"""What a row has beyond its lines: a few elements at its two ends, which threads load and store one at a time."""

from __future__ import annotations

import dataclasses
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl

from search_spaces.rowwise.reduction import Reduction, Statistics
from search_spaces.rowwise.team import Team

TEAM = Team(warps=1, vector=1)
PIECE = TEAM.rows * TEAM.columns  # elements: one for each thread of a warpgroup


class Start(NamedTuple):
    """Where a row starts, and where its lines do, which is a multiple of an access: elements of the array."""

    row: Any
    lines: Any


class End(NamedTuple):
    """A piece of one row's ends, in one warpgroup's registers.

    Attributes:
      start: of the array's element that is its first.
      elements: as they are in memory.
      since, until: elements of the array between which it counts; others are in a line, too, or in no piece at all.
      is_one: whether there is such a piece.
    """

    start: Any
    elements: jax.Array
    since: Any
    until: Any
    is_one: Any


@dataclasses.dataclass(frozen=True)
class Ends:
    """How the ends of a row are cut into pieces; fields may be `Columns` of schedules.

    Pieces of what comes after the lines end with the row, and reach back into lines as far as they are longer; what
    comes before the lines is one more, which starts with the row. What two have both counts once, and is stored twice
    with the same bits.

    Attributes:
      columns: of a row.
      in_lines: of these, those in its lines.
      before: the most of them that may come before its lines.
    """

    columns: int
    in_lines: Any
    before: Any

    @property
    def after(self) -> Any:
        """Pieces of what comes after the lines."""
        return -(-(self.columns - self.in_lines) // PIECE)

    @property
    def pieces(self) -> Any:
        return self.after + (self.before > 0)

    def read(self, x: Any, start: Start, warpgroup: Any, warpgroups: int) -> list[End]:
        """The pieces of one of the `warpgroups` that share the row: all have as many, if only some that are none."""
        after, pieces = int(self.after), int(self.pieces)
        ends = []
        for first in range(0, pieces, warpgroups):
            number = warpgroup + first
            is_after, end_of_row = number < after, start.row + self.columns
            begin = jnp.where(is_after, end_of_row - (number + 1) * PIECE, start.row)
            since = jnp.where(is_after, start.lines + self.in_lines, start.row)
            until = jnp.where(is_after, end_of_row, jnp.where(number == after, start.lines, start.row))
            ends.append(End(begin, TEAM.read_run_narrow(x, begin), since, until, number < pieces))
        return ends

    def statistics(self, reduction: Reduction, ends: list[End]) -> Statistics:
        """Of each warp, of its `ends`."""
        index = TEAM.index(0) * TEAM.columns + TEAM.index(1)
        counted = [
            jnp.where(
                (index + end.start >= end.since) & (index + end.start < end.until),
                end.elements.astype(jnp.float32),
                reduction.outside,
            )
            for end in ends
        ]
        nothing = tuple(TEAM.fill(value) for value in reduction.start)
        return reduction.join(reduction.absorb(nothing, counted), TEAM)

    def finish(
        self, reduction: Reduction, ends: list[End], start: Start, shared: Any, settled: Statistics, out: Any
    ) -> None:
        """Computes and stores their results; `shared` is what all rows share, or None."""
        for end in ends:

            @pl.when(end.is_one)
            def store(end: End = end) -> None:
                other = None if shared is None else TEAM.read_run(shared, end.start - start.row)
                result = reduction.finish(end.elements.astype(jnp.float32), other, settled)
                TEAM.write_run(out, end.start, result)
