"""Count the bytes that one launch of each schedule loads, from the blocks that run at the same time."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from scheduler.core.hardware import Hardware
from search_spaces.footprint import Footprint

Array = npt.NDArray[np.float64]

# Operands of at most this share of the last-level cache, together, are L2-resident: whoever made them has just written
# them, and a bench does not rotate through so many copies that it would lose them.
L2_RESIDENT = 1 / 32


@dataclasses.dataclass(frozen=True)
class Traffic:
    """Bytes that one launch of each schedule loads.

    Attributes:
      cache_bytes: from the last-level cache into the cores.
      memory_bytes: from device memory into that cache.
      compulsory_bytes: every operand loaded once and every result written once, what no schedule can avoid.
      l2_resident: the operands are so small that they are in that cache already.
      fetched: share of its steps in which a core loads each operand of a mean step; 1 where nothing stays on chip.
    """

    cache_bytes: Array
    memory_bytes: Array
    compulsory_bytes: Array
    l2_resident: npt.NDArray[np.bool_]
    fetched: Sequence[Array]


def traffic(footprint: Footprint, hardware: Hardware, l2_share: float) -> Traffic:
    """Loads of the whole launch, from the windows of blocks that run at the same time.

    Blocks of one window load a common operand block at about the same time, so device memory delivers it once for each
    window; between windows it stays in the cache as far as the operands fit into `l2_share` of it. Where a grid is a
    loop of each core, a block that the step before had is there already.
    """
    f, demand = footprint, footprint.mean_step
    blocks, steps = block_count(f), column(f.steps)
    at_once = np.minimum(concurrent(f, hardware), blocks)
    windows = blocks / at_once
    once = [all_blocks * steps * o.bytes for all_blocks, o in zip(block_loads(f, blocks), demand.loads, strict=True)]
    if hardware.sequential_grid:
        fetched = shares_fetched(f)
        again = [share * blocks * steps * o.bytes for share, o in zip(fetched, demand.loads, strict=True)]
    else:
        fetched = [np.ones_like(blocks) for _ in demand.loads]
        again = [
            distinct * steps * o.bytes * windows
            for distinct, o in zip(block_loads(f, at_once), demand.loads, strict=True)
        ]
    operands: Array = column(sum(once))
    kept = np.minimum(1.0, l2_share * hardware.l2_bytes / np.maximum(operands, 1.0))
    l2_resident = operands <= L2_RESIDENT * hardware.l2_bytes
    loaded = [
        np.where(l2_resident, 0.0, kept * a + (1 - kept) * np.maximum(a, b)) for a, b in zip(once, again, strict=True)
    ]
    return Traffic(
        cache_bytes=column(
            sum(share * blocks * steps * o.bytes / o.multicast for share, o in zip(fetched, demand.loads, strict=True))
        ),
        memory_bytes=column(sum(loaded)),
        compulsory_bytes=operands + blocks * steps * demand.bytes_written,
        l2_resident=l2_resident,
        fetched=fetched,
    )


def shares_fetched(footprint: Footprint) -> list[Array]:
    """Share of its steps in which a core that goes on from tile to tile loads each operand of a mean step.

    Others find the block of the step before. One that each step of a tile has anew is loaded in all of them; any other
    wherever an axis that selects it advances: walking 2 x 3 tiles row by row, rows are loaded in 2 of 6, columns in 6.
    """
    f = footprint
    loops = _loops(f)
    of_steps = len(f.step.loads)
    shares = []
    for number, operand in enumerate(f.mean_step.loads):
        share, advances = np.ones_like(block_count(f)), np.zeros(1, dtype=bool)
        for axis, extent in loops:
            advances = advances | (np.isin(axis, operand.axes) & (extent > 1))
            share = np.where(advances, share, share / extent)
        anew = (column(f.steps) > 1) & (number < of_steps)
        shares.append(np.where(anew, 1.0, share))
    return shares


def _loops(footprint: Footprint) -> list[tuple[npt.NDArray[np.int64], Array]]:
    """The loops in which tiles are walked, the innermost first: axis and extent ``[schedule]`` of each."""
    axes, extents, group = _order(footprint)
    loops = [(axes[0], group), *zip(axes[1:2], extents[1:2], strict=True), (axes[0], np.ceil(extents[0] / group))]
    return [*loops, *zip(axes[2:], extents[2:], strict=True)]


def concurrent(footprint: Footprint, hardware: Hardware) -> Array:
    """Blocks that run at the same time on the whole chip; the cores that whole clusters leave over stay idle."""
    clusters = np.maximum(hardware.cores // column(footprint.cluster), 1)
    return resident(footprint, hardware) * clusters * footprint.cluster


def resident(footprint: Footprint, hardware: Hardware) -> Array:
    """Occupancy: blocks that share one core, by on-chip memory, registers, threads and the limit of blocks; at least 1.

    A persistent kernel starts one block for each core.
    """
    f, h = footprint, hardware
    threads = np.maximum(column(f.threads), 1)
    registers = np.maximum(np.where(column(f.registers_per_block) > 0, f.registers_per_block, f.registers * threads), 1)
    onchip = np.maximum(column(f.onchip_bytes) + h.onchip_reserved_bytes, 1)
    fit = np.minimum(h.onchip_bytes_per_core // onchip, h.registers_per_core // registers)
    fit = np.minimum(np.minimum(fit, h.threads_per_core // threads), h.blocks_per_core)
    return np.where(f.persistent, 1.0, np.maximum(fit, 1.0)) * np.ones_like(block_count(f))


def block_loads(footprint: Footprint, blocks: npt.ArrayLike) -> list[Array]:
    """Distinct blocks of each load of a mean step that the first `blocks` output blocks need: one array per load.

    Walking 9 of 9 x 9 output blocks of a matmul row by row takes 1 + 9 (90 in 9 steps), in groups of three 3 + 3 (54):
    the teaching example of grouped ordering (Triton's tutorial on matrix multiplication).
    """
    box = window(footprint, blocks)
    ones = np.ones(box.shape[1])
    return [
        np.minimum(np.prod([ones, *(box[axis] for axis in o.axes)], axis=0), blocks) for o in footprint.mean_step.loads
    ]


def window(footprint: Footprint, blocks: npt.ArrayLike) -> Array:
    """Extents ``[axis of the grid, schedule]`` of the box of output blocks that `blocks` consecutive ones span.

    They advance along the minor axis for `group` blocks, then along the last of the other axes through its whole
    extent, then to the next group of the minor axis; when that plane is full, along the other axes, the last first.
    """
    order, extents, group = _order(footprint, blocks)
    left: Array = np.broadcast_to(np.atleast_1d(column(blocks)), extents.shape[1:])
    axes = len(extents)
    box = np.empty_like(extents)
    if axes > 1:
        box[1] = np.minimum(np.ceil(left / group), extents[1])
        group = group * np.ceil(left / (group * extents[1]))
    else:
        group = left
    box[0] = np.minimum(np.minimum(group, extents[0]), left)
    left = left / box[:2].prod(axis=0)
    for axis in range(2, axes):
        box[axis] = np.clip(np.ceil(left), 1, extents[axis])
        left = left / box[axis]
    out = np.empty_like(box)
    np.put_along_axis(out, order, box, axis=0)
    return out


def _order(footprint: Footprint, blocks: npt.ArrayLike = 1.0) -> tuple[npt.NDArray[np.int64], Array, Array]:
    """Axes of the grid, the minor one first, ``[axis, schedule]``; their extents in this order; tiles of a group."""
    f = footprint
    # A scalar serves all schedules, also where no extent is anything else.
    *extents_of, _ = np.broadcast_arrays(*(np.atleast_1d(column(x)) for x in (*f.grid, blocks)))
    grid = np.stack(extents_of)
    axes, count = grid.shape
    orders = np.array([[axis, *(other for other in reversed(range(axes)) if other != axis)] for axis in range(axes)])
    order = orders[np.broadcast_to(np.asarray(f.minor), count)].T
    extents = np.take_along_axis(grid, order, axis=0)
    return order, extents, np.minimum(column(f.group), extents[0])


def walk(grid: Sequence[int], minor: int, group: int, *, snake: bool = False) -> npt.NDArray[np.int64]:
    """The tiles of one schedule in the order in which blocks take them, as `window` has it: ``[tile, axis]``."""
    inner, *outer = (minor, *(axis for axis in reversed(range(len(grid))) if axis != minor))
    numbers = np.indices([grid[axis] for axis in (*reversed(outer[1:]), *outer[:1], inner)]).reshape(len(grid), -1)
    *planes, major, column = numbers if outer else (*numbers[:-1], np.zeros_like(numbers[-1]), numbers[-1])
    groups = column // max(group, 1)
    along = np.where(snake & (groups % 2 == 1), -major, major)
    order = np.lexsort((column, along, groups, *reversed(planes)))
    tiles = np.empty((numbers.shape[1], len(grid)), dtype=np.int64)
    for axis, values in zip((*reversed(outer[1:]), *outer[:1], inner), numbers, strict=True):
        tiles[:, axis] = values[order]
    return tiles


def block_count(footprint: Footprint) -> Array:
    """Output blocks of one launch."""
    return np.prod(np.broadcast_arrays(*(column(extent) for extent in footprint.grid)), axis=0)


def column(value: npt.ArrayLike) -> Array:
    """A column of a footprint as numbers to compute with."""
    return np.asarray(value, dtype=np.float64)
