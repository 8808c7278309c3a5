"""Row programs on NVIDIA Hopper (sm_90), and those that fit registers also on chips before it.

See docs/results.md for expected performance.
"""

from __future__ import annotations

import functools
from typing import Any

import jax

from search_spaces.footprint import Footprint
from search_spaces.hopper import WARP, WARPGROUP, WARPS, not_hopper
from search_spaces.kernel import INDICES_OF_32_BITS, Kernel
from search_spaces.mma.fragments import not_before_hopper
from search_spaces.rows.builder import online
from search_spaces.rows.hopper.chunks import launch, one_row
from search_spaces.rows.hopper.footprint import footprint
from search_spaces.rows.hopper.partition import RegisterPlan, RowPartition, persistent_ctas
from search_spaces.rows.hopper.pipeline import all_rows
from search_spaces.rows.hopper.registers import run_in_registers
from search_spaces.rows.hopper.space import MOST_ELEMENTS_BEFORE_HOPPER, RowSchedule, coalescing, space
from search_spaces.rows.problem import RowProblem
from search_spaces.rows.program import Program
from search_spaces.space import Columns, Space
from search_spaces.target import Target

__all__ = ["HopperRows", "RowSchedule", "coalescing"]

# Element types of arrays that the kernels load and store.
LOADED = frozenset({"float32", "bfloat16", "float16", "int32", "int8", "uint8", "float8_e4m3fn", "float8_e5m2"})


class HopperRows(Kernel[RowProblem, RowSchedule]):
    """A row program."""

    backend = "mosaic_gpu"
    version = 1
    most_elements = INDICES_OF_32_BITS
    verified_on = frozenset({"sm_90"})  # tests/device on an NVIDIA H200

    def supports(self, problem: RowProblem, target: Target) -> str | None:
        program = problem.program
        if not_hopper(target) and (reason := not_before_hopper(target, frozenset({"sm_90"}))):
            return reason
        if program.columns < (WARP if problem.rows >= WARPS else WARPGROUP):
            return f"{problem.rows} rows of {program.columns} elements are less than a warpgroup loads at once"
        if not any(x.kind == "row" for x in program.operands):
            return "reads rows, and the program has none"
        if others := ({x.dtype for x in program.operands} | {x.dtype for x in program.results}) - LOADED:
            return f"loads and stores no {', '.join(sorted(others))}"
        if any(x.name == "round" and x.params == ("float8_e5m2",) for x in program.equations):
            return "rounds to float8_e5m2 by an instruction that knows no infinity: clip to the largest number first"
        most = MOST_ELEMENTS_BEFORE_HOPPER * WARPGROUP
        if not_hopper(target) and program.stages and program.columns > most:
            return f"keeps rows of {most} elements at most in registers, not of {program.columns}, without TMA"
        return None

    def space(self, problem: RowProblem, target: Target) -> Space[RowSchedule]:
        return space(problem, target)

    def footprint(self, problem: RowProblem, schedules: Columns, target: Target) -> Footprint:
        return footprint(problem, schedules, target)

    def run(self, problem: RowProblem, schedule: RowSchedule, target: Target, /, *args: Any, **params: Any) -> Any:
        # Indices are 32 bits wide, whatever the user's default.
        with jax.enable_x64(False):
            made = _run(problem, problem.program_of(**params), schedule, target, args)
        return problem.pack([x.reshape(s.shape) for x, s in zip(made, problem.results(), strict=True)])


def _run(p: RowProblem, program: Program, s: RowSchedule, target: Target, args: Any) -> list[jax.Array]:
    columns = program.columns
    if s.residency in ("registers", "span", "ring"):
        return run_in_registers(program, RegisterPlan.of(columns, s), target.cores, p.results(), args, p.rows)
    program, plan = online(program), RowPartition.of(columns, s)
    launched = functools.partial(launch, program=program, plan=plan, results=p.results(), arrays=args)
    if s.residency != "pipeline":
        return launched(one_row, row=p.rows)
    # All should fit the chip at once. If they do not, the last ones start when the first have ended.
    ctas = persistent_ctas(plan.cluster, target.cores, p.rows)
    return launched(functools.partial(all_rows, of_array=p.rows), persistent_cta=ctas)
