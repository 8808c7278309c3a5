"""TPU kernels of operations in which each result row depends on one row of each operand."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Generic, TypeVar

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from search_spaces.footprint import Footprint
from search_spaces.kernel import INDICES_OF_32_BITS, Kernel
from search_spaces.rowwise import HalvesFormula, Reduction
from search_spaces.rowwise.problem import RowProblem
from search_spaces.rowwise.tpu.row_blocks import Place, RowLoop, chunked_rows, over_rows, whole_rows
from search_spaces.rowwise.tpu.space import (
    HalvesSchedule,
    RowSchedule,
    TpuElementCosts,
    footprint,
    halves_footprint,
    halves_space,
    row_space,
)
from search_spaces.space import Columns, Space
from search_spaces.target import Target
from search_spaces.tpu import LANES, limit_or_none

# ------------------------------------------------------------------------------
# Rows of two halves on a TPU: elements are independent, so a block is some rows, computed in steps.
#
# If halves start at a register of 128 columns, a step loads the same position of each half and stores the results.
# Otherwise the other half is offset by some columns: its elements are loaded from the preceding register on, and
# shifted. Results of the second half are then computed in a separate pass.


def rows_of_halves(
    formula: HalvesFormula,
    s: HalvesSchedule,
    columns: int,
    result: jax.ShapeDtypeStruct,
    operands: Sequence[jax.Array],
    name: str,
) -> jax.Array:
    """Returns the only result, given operands of `columns` columns or of two halves of these."""
    rows = result.shape[0]
    compute = _shifted if columns % LANES else _aligned

    def kernel(*refs: Any) -> None:
        *sources, out = refs
        over_rows(s.rows, s.step_rows, lambda at: compute(formula, s.lanes, columns, at, sources, out))

    def whole(x: Any) -> pl.BlockSpec:
        return pl.BlockSpec((s.rows, x.shape[-1]), lambda i: (i, 0))

    made: jax.Array = pl.pallas_call(
        kernel,
        grid=(pl.cdiv(rows, s.rows),),
        in_specs=[whole(x) for x in operands],
        out_specs=whole(result),
        out_shape=result,
        compiler_params=pltpu.CompilerParams(
            dimension_semantics=("parallel",), vmem_limit_bytes=limit_or_none(s.vmem_limit_mib)
        ),
        name=name,
    )(*operands)
    return made


def _aligned(formula: HalvesFormula, lanes: int, columns: int, at: Any, sources: Sequence[Any], out: Any) -> None:
    def step(place: Place) -> None:
        start, width = place
        halves = [
            sources[number][at, pl.ds(start + second * columns, width)].astype(jnp.float32)
            for number, second in formula.read
        ]
        for second, result in zip(formula.written, formula.compute(*halves), strict=True):
            out[at, pl.ds(start + second * columns, width)] = result.astype(out.dtype)

    RowLoop(columns, lanes, 1).apply(step)


def _shifted(formula: HalvesFormula, lanes: int, columns: int, at: Any, sources: Sequence[Any], out: Any) -> None:
    beyond = columns % LANES  # columns in the last register of a half: the offset of the second half
    behind = columns - beyond

    def load(number: int, start: Any, skipped: int, width: int) -> jax.Array:
        loaded = sources[number][at, pl.ds(start, skipped + width)].astype(jnp.float32)
        return loaded[:, skipped:] if skipped else loaded

    def results(start: Any, width: int) -> tuple[jax.Array, ...]:
        """Returns the results from column `start` of a half on, a multiple of 128."""
        read = (
            load(number, behind + start, beyond, width) if second else load(number, start, 0, width)
            for number, second in formula.read
        )
        return formula.compute(*read)

    def first(place: Place) -> None:
        out[at, pl.ds(*place)] = results(*place)[0].astype(out.dtype)

    def second(place: Place) -> None:
        """Computes the rest after the second half's first register: stores are aligned there, and loads shifted."""
        start, width = place
        read = (
            load(number, behind + LANES + start, 0, width) if second else load(number, start, LANES - beyond, width)
            for number, second in formula.read
        )
        out[at, pl.ds(behind + LANES + start, width)] = formula.compute(*read)[1].astype(out.dtype)

    RowLoop(behind, lanes, 1).apply(first)
    seam = results(behind, beyond)[0]
    if len(formula.written) == 2:
        after = min(LANES - beyond, columns)
        seam = jnp.concatenate([seam, results(0, after)[1]], axis=-1)
        if (left := columns - after) > 0:
            RowLoop(left, lanes, 1).apply(second)
    out[at, pl.ds(behind, seam.shape[-1])] = seam.astype(out.dtype)


P = TypeVar("P", bound=RowProblem)


class TpuRows(Kernel[P, RowSchedule], Generic[P]):
    """A reduction of each row on a TPU. Results are the computed elements, and the reduced row if it is a result."""

    backend = "mosaic_tpu"
    version = 1
    most_elements = INDICES_OF_32_BITS

    def __init__(self, formula: type[Reduction], name: str, costs: TpuElementCosts) -> None:
        """Makes the kernel of `formula`; `name` is its name in profiles, and `costs` are those of one element."""
        self.formula, self.name, self.costs = formula, name, costs

    def supports(self, problem: P, target: Target) -> str | None:
        return refusal(problem, target)

    def space(self, problem: P, target: Target) -> Space[RowSchedule]:
        return row_space(problem)

    def footprint(self, problem: P, schedules: Columns, target: Target) -> Footprint:
        return footprint(problem, schedules, self.costs, len(self.formula.init), target)

    def run(self, problem: P, schedule: RowSchedule, target: Target, /, *args: Any, **params: Any) -> Any:
        reduction = self.formula.of(problem, **params)
        by_row, shared = problem.apart(args)
        by_row = _in_hbm(by_row)
        # A shared row of a narrow type would have to be unpacked in each step.
        wide = _in_hbm([x.astype(jnp.float32).reshape(1, -1) for x in shared])
        arrays = (problem.results(), by_row, wide, self.name)
        # Indices are 32 bits wide, whatever the user's default.
        with jax.enable_x64(False):
            if schedule.residency == "window":
                return problem.pack(whole_rows(reduction, schedule, *arrays))
            return problem.pack(chunked_rows(reduction, schedule, target.cores, *arrays))


class TpuHalves(Kernel[P, HalvesSchedule], Generic[P]):
    """A formula on elements at the same position of several halves, on a TPU."""

    backend = "mosaic_tpu"
    version = 1
    most_elements = INDICES_OF_32_BITS

    def __init__(self, formula: HalvesFormula, name: str, costs: TpuElementCosts) -> None:
        """Makes the kernel of `formula`; `name` is its name in profiles, and `costs` are those of one element."""
        self.formula, self.name, self.costs = formula, name, costs

    def supports(self, problem: P, target: Target) -> str | None:
        return refusal(problem, target)

    def space(self, problem: P, target: Target) -> Space[HalvesSchedule]:
        return halves_space(problem)

    def footprint(self, problem: P, schedules: Columns, target: Target) -> Footprint:
        return halves_footprint(problem, schedules, self.costs, target)

    def run(self, problem: P, schedule: HalvesSchedule, target: Target, /, *args: Any, **params: Any) -> jax.Array:
        with jax.enable_x64(False):
            (result,) = problem.results()
            return rows_of_halves(self.formula, schedule, problem.columns, result, _in_hbm(args), self.name)


def _in_hbm(arrays: Sequence[jax.Array]) -> Sequence[jax.Array]:
    """Places arrays in HBM: XLA's copies for a kernel (of odd columns) may otherwise take VMEM of its windows."""
    return [pltpu.with_memory_space_constraint(x, pltpu.HBM) for x in arrays]


def refusal(p: RowProblem, target: Target) -> str | None:
    """Returns why the row kernels for TPUs cannot run `p`, or None."""
    if target.platform != "tpu":
        return f"is written for TPUs, not for {target.kind} ({target.architecture})"
    if p.dtype == "float16":
        return "the compiler for TPUs loads no float16 in a kernel"
    return None
