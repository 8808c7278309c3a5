"""Row-wise operations as TPU kernels: supports, space, footprint and run for any formula."""

from __future__ import annotations

import abc
from collections.abc import Sequence
from typing import Any, ClassVar, Generic, TypeVar

import jax
import jax.numpy as jnp
from jax.experimental.pallas import tpu as pltpu

from search_spaces.footprint import Footprint
from search_spaces.kernel import INDICES_OF_32_BITS, Kernel, Target
from search_spaces.rowwise.halves import HalvesFormula
from search_spaces.rowwise.problem import RowProblem
from search_spaces.rowwise.reduction import Reduction
from search_spaces.rowwise.tpu.chunked_rows import chunked_rows
from search_spaces.rowwise.tpu.footprint import ElementCosts, footprint, halves_footprint
from search_spaces.rowwise.tpu.halves import rows_of_halves
from search_spaces.rowwise.tpu.schedule import HalvesSchedule, RowSchedule
from search_spaces.rowwise.tpu.space import halves_space, row_space
from search_spaces.rowwise.tpu.whole_rows import whole_rows
from search_spaces.space import Columns, Space

P = TypeVar("P", bound=RowProblem)


class TpuRows(Kernel[P, RowSchedule], Generic[P]):
    """A reduction of each row on a TPU, with row results: the computed elements, and the reduced row if it is a result.

    Attributes:
      name: name of the kernel in profiles.
      costs: costs of one element.
    """

    backend = "mosaic_tpu"
    version = 1
    most_elements = INDICES_OF_32_BITS

    name: ClassVar[str]
    costs: ClassVar[ElementCosts]

    @abc.abstractmethod
    def reduction(self, problem: P, **params: Any) -> Reduction:
        """Returns the formula."""

    def supports(self, problem: P, target: Target) -> str | None:
        return refusal(problem, target)

    def space(self, problem: P, target: Target) -> Space[RowSchedule]:
        return row_space(problem)

    def footprint(self, problem: P, schedules: Columns, target: Target) -> Footprint:
        return footprint(problem, schedules, self.costs, len(self.reduction(problem).init), target)

    def run(self, problem: P, schedule: RowSchedule, target: Target, /, *args: Any, **params: Any) -> Any:
        reduction = self.reduction(problem, **params)
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


class TpuHalves(HalvesFormula, Kernel[P, HalvesSchedule], Generic[P]):
    """A formula on elements at the same position of several halves, on a TPU.

    Attributes:
      name: name of the kernel in profiles.
      costs: costs of one element of a half.
    """

    backend = "mosaic_tpu"
    version = 1
    most_elements = INDICES_OF_32_BITS

    name: ClassVar[str]
    costs: ClassVar[ElementCosts]

    def supports(self, problem: P, target: Target) -> str | None:
        return refusal(problem, target)

    def space(self, problem: P, target: Target) -> Space[HalvesSchedule]:
        return halves_space(problem)

    def footprint(self, problem: P, schedules: Columns, target: Target) -> Footprint:
        return halves_footprint(problem, schedules, self.costs, target)

    def run(self, problem: P, schedule: HalvesSchedule, target: Target, /, *args: Any, **params: Any) -> jax.Array:
        with jax.enable_x64(False):
            (result,) = problem.results()
            return rows_of_halves(self, schedule, problem.columns, result, _in_hbm(args), self.name)


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
