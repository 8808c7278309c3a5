"""The matmul by warp-level MMA, in which a CTA computes one tile and cp.async copies operands some steps ahead.

All threads copy and multiply, as in CUTLASS' multistage main loop. The fragments for the last instruction along k of a
step are the last ones read from its stage. Threads then wait for their own copies of the next stage, and for each
other. After that the next stage is complete and this one is no longer read, so copies into it can start. Only then do
threads multiply these last fragments, while the first ones of the next step are being loaded.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl

from search_spaces.footprint import Footprint
from search_spaces.hopper import padded
from search_spaces.jax_compat import interprets, plgpu
from search_spaces.kernel import INDICES_OF_32_BITS, Kernel, padded_elements
from search_spaces.matmul import epilogue
from search_spaces.matmul.mma import space
from search_spaces.matmul.mma.space import MmaSchedule, Tiling, footprint
from search_spaces.matmul.problem import MatmulProblem
from search_spaces.matmul.tiles import planar_snake, reduced
from search_spaces.mma import cp_async, fragments, staging
from search_spaces.mma.cp_async import SmemTile, Source
from search_spaces.mma.fragments import Operand, WarpTiles, multiplies, not_before_hopper
from search_spaces.problem import Arrays, as_tuple
from search_spaces.space import Columns, Space, round_up
from search_spaces.target import Target


@dataclasses.dataclass(frozen=True)
class Plan:
    """The static parameters of a kernel, all plain numbers.

    Attributes:
      p: the problem of the launch.
      s: its schedule.
      a, b: the operands in shared memory.
      warps: the tiles of a warpgroup's warps.
      warpgroups: of a CTA.
      grid: tiles along m and n.
      steps: of a CTA's part of k.
      rows: the rows of a tile that a warpgroup finishes at a time.
      staging_bytes: of shared memory that a warpgroup needs for these rows.
    """

    p: MatmulProblem
    s: MmaSchedule
    a: Operand
    b: Operand
    warps: WarpTiles
    warpgroups: int
    grid: tuple[int, int]
    steps: int
    rows: staging.Rows
    staging_bytes: int

    @classmethod
    def of(cls, p: MatmulProblem, s: MmaSchedule) -> Plan:
        t, dtype = Tiling(p, s), jnp.dtype(p.dtype)
        warps = WarpTiles(int(t.wg_m), int(t.wg_n), int(t.m_warps), bool(t.along_m), dtype)
        return cls(
            p=p,
            s=s,
            a=Operand(SmemTile(*t.a_tile, dtype), k_major=not p.transpose_a),
            b=Operand(SmemTile(*t.b_tile, dtype), k_major=p.transpose_b),
            warps=warps,
            warpgroups=int(t.warpgroups),
            grid=(int(t.grid_m), int(t.grid_n)),
            steps=int(t.steps),
            rows=staging.Rows(warps, int(t.vector)),
            staging_bytes=int(t.staging_bytes),
        )

    @property
    def threads(self) -> int:
        return int(Tiling(self.p, self.s).threads)

    @property
    def instructions(self) -> int:
        """Number of instructions along k of a step."""
        return self.a.k // self.warps.k

    @property
    def scratch(self) -> list[Any]:
        """All stages, each with `a` and then `b`; in the interpreter also the barriers of warpgroups."""
        stages = plgpu.SMEM((self.s.stages, self.a.tile.elements + self.b.tile.elements), self.a.tile.dtype)
        return [stages, *cp_async.meetings(self.warpgroups)]


def kernel(plan: Plan) -> Callable[..., None]:
    """Builds the kernel from its plan; its arguments are operands, then results or the accumulators of splits."""
    p, s = plan.p, plan.s

    def matmul(*refs: Any) -> None:
        count, several = len(p.operands()), len(p.columns)
        smem, *meeting = refs[count + several :]
        cta = Cta(plan, p.named(refs[:count]), refs[count : count + several], smem, *meeting)
        product, row, column = planar_snake(lax.axis_index("tile"), plan.grid, s.grid_minor_dim, s.grid_tile_width)
        row, column = row * s.tile_m, column * s.tile_n
        acc = main_loop(cta, product, row, column)
        finish(cta, product, row, column, acc)

    return matmul


@dataclasses.dataclass(frozen=True)
class Cta:
    """One CTA of a launch, as seen by one of its warpgroups.

    Attributes:
      plan: of the launch.
      operands: in device memory, by name.
      results: in device memory.
      smem: its stages.
      meeting: in the interpreter, the barrier of its warpgroups, if there are several.
    """

    plan: Plan
    operands: Any
    results: tuple[Any, ...]
    smem: Any
    meeting: Any = None

    @property
    def warpgroup(self) -> Any:
        return lax.axis_index("wg") if self.plan.warpgroups > 1 else 0

    def parts(self, stage: Any) -> tuple[Any, Any]:
        """Returns the parts of a stage that hold `a` and `b`."""
        first, second = self.plan.a.tile.elements, self.plan.b.tile.elements
        return self.smem.at[stage, pl.ds(0, first)], self.smem.at[stage, pl.ds(first, second)]


def main_loop(cta: Cta, product: Any, row: Any, column: Any) -> jax.Array:
    """Computes the accumulators of a warpgroup's part of a tile: all steps of the CTA's part of k."""
    plan, p, s = cta.plan, cta.plan.p, cta.plan.s
    batch, first_step = product, jnp.int32(0)
    if s.split_k > 1:
        batch, first_step = lax.rem(product, p.batch), lax.div(product, p.batch) * plan.steps
    # Even if tiles divide k, its last split may have steps beyond k.
    m, n, whole_k = plan.grid[0] * s.tile_m, plan.grid[1] * s.tile_n, s.split_k * plan.steps * s.tile_k
    a = Source(cta.operands.a, p.batch > 1, (whole_k, m) if p.transpose_a else (m, whole_k))
    b = Source(cta.operands.b, p.batch > 1, (n, whole_k) if p.transpose_b else (whole_k, n))
    ahead = s.stages - 1

    def copy(step: Any, stage: Any, part: tuple[int, int] = (0, 1), when: Any = True) -> None:
        k = (first_step + step) * s.tile_k
        to_a, to_b = cta.parts(stage)
        at_a, at_b = (k, row) if p.transpose_a else (row, k), (column, k) if p.transpose_b else (k, column)
        cp_async.copy(a, batch, at_a, plan.a.tile, to_a, plan.threads, part, when)
        cp_async.copy(b, batch, at_b, plan.b.tile, to_b, plan.threads, part, when)

    def load(stage: Any, number: int) -> tuple[jax.Array, jax.Array]:
        one, other = cta.parts(stage)
        wg = cta.warpgroup
        return fragments.lhs(one, plan.a, plan.warps, wg, number), fragments.rhs(other, plan.b, plan.warps, wg, number)

    def arrive() -> None:
        """Waits until the next step's operands have arrived, and this step's are no longer read."""
        cp_async.commit()
        cp_async.wait(ahead - 1)
        cp_async.synchronize(cta.meeting)

    def step(number: Any, carried: Any) -> Any:
        cp_async.rolled()
        acc, now, stage, free = carried
        following = cp_async.following(stage, s.stages)
        for each in range(plan.instructions):
            if each < parts:
                copy(number + ahead, free, (each, parts), number + ahead < plan.steps)
            if each + 1 < plan.instructions:
                then = load(stage, each + 1)
            else:  # After the last step these are stale fragments, which are not multiplied.
                arrive()
                then = load(following, 0)
            acc, now = fragments.multiply(acc, now[0], now[1], plan.warps), then
        return acc, now, following, stage

    # Copies are issued with all instructions along k but the last.
    parts = max(plan.instructions - 1, 1)
    for number in range(ahead):
        if number > 0:
            cp_async.commit()
        if number < plan.steps:
            copy(jnp.int32(number), number)
    arrive()
    start = fragments.zeros(plan.warps), load(0, 0), jnp.int32(0), jnp.int32(ahead)
    acc: jax.Array = lax.fori_loop(0, plan.steps, step, start)[0]
    # The rows reuse the space of the stages; nothing is copied there any more.
    cp_async.synchronize(cta.meeting)
    return acc


def finish(cta: Cta, product: Any, row: Any, column: Any, acc: jax.Array) -> None:
    """Runs the epilogue, some rows at a time: bias, activation and residual, rounding, store."""
    plan, p, s, to = cta.plan, cta.plan.p, cta.plan.s, cta.plan.rows
    first_row = row + (cta.warpgroup * plan.warps.m if plan.warps.along_m else 0)
    first_column = column + (0 if plan.warps.along_m else cta.warpgroup * plan.warps.n)
    clipped = p.m % s.tile_m > 0, p.n % s.tile_n > 0
    batched = p.batch > 1
    # The bias of these columns serves all rows.
    bias = residual = None
    if p.bias:
        window = staging.Window(batched, by_row=False, clip_rows=False, clip_columns=clipped[1])
        bias = staging.load(cta.operands.bias, window, (product, 0, first_column), 0, to)
    for first in to.firsts:
        value = staging.exchange(acc, first, cta.smem, plan.staging_bytes, to)
        if p.residual:
            window = staging.Window(batched, True, *clipped)
            residual = staging.load(cta.operands.residual, window, (product, first_row, first_column), first, to)
        if p.fused:
            value = epilogue.apply(value, bias=bias, activation=p.activation, residual=residual)
        store(cta, (product, first_row, first_column), first, value.astype(cta.results[0].dtype))


def store(cta: Cta, corner: tuple[Any, Any, Any], down: int, value: jax.Array) -> None:
    """Stores rows of a warpgroup's part of a tile to the results, which split the columns."""
    plan, p, s, to = cta.plan, cta.plan.p, cta.plan.s, cta.plan.rows
    several = s.split_k > 1 or p.batch > 1
    clip_columns = p.n % s.tile_n > 0 or len(cta.results) > 1
    window = staging.Window(several, True, p.m % s.tile_m > 0, clip_columns)
    if len(cta.results) == 1:
        staging.store(cta.results[0], window, corner, down, value, to)
        return
    first, (product, row, column) = 0, corner
    for result, columns in zip(cta.results, p.columns, strict=True):

        @pl.when((column < first + columns) & (column + plan.warps.n > first))
        def store_here(result: Any = result, first: int = first) -> None:
            staging.store(result, window, (product, row, column - first), down, value, to)

        first += columns


# ------------------------------------------------------------------------------
# The matmul by warp-level MMA: supported problems, and the launch of one matmul.


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
        return space.space(problem, target.cores)

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


__all__ = ["MmaSchedule", "MosaicGpuMmaMatmul"]
