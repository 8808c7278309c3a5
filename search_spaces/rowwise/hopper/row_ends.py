"""The ends of a row: the few elements besides its lines, which TMA cannot address, loaded and stored one per thread."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl

from search_spaces.rowwise.hopper.thread_layout import ThreadLayout
from search_spaces.rowwise.reduction import Reduction, Statistics

LAYOUT = ThreadLayout(warps=1, vector=1)
ELEMENTS = LAYOUT.rows * LAYOUT.columns  # elements of a fragment: one per thread of a warpgroup


class RowStart(NamedTuple):
    """The start of a row, and of its lines, a multiple of an access: element indices of the array."""

    row: Any
    lines: Any


class End(NamedTuple):
    """A fragment of one row's ends, in one warpgroup's registers.

    Attributes:
      start: index in the array of its first element.
      operands: its elements of each row operand, in their dtype in memory.
      first, last: half-open range of array indices in which its elements count; others are in a line, too, or unused.
      exists: whether there is such a fragment.
    """

    start: Any
    operands: tuple[jax.Array, ...]
    first: Any
    last: Any
    exists: Any

    def row(self, reduction: Reduction) -> jax.Array:
        """Returns the elements of the reduced row."""
        return reduction.prologue(*self.operands).astype(jnp.float32)


@dataclasses.dataclass(frozen=True)
class RowEnds:
    """The division of a row's ends into fragments; fields may be `Columns` of schedules.

    Fragments after the lines are aligned to the end of the row, and reach back into the lines if they are longer. The
    elements before the lines are one more fragment, aligned to the start of the row. Overlapping elements count once,
    and are stored twice with the same bits.

    Attributes:
      columns: columns of a row.
      in_lines: number of these in its lines.
      before: maximum number of these before its lines.
    """

    columns: int
    in_lines: Any
    before: Any

    @property
    def fragments_after(self) -> Any:
        """Fragments after the lines."""
        return -(-(self.columns - self.in_lines) // ELEMENTS)

    @property
    def fragments(self) -> Any:
        return self.fragments_after + (self.before > 0)

    def load(self, xs: Sequence[Any], start: RowStart, warpgroup: Any, warpgroups: int) -> list[End]:
        """Loads the fragments of one of the `warpgroups` that share the row.

        All warpgroups have the same number of fragments; some may not exist.
        """
        after, fragments = int(self.fragments_after), int(self.fragments)
        ends = []
        for offset in range(0, fragments, warpgroups):
            number = warpgroup + offset
            is_after, end_of_row = number < after, start.row + self.columns
            begin = jnp.where(is_after, end_of_row - (number + 1) * ELEMENTS, start.row)
            first = jnp.where(is_after, start.lines + self.in_lines, start.row)
            last = jnp.where(is_after, end_of_row, jnp.where(number == after, start.lines, start.row))
            operands = tuple(LAYOUT.load_flat_narrow(x, begin) for x in xs)
            ends.append(End(begin, operands, first, last, number < fragments))
        return ends

    def reduce(self, reduction: Reduction, ends: list[End]) -> Statistics:
        """Returns the statistics of each warp for its `ends`."""
        index = LAYOUT.iota(0) * LAYOUT.columns + LAYOUT.iota(1)
        masked = [
            jnp.where(
                (index + end.start >= end.first) & (index + end.start < end.last),
                end.row(reduction),
                reduction.identity,
            )
            for end in ends
        ]
        init = tuple(LAYOUT.full(value) for value in reduction.init)
        return reduction.reduce(reduction.update(init, masked), LAYOUT)

    def apply(
        self,
        reduction: Reduction,
        ends: list[End],
        start: RowStart,
        shared: Any,
        final: Statistics,
        out: Any,
        row_out: Sequence[Any],
    ) -> None:
        """Computes and stores the results of `ends`, and the row itself to `row_out`.

        `shared` is the operand that all rows share, or None.
        """
        for end in ends:

            @pl.when(end.exists)
            def store(end: End = end) -> None:
                other = None if shared is None else LAYOUT.load_flat(shared, end.start - start.row)
                row = end.row(reduction)
                LAYOUT.store_flat(out, end.start, reduction.apply(row, other, final))
                for ref in row_out:
                    LAYOUT.store_flat(ref, end.start, row)
