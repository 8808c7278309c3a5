"""Rows that wait on chip, a block each: parts of a row in on-chip memory, the rest in registers, all loaded at once."""

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
from search_spaces.rowwise.team import WARPS


@dataclasses.dataclass(frozen=True)
class Whole(Chunks):
    """Where the chunks of a whole row wait; fields may be `Columns` of schedules.

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
        slots = self.slots * self.chunk * self.line * itemsize
        board = board_bytes(statistics, WARPS * self.warpgroups, boards=1)
        barriers = (self.slots + 1) * BARRIER_BYTES
        return round_up(slots, ALIGNMENT) + board + REDUCTION_BYTES + barriers


def onchip(reduction: Reduction, w: Whole, result: jax.ShapeDtypeStruct, x: jax.Array, *shared: jax.Array) -> jax.Array:
    """The kernel: a block for each row, several of which share a core, so that one computes while others load.

    One thread starts the copies of all chunks for on-chip memory (TMA bulk copies), and all threads the loads of what
    they hold in registers. Statistics are gathered as chunks arrive; when the warps have agreed on those of the row,
    results are computed and stored.
    """
    rows, lines, slots_used = result.shape[0], w.lines, int(w.slots)
    team, together = w.team, w.team_of_share
    on_chip = {
        "told": plgpu.SMEM((len(reduction.start), WARPS * w.warpgroups), jnp.float32),
        "all_told": plgpu.Barrier(num_arrivals=w.warpgroups, num_barriers=1),
    }
    if slots_used:
        on_chip["slots"] = plgpu.SMEM((slots_used, w.chunk, w.line), x.dtype)
        on_chip["loaded"] = plgpu.Barrier(num_arrivals=1, num_barriers=slots_used)

    def kernel(*refs: Any) -> None:
        x, *rest, out = refs
        row, warpgroup = lax.axis_index("row"), lax.axis_index("warpgroup")
        places, share = w.places(warpgroup), w.share(warpgroup)

        def start_of(chunk: Any) -> Any:
            return lax.min(chunk * w.chunk, lines - w.chunk)

        def block(told: Any, all_told: Any, slots: Any = None, loaded: Any = None) -> None:
            if slots_used:

                @pl.when(warpgroup == 0)
                def copy() -> None:
                    def copy_chunk(slot: Any, _: None) -> None:
                        plgpu.copy_gmem_to_smem(
                            x.at[pl.ds(row * lines + start_of(slot + w.held), w.chunk)],
                            slots.at[slot],
                            loaded.at[slot],
                            oob_mode=plgpu.OOBFillMode.PROMISE_IN_BOUNDS,  # one run of bytes: a copy of any length
                        )

                    lax.fori_loop(0, slots_used, copy_chunk, None)

            held = [
                [team.read_narrow(x, row * lines + start_of(jnp.int32(chunk)) + place, 0) for place in places]
                for chunk in range(w.held)
            ]

            def read(slot: Any) -> list[jax.Array]:
                return [team.read(slots.at[slot], place, 0) for place in places]

            def gather(slot: Any, statistics: Statistics, *, last: bool = False) -> Statistics:
                plgpu.barrier_wait(loaded.at[slot])
                pieces = read(slot)
                return reduction.absorb(statistics, w.counted(reduction, places, pieces) if last else pieces)

            statistics: Statistics = tuple(team.fill(value) for value in reduction.start)
            for chunk, narrow in enumerate(held):
                pieces = [piece.astype(jnp.float32) for piece in narrow]
                last = chunk == w.chunks - 1
                statistics = reduction.absorb(statistics, w.counted(reduction, places, pieces) if last else pieces)
            if slots_used:
                statistics = lax.fori_loop(0, slots_used - 1, gather, statistics)
                statistics = gather(jnp.int32(slots_used - 1), statistics, last=True)
            settled = w.agreed(reduction, statistics, warpgroup, told, all_told.at[0])

            def finish(chunk: Any, pieces: list[jax.Array]) -> None:
                start = start_of(chunk)
                others = [team.read(rest[0], start + place, 0) if rest else None for place in places]
                for place, piece, other in zip(places, pieces, others, strict=True):
                    team.write(out, row * lines + start + place, 0, reduction.finish(piece, other, settled))

            def finish_slot(slot: Any, _: None) -> None:
                first = start_of(slot + w.held) + share
                other = together.read(rest[0], first, 0) if rest else None
                elements = together.read(slots.at[slot], share, 0)
                together.write(out, row * lines + first, 0, reduction.finish(elements, other, settled))

            for chunk, narrow in enumerate(held):
                finish(jnp.int32(chunk), [piece.astype(jnp.float32) for piece in narrow])
            if slots_used:
                lax.fori_loop(0, slots_used, finish_slot, None)

        pl.run_scoped(block, **on_chip, collective_axes="warpgroup")

    made: jax.Array = plgpu.kernel(
        kernel,
        out_type=jax.ShapeDtypeStruct((rows * lines, w.line), result.dtype),
        grid=(rows,),
        grid_names=("row",),
        num_threads=w.warpgroups,
        thread_name="warpgroup",
        compiler_params=COMPILER,
    )(x.reshape(rows * lines, w.line), *(weight.reshape(lines, w.line) for weight in shared))
    return made.reshape(result.shape)
