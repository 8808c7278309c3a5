"""Rows that stream through on-chip memory: results of one row are computed while the next one is being reduced."""

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
from search_spaces.rowwise.ring import COMPUTE_REGISTERS, COPY_REGISTERS
from search_spaces.rowwise.team import WARPS


@dataclasses.dataclass(frozen=True)
class Stream(Chunks):
    """How rows stream; fields may be `Columns` of schedules.

    A chunk of one row is finished just before the same chunk of the next row is gathered, whose load may have its
    place. So what waits is one row, however far the two have come, and loads and stores are under way at all times.

    Attributes:
      slots: for chunks that wait in on-chip memory; those that a row leaves free, one at least, are for what is loaded
        next.
      ahead: slots beside, through which the first chunks go of a row that has too many to wait: they are loaded again
        to be finished. 0 where all of a row can wait.
    """

    slots: Any
    ahead: Any

    @property
    def kept(self) -> Any:
        """Chunks of a row that wait in on-chip memory."""
        return np.minimum(self.chunks, self.slots - 1)

    @property
    def again(self) -> Any:
        """Chunks of a row that are loaded twice."""
        return self.chunks - self.kept

    @property
    def loads(self) -> Any:
        """Of chunks for one row."""
        return self.chunks + self.again

    def onchip_bytes(self, itemsize: int, statistics: int) -> Any:
        """Of one block, to the byte."""
        chunk = self.chunk * self.line * itemsize
        slots = round_up(self.slots * chunk, ALIGNMENT) + round_up(self.ahead * chunk, ALIGNMENT)
        boards = board_bytes(statistics, WARPS * self.warpgroups, boards=2)
        barriers = (2 * (self.slots + self.ahead) + 1) * BARRIER_BYTES
        return slots + boards + REDUCTION_BYTES + barriers


def stream(
    reduction: Reduction, r: Stream, cores: int, result: jax.ShapeDtypeStruct, x: jax.Array, *shared: jax.Array
) -> jax.Array:
    """The kernel: a block for each core, which takes every so-many-th row; all its warps share two rows at a time.

    One warpgroup copies chunks in, as far ahead as there are free slots. The others leave their statistics of a row on
    chip, in one of two places by turns, so that one barrier a row is enough: none writes to a place before all have
    passed the barrier of the row after, and so have read it.
    """
    rows, lines, chunks, kept, again = result.shape[0], r.lines, r.chunks, int(r.kept), int(r.again)
    team = r.team
    on_chip = {
        "told": plgpu.SMEM((2, len(reduction.start), WARPS * r.warpgroups), jnp.float32),
        "all_told": plgpu.Barrier(num_arrivals=r.warpgroups, num_barriers=1),
        "waiting": _room(r, r.slots, x.dtype),
        "passing": _room(r, r.ahead, x.dtype) if again else (),
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

        def passed(turn: Any) -> Any:
            """Chunks that passed before this turn's: a row's once in its own turn, and again in the next."""
            return lax.max(again * (2 * turn - 1), 0)

        def copy(waiting: _Slots, passing: _Slots) -> None:
            def copy_row(turn: Any, *, is_first: bool = False) -> None:
                def copy_twice(chunk: Any, _: None) -> None:
                    if is_first:
                        passing.fill(chunk, x, line_of(turn, chunk))
                    else:
                        step = passed(turn) + 2 * chunk
                        passing.fill(step, x, line_of(turn - 1, chunk))
                        passing.fill(step + 1, x, line_of(turn, chunk))

                def copy_once(chunk: Any, _: None) -> None:
                    waiting.fill(turn * kept + chunk - again, x, line_of(turn, chunk))

                if again:
                    lax.fori_loop(0, again, copy_twice, None)
                lax.fori_loop(again, chunks, copy_once, None)

            def copy_again(chunk: Any, _: None) -> None:
                passing.fill(passed(turns) + chunk, x, line_of(turns - 1, chunk))

            copy_row(jnp.int32(0), is_first=True)
            lax.fori_loop(1, turns, lambda turn, _: copy_row(turn), None)
            if again:
                lax.fori_loop(0, again, copy_again, None)
            waiting.drain(turns * kept)
            if again:
                passing.drain(2 * again * turns)

        def compute(waiting: _Slots, passing: _Slots, told: Any, all_told: Any) -> None:
            places = r.places(warpgroup)

            def read(slot: Any) -> list[jax.Array]:
                return [team.read(slot, place, 0) for place in places]

            def pass_by(step: Any) -> list[jax.Array]:
                pieces = read(passing.loaded_slot(step))
                passing.release(step)
                return pieces

            def finish(turn: Any, chunk: Any, pieces: list[jax.Array], settled: Statistics) -> None:
                start, first = start_of(chunk), line_of(turn, chunk)
                others = [team.read(rest[0], start + place, 0) if rest else None for place in places]
                for place, piece, other in zip(places, pieces, others, strict=True):
                    team.write(out, first + place, 0, reduction.finish(piece, other, settled))

            def finish_waiting(turn: Any, chunk: Any, settled: Statistics) -> None:
                step = turn * kept + chunk - again
                pieces = read(waiting.slot(step))
                waiting.release(step)
                finish(turn, chunk, pieces, settled)

            def row(turn: Any, before: Statistics | None) -> Statistics:
                """Gathers a row, and finishes the one before, which is settled."""

                def both_passing(chunk: Any, statistics: Statistics) -> Statistics:
                    if before is None:
                        return reduction.absorb(statistics, pass_by(chunk))
                    step = passed(turn) + 2 * chunk
                    finish(turn - 1, chunk, pass_by(step), before)
                    return reduction.absorb(statistics, pass_by(step + 1))

                def both_waiting(chunk: Any, statistics: Statistics, *, is_last: bool = False) -> Statistics:
                    if before is not None:
                        finish_waiting(turn - 1, chunk, before)
                    pieces = read(waiting.loaded_slot(turn * kept + chunk - again))
                    return reduction.absorb(statistics, r.counted(reduction, places, pieces) if is_last else pieces)

                statistics: Statistics = tuple(team.fill(value) for value in reduction.start)
                if again:
                    statistics = lax.fori_loop(0, again, both_passing, statistics)
                statistics = lax.fori_loop(again, chunks - 1, both_waiting, statistics)
                statistics = both_waiting(jnp.int32(chunks - 1), statistics, is_last=True)
                board = told.at[lax.rem(turn, 2)]
                return r.agreed(reduction, statistics, warpgroup, board, all_told.at[0])

            settled = lax.fori_loop(1, turns, row, row(jnp.int32(0), None))
            lax.fori_loop(again, chunks, lambda chunk, _: finish_waiting(turns - 1, chunk, settled), None)
            if again:
                last = passed(turns)
                lax.fori_loop(0, again, lambda c, _: finish(turns - 1, c, pass_by(last + c), settled), None)

        def block(told: Any, all_told: Any, waiting: Any, passing: Any) -> None:
            waiting, passing = _Slots(r.slots, r.chunk, *waiting), _Slots(r.ahead, r.chunk, *passing)
            most = COMPUTE_REGISTERS.get(r.warpgroups)

            @pl.when(warpgroup == r.warpgroups)
            def copier() -> None:
                if most is not None:
                    plgpu.set_max_registers(COPY_REGISTERS, action="decrease")
                copy(waiting, passing)

            @pl.when(warpgroup != r.warpgroups)
            def computer() -> None:
                if most is not None:
                    plgpu.set_max_registers(most, action="increase")
                compute(waiting, passing, told, all_told)

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


@dataclasses.dataclass(frozen=True)
class _Slots:
    """Slots in on-chip memory that chunks go through in order, and the barriers by which that is told."""

    count: int
    chunk: int  # lines
    slots: Any = None
    loaded: Any = None
    released: Any = None

    def fill(self, step: Any, x: Any, line: Any) -> None:
        """Starts the load of a chunk when its slot is free."""
        slot = lax.rem(step, self.count)

        @pl.when(step >= self.count)
        def wait_for_room() -> None:
            plgpu.barrier_wait(self.released.at[slot])
            plgpu.commit_smem()  # orders the others' reads before a write by the copying unit

        plgpu.copy_gmem_to_smem(
            x.at[pl.ds(line, self.chunk)],
            self.slots.at[slot],
            self.loaded.at[slot],
            oob_mode=plgpu.OOBFillMode.PROMISE_IN_BOUNDS,  # one run of bytes: a copy of any length
        )

    def drain(self, steps: Any) -> None:
        """Waits until the last chunks are released."""

        def wait(step: Any, _: None) -> None:
            plgpu.barrier_wait(self.released.at[lax.rem(step, self.count)])

        lax.fori_loop(lax.max(steps - self.count, 0), steps, wait, None)

    def slot(self, step: Any) -> Any:
        return self.slots.at[lax.rem(step, self.count)]

    def loaded_slot(self, step: Any) -> Any:
        """The same, once its load has arrived; to be asked for once."""
        plgpu.barrier_wait(self.loaded.at[lax.rem(step, self.count)])
        return self.slot(step)

    def release(self, step: Any) -> None:
        plgpu.barrier_arrive(self.released.at[lax.rem(step, self.count)])


def _room(r: Stream, slots: int, dtype: Any) -> tuple[Any, Any, Any]:
    """The fields of so many `_Slots` that are allocated."""
    return (
        plgpu.SMEM((slots, r.chunk, r.line), dtype),
        plgpu.Barrier(num_arrivals=1, num_barriers=slots),
        plgpu.Barrier(num_arrivals=r.warpgroups, num_barriers=slots),
    )
