"""Loops over a block in VMEM, a few rows and a few fragments of them at a time, to fit the registers."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl

from search_spaces.rowwise.reduction import Reduction, Statistics

C = TypeVar("C")
# Up to this number of steps through a row, the loop is unrolled: the compiler then fills the stalls of one step with
# the next (softmax of 256 x 4096, 16 rows a step: 9,084 cycles, and 18,190 in a loop; libtpu 0.0.48's static schedule,
# v6e).
UNROLLED = 32
# First column and number of columns of a fragment: a multiple of 128 except for the last fragment of a row.
Place = tuple[Any, int]


class Lanes:
    """A `Reducer` over the columns of an array."""

    def max(self, parts: jax.Array, /) -> jax.Array:
        return parts.max(axis=-1, keepdims=True)

    def sum(self, parts: jax.Array, /) -> jax.Array:
        return parts.sum(axis=-1, keepdims=True)

    def broadcast(self, reduced: jax.Array, /) -> jax.Array:
        return reduced


def over_rows(rows: int, step_rows: int, body: Callable[[Any], None]) -> None:
    """Calls `body` with each slice of `step_rows` rows."""
    if rows == step_rows:
        body(pl.ds(0, rows))
        return

    def one(step: Any, carry: int) -> int:
        body(pl.ds(pl.multiple_of(step * step_rows, step_rows), step_rows))
        return carry

    lax.fori_loop(0, rows // step_rows, one, 0)


@dataclasses.dataclass(frozen=True)
class RowLoop:
    """A pass over `columns` columns: steps of `fragments` fragments of `lanes` columns, the rest, and the tail."""

    columns: int
    lanes: int
    fragments: int

    @property
    def tail(self) -> Place | None:
        """The last fragment, if it is narrower than `lanes`."""
        width = self.columns % self.lanes
        return (self.columns - width, width) if width else None

    def over_fragments(self, visit: Callable[[C, Sequence[Place]], C], carry: C) -> C:
        """Folds `visit` over the steps, starting with `carry`; without the tail."""
        step = self.lanes * self.fragments
        steps = self.columns // step

        def places(start: Any, count: int) -> list[Place]:
            return [(start + number * self.lanes, self.lanes) for number in range(count)]

        if steps == 1:
            carry = visit(carry, places(0, self.fragments))
        elif steps:
            if steps <= UNROLLED:
                for number in range(steps):
                    carry = visit(carry, places(number * step, self.fragments))
            else:
                whole: Any = lax.fori_loop(
                    0, steps, lambda j, c: visit(c, places(pl.multiple_of(j * step, step), self.fragments)), carry
                )
                carry = whole
        left = (self.columns - steps * step) // self.lanes
        return visit(carry, places(steps * step, left)) if left else carry

    def statistics(self, reduction: Reduction, rows: int, read: Callable[[Place], jax.Array]) -> Statistics:
        """Returns the statistics of `rows` rows, from the fragments that `read` returns."""

        def initial(columns: int) -> Statistics:
            return tuple(jnp.full((rows, columns), value, jnp.float32) for value in reduction.init)

        found = []
        if self.columns >= self.lanes:
            lanes = self.over_fragments(
                lambda statistics, places: reduction.update(statistics, [read(place) for place in places]),
                initial(self.lanes),
            )
            found.append(reduction.reduce(lanes, Lanes()))
        if self.tail is not None:
            narrower = reduction.update(initial(self.tail[1]), [read(self.tail)])
            found.append(reduction.reduce(narrower, Lanes()))
        return found[0] if len(found) == 1 else reduction.combine(*found)

    def apply(self, write: Callable[[Place], None]) -> None:
        """Calls `write` for each fragment."""

        def visit(carry: int, places: Sequence[Place]) -> int:
            for place in places:
                write(place)
            return carry

        self.over_fragments(visit, 0)
        if self.tail is not None:
            write(self.tail)
