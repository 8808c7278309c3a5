"""The schedules of row-wise kernels on TPUs, their search space, and their footprint."""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np
import numpy.typing as npt

from search_spaces.footprint import Footprint, Operand, Phase
from search_spaces.problem import nbytes
from search_spaces.rowwise.problem import RowProblem
from search_spaces.space import Column, Columns, Space, cdiv, round_up
from search_spaces.target import Target
from search_spaces.tpu import ALLOCATION_BYTES, LANES, SUBLANES, VMEM_LIMITS_MIB, limit_bytes

# ------------------------------------------------------------------------------
# Resource demands of one launch of each schedule of a row-wise kernel on a TPU.

# Buffers of a window: the current block, and the next or the previous one.
BUFFERS = 2
# Chips without a load of one sublane into all: the compiler gives each such load in its code a temporary of one
# register.
REPLICATING = frozenset({"TPU v4"})
REGISTER_BYTES = SUBLANES * LANES * 4
# Chips that unpack two-byte arrays of at most four rows, which have smaller tiles, through memory.
UNPACKING = frozenset({"TPU v4", "TPU v5 lite", "TPU v5"})
UNPACKED_BYTES = 9 * REGISTER_BYTES


@dataclasses.dataclass(frozen=True)
class TpuElementCosts:
    """Costs of the formula per element: operations of vector lanes, and exponentials and similar operations."""

    fp32_ops: float
    mufu_ops: float


def footprint(p: RowProblem, s: Columns, costs: TpuElementCosts, statistics: int, target: Target) -> Footprint:
    """Returns the footprint of kernels that reduce a row, for a formula with `statistics` statistics."""
    window, keeps = s.residency == "window", s.residency == "scratch"
    blocks, chunks = cdiv(p.rows, s.rows), cdiv(p.columns, s.columns)
    arrays, itemsize = len(p.row_operands) + len(p.results()), p.itemsize
    _, shared = p.apart(p.operands())
    buffers = _buffers(blocks, chunks, target)
    weight_buffers = np.where(chunks > 1, BUFFERS, 1)
    onchip: Any = arrays * buffers * rows_bytes(s.rows, s.columns, itemsize)
    onchip = onchip + len(shared) * weight_buffers * row_bytes(s.columns)
    onchip = onchip + keeps * chunks * rows_bytes(s.rows, s.columns, itemsize)
    onchip = onchip + np.where(window, 0, 1 + keeps) * statistics * rows_bytes(s.rows, 1, 4)
    if shared and target.architecture in REPLICATING:
        onchip = onchip + REGISTER_BYTES * _registers_in_code(s)
    onchip = onchip + _unpacked_bytes(p, target)
    block_bytes = p.rows / blocks * p.columns / chunks * itemsize
    elements = round_up(s.rows, SUBLANES) * round_up(s.columns, LANES)
    loads = np.where(s.residency == "reread", 2, 1)
    # With a scratch array, the grid has one more round than blocks per core: it loads the first block and computes
    # nothing.
    rounds = np.where(keeps, (blocks + np.minimum(target.cores, blocks)) / blocks, 1.0)
    # One loop reduces the rows of a step, another computes their results.
    iterations = cdiv(s.rows, s.step_rows) * 2 * cdiv(s.columns, s.lanes * s.fragments)
    return Footprint(
        arithmetic=p.arithmetic,
        grid=(blocks, chunks),
        minor=1,
        group=chunks,
        axes=("rows", "chunks of a row"),
        step=Phase(
            loads=(
                *(Operand(bytes=loads * block_bytes, axes=(0, 1), name=name) for name in p.row_operands),
                *(Operand(bytes=nbytes(x) / chunks, axes=(1,), name="weight") for x in shared),
            ),
            flops=p.flops / p.rows * s.rows / chunks,
            fp32_ops=costs.fp32_ops * elements * rounds,
            mufu_ops=costs.mufu_ops * elements * rounds,
            iterations=iterations * rounds,
        ),
        tile=Phase(bytes_written=len(p.results()) * block_bytes),
        onchip_bytes=np.asarray(onchip, dtype=np.int64),
        onchip_limit_bytes=limit_bytes(s.vmem_limit_mib),
        stages=BUFFERS,
        persistent=True,
        launches=1 + len(shared),
    )


def halves_footprint(p: RowProblem, s: Columns, costs: TpuElementCosts, target: Target) -> Footprint:
    """Returns the footprint of kernels on rows of halves, in blocks of whole rows."""
    blocks = cdiv(p.rows, s.rows)
    arrays = (*p.operands(), *p.results())
    buffers = _buffers(blocks, 1, target)
    onchip = sum(buffers * rows_bytes(s.rows, x.shape[-1], p.itemsize) for x in arrays) + _unpacked_bytes(p, target)
    elements = round_up(s.rows, SUBLANES) * round_up(p.columns, LANES)
    return Footprint(
        arithmetic=p.arithmetic,
        grid=(blocks,),
        axes=("rows",),
        step=Phase(
            loads=tuple(
                Operand(bytes=nbytes(x) / blocks, axes=(0,), name=name)
                for x, name in zip(p.operands(), p.row_operands, strict=True)
            ),
            flops=p.flops / p.rows * s.rows,
            fp32_ops=costs.fp32_ops * elements,
            mufu_ops=costs.mufu_ops * elements,
            iterations=cdiv(s.rows, s.step_rows) * cdiv(p.columns, s.lanes),
        ),
        tile=Phase(bytes_written=sum(map(nbytes, p.results())) / blocks),
        onchip_bytes=np.asarray(onchip, dtype=np.int64),
        onchip_limit_bytes=limit_bytes(s.vmem_limit_mib),
        stages=BUFFERS,
        persistent=True,
    )


def _buffers(blocks: Column, chunks: Column | int, target: Target) -> Column:
    """Returns the buffers of a window: one if its block never changes, in a grid of one step, or of one per core."""
    return np.where((chunks == 1) & ((blocks == 1) | (blocks == target.cores)), 1, BUFFERS)


def rows_bytes(rows: Column | int, columns: Column | int, itemsize: int) -> npt.NDArray[np.int64]:
    """Returns the VMEM of one buffer of rows: a tile is eight rows of 128 columns, for narrow types, too."""
    return np.asarray(round_up(rows, SUBLANES) * round_up(columns, LANES) * itemsize, dtype=np.int64)


def row_bytes(columns: Column | int) -> npt.NDArray[np.int64]:
    """Returns the VMEM of one buffer of ``float32[1, columns]``."""
    return np.asarray(round_up(round_up(columns, LANES) * 4, ALLOCATION_BYTES), dtype=np.int64)


def _registers_in_code(s: Columns) -> Column:
    """Returns the registers of a row that the code of one pass names: of a loop step, and of the remainder."""
    step = s.lanes * s.fragments
    left, tail = s.columns % step // s.lanes * s.lanes, s.columns % s.lanes
    return np.where(s.columns >= step, step, 0) // LANES + left // LANES + cdiv(tail, LANES)


def _unpacked_bytes(p: RowProblem, target: Target) -> int:
    few = p.itemsize == 2 and p.rows <= SUBLANES // 2
    return UNPACKED_BYTES if few and target.architecture in UNPACKING else 0


# ------------------------------------------------------------------------------
# The schedule of a row-wise kernel on a TPU: the blocks of the grid, and the steps in which a block is computed.


@dataclasses.dataclass(frozen=True)
class RowSchedule:
    """The schedule of a reduction of each row.

    Attributes:
      residency: where a row resides until it has been read completely: in the "window" of a block that has all of it;
        in a "scratch" array, chunk by chunk, while the previous rows' results are written; or nowhere ("reread").
      rows: rows of a block.
      columns: columns of a block: all, or those of a chunk.
      step_rows: rows of a block that are computed at the same time.
      lanes: columns of one fragment, which has an array of statistics of the same size.
      fragments: fragments per step of the loop over a row.
      vmem_limit_mib: VMEM limit that the launch requests (`search_spaces.tpu`).
    """

    residency: str
    rows: int
    columns: int
    step_rows: int
    lanes: int
    fragments: int
    vmem_limit_mib: int = 0


@dataclasses.dataclass(frozen=True)
class HalvesSchedule:
    """The schedule for rows of two halves, whose blocks have all columns.

    Attributes:
      rows: rows of a block.
      step_rows: rows of a block that are computed at the same time.
      lanes: columns of each half per step of the loop over a row.
      vmem_limit_mib: VMEM limit that the launch requests (`search_spaces.tpu`).
    """

    rows: int
    step_rows: int
    lanes: int
    vmem_limit_mib: int = 0


# Rows of a block: below these, the overhead of a grid step shows; above, the wait for the first block does.
ROWS = (8, 16, 32, 64, 128, 256, 512, 1024)
STEP_ROWS = (8, 16, 32, 64)
CHUNKS = (4096, 16384)
# From this length on, rows may be too long for windows that hold a whole row.
LONG = 2**16


def row_space(p: RowProblem) -> Space[RowSchedule]:
    """Returns the space of kernels that reduce a row."""
    rows = _rows(p)
    chunks = tuple(columns for columns in CHUNKS if p.columns >= LONG)
    return Space(
        RowSchedule,
        choices={
            "residency": ("window", "scratch", "reread") if chunks else ("window",),
            "rows": rows,
            "columns": (p.columns, *chunks),
            "step_rows": STEP_ROWS,
            "lanes": (128, 256, 512),
            "fragments": (2, 4, 8),
            "vmem_limit_mib": VMEM_LIMITS_MIB,
        },
        rules={
            "a window has all columns of a row, and other residencies have chunks": lambda s: (
                (s.residency == "window") == (s.columns == p.columns)
            ),
            "of chunks, more than 64 rows a block gain nothing": lambda s: (s.residency == "window") | (s.rows <= 64),
            "rows of a step divide those of a block": lambda s: s.rows % s.step_rows == 0,
            # TPU7x: "cannot statically prove that index in dimension 1 is a multiple of 16" (E2003).
            "steps through a scratch array of narrow elements are of whole tiles": lambda s: (
                (s.residency != "scratch") | (s.step_rows * p.itemsize >= SUBLANES * 4) | (s.rows == s.step_rows)
            ),
            "a step takes 8 to 16 registers": lambda s: (_registers(s) >= 8) & (_registers(s) <= 16),
            "a fragment is no wider than a row": lambda s: (s.lanes <= p.columns) | (s.lanes == 128),
        },
    )


def halves_space(p: RowProblem) -> Space[HalvesSchedule]:
    """Returns the space of kernels on rows of halves."""
    return Space(
        HalvesSchedule,
        choices={
            "rows": _rows(p),
            "step_rows": STEP_ROWS,
            "lanes": (128, 256, 512, 1024),
            "vmem_limit_mib": VMEM_LIMITS_MIB,
        },
        rules={
            "rows of a step divide those of a block": lambda s: s.rows % s.step_rows == 0,
            "a step takes 4 or 8 registers of each half": lambda s: (
                (_registers_of_half(s) >= 4) & (_registers_of_half(s) <= 8)
            ),
            "a step is no wider than a row": lambda s: (s.lanes <= p.columns) | (s.lanes == 128),
        },
    )


def _rows(p: RowProblem) -> tuple[int, ...]:
    return tuple(rows for rows in ROWS if rows <= round_up(p.rows, SUBLANES))


def _registers(s: RowSchedule) -> int:
    return _registers_of_half(s) * s.fragments


def _registers_of_half(s: RowSchedule | HalvesSchedule) -> int:
    return s.step_rows // SUBLANES * (s.lanes // LANES)
