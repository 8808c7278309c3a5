"""Rows that flow through on-chip memory: blocks stay, and finish one row while they reduce the next."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl

from search_spaces.jax_compat import plgpu
from search_spaces.rowwise.chunks import ALIGNMENT, BARRIER_BYTES, REDUCTION_BYTES, round_up
from search_spaces.rowwise.parts import Parts
from search_spaces.rowwise.reduction import Reduction, Statistics

MOST_BLOCKS = 8  # of a cluster (CUDA C++ Programming Guide, thread block clusters)
BOARDS = 2  # A block may be a row ahead of the others of its cluster, and no further.


@dataclasses.dataclass(frozen=True)
class Flow(Parts):
    """How rows flow; fields may be `Columns` of schedules.

    A chunk of one row is finished just before a chunk of the next row is gathered, and the chunk after the last that is
    on its way takes its place. So there are slots for a row, for what is gathered ahead, and for what is on its way:
    more than `chunks` + `ahead`, or no load would have a place when it is waited for.

    Attributes:
      slots: chunks that a block has room for.
      ahead: chunks of the next row that are gathered before statistics of this one are needed.
    """

    slots: Any
    ahead: Any

    def onchip_bytes(self, itemsize: int, statistics: int) -> Any:
        """Of one block, to the byte."""
        slots = round_up(self.slots * self.elements * itemsize, ALIGNMENT)
        barriers = (2 * self.slots + (self.cluster == 1)) * BARRIER_BYTES
        return slots + self.board(statistics).onchip_bytes(BOARDS) + REDUCTION_BYTES + barriers

    def workers(self, cores: int, rows: int) -> int:
        """Blocks or clusters that rows are dealt to: as few as are done no later than all that the chip has room for.

        Hopper's cores come in pairs, and these in groups that a cluster does not reach beyond; which are not all of one
        size, so that some cores are left over where clusters are of more than two blocks (docs/rows.md).
        """
        together = 2 if self.cluster <= 2 else MOST_BLOCKS
        room = max(1, cores // together * together // self.cluster)
        turns = -(-rows // room)
        return -(-rows // turns)


def flow(
    reduction: Reduction, f: Flow, cores: int, result: jax.ShapeDtypeStruct, x: jax.Array, *shared: jax.Array
) -> jax.Array:
    """The kernel: each worker, a block or a cluster of them, takes every so-many-th row.

    All blocks should fit the chip at once. If they do not, the last ones start when the first have ended.
    """
    rows, chunks, ahead = result.shape[0], int(f.chunks), f.ahead
    team, run, board = f.team, f.run, f.board(len(reduction.start))
    on_chip = board.on_chip(BOARDS) | {
        "slots": plgpu.SMEM((f.slots, f.elements), x.dtype),
        "loaded": plgpu.Barrier(num_arrivals=1, num_barriers=f.slots),
        "released": plgpu.Barrier(num_arrivals=f.warpgroups, num_barriers=f.slots),
    }

    def kernel(*refs: Any) -> None:
        x, *rest, out = refs[: 2 + len(shared)]
        elsewhere = refs[2 + len(shared) :]
        worker, workers, warpgroup = lax.axis_index("worker"), lax.axis_size("worker"), lax.axis_index("warpgroup")
        turns = lax.div(rows - 1 - worker + workers, workers)
        places, share = f.places(warpgroup), f.share(warpgroup)
        start_of, since = f.part()

        def row_of(turn: Any) -> Any:
            return worker + turn * workers

        def block(slots: Any, told: Any, loaded: Any, released: Any, all_told: Any = None) -> None:
            def copy(load: Any) -> None:
                slot, turn, chunk = lax.rem(load, f.slots), lax.div(load, chunks), lax.rem(load, chunks)
                plgpu.copy_gmem_to_smem(
                    x.at[pl.ds(f.start(row_of(turn)).lines + start_of(chunk), f.elements)],
                    slots.at[slot],
                    loaded.at[slot],
                    oob_mode=plgpu.OOBFillMode.PROMISE_IN_BOUNDS,  # one run of bytes: a copy of any length
                )

            def slot_of(turn: Any, chunk: Any) -> Any:
                return lax.rem(turn * chunks + chunk, f.slots)

            def refill(turn: Any, chunk: Any) -> None:
                """The slot that was finished in the step before this one's."""
                load = turn * chunks + chunk - (1 + chunks + ahead) + f.slots

                @pl.when((warpgroup == 0) & (load >= f.slots) & (load < turns * chunks))
                def copy_next() -> None:
                    plgpu.barrier_wait(released.at[lax.rem(load, f.slots)])
                    plgpu.commit_smem()  # orders the reads before a write by the copying unit
                    copy(load)

            def gather(turn: Any, chunk: Any, statistics: Statistics, since: Any = 0) -> Statistics:
                slot = slot_of(turn, chunk)

                @pl.when(turn < turns)  # Beyond the last row nothing comes, and nobody asks what is gathered.
                def wait() -> None:
                    plgpu.barrier_wait(loaded.at[slot])

                pieces = [team.read_run(slots.at[slot], place) for place in places]
                return reduction.absorb(statistics, f.counted(reduction, places, pieces, since))

            def finish(turn: Any, chunk: Any, settled: Statistics) -> None:
                slot, first, start = slot_of(turn, chunk), start_of(chunk) + share, f.start(row_of(turn))
                elements = run.read(slots.at[slot], share)
                plgpu.barrier_arrive(released.at[slot])
                other = run.read(rest[0], f.shift(start) + first) if rest else None
                run.write(out, start.lines + first, reduction.finish(elements, other, settled))

            nothing: Statistics = tuple(team.fill(value) for value in reduction.start)

            def row(turn: Any, before: Statistics | None, statistics: Statistics) -> tuple[Statistics, Statistics]:
                """Gathers what is left of a row and the first chunks of the next, and finishes the row `before`."""

                def step(chunk: Any, statistics: Statistics, *, since: Any = 0) -> Statistics:
                    refill(turn, chunk)
                    if before is not None:
                        finish(turn - 1, chunk - ahead, before)
                    return gather(turn, chunk, statistics, since)

                start = f.start(row_of(turn))
                ends = f.read_ends(x, start, warpgroup)
                first = ahead
                if not ahead and f.repeated:
                    statistics, first = step(jnp.int32(0), statistics, since=since(0)), 1
                statistics = lax.fori_loop(first, chunks - 1, step, statistics)
                statistics = step(jnp.int32(chunks - 1), statistics, since=since(chunks - 1))
                place = elsewhere[0].at[row_of(turn)] if elsewhere else told.at[lax.rem(turn, BOARDS)]
                barrier = None if all_told is None else all_told.at[0]
                board.tell(f.of_warps(reduction, statistics, ends), warpgroup, place, barrier)
                following = nothing
                for chunk in range(ahead):
                    refill(turn + 1, chunk)
                    if before is not None:
                        finish(turn - 1, jnp.int32(chunks - ahead + chunk), before)
                    following = gather(turn + 1, jnp.int32(chunk), following, since(chunk))
                settled = board.heard(reduction, place, barrier)
                f.ends.finish(reduction, ends, start, rest[0] if rest else None, settled, out)
                return settled, following

            @pl.when(warpgroup == 0)
            def fill() -> None:
                lax.fori_loop(0, lax.min(turns * chunks, f.slots), lambda load, _: copy(load), None)

            statistics = nothing
            for chunk in range(ahead):
                statistics = gather(jnp.int32(0), jnp.int32(chunk), statistics, since(chunk))
            begun = row(jnp.int32(0), None, statistics)
            settled, _ = lax.fori_loop(1, turns, lambda turn, carry: row(turn, *carry), begun)
            lax.fori_loop(0, chunks, lambda chunk, _: finish(turns - 1, chunk, settled), None)

            @pl.when(warpgroup == 0)
            def drain() -> None:
                steps = turns * chunks

                def wait(step: Any, _: None) -> None:
                    plgpu.barrier_wait(released.at[lax.rem(step, f.slots)])

                lax.fori_loop(lax.max(steps - f.slots, 0), steps, wait, None)

        pl.run_scoped(block, **on_chip, collective_axes="warpgroup")

    return f.launch(kernel, board, result, x, shared, worker=f.workers(cores, rows))
