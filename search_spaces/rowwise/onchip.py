"""Rows that wait on chip, of a block or a cluster each: in on-chip memory and registers, all of it loaded at once."""

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


@dataclasses.dataclass(frozen=True)
class Whole(Parts):
    """Where the chunks of a block's part of a row wait; fields may be `Columns` of schedules.

    Attributes:
      held: chunks that threads hold in registers, as they came from memory; the others are in on-chip memory.
    """

    held: Any

    @property
    def slots(self) -> Any:
        """Chunks in on-chip memory."""
        return self.chunks - self.held

    def onchip_bytes(self, itemsize: int, statistics: int) -> Any:
        """Of one block, to the byte."""
        slots = self.slots * self.elements * itemsize
        barriers = (self.slots + (self.cluster == 1)) * BARRIER_BYTES
        return round_up(slots, ALIGNMENT) + self.board(statistics).onchip_bytes() + REDUCTION_BYTES + barriers


def onchip(reduction: Reduction, w: Whole, result: jax.ShapeDtypeStruct, x: jax.Array, *shared: jax.Array) -> jax.Array:
    """The kernel: a block for each part of a row. Several share a core, so that one computes while others load.

    One thread starts the copies of all chunks for on-chip memory (TMA bulk copies), and all threads the loads of what
    they hold in registers. Statistics are gathered as chunks arrive; when the warps have agreed on those of the row,
    results are computed and stored.
    """
    rows, chunks, slots_used = result.shape[0], int(w.chunks), int(w.slots)
    team, run, board = w.team, w.run, w.board(len(reduction.start))
    on_chip = board.on_chip()
    if slots_used:
        on_chip["slots"] = plgpu.SMEM((slots_used, w.elements), x.dtype)
        on_chip["loaded"] = plgpu.Barrier(num_arrivals=1, num_barriers=slots_used)

    def kernel(*refs: Any) -> None:
        x, *rest, out = refs[: 2 + len(shared)]
        elsewhere = refs[2 + len(shared) :]
        row, warpgroup = lax.axis_index("row"), lax.axis_index("warpgroup")
        places, share = w.places(warpgroup), w.share(warpgroup)
        start_of, since = w.part()
        start = w.start(row)

        def block(told: Any, all_told: Any = None, slots: Any = None, loaded: Any = None) -> None:
            if slots_used:

                @pl.when(warpgroup == 0)
                def copy() -> None:
                    def copy_chunk(slot: Any, _: None) -> None:
                        plgpu.copy_gmem_to_smem(
                            x.at[pl.ds(start.lines + start_of(slot + w.held), w.elements)],
                            slots.at[slot],
                            loaded.at[slot],
                            oob_mode=plgpu.OOBFillMode.PROMISE_IN_BOUNDS,  # one run of bytes: a copy of any length
                        )

                    lax.fori_loop(0, slots_used, copy_chunk, None)

            held = [
                [team.read_run_narrow(x, start.lines + start_of(jnp.int32(chunk)) + place) for place in places]
                for chunk in range(w.held)
            ]
            ends = w.read_ends(x, start, warpgroup)

            def gather(slot: Any, statistics: Statistics, *, since: Any = 0) -> Statistics:
                plgpu.barrier_wait(loaded.at[slot])
                pieces = [team.read_run(slots.at[slot], place) for place in places]
                return reduction.absorb(statistics, w.counted(reduction, places, pieces, since))

            statistics: Statistics = tuple(team.fill(value) for value in reduction.start)
            for chunk, narrow in enumerate(held):
                pieces = [piece.astype(jnp.float32) for piece in narrow]
                statistics = reduction.absorb(statistics, w.counted(reduction, places, pieces, since(chunk)))
            if slots_used:
                whole_since = 0
                if w.repeated and not w.held and slots_used > 1:
                    statistics = gather(jnp.int32(0), statistics, since=since(0))
                    whole_since = 1
                statistics = lax.fori_loop(whole_since, slots_used - 1, gather, statistics)
                statistics = gather(jnp.int32(slots_used - 1), statistics, since=since(chunks - 1))
            place = elsewhere[0].at[row] if elsewhere else told.at[0]
            barrier = None if all_told is None else all_told.at[0]
            of_warps = w.of_warps(reduction, statistics, ends)
            settled = board.agreed(reduction, of_warps, warpgroup, place, barrier)
            shift = w.shift(start)

            def finish(chunk: Any, pieces: list[jax.Array]) -> None:
                first = start_of(chunk)
                others = [team.read_run(rest[0], shift + first + place) if rest else None for place in places]
                for place, piece, other in zip(places, pieces, others, strict=True):
                    team.write_run(out, start.lines + first + place, reduction.finish(piece, other, settled))

            def finish_slot(slot: Any, _: None) -> None:
                first = start_of(slot + w.held) + share
                other = run.read(rest[0], shift + first) if rest else None
                elements = run.read(slots.at[slot], share)
                run.write(out, start.lines + first, reduction.finish(elements, other, settled))

            for chunk, narrow in enumerate(held):
                finish(jnp.int32(chunk), [piece.astype(jnp.float32) for piece in narrow])
            if slots_used:
                lax.fori_loop(0, slots_used, finish_slot, None)
            w.ends.finish(reduction, ends, start, rest[0] if rest else None, settled, out)

        pl.run_scoped(block, **on_chip, collective_axes="warpgroup")

    return w.launch(kernel, board, result, x, shared, row=rows)
