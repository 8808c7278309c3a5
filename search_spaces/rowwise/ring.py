"""Rows that wait in on-chip memory between their reduction and their results: a ring of chunks, filled ahead."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental import pallas as pl

from search_spaces.jax_compat import plgpu
from search_spaces.rowwise.reduction import Reduction, Statistics
from search_spaces.rowwise.slots import Block, Slots, staying


@dataclasses.dataclass(frozen=True)
class Ring(Slots):
    """How rows pass through on-chip memory; fields may be `Columns` of schedules.

    Of a row longer than the ring the first chunks may be held in registers and the last ones stay in the ring; those in
    between are loaded again after them. So chunks leave the ring in the order in which they came.

    Attributes:
      ahead: slots that stay free of a row that is longer than the ring, for what is loaded next.
      held: chunks of a row that threads hold in registers.
    """

    ahead: Any
    held: Any

    @property
    def kept(self) -> Any:
        """Chunks of a row that stay in the ring until its results are computed."""
        return np.minimum(self.chunks - self.held, self.slots - self.ahead)

    @property
    def again(self) -> Any:
        """Chunks of a row that are loaded twice."""
        return self.chunks - self.held - self.kept

    @property
    def loads(self) -> Any:
        """Of chunks for one row."""
        return self.chunks + self.again

    def chunk_of(self, load: Any) -> Any:
        return lax.select(load < self.chunks, load, load - self.chunks + self.held)


def ring(
    reduction: Reduction, r: Ring, cores: int, result: jax.ShapeDtypeStruct, x: jax.Array, *shared: jax.Array
) -> jax.Array:
    """The kernel: all computing warps of a block share a row, which they go over twice.

    On the way there each thread gathers statistics of its elements, on the way back it computes results and stores them
    directly.
    """
    chunks, kept, loaded_again, loads = r.chunks, int(r.kept), int(r.again), int(r.loads)
    team, together = r.team, r.team_of_share

    def compute(b: Block) -> None:
        places, share = r.places(b.warpgroup), r.share(b.warpgroup)

        def compute_row(turn: Any, _: None) -> None:
            def slot_of(load: Any) -> Any:
                return lax.rem(turn * loads + load, r.slots)

            def read(slot: Any) -> list[jax.Array]:
                return [team.read(b.slots.at[slot], place, 0) for place in places]

            def gather(chunk: Any, statistics: Statistics, *, last: bool = False) -> Statistics:
                slot = slot_of(chunk)
                plgpu.barrier_wait(b.loaded.at[slot])
                pieces = read(slot)
                if last:
                    pieces = r.counted(reduction, places, pieces, r.overlap)

                @pl.when(chunk < chunks - kept)
                def release() -> None:
                    plgpu.barrier_arrive(b.released.at[slot])

                return reduction.absorb(statistics, pieces)

            def finish(chunk: Any, elements: jax.Array) -> None:
                other = together.read(b.shared[0], r.start_of(chunk) + share, 0) if b.shared else None
                together.write(b.out, b.line_of(turn, chunk) + share, 0, reduction.finish(elements, other, settled))

            def finish_from_ring(chunk: Any, load: Any, *, wait: bool) -> None:
                slot = slot_of(load)
                if wait:
                    plgpu.barrier_wait(b.loaded.at[slot])
                elements = together.read(b.slots.at[slot], share, 0)
                plgpu.barrier_arrive(b.released.at[slot])
                finish(chunk, elements)

            statistics: Statistics = tuple(team.fill(value) for value in reduction.start)
            held = []
            for chunk in range(r.held):
                slot = slot_of(chunk)
                plgpu.barrier_wait(b.loaded.at[slot])
                held.append(together.read_narrow(b.slots.at[slot], share, 0))
                pieces = read(slot)
                plgpu.barrier_arrive(b.released.at[slot])
                statistics = reduction.absorb(statistics, pieces)
            statistics = lax.fori_loop(r.held, chunks - 1, gather, statistics)
            statistics = gather(jnp.int32(chunks - 1), statistics, last=True)
            settled = b.agreed(turn, statistics)

            def finish_kept(chunk: Any, _: None) -> None:
                finish_from_ring(chunk, chunk, wait=False)

            def finish_again(chunk: Any, _: None) -> None:
                finish_from_ring(chunk, chunk - r.held + chunks, wait=True)

            lax.fori_loop(chunks - kept, chunks, finish_kept, None)
            lax.fori_loop(r.held, r.held + loaded_again, finish_again, None)
            # Last, when all slots are free and chunks of the next row on their way.
            for chunk, narrow in enumerate(held):
                finish(jnp.int32(chunk), narrow.astype(jnp.float32))

        lax.fori_loop(0, b.turns, compute_row, None)

    return staying(reduction, r, cores, result, x, shared, compute)
