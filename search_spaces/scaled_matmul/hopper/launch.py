"""The scaled matmul on Hopper: supported problems, and the launch of one scaled matmul.

The kernel is that of the matmul (search_spaces/matmul/hopper), with a main loop that scales (scales.py there). With
scales by blocks, a step is a block of k: its accumulators start from zero, and are scaled and added to the sums. This
doubles the registers, so tiles are half as large. Consumers read scales from device memory directly, before they wait
for the step's operands.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp

from search_spaces.footprint import Footprint
from search_spaces.hopper.operands import not_hopper, padded
from search_spaces.kernel import INDICES_OF_32_BITS, Kernel, Target, padded_elements
from search_spaces.matmul.hopper.persistent_launch import launched
from search_spaces.matmul.hopper.schedule import HopperSchedule
from search_spaces.matmul.hopper.tiling import Tiling
from search_spaces.scaled_matmul.hopper.footprint import footprint
from search_spaces.scaled_matmul.hopper.space import scaling, space
from search_spaces.scaled_matmul.problem import BLOCK, ScaledMatmulProblem
from search_spaces.space import Columns, Space, cdiv


class MosaicGpuScaledMatmul(Kernel[ScaledMatmulProblem, HopperSchedule]):
    backend = "mosaic_gpu"
    version = 1
    most_elements = INDICES_OF_32_BITS
    verified_on = frozenset({"sm_90"})  # tests/device on an NVIDIA H200

    def supports(self, problem: ScaledMatmulProblem, target: Target) -> str | None:
        if reason := not_hopper(target):
            return reason
        if not problem.transpose_b:  # PTX ISA, asynchronous warpgroup level matrix: 8-bit operands have one order
            return f"multiplies {problem.dtype} only where k is the last axis of both operands (transpose_b)"
        return None

    def largest_array(self, problem: ScaledMatmulProblem) -> int:
        # Rows that are not whole swizzled rows of 128 bytes are copied into padded ones.
        return padded_elements((*problem.operands(), *problem.results()), -1, 128)

    def space(self, problem: ScaledMatmulProblem, target: Target) -> Space[HopperSchedule]:
        return space(problem, target.cores)

    def footprint(self, problem: ScaledMatmulProblem, schedules: Columns, target: Target) -> Footprint:
        return footprint(problem, schedules)

    def run(
        self, problem: ScaledMatmulProblem, schedule: HopperSchedule, target: Target, /, *args: Any, **params: Any
    ) -> jax.Array:
        p, s = problem, schedule
        a, b, a_scale, b_scale = args
        t = Tiling(p.product, s)
        rows, columns = s.tile_m * t.grid_m * t.cluster_m, s.tile_n * t.grid_n * t.cluster_n
        # A tile may extend beyond the edges, and so do the scales that it reads.
        by_blocks = p.a_scales == "blocks"
        a_scale = _extended(a_scale.T, (a_scale.shape[1], rows)) if by_blocks else _extended(a_scale, (rows,))
        by_blocks = p.b_scales == "blocks"
        b_scale = _extended(b_scale, (cdiv(columns, BLOCK), b_scale.shape[1]) if by_blocks else (columns,))
        operands = [padded(x, extents) for x, extents in zip((a, b), t.extents, strict=True)]
        (c,) = launched(p.product, s, target, [*operands, a_scale, b_scale], posed=p, scaling=scaling(p))
        return c


def _extended(x: jax.Array, shape: tuple[Any, ...]) -> jax.Array:
    """Pads the ends of the axes with zeros."""
    return jnp.pad(x, [(0, int(extent) - have) for extent, have in zip(shape, x.shape, strict=True)])
