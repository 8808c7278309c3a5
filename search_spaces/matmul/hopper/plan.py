"""The plan of a launch, known before tracing: tilings, SMEM layouts, scratch."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax.numpy as jnp

from search_spaces.hopper.smem_layout import SmemTile, Tiled, Untiled
from search_spaces.jax_compat import plgpu
from search_spaces.matmul.hopper.dsmem_reduction import DsmemReduction, dsmem_reduction
from search_spaces.matmul.hopper.epilogue_loads import bias_scratch, residual_scratch
from search_spaces.matmul.hopper.factors import Gate, factors
from search_spaces.matmul.hopper.schedule import HopperSchedule, mirrored
from search_spaces.matmul.hopper.tiling import Tiling
from search_spaces.matmul.problem import MatmulProblem


@dataclasses.dataclass(frozen=True)
class Plan:
    """The plan of a launch, known before tracing.

    Attributes:
      problem, tiling: of the arrays as stored in device memory.
      p, s, t: problem, schedule and tiling as wgmma sees them; with `swap_ab` the mirrored ones.
      a_tile, b_tile: a stage of each operand.
      out_tile: an epilogue subtile.
      reduction: of cluster split-K; None for other schedules.
      factors: the matmuls with `a` whose results are multiplied; the first one is `problem`.
    """

    problem: MatmulProblem
    tiling: Tiling
    p: MatmulProblem
    s: HopperSchedule
    t: Tiling
    a_tile: SmemTile
    b_tile: SmemTile
    out_tile: SmemTile
    reduction: DsmemReduction | None
    factors: tuple[MatmulProblem, ...]

    @property
    def larger(self) -> SmemTile:
        """The operand whose stages a reduction reuses after the main loop."""
        return self.a_tile if self.s.tile_m > self.s.tile_n else self.b_tile

    @property
    def out_n(self) -> int:
        """Columns, as wgmma sees them, that a consumer finishes."""
        return int(self.t.wg_n // self.t.cluster_k)

    @property
    def without(self) -> tuple[None, ...]:
        """One None per factor, in place of absent biases or mailboxes."""
        return (None,) * len(self.factors)

    @property
    def outputs(self) -> int:
        """Number of matrices that a launch writes: its results, or with split-K one per split and factor."""
        return int(self.t.products * (len(self.factors) if self.s.split_k > 1 else 1))

    @property
    def groups(self) -> int:
        """Number of consumer groups that take whole tiles in turn."""
        return int(self.t.consumers // self.t.cooperating)


def plan(problem: MatmulProblem, schedule: HopperSchedule, gate: Gate | None = None) -> Plan:
    """Returns the plan of a launch for `problem` with a legal schedule.

    Raises:
      ValueError: the stages of neither operand are large enough for the data that a DSMEM reduction receives.
    """
    tiling = Tiling(problem, schedule)
    p, s = mirrored(problem, schedule) if schedule.swap_ab else (problem, schedule)
    dtype = jnp.dtype(p.dtype)
    out_dtype = p.whole.dtype if s.split_k == 1 else p.acc_dtype
    a_extents = (s.tile_k, s.tile_m) if p.transpose_a else (s.tile_m, s.tile_k)
    b_extents = (s.tile_n, s.tile_k) if p.transpose_b else (s.tile_k, s.tile_n)
    layout = Untiled if tiling.untiled else Tiled
    made = Plan(
        problem=problem,
        tiling=tiling,
        p=p,
        s=s,
        t=Tiling(p, s),
        a_tile=layout(*a_extents, dtype, int(tiling.swizzle)),
        b_tile=layout(*b_extents, dtype, int(tiling.swizzle)),
        out_tile=layout(int(tiling.epi_m), int(tiling.epi_n), out_dtype, int(tiling.out_swizzle)),
        reduction=dsmem_reduction(problem, schedule),
        factors=factors(problem, gate),
    )
    larger = made.larger
    if made.reduction and made.reduction.onchip_bytes > s.stages * larger.rows * larger.columns * dtype.itemsize:
        raise ValueError(f"{schedule}: half of a tile's accumulators outgrow the operands' stages: more stages do it")
    return made


def scratch(launch: Plan) -> dict[str, Any]:
    """Returns the arrays and barriers of a CTA, by name."""
    s, t, dtype = launch.s, launch.t, launch.a_tile.dtype
    a, b, out = launch.a_tile, launch.b_tile, launch.out_tile
    weights = len(launch.factors)
    of_a, of_b = (weights, 1) if s.swap_ab else (1, weights)  # tiles per step
    empty = {"num_arrivals": t.cooperating, "num_barriers": s.stages}
    return {
        "a_smem": plgpu.SMEM((s.stages * of_a, *a.shape), dtype, transforms=a.transforms),
        **(launch.reduction.scratch() if launch.reduction else {}),
        "b_smem": plgpu.SMEM((s.stages * of_b, *b.shape), dtype, transforms=b.transforms),
        **bias_scratch(launch.problem, launch.tiling),
        "full": plgpu.Barrier(num_arrivals=of_a * a.copies + of_b * b.copies, num_barriers=launch.groups * s.stages),
        "out_smem": plgpu.SMEM(
            (t.consumers, int(launch.tiling.epi_stages), *out.shape), out.dtype, transforms=out.transforms
        ),
        # A stage that two CTAs fill is empty when both CTAs have read their copy.
        "empty": plgpu.Barrier(**empty)
        if s.cluster in ("none", "split_k")
        else plgpu.ClusterBarrier(collective_axes=("cluster",), **empty),
        **residual_scratch(launch.problem, launch.tiling),
        **{
            f"{name}_{number}": array
            for number, factor in enumerate(launch.factors[1:], 1)
            for name, array in bias_scratch(factor, launch.tiling).items()
        },
    }


def by_factor(launch: Plan, others: dict[str, Any]) -> list[dict[str, Any]]:
    """Returns the scratch of each factor's epilogue, by `EpilogueLoads`'s names."""
    first = {name: x for name, x in others.items() if not name[-1].isdigit()}
    more = [
        {name.removesuffix(end): x for name, x in others.items() if name.endswith(end)}
        for end in (f"_{number}" for number in range(1, len(launch.factors)))
    ]
    return [first, *more]
