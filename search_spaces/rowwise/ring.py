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
from search_spaces.rowwise.chunks import ALIGNMENT, BARRIER_BYTES, REDUCTION_BYTES, Chunks, board_bytes, round_up
from search_spaces.rowwise.reduction import Reduction, Statistics
from search_spaces.rowwise.registers import COMPILER
from search_spaces.rowwise.team import WARPS

# Registers per thread, in multiples of 8. All of a block start with 65,536 / threads, rounded down to a multiple of 8;
# what the copying threads give back, those share who compute: by their warpgroups. One alone needs nothing, for two
# warpgroups start with more than a thread can have.
COPY_REGISTERS = 40
COMPUTE_REGISTERS = {2: 232, 4: 104}


@dataclasses.dataclass(frozen=True)
class Ring(Chunks):
    """How rows pass through on-chip memory; fields may be `Columns` of schedules.

    Chunks are loaded in order, by one more warpgroup than compute. Of a row longer than the ring the first chunks may
    be held in registers and the last ones stay in the ring; those in between are loaded again after them. So chunks
    leave the ring in the order in which they came.

    Attributes:
      slots: chunks that the ring has room for.
      ahead: slots that stay free of a row that is longer than the ring, for what is loaded next.
      held: chunks of a row that threads hold in registers.
    """

    slots: Any
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

    def onchip_bytes(self, itemsize: int, statistics: int) -> Any:
        """Of one block, to the byte."""
        ring = self.slots * self.chunk * self.line * itemsize
        boards = board_bytes(statistics, WARPS * self.warpgroups, boards=2)
        barriers = (2 * self.slots + 1) * BARRIER_BYTES
        return round_up(ring, ALIGNMENT) + boards + REDUCTION_BYTES + barriers


def ring(
    reduction: Reduction, r: Ring, cores: int, result: jax.ShapeDtypeStruct, x: jax.Array, *shared: jax.Array
) -> jax.Array:
    """The kernel: a block for each core, which takes every so-many-th row; all its warps share a row.

    One warpgroup copies chunks into the ring, as far ahead as there are free slots, into the next row where one ends.
    The others go over a row twice: on the way there each thread gathers statistics of its elements, on the way back it
    computes results and stores them directly. In between the warps leave their statistics on chip, in one of two
    places by turns, so that one barrier a row is enough: none writes to a place before all have passed the barrier of
    the row after, and so have read it.
    """
    rows, lines, chunks = result.shape[0], r.lines, r.chunks
    kept, loaded_again, loads = int(r.kept), int(r.again), int(r.loads)
    team, together = r.team, r.team_of_share
    on_chip = {
        "slots": plgpu.SMEM((r.slots, r.chunk, r.line), x.dtype),
        "told": plgpu.SMEM((2, len(reduction.start), WARPS * r.warpgroups), jnp.float32),
        "loaded": plgpu.Barrier(num_arrivals=1, num_barriers=r.slots),
        "released": plgpu.Barrier(num_arrivals=r.warpgroups, num_barriers=r.slots),
        "all_told": plgpu.Barrier(num_arrivals=r.warpgroups, num_barriers=1),
    }

    def kernel(*refs: Any) -> None:
        x, *rest, out = refs
        worker, workers = lax.axis_index("worker"), lax.axis_size("worker")
        warpgroup = lax.axis_index("warpgroup")
        turns = lax.div(rows - 1 - worker + workers, workers)

        def line_of(turn: Any, chunk: Any) -> Any:
            return (worker + turn * workers) * lines + lax.min(chunk * r.chunk, lines - r.chunk)

        def copy(slots: Any, loaded: Any, released: Any) -> None:
            def copy_row(turn: Any, _: None) -> None:
                def copy_chunk(load: Any, _: None) -> None:
                    step = turn * loads + load
                    slot = lax.rem(step, r.slots)

                    @pl.when(step >= r.slots)
                    def wait_for_room() -> None:
                        plgpu.barrier_wait(released.at[slot])
                        plgpu.commit_smem()  # orders the others' reads before a write by the copying unit

                    chunk = lax.select(load < chunks, load, load - chunks + r.held)
                    plgpu.copy_gmem_to_smem(
                        x.at[pl.ds(line_of(turn, chunk), r.chunk)],
                        slots.at[slot],
                        loaded.at[slot],
                        oob_mode=plgpu.OOBFillMode.PROMISE_IN_BOUNDS,  # one run of bytes: a copy of any length
                    )

                lax.fori_loop(0, loads, copy_chunk, None)

            lax.fori_loop(0, turns, copy_row, None)

            def drain(step: Any, _: None) -> None:
                plgpu.barrier_wait(released.at[lax.rem(step, r.slots)])

            lax.fori_loop(lax.max(turns * loads - r.slots, 0), turns * loads, drain, None)

        def compute(slots: Any, told: Any, loaded: Any, released: Any, all_told: Any) -> None:
            places, share = r.places(warpgroup), r.share(warpgroup)

            def compute_row(turn: Any, _: None) -> None:
                def slot_of(load: Any) -> Any:
                    return lax.rem(turn * loads + load, r.slots)

                def read(slot: Any) -> list[jax.Array]:
                    return [team.read(slots.at[slot], place, 0) for place in places]

                def gather(chunk: Any, statistics: Statistics, *, last: bool = False) -> Statistics:
                    slot = slot_of(chunk)
                    plgpu.barrier_wait(loaded.at[slot])
                    pieces = read(slot)
                    if last:
                        pieces = r.counted(reduction, places, pieces)

                    @pl.when(chunk < chunks - kept)
                    def release() -> None:
                        plgpu.barrier_arrive(released.at[slot])

                    return reduction.absorb(statistics, pieces)

                def finish(chunk: Any, elements: jax.Array) -> None:
                    column = lax.min(chunk * r.chunk, lines - r.chunk)
                    other = together.read(rest[0], column + share, 0) if rest else None
                    together.write(out, line_of(turn, chunk) + share, 0, reduction.finish(elements, other, settled))

                def finish_from_ring(chunk: Any, load: Any, *, wait: bool) -> None:
                    slot = slot_of(load)
                    if wait:
                        plgpu.barrier_wait(loaded.at[slot])
                    elements = together.read(slots.at[slot], share, 0)
                    plgpu.barrier_arrive(released.at[slot])
                    finish(chunk, elements)

                statistics: Statistics = tuple(team.fill(value) for value in reduction.start)
                held = []
                for chunk in range(r.held):
                    slot = slot_of(chunk)
                    plgpu.barrier_wait(loaded.at[slot])
                    held.append(together.read_narrow(slots.at[slot], share, 0))
                    pieces = read(slot)
                    plgpu.barrier_arrive(released.at[slot])
                    statistics = reduction.absorb(statistics, pieces)
                statistics = lax.fori_loop(r.held, chunks - 1, gather, statistics)
                statistics = gather(jnp.int32(chunks - 1), statistics, last=True)
                settled = r.agreed(reduction, statistics, warpgroup, told.at[lax.rem(turn, 2)], all_told.at[0])

                def finish_kept(chunk: Any, _: None) -> None:
                    finish_from_ring(chunk, chunk, wait=False)

                def finish_again(chunk: Any, _: None) -> None:
                    finish_from_ring(chunk, chunk - r.held + chunks, wait=True)

                lax.fori_loop(chunks - kept, chunks, finish_kept, None)
                lax.fori_loop(r.held, r.held + loaded_again, finish_again, None)
                # Last, when all slots are free and chunks of the next row on their way.
                for chunk, narrow in enumerate(held):
                    finish(jnp.int32(chunk), narrow.astype(jnp.float32))

            lax.fori_loop(0, turns, compute_row, None)

        def block(slots: Any, told: Any, loaded: Any, released: Any, all_told: Any) -> None:
            most = COMPUTE_REGISTERS.get(r.warpgroups)

            @pl.when(warpgroup == r.warpgroups)
            def copier() -> None:
                if most is not None:
                    plgpu.set_max_registers(COPY_REGISTERS, action="decrease")
                copy(slots, loaded, released)

            @pl.when(warpgroup != r.warpgroups)
            def computer() -> None:
                if most is not None:
                    plgpu.set_max_registers(most, action="increase")
                compute(slots, told, loaded, released, all_told)

        pl.run_scoped(block, **on_chip, collective_axes="warpgroup")

    made: jax.Array = plgpu.kernel(
        kernel,
        out_type=jax.ShapeDtypeStruct((rows * lines, r.line), result.dtype),
        grid=(max(1, min(cores, rows)),),
        grid_names=("worker",),
        num_threads=r.warpgroups + 1,
        thread_name="warpgroup",
        compiler_params=COMPILER,
    )(x.reshape(rows * lines, r.line), *(weight.reshape(lines, r.line) for weight in shared))
    return made.reshape(result.shape)
