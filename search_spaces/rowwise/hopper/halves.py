"""Rows of two halves on Hopper: elements are independent, so a block computes a span of a few rows."""

from __future__ import annotations

import dataclasses
from typing import Any, Generic, TypeVar

import jax
import numpy as np
from jax import lax

from search_spaces.footprint import Footprint, Operand, Phase
from search_spaces.hopper.limits import WARP, WARPGROUP, WARPS
from search_spaces.jax_compat import plgpu
from search_spaces.kernel import INDICES_OF_32_BITS, Kernel
from search_spaces.rowwise.hopper.kernel import refusal
from search_spaces.rowwise.hopper.resident import COMPILER_PARAMS
from search_spaces.rowwise.hopper.space import coalescing, vectors
from search_spaces.rowwise.hopper.thread_layout import ThreadLayout
from search_spaces.rowwise.problem import RowProblem
from search_spaces.rowwise.reduction import HalvesFormula
from search_spaces.space import Columns, Space, round_up
from search_spaces.target import Target

P = TypeVar("P", bound=RowProblem)
# Registers of a thread besides its elements of all halves (ptxas; see docs/kernels/rows-hopper.md).
OTHER_REGISTERS = 24


@dataclasses.dataclass(frozen=True)
class SiluSchedule:
    """The work of a block of one warpgroup.

    Attributes:
      warps: warps that share a row: one, with the next rows in the three others, or all four.
      vector: elements of one access of one thread.
      accesses: accesses of a thread to each half of a row.
      rows: rows of the warps that share one; loads of all rows are issued before these warps compute.
    """

    warps: int
    vector: int
    accesses: int
    rows: int


class HopperHalves(Kernel[P, SiluSchedule], Generic[P]):
    """A formula on elements at the same position of several halves, on Hopper."""

    backend = "mosaic_gpu"
    version = 1
    most_elements = INDICES_OF_32_BITS
    verified_on = frozenset({"sm_90"})  # tests/device on an NVIDIA H200

    def __init__(self, formula: HalvesFormula, *, fp32_ops: int, mufu_ops: int) -> None:
        """Makes the kernel of `formula`, with these FP32 and special-function operations per element."""
        self.formula, self.fp32_ops, self.mufu_ops = formula, fp32_ops, mufu_ops

    def supports(self, problem: P, target: Target) -> str | None:
        return refusal(problem, target)

    def space(self, problem: P, target: Target) -> Space[SiluSchedule]:
        p, cores = problem, target.cores
        return Space(
            SiluSchedule,
            choices={"warps": (4, 1), "vector": vectors(p), "accesses": (1, 2, 4, 8), "rows": (1, 2, 4)},
            rules={
                "a block is no wider than a row, and has no more rows than there are": lambda s: (
                    (_columns(s) <= p.columns) & (_rows(s) <= p.rows)
                ),
                "more than one load of each half a thread leave cores idle": lambda s: (
                    (s.accesses * s.rows == 1) | (_blocks(p, s) >= cores)
                ),
                "more than 16 elements of each half a thread hide no more latency, and were slower": lambda s: (
                    s.accesses * s.rows * s.vector <= 16
                ),
                "several rows a thread only where the row is one block": lambda s: (
                    (s.rows == 1) | (_columns(s) == p.columns)
                ),
            },
        )

    def footprint(self, problem: P, schedules: Columns, target: Target) -> Footprint:
        p, s = problem, schedules
        rows, columns = -(-p.rows // _rows(s)), -(-p.columns // _columns(s))
        elements = _rows(s) * _columns(s)
        half_bytes = p.rows / rows * p.columns / columns * p.itemsize
        # Loads and stores of each fragment.
        transactions = (len(self.formula.read) + len(self.formula.written)) * elements // (WARP * s.vector)
        registers = OTHER_REGISTERS + len(self.formula.read) * s.accesses * s.rows * s.vector
        return Footprint(
            arithmetic=p.arithmetic,
            grid=(rows, columns),
            step=Phase(
                loads=(Operand(bytes=len(self.formula.read) * half_bytes, axes=(0, 1), name="x"),),
                flops=p.flops / p.rows / p.columns * elements,
                fp32_ops=self.fp32_ops * elements + WARP * transactions,
                mufu_ops=self.mufu_ops * elements,
                transactions=transactions,
            ),
            tile=Phase(bytes_written=len(self.formula.written) * half_bytes),
            onchip_bytes=np.zeros(len(s), dtype=np.int64),
            minor=1,
            axes=("rows", "columns"),
            group=columns,
            threads=WARPGROUP,
            registers=registers,
            registers_per_block=WARPGROUP * round_up(registers, 8),
            coalescing=coalescing(p.columns * p.itemsize, s.vector * p.itemsize),
            access_bytes=s.vector * p.itemsize,
        )

    def run(self, problem: P, schedule: SiluSchedule, target: Target, /, *args: Any, **params: Any) -> jax.Array:
        p, s = problem, schedule
        layout, rows, columns = ThreadLayout(s.warps, s.vector), int(_rows(s)), _columns(s)
        blocks = -(-p.columns // columns)  # of a row

        def kernel(*arrays: Any) -> None:
            *operands, out = arrays
            block = lax.axis_index("block")
            # The last block of an axis starts early enough to be whole; overlapping elements are stored twice, with the
            # same bits.
            row = lax.min(lax.div(block, blocks) * rows, p.rows - rows)
            column = lax.min(lax.rem(block, blocks) * columns, p.columns - columns)
            places = [
                (row + step * layout.rows, column + access * layout.columns)
                for step in range(s.rows)
                for access in range(s.accesses)
            ]

            def half(place: tuple[Any, Any], second: bool) -> tuple[Any, Any]:
                row, column = place
                return row, column + p.columns if second else column

            loaded = [
                [layout.load(operands[number], *half(place, second)) for number, second in self.formula.read]
                for place in places
            ]
            for place, halves in zip(places, loaded, strict=True):
                for second, result in zip(self.formula.written, self.formula.compute(*halves), strict=True):
                    layout.store(out, *half(place, second), result)

        # Indices are 32 bits wide, whatever the user's default.
        with jax.enable_x64(False):
            out: jax.Array = plgpu.kernel(
                kernel,
                out_type=p.result(),
                grid=(int(_blocks(p, s)),),
                grid_names=("block",),
                compiler_params=COMPILER_PARAMS,
            )(*args)
        return out


def _rows(s: Any) -> Any:
    """Returns the rows of a block."""
    return np.where(s.warps == 1, WARPS, 1) * s.rows


def _columns(s: Any) -> Any:
    """Returns the columns of a block."""
    return WARP * s.warps * s.vector * s.accesses


def _blocks(p: RowProblem, s: Any) -> Any:
    return -(-p.rows // _rows(s)) * -(-p.columns // _columns(s))
