"""Row-wise reductions as kernels: supports, space, footprint and run for any formula.

On chips before Hopper, rows only reside in registers: the other residencies need TMA.
"""

from __future__ import annotations

from typing import Any, Generic, TypeVar

import jax

from search_spaces.footprint import Footprint
from search_spaces.hopper.limits import WARP, WARPGROUP, WARPS, not_hopper
from search_spaces.kernel import INDICES_OF_32_BITS, Kernel
from search_spaces.mma.fragments import not_before_hopper
from search_spaces.rowwise.hopper.persistent_pipeline import PersistentPipeline, persistent_pipeline
from search_spaces.rowwise.hopper.resident import (
    MOST_ELEMENTS_BEFORE_HOPPER,
    RegisterResident,
    SmemResident,
    register_resident,
    smem_resident,
)
from search_spaces.rowwise.hopper.space import ElementCosts, RowSchedule, footprint, space
from search_spaces.rowwise.problem import RowProblem
from search_spaces.rowwise.reduction import Reduction
from search_spaces.space import Columns, Space
from search_spaces.target import Target

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
        return space(problem, target)

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
                made = persistent_pipeline(reduction, plan, target.cores, *arrays)
        return problem.pack(made)


def refusal(p: RowProblem, target: Target) -> str | None:
    """Returns why the row kernels of this architecture cannot run `p`, or None."""
    if not_hopper(target) and (reason := not_before_hopper(target, frozenset({"sm_90"}))):
        return reason
    if p.columns < (WARP if p.rows >= WARPS else WARPGROUP):
        return f"{p.rows} rows of {p.columns} elements are less than a warpgroup loads at once"
    return None
