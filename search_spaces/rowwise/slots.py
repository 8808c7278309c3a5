"""Blocks that stay, and slots in on-chip memory that a warpgroup of their own fills ahead of those who compute."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl

from search_spaces.jax_compat import plgpu
from search_spaces.rowwise.chunks import ALIGNMENT, BARRIER_BYTES, REDUCTION_BYTES, Chunks, round_up
from search_spaces.rowwise.exchange import Board
from search_spaces.rowwise.reduction import Reduction, Statistics
from search_spaces.rowwise.registers import COMPILER
from search_spaces.rowwise.team import WARPS

# Registers per thread, in multiples of 8. All of a block start with 65,536 / threads, rounded down to a multiple of 8;
# what the copying threads give back, those share who compute: by their warpgroups. One alone needs nothing, for two
# warpgroups start with more than a thread can have.
COPY_REGISTERS = 40
COMPUTE_REGISTERS = {2: 232, 4: 104}


@dataclasses.dataclass(frozen=True)
class Slots(Chunks):
    """Rows whose chunks pass through slots, loaded in order by one more warpgroup than compute.

    Attributes:
      slots: chunks that there is room for.
    """

    slots: Any

    @property
    def loads(self) -> Any:
        """Of chunks for one row."""
        return self.chunks

    def chunk_of(self, load: Any) -> Any:
        """Which chunk of its row the `load`-th load of a row brings."""
        return load

    def start_of(self, chunk: Any) -> Any:
        """The first line of a chunk, in its row."""
        return lax.min(chunk * self.chunk, self.lines - self.chunk)

    def onchip_bytes(self, itemsize: int, statistics: int) -> Any:
        """Of one block, to the byte."""
        slots = round_up(self.slots * self.chunk * self.line * itemsize, ALIGNMENT)
        boards = Board(statistics, WARPS * self.warpgroups).onchip_bytes(boards=2)
        return slots + boards + REDUCTION_BYTES + (2 * self.slots + 1) * BARRIER_BYTES


@dataclasses.dataclass(frozen=True)
class Block:
    """What a computing warpgroup of a block has.

    Attributes:
      warpgroup: its number.
      turns: rows of the block.
      line_of: the first line in device memory of a chunk of the row of a turn.
      shared, out: arrays that all rows share, and the result, in device memory.
      slots: chunks on chip; `loaded` tells that one is there, `released` that it has been read.
      agreed: what `finish` needs of the row of a turn, from a thread's statistics (`Board.agreed`).
    """

    warpgroup: Any
    turns: Any
    line_of: Callable[[Any, Any], Any]
    shared: Any
    out: Any
    slots: Any
    loaded: Any
    released: Any
    agreed: Callable[[Any, Statistics], Statistics]


def staying(
    reduction: Reduction,
    r: Slots,
    cores: int,
    result: jax.ShapeDtypeStruct,
    x: jax.Array,
    shared: tuple[jax.Array, ...],
    compute: Callable[[Block], None],
) -> jax.Array:
    """The kernel: a block for each core, which takes every so-many-th row.

    One warpgroup copies chunks in, as far ahead as there are free slots, into the next row where one ends; the others
    `compute`.
    """
    rows, lines, loads = result.shape[0], r.lines, int(r.loads)
    board = Board(len(reduction.start), WARPS * r.warpgroups)
    on_chip = {
        "slots": plgpu.SMEM((r.slots, r.chunk, r.line), x.dtype),
        "told": plgpu.SMEM((2, *board.shape), jnp.float32),
        "loaded": plgpu.Barrier(num_arrivals=1, num_barriers=r.slots),
        "released": plgpu.Barrier(num_arrivals=r.warpgroups, num_barriers=r.slots),
        "all_told": plgpu.Barrier(num_arrivals=r.warpgroups, num_barriers=1),
    }

    def kernel(*refs: Any) -> None:
        x, *shared, out = refs
        worker, workers = lax.axis_index("worker"), lax.axis_size("worker")
        warpgroup = lax.axis_index("warpgroup")
        turns = lax.div(rows - 1 - worker + workers, workers)

        def line_of(turn: Any, chunk: Any) -> Any:
            return (worker + turn * workers) * lines + r.start_of(chunk)

        def copy(slots: Any, loaded: Any, released: Any) -> None:
            def copy_row(turn: Any, _: None) -> None:
                def copy_chunk(load: Any, _: None) -> None:
                    step = turn * loads + load
                    slot = lax.rem(step, r.slots)

                    @pl.when(step >= r.slots)
                    def wait_for_room() -> None:
                        plgpu.barrier_wait(released.at[slot])
                        plgpu.commit_smem()  # orders the others' reads before a write by the copying unit

                    plgpu.copy_gmem_to_smem(
                        x.at[pl.ds(line_of(turn, r.chunk_of(load)), r.chunk)],
                        slots.at[slot],
                        loaded.at[slot],
                        oob_mode=plgpu.OOBFillMode.PROMISE_IN_BOUNDS,  # one run of bytes: a copy of any length
                    )

                lax.fori_loop(0, loads, copy_chunk, None)

            lax.fori_loop(0, turns, copy_row, None)

            def drain(step: Any, _: None) -> None:
                plgpu.barrier_wait(released.at[lax.rem(step, r.slots)])

            lax.fori_loop(lax.max(turns * loads - r.slots, 0), turns * loads, drain, None)

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

                def agreed(turn: Any, statistics: Statistics) -> Statistics:
                    # Two boards, used by turns, so that one barrier a row is enough: none writes to a board before all
                    # have passed the barrier of the row after, and have read it.
                    place = told.at[lax.rem(turn, 2)]
                    return board.agreed(reduction, statistics, r.team, warpgroup, place, all_told.at[0])

                compute(Block(warpgroup, turns, line_of, shared, out, slots, loaded, released, agreed))

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
