"""The kernel: a CTA computes one tile; cp.async copies operands some steps ahead of the warps that multiply.

All threads copy and multiply, as in CUTLASS' multistage main loop. The fragments for the last instruction along k of a
step are the last ones read from its stage. Threads then wait for their own copies of the next stage, and for each
other. After that the next stage is complete and this one is no longer read, so copies into it can start. Only then do
threads multiply these last fragments, while the first ones of the next step are being loaded.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl

from search_spaces.jax_compat import plgpu
from search_spaces.matmul import epilogue
from search_spaces.matmul.mma.schedule import MmaSchedule
from search_spaces.matmul.mma.tiling import Tiling
from search_spaces.matmul.problem import MatmulProblem
from search_spaces.matmul.rasterization import planar_snake
from search_spaces.mma import cp_async, fragments, staging
from search_spaces.mma.cp_async import SmemTile, Source
from search_spaces.mma.fragments import Operand, WarpTiles


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
