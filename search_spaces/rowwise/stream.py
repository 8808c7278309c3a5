"""Rows that stream through on-chip memory: results of one row are computed while the next one is being reduced."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl

from search_spaces.jax_compat import plgpu
from search_spaces.rowwise.chunks import ALIGNMENT, BARRIER_BYTES, REDUCTION_BYTES, Chunks, board_bytes, round_up
from search_spaces.rowwise.reduction import Reduction, Statistics
from search_spaces.rowwise.registers import COMPILER
from search_spaces.rowwise.ring import COMPUTE_REGISTERS, COPY_REGISTERS
from search_spaces.rowwise.team import WARPS


@dataclasses.dataclass(frozen=True)
class Stream(Chunks):
    """How rows stream; fields may be `Columns` of schedules.

    A chunk of one row is finished just before the same chunk of the next row is gathered, whose load may have its
    place. So what waits is one row, however far the two have come, and loads and stores are under way at all times.

    Attributes:
      slots: for chunks in on-chip memory, more than a row has; what a row leaves free is for what is loaded next.
    """

    slots: Any

    def onchip_bytes(self, itemsize: int, statistics: int) -> Any:
        """Of one block, to the byte."""
        slots = round_up(self.slots * self.chunk * self.line * itemsize, ALIGNMENT)
        boards = board_bytes(statistics, WARPS * self.warpgroups, boards=2)
        return slots + boards + REDUCTION_BYTES + (2 * self.slots + 1) * BARRIER_BYTES


def stream(
    reduction: Reduction, r: Stream, cores: int, result: jax.ShapeDtypeStruct, x: jax.Array, *shared: jax.Array
) -> jax.Array:
    """The kernel: a block for each core, which takes every so-many-th row; all its warps share two rows at a time.

    One warpgroup copies chunks in, as far ahead as there are free slots. The others leave their statistics of a row on
    chip, in one of two places by turns, so that one barrier a row is enough: none writes to a place before all have
    passed the barrier of the row after, and so have read it.
    """
    rows, lines, chunks = result.shape[0], r.lines, r.chunks
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

        def start_of(chunk: Any) -> Any:
            return lax.min(chunk * r.chunk, lines - r.chunk)

        def line_of(turn: Any, chunk: Any) -> Any:
            return (worker + turn * workers) * lines + start_of(chunk)

        def slot_of(turn: Any, chunk: Any) -> Any:
            return lax.rem(turn * chunks + chunk, r.slots)

        def copy(slots: Any, loaded: Any, released: Any) -> None:
            def copy_row(turn: Any, _: None) -> None:
                def copy_chunk(chunk: Any, _: None) -> None:
                    slot = slot_of(turn, chunk)

                    @pl.when(turn * chunks + chunk >= r.slots)
                    def wait_for_room() -> None:
                        plgpu.barrier_wait(released.at[slot])
                        plgpu.commit_smem()  # orders the others' reads before a write by the copying unit

                    plgpu.copy_gmem_to_smem(
                        x.at[pl.ds(line_of(turn, chunk), r.chunk)],
                        slots.at[slot],
                        loaded.at[slot],
                        oob_mode=plgpu.OOBFillMode.PROMISE_IN_BOUNDS,  # one run of bytes: a copy of any length
                    )

                lax.fori_loop(0, chunks, copy_chunk, None)

            lax.fori_loop(0, turns, copy_row, None)

            def drain(step: Any, _: None) -> None:
                plgpu.barrier_wait(released.at[lax.rem(step, r.slots)])

            lax.fori_loop(lax.max(turns * chunks - r.slots, 0), turns * chunks, drain, None)

        def compute(slots: Any, told: Any, loaded: Any, released: Any, all_told: Any) -> None:
            places, share = r.places(warpgroup), r.share(warpgroup)

            def finish(turn: Any, chunk: Any, settled: Statistics) -> None:
                slot, start, first = slot_of(turn, chunk), start_of(chunk), line_of(turn, chunk)
                elements = together.read(slots.at[slot], share, 0)
                plgpu.barrier_arrive(released.at[slot])
                other = together.read(rest[0], start + share, 0) if rest else None
                together.write(out, first + share, 0, reduction.finish(elements, other, settled))

            def row(turn: Any, before: Statistics | None) -> Statistics:
                """Gathers a row, and finishes the one before, which is settled."""

                def both(chunk: Any, statistics: Statistics, *, is_last: bool = False) -> Statistics:
                    if before is not None:
                        finish(turn - 1, chunk, before)
                    slot = slot_of(turn, chunk)
                    plgpu.barrier_wait(loaded.at[slot])
                    pieces = [team.read(slots.at[slot], place, 0) for place in places]
                    return reduction.absorb(statistics, r.counted(reduction, places, pieces) if is_last else pieces)

                statistics: Statistics = tuple(team.fill(value) for value in reduction.start)
                statistics = lax.fori_loop(0, chunks - 1, both, statistics)
                statistics = both(jnp.int32(chunks - 1), statistics, is_last=True)
                return r.agreed(reduction, statistics, warpgroup, told.at[lax.rem(turn, 2)], all_told.at[0])

            settled = lax.fori_loop(1, turns, row, row(jnp.int32(0), None))
            lax.fori_loop(0, chunks, lambda chunk, _: finish(turns - 1, chunk, settled), None)

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
