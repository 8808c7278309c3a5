"""Rows that stream through on-chip memory: results of one row are computed while the next one is being reduced."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from search_spaces.jax_compat import plgpu
from search_spaces.rowwise.reduction import Reduction, Statistics
from search_spaces.rowwise.slots import Block, Slots, staying


@dataclasses.dataclass(frozen=True)
class Stream(Slots):
    """How rows stream; fields may be `Columns` of schedules.

    A chunk of one row is finished just before the same chunk of the next row is gathered, whose load may have its
    place. So what waits is one row, however far the two have come, and loads and stores are under way at all times.

    There are more slots than a row has chunks; what a row leaves free is for what is loaded next.
    """


def stream(
    reduction: Reduction, r: Stream, cores: int, result: jax.ShapeDtypeStruct, x: jax.Array, *shared: jax.Array
) -> jax.Array:
    """The kernel: all computing warps of a block share two rows at a time."""
    chunks, team, together = r.chunks, r.team, r.team_of_share

    def compute(b: Block) -> None:
        places, share = r.places(b.warpgroup), r.share(b.warpgroup)

        def slot_of(turn: Any, chunk: Any) -> Any:
            return lax.rem(turn * chunks + chunk, r.slots)

        def finish(turn: Any, chunk: Any, settled: Statistics) -> None:
            slot, start, first = slot_of(turn, chunk), r.start_of(chunk), b.line_of(turn, chunk)
            elements = together.read(b.slots.at[slot], share, 0)
            plgpu.barrier_arrive(b.released.at[slot])
            other = together.read(b.shared[0], start + share, 0) if b.shared else None
            together.write(b.out, first + share, 0, reduction.finish(elements, other, settled))

        def row(turn: Any, before: Statistics | None) -> Statistics:
            """Gathers a row, and finishes the one before, which is settled."""

            def both(chunk: Any, statistics: Statistics, *, is_last: bool = False) -> Statistics:
                if before is not None:
                    finish(turn - 1, chunk, before)
                slot = slot_of(turn, chunk)
                plgpu.barrier_wait(b.loaded.at[slot])
                pieces = [team.read(b.slots.at[slot], place, 0) for place in places]
                if is_last:
                    pieces = r.counted(reduction, places, pieces, r.overlap)
                return reduction.absorb(statistics, pieces)

            statistics: Statistics = tuple(team.fill(value) for value in reduction.start)
            statistics = lax.fori_loop(0, chunks - 1, both, statistics)
            statistics = both(jnp.int32(chunks - 1), statistics, is_last=True)
            return b.agreed(turn, statistics)

        settled = lax.fori_loop(1, b.turns, row, row(jnp.int32(0), None))
        lax.fori_loop(0, chunks, lambda chunk, _: finish(b.turns - 1, chunk, settled), None)

    return staying(reduction, r, cores, result, x, shared, compute)
