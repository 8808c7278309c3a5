"""Resource demands of one launch of each schedule of a row-wise kernel on a TPU."""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np
import numpy.typing as npt

from search_spaces.footprint import Footprint, Operand, Phase
from search_spaces.kernel import Target
from search_spaces.problem import nbytes
from search_spaces.rowwise.problem import RowProblem
from search_spaces.space import Column, Columns, cdiv, round_up
from search_spaces.tpu.vmem import ALLOCATION_BYTES, LANES, SUBLANES, limit_bytes

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
class ElementCosts:
    """Costs of the formula per element: operations of vector lanes, and exponentials and similar operations."""

    fp32_ops: float
    mufu_ops: float


def footprint(p: RowProblem, s: Columns, costs: ElementCosts, statistics: int, target: Target) -> Footprint:
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


def halves_footprint(p: RowProblem, s: Columns, costs: ElementCosts, target: Target) -> Footprint:
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
