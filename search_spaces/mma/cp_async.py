"""Swizzled tiles in shared memory, and their copies from device memory by cp.async, which fills edges with zeros.

A tile has its rows in sequence, as in device memory. In each 128 bytes, a swizzle permutes runs of 16 bytes: a run's
index is xored with the index of the 128 bytes. The 8 runs, from 8 rows, that ldmatrix reads at a time then lie in
different banks. If a row is shorter than 128 bytes, only its own runs are permuted.

Copies are inline PTX: with cp.async, `plgpu.copy_gmem_to_smem` does not support copies beyond an array's edge (jax
0.11.2), and on Hopper it uses TMA.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import jax.numpy as jnp
from jax.experimental import pallas as pl

from search_spaces.hopper import ACCESS_BYTES
from search_spaces.jax_compat import interprets, mosaic_gpu_code, plgpu
from search_spaces.mma import lanes

SWIZZLE_RUNS = 8  # runs of 16 bytes that a swizzle permutes at most


@dataclasses.dataclass(frozen=True)
class SmemTile:
    """A tile of an array in shared memory.

    Attributes:
      rows, columns: its extents, in the array's device memory layout.
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
        """Number of 16-byte runs that a swizzle permutes."""
        return min(SWIZZLE_RUNS, self.row_bytes // ACCESS_BYTES)

    def swizzle(self, row: Any) -> Any:
        """Returns the value that is xored with the index of a run in this row, per thread."""
        return row // (SWIZZLE_RUNS // self.runs) % self.runs


@dataclasses.dataclass(frozen=True)
class Source:
    """An array in device memory, ``[batch, rows, columns]`` or without the batch; rows are aligned to 16 bytes.

    Attributes:
      array: a reference to it.
      batched: whether it has a batch axis.
      reach: the row and the column where the tiles of a launch end. This is beyond the array's edge if the tiles do not
        divide the array, or if there are too many tiles.
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
    """Starts the copy of the `tile` at `corner` of a batch element, without waiting for it.

    Args:
      smem: a reference to as many elements as the tile has, aligned to 128 bytes.
      threads: of the CTA, all of which call this.
      part: index of a part of the tile's copies, and the number of parts; in the interpreter part 0 copies the whole
        tile.
      when: whether to copy; the same for all threads.
    """
    part_number, parts = part
    (extent, columns), itemsize = source.extents, tile.dtype.itemsize
    pitch = columns * itemsize
    at_once = threads // tile.runs  # units of a swizzle's runs
    # If whole tiles make up the array, no copy needs a condition.
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
            # Compared in inline PTX, so that the compiler does not keep each copy's result in a register from step to
            # step.
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
    """Commits the copies since the last call as a group, which may be empty."""
    _instruct("cp.async.commit_group;")


def wait(groups: int) -> None:
    """Waits until all but the last `groups` groups of this thread have arrived."""
    _instruct(f"cp.async.wait_group {groups};")


def rolled() -> None:
    """Keeps ptxas from unrolling a loop, even a short one, which saves registers; call it at the start of the body."""
    _instruct('.pragma "nounroll";')


def meetings(warpgroups: int) -> list[Any]:
    """Returns the interpreter's barrier of a CTA's warpgroups, if there are several; otherwise an empty list."""
    return [plgpu.Barrier(num_arrivals=warpgroups)] if interprets() and warpgroups > 1 else []


def synchronize(meeting: Any = None) -> None:
    """Synchronizes all threads of the CTA, including their shared memory writes and the copies they waited for.

    In the interpreter, several warpgroups wait at the barrier `meeting`.
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
    """Returns the stage that holds the operands of the next step."""
    return jnp.where(stage == stages - 1, 0, stage + 1)
