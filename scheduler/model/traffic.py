"""Counts the bytes that one launch of each schedule loads, from the blocks that run concurrently."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from scheduler.core.hardware import Hardware
from search_spaces.footprint import Footprint

Array = npt.NDArray[np.float64]

# Operands that together take at most this fraction of the last-level cache count as L2-resident. Their producer has
# just written them, and a benchmark does not rotate through enough copies to evict them.
L2_RESIDENT = 1 / 32


@dataclasses.dataclass(frozen=True)
class Traffic:
    """Bytes that one launch of each schedule loads.

    Attributes:
      cache_bytes: bytes from the last-level cache into the cores.
      memory_bytes: bytes from device memory into the last-level cache.
      compulsory_bytes: minimum bytes for any schedule: every operand loaded once, every result written once.
      l2_resident: whether the operands are small enough to be in the last-level cache already.
      fetched: for each operand of an average step, the fraction of steps in which a core loads it; 1 if nothing stays
        on chip.
    """

    cache_bytes: Array
    memory_bytes: Array
    compulsory_bytes: Array
    l2_resident: npt.NDArray[np.bool_]
    fetched: Sequence[Array]


def traffic(footprint: Footprint, hardware: Hardware, l2_share: float) -> Traffic:
    """Returns the loads of the whole launch, from the windows of concurrent blocks.

    Blocks of one window load a common operand block at about the same time, so device memory delivers it once per
    window. Between windows, operands stay in the last-level cache to the extent that they fit into `l2_share` of it. If
    each core runs the grid as a loop, an operand block of the previous step is already on chip.
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
    """Returns, for each operand of an average step, the fraction of steps in which a core loads it.

    Applies to a core that runs the grid as a loop. In the other steps, the core reuses the block of the previous step.
    An operand that changes in each step of a tile is loaded in every step. Any other operand is loaded when an axis
    that selects it advances. For example, a row-by-row walk over 2 x 3 tiles loads rows in 2 of 6 steps, and columns in
    all 6.
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
    """Returns the loops of the walk over tiles, innermost first: axis and extent of each, ``[schedule]``."""
    axes, extents, group = _order(footprint)
    loops = [(axes[0], group), *zip(axes[1:2], extents[1:2], strict=True), (axes[0], np.ceil(extents[0] / group))]
    return [*loops, *zip(axes[2:], extents[2:], strict=True)]


def concurrent(footprint: Footprint, hardware: Hardware) -> Array:
    """Returns the number of concurrent blocks on the whole chip. Cores left over by whole clusters stay idle."""
    clusters = np.maximum(hardware.cores // column(footprint.cluster), 1)
    return resident(footprint, hardware) * clusters * footprint.cluster


def resident(footprint: Footprint, hardware: Hardware) -> Array:
    """Returns the occupancy: the number of blocks that share one core, at least 1.

    The limits are on-chip and tensor memory, registers, threads, and blocks per core; of a persistent kernel, also the
    blocks that it starts for each core.
    """
    f, h = footprint, hardware
    threads = np.maximum(column(f.threads), 1)
    registers = np.maximum(np.where(column(f.registers_per_block) > 0, f.registers_per_block, f.registers * threads), 1)
    onchip = np.maximum(column(f.onchip_bytes) + h.onchip_reserved_bytes, 1)
    fit = np.minimum(h.onchip_bytes_per_core // onchip, h.registers_per_core // registers)
    fit = np.minimum(np.minimum(fit, h.threads_per_core // threads), h.blocks_per_core)
    tmem = column(f.tmem_bytes)
    fit = np.where(tmem > 0, np.minimum(fit, h.tmem_bytes // np.maximum(tmem, 1)), fit)
    most = np.where(f.persistent, f.per_core, np.inf)
    return np.maximum(np.minimum(fit, most), 1.0) * np.ones_like(block_count(f))


def block_loads(footprint: Footprint, blocks: npt.ArrayLike) -> list[Array]:
    """Returns the number of distinct blocks of each load that the first `blocks` output blocks need.

    The result has one array per load of an average step. For example, the first 9 of 9 x 9 output blocks of a matmul
    need 1 + 9 blocks row by row (90 in 9 steps), and 3 + 3 blocks in groups of three (54). This is the example of
    grouped ordering in Triton's tutorial on matrix multiplication.
    """
    box = window(footprint, blocks)
    ones = np.ones(box.shape[1])
    return [
        np.minimum(np.prod([ones, *(box[axis] for axis in o.axes)], axis=0), blocks) for o in footprint.mean_step.loads
    ]


def window(footprint: Footprint, blocks: npt.ArrayLike) -> Array:
    """Returns the extents ``[axis of the grid, schedule]`` of the box that `blocks` consecutive output blocks span.

    Output blocks advance along the minor axis for `group` blocks, then along the last of the other axes through its
    whole extent, then to the next group of the minor axis. When that plane is full, they advance along the remaining
    axes, the last one first.
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
    """Returns the axes of the grid, minor axis first; their extents in this order; and the group sizes.

    Axes and extents have the shape ``[axis, schedule]``.
    """
    f = footprint
    # A scalar applies to all schedules. All extents may be scalars.
    *extents_of, _ = np.broadcast_arrays(*(np.atleast_1d(column(x)) for x in (*f.grid, blocks)))
    grid = np.stack(extents_of)
    axes, count = grid.shape
    orders = np.array([[axis, *(other for other in reversed(range(axes)) if other != axis)] for axis in range(axes)])
    order = orders[np.broadcast_to(np.asarray(f.minor), count)].T
    extents = np.take_along_axis(grid, order, axis=0)
    return order, extents, np.minimum(column(f.group), extents[0])


def walk(grid: Sequence[int], minor: int, group: int, *, snake: bool = False) -> npt.NDArray[np.int64]:
    """Returns the tiles of one schedule in execution order, ``[tile, axis]``, with the traversal of `window`.

    With `snake`, every second group runs through the major axis in reverse.
    """
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
    """Returns the number of output blocks of one launch."""
    return np.prod(np.broadcast_arrays(*(column(extent) for extent in footprint.grid)), axis=0)


def column(value: npt.ArrayLike) -> Array:
    """Converts a column of a footprint to float64."""
    return np.asarray(value, dtype=np.float64)
