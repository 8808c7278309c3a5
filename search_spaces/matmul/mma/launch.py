"""The matmul by warp-level MMA: supported problems, and the launch of one matmul."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp

from search_spaces.footprint import Footprint
from search_spaces.hopper.operands import padded
from search_spaces.jax_compat import interprets, plgpu
from search_spaces.kernel import INDICES_OF_32_BITS, Kernel, Target, padded_elements
from search_spaces.matmul.mma.footprint import footprint
from search_spaces.matmul.mma.kernel import Plan, kernel
from search_spaces.matmul.mma.schedule import MmaSchedule
from search_spaces.matmul.mma.space import space
from search_spaces.matmul.mma.tiling import Tiling
from search_spaces.matmul.problem import MatmulProblem
from search_spaces.matmul.split_k import reduced
from search_spaces.mma.architectures import multiplies, not_before_hopper
from search_spaces.problem import Arrays, as_tuple
from search_spaces.space import Columns, Space, round_up


class MosaicGpuMmaMatmul(Kernel[MatmulProblem, MmaSchedule]):
    """For chips without a faster instruction; on Hopper, where wgmma has twice its rate, only if requested.

    Attributes:
      also_on: other architectures on which it may run, such as "sm_90".
    """

    backend = "mosaic_gpu_mma"
    version = 2
    most_elements = INDICES_OF_32_BITS

    def __init__(self, *, also_on: Sequence[str] = ()) -> None:
        self.also_on = frozenset(also_on)

    def supports(self, problem: MatmulProblem, target: Target) -> str | None:
        if reason := not_before_hopper(target, self.also_on) or multiplies(target, problem.dtype):
            return reason
        # Before sm_100, ldmatrix transposes only 16-bit elements (PTX ISA, ldmatrix).
        if jnp.dtype(problem.dtype).itemsize != 2 and (problem.transpose_a or not problem.transpose_b):
            return f"multiplies {problem.dtype} only where k is the last axis of both operands (transpose_b alone)"
        return None

    def largest_array(self, problem: MatmulProblem) -> int:
        # Rows that are not whole swizzled rows of 128 bytes are copied into padded ones.
        return padded_elements((*problem.operands(), *problem.results()), -1, 128)

    def space(self, problem: MatmulProblem, target: Target) -> Space[MmaSchedule]:
        return space(problem, target.cores)

    def footprint(self, problem: MatmulProblem, schedules: Columns, target: Target) -> Footprint:
        return footprint(problem, schedules)

    def run(
        self, problem: MatmulProblem, schedule: MmaSchedule, target: Target, /, *args: Any, **params: Any
    ) -> Arrays:
        p, s = problem, schedule
        # The reduction kernel of split-K applies the epilogue, and slices several results.
        inside = p if s.split_k == 1 else p.plain.joined
        results = launched(inside, s, args[: len(inside.operands())])
        return p.pack(results) if s.split_k == 1 else reduced(p, s.split_k, results[0], args)


def launched(p: MatmulProblem, s: MmaSchedule, operands: Sequence[jax.Array]) -> list[jax.Array]:
    """Runs the launch and returns the results ``[..., m, n]``; with split-K, the accumulators of each split.

    The splits lie along the first axis.
    """
    if interprets() and (whole := _in_whole_tiles(p, s)) != p:
        arrays = [padded(x, like.shape) for x, like in zip(operands, whole.operands(), strict=True)]
        (result,) = launched(whole, s, arrays)
        return list(as_tuple(p.cut(result[..., : p.m, : p.n])))
    extents = Tiling(p, s).extents  # of a and b
    operands = [*map(padded, operands, extents), *operands[2:]]
    plan = Plan.of(p, s)
    dtype = p.whole.dtype if s.split_k == 1 else p.acc_dtype
    places = p.batch * s.split_k
    lead = (places,) if places > 1 else ()
    run = plgpu.kernel(
        kernel(plan),
        out_type=tuple(jax.ShapeDtypeStruct((*lead, p.m, n), dtype) for n in p.columns),
        grid=(places * plan.grid[0] * plan.grid[1],),
        grid_names=("tile",),
        **({"num_threads": plan.warpgroups, "thread_name": "wg"} if plan.warpgroups > 1 else {}),
        scratch_types=plan.scratch,
        # The kernel contains its own barriers.
        compiler_params=plgpu.CompilerParams(
            lowering_semantics=plgpu.LoweringSemantics.Lane, unsafe_no_auto_barriers=True, reduction_scratch_bytes=0
        ),
    )
    # Indices are 32 bits wide, regardless of the user's default.
    with jax.enable_x64(False):
        return list(run(*operands))


def _in_whole_tiles(p: MatmulProblem, s: MmaSchedule) -> MatmulProblem:
    """Rounds a matmul up to whole tiles, in one array: the interpreter does not support clipped accesses or copies."""
    return dataclasses.replace(
        p.joined, m=round_up(p.m, s.tile_m), n=round_up(p.n, s.tile_n), k=round_up(p.k, s.tile_k * s.split_k)
    )
