"""Row-wise kernels for NVIDIA Hopper (sm_90): register-resident, SMEM-resident, and persistent pipelines.

See docs/results.md for expected performance.
"""

from __future__ import annotations

import dataclasses
from typing import Any, Generic, TypeVar

import jax
import numpy as np
from jax import lax

from search_spaces.footprint import Footprint, Operand, Phase
from search_spaces.hopper import WARP, WARPGROUP, WARPS, not_hopper
from search_spaces.jax_compat import plgpu
from search_spaces.kernel import INDICES_OF_32_BITS, Kernel
from search_spaces.mma.fragments import not_before_hopper
from search_spaces.rowwise import HalvesFormula, Reduction
from search_spaces.rowwise.hopper import persistent_pipeline, space
from search_spaces.rowwise.hopper.persistent_pipeline import PersistentPipeline
from search_spaces.rowwise.hopper.resident import (
    COMPILER_PARAMS,
    MOST_ELEMENTS_BEFORE_HOPPER,
    RegisterResident,
    SmemResident,
    register_resident,
    smem_resident,
)
from search_spaces.rowwise.hopper.space import ElementCosts, RowSchedule, coalescing, footprint, vectors
from search_spaces.rowwise.hopper.thread_layout import ThreadLayout
from search_spaces.rowwise.problem import RowProblem
from search_spaces.space import Columns, Space, round_up
from search_spaces.target import Target

# ------------------------------------------------------------------------------
# Row-wise reductions as kernels: supports, space, footprint and run for any formula.
#
# On chips before Hopper, rows only reside in registers: the other residencies need TMA.

P = TypeVar("P", bound=RowProblem)


class HopperRows(Kernel[P, RowSchedule], Generic[P]):
    """A reduction of each row. Its results are the computed elements, and the reduced row itself if it is a result."""

    backend = "mosaic_gpu"
    version = 1
    most_elements = INDICES_OF_32_BITS
    verified_on = frozenset({"sm_90"})  # tests/device on an NVIDIA H200

    def __init__(self, formula: type[Reduction], costs: ElementCosts) -> None:
        """Makes the kernel of `formula`; `costs` are those of one element."""
        self.formula, self.costs = formula, costs

    def supports(self, problem: P, target: Target) -> str | None:
        most = MOST_ELEMENTS_BEFORE_HOPPER * WARPGROUP
        if (reason := refusal(problem, target)) is None and not_hopper(target) and problem.columns > most:
            return f"keeps rows of {most} elements at most in registers, not of {problem.columns}, without TMA"
        return reason

    def space(self, problem: P, target: Target) -> Space[RowSchedule]:
        return space.space(problem, target)

    def footprint(self, problem: P, schedules: Columns, target: Target) -> Footprint:
        return footprint(problem, schedules, self.costs, len(self.formula.init))

    def run(self, problem: P, schedule: RowSchedule, target: Target, /, *args: Any, **params: Any) -> Any:
        columns, arrays = problem.columns, (problem.results(), *problem.apart(args))
        reduction = self.formula.of(problem, **params)
        # Indices are 32 bits wide, whatever the user's default.
        with jax.enable_x64(False):
            if schedule.residency == "registers":
                made = register_resident(reduction, RegisterResident.of(columns, schedule), *arrays)
            elif schedule.residency == "smem":
                made = smem_resident(reduction, SmemResident.of(columns, schedule), *arrays)
            else:
                plan = PersistentPipeline.of(columns, schedule)
                made = persistent_pipeline.persistent_pipeline(reduction, plan, target.cores, *arrays)
        return problem.pack(made)


def refusal(p: RowProblem, target: Target) -> str | None:
    """Returns why the row kernels of this architecture cannot run `p`, or None."""
    if not_hopper(target) and (reason := not_before_hopper(target, frozenset({"sm_90"}))):
        return reason
    if p.columns < (WARP if p.rows >= WARPS else WARPGROUP):
        return f"{p.rows} rows of {p.columns} elements are less than a warpgroup loads at once"
    return None


# ------------------------------------------------------------------------------
# Rows of two halves on Hopper: elements are independent, so a block computes a span of a few rows.

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
                    (_block_columns(s) <= p.columns) & (_block_rows(s) <= p.rows)
                ),
                "more than one load of each half a thread leave cores idle": lambda s: (
                    (s.accesses * s.rows == 1) | (_blocks(p, s) >= cores)
                ),
                "more than 16 elements of each half a thread hide no more latency, and were slower": lambda s: (
                    s.accesses * s.rows * s.vector <= 16
                ),
                "several rows a thread only where the row is one block": lambda s: (
                    (s.rows == 1) | (_block_columns(s) == p.columns)
                ),
            },
        )

    def footprint(self, problem: P, schedules: Columns, target: Target) -> Footprint:
        p, s = problem, schedules
        rows, columns = -(-p.rows // _block_rows(s)), -(-p.columns // _block_columns(s))
        elements = _block_rows(s) * _block_columns(s)
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
        layout, rows, columns = ThreadLayout(s.warps, s.vector), int(_block_rows(s)), _block_columns(s)
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


def _block_rows(s: Any) -> Any:
    """Returns the rows of a block."""
    return np.where(s.warps == 1, WARPS, 1) * s.rows


def _block_columns(s: Any) -> Any:
    """Returns the columns of a block."""
    return WARP * s.warps * s.vector * s.accesses


def _blocks(p: RowProblem, s: Any) -> Any:
    return -(-p.rows // _block_rows(s)) * -(-p.columns // _block_columns(s))
