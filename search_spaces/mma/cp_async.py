"""Tiles of arrays in shared memory, swizzled, and how threads copy them there: cp.async, which fills edges with zeros.

A tile has its rows one after the other, as they lie in device memory. Of each 128 bytes a swizzle exchanges runs of 16:
their number becomes that xor the number of the 128 bytes, so that the 8 runs that ldmatrix reads at a time, from 8
rows, lie in banks of their own; where a row is shorter than that, as many of its runs as it has.

Copies are written out as PTX: `plgpu.copy_gmem_to_smem` takes no copy that reaches beyond an array where it is done by
cp.async (jax 0.11.2), and is TMA's on Hopper.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import jax.numpy as jnp
from jax.experimental import pallas as pl

from search_spaces.hopper.limits import ACCESS_BYTES
from search_spaces.jax_compat import interprets, mosaic_gpu_code, plgpu
from search_spaces.mma import lanes

SWIZZLE_RUNS = 8  # runs of 16 bytes that a swizzle exchanges at most


@dataclasses.dataclass(frozen=True)
class SmemTile:
    """A tile of an array as it lies in shared memory.

    Attributes:
      rows, columns: of the array in device memory.
      dtype: of its elements.
    """

    rows: int
    columns: int
    dtype: Any

    @property
    def row_bytes(self) -> int:
        return int(self.columns * self.dtype.itemsize)

    @property
    def elements(self) -> int:
        return self.rows * self.columns

    @property
    def runs(self) -> int:
        """Of 16 bytes, that are exchanged with each other."""
        return min(SWIZZLE_RUNS, self.row_bytes // ACCESS_BYTES)

    def swizzle(self, row: Any) -> Any:
        """What the number of a run becomes by xor in this row, of each thread's own."""
        return row // (SWIZZLE_RUNS // self.runs) % self.runs


@dataclasses.dataclass(frozen=True)
class Source:
    """An array in device memory, ``[batch, rows, columns]`` or without the batch, whose rows start at 16 bytes.

    Attributes:
      array: a reference to it.
      batched: whether it has a batch axis.
      reach: the row and the column that the tiles of a launch end at, together: beyond the array, where they do not
        divide it or are too many.
    """

    array: Any
    batched: bool
    reach: tuple[int, int]

    @property
    def extents(self) -> tuple[int, int]:
        return tuple(self.array.shape[-2:])


def copy(
    source: Source,
    batch: Any,
    corner: tuple[Any, Any],
    tile: SmemTile,
    smem: Any,
    threads: int,
    part: tuple[int, int] = (0, 1),
    when: Any = True,
) -> None:
    """Starts to copy the `tile` at this row and column of an element of the batch; nothing waits for it yet.

    Args:
      smem: a reference to as many elements as the tile has, at a multiple of 128 bytes.
      threads: of the CTA, all of which call this.
      part: of the tile's copies, and in how many they are divided; interpreted, the first one is all.
      when: whether to; the same for all threads.
    """
    part_number, parts = part
    (extent, columns), itemsize = source.extents, tile.dtype.itemsize
    pitch = columns * itemsize
    at_once = threads // tile.runs  # units of a swizzle's runs
    # Where whole tiles make up the array no copy needs a condition.
    clip_rows, clip_columns = source.reach[0] > extent, source.reach[1] > columns

    def meaning(array: Any, smem: Any, batch: Any, row: Any, column: Any, when: Any) -> None:
        if part_number > 0:
            return

        @pl.when(when)
        def whole() -> None:
            box = pl.ds(row, tile.rows), pl.ds(column, tile.columns)
            smem[...] = array[(batch, *box) if source.batched else box].reshape(smem.shape)

    @mosaic_gpu_code(
        meaning, arg_types=(plgpu.RefType(), plgpu.RefType(), *[plgpu.Layout.WG_SPLAT] * 4), return_type=None
    )
    def start(_: Any, array: Any, smem: Any, batch: Any, row: Any, column: Any, when: Any) -> None:
        batch, row, column = (lanes.number(x) for x in (batch, row, column))
        run, unit = lanes.thread() % tile.runs, lanes.thread() // tile.runs
        to = lanes.smem_address(smem) + unit * tile.row_bytes + (run ^ tile.swizzle(unit)) * ACCESS_BYTES
        first = lanes.wide(row + unit)
        if source.batched:
            first = first + lanes.wide(batch) * extent
        of = lanes.gmem_address(array) + first * pitch + lanes.wide(column * itemsize + run * ACCESS_BYTES)
        numbers = range(0, tile.rows * tile.row_bytes // (tile.runs * ACCESS_BYTES), at_once)
        for number in numbers[part_number * len(numbers) // parts : (part_number + 1) * len(numbers) // parts]:
            box, row_of_tile = divmod(number, tile.rows)
            beyond = box * tile.runs * ACCESS_BYTES
            # Compared here, where no compiler keeps what comes out of it for each copy from step to step.
            text = [".reg .pred %within;", ".reg .b32 %size;", f"mov.b32 %size, {ACCESS_BYTES};"]
            limits = [("$2", extent - row_of_tile)] * clip_rows + [("$3", pitch - beyond)] * clip_columns
            for at, limit in limits:
                text += [f"setp.lt.u32 %within, {at}, {max(limit, 0)};", "selp.b32 %size, %size, 0, %within;"]
            text.append(
                f"@$4 cp.async.cg.shared.global.L2::128B [$0+{row_of_tile * tile.row_bytes + beyond}], "
                f"[$1+{row_of_tile * pitch + beyond}], {ACCESS_BYTES}, %size;"
            )
            lanes.instruct(
                "{ " + " ".join(text) + " }",
                "r,l,r,r,b",
                [lanes.register(x) for x in (to, of, row + unit, column * itemsize + run * ACCESS_BYTES, when)],
            )

    start(source.array, smem, *(jnp.int32(x) for x in (batch, *corner)), jnp.bool_(when))


def commit() -> None:
    """What was started since the last time is a group, also where that is nothing."""
    _instruct("cp.async.commit_group;")


def wait(groups: int) -> None:
    """Until all but the last so many groups of this thread have arrived."""
    _instruct(f"cp.async.wait_group {groups};")


def rolled() -> None:
    """At the start of a loop's body: ptxas leaves it one, also if it is short, which takes fewer registers."""
    _instruct('.pragma "nounroll";')


def meetings(warpgroups: int) -> list[Any]:
    """Scratch for the barrier of a CTA's warpgroups where they are interpreted, if there are several; else none."""
    return [plgpu.Barrier(num_arrivals=warpgroups)] if interprets() and warpgroups > 1 else []


def synchronize(meeting: Any = None) -> None:
    """Waits for all threads of the CTA, and for what they wrote to shared memory, or what they waited for there.

    Where it is interpreted, its warpgroups wait at a barrier of theirs, `meeting`, if there are several.
    """
    if interprets():
        if meeting is not None:
            plgpu.barrier_arrive(meeting)
            plgpu.barrier_wait(meeting)
        return

    @mosaic_gpu_code(lambda: None)
    def wait_for_all(_: Any) -> None:
        lanes.synchronize()

    wait_for_all()


def _instruct(text: str) -> None:
    @mosaic_gpu_code(lambda: None)
    def instruct(_: Any) -> None:
        lanes.instruct(text, "", [])

    instruct()


def following(stage: Any, stages: int) -> Any:
    """Where the operands of the step lie that follows the one whose lie in this stage."""
    return jnp.where(stage == stages - 1, 0, stage + 1)
