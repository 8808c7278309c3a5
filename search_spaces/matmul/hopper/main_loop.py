"""The state of a CTA (operands, scales, buffers), and the main loop, in which a consumer accumulates a tile."""

from __future__ import annotations

import dataclasses
import math
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl

from search_spaces.hopper import WGMMA_ROWS, synchronization, untiled_swizzled
from search_spaces.hopper.smem_layout import SmemTile
from search_spaces.hopper.synchronization import Pipeline, Turns
from search_spaces.jax_compat import load, plgpu
from search_spaces.matmul.hopper.epilogue_loads import EpilogueLoads
from search_spaces.matmul.hopper.plan import Plan
from search_spaces.matmul.hopper.schedule import Source
from search_spaces.matmul.hopper.tile_scheduler import TailReduction, TileScheduler, WorkTile

# ------------------------------------------------------------------------------
# An operand of wgmma in a launch: its arrays in device memory, and its stages in shared memory.


@dataclasses.dataclass(frozen=True)
class Operand:
    """`a` or `b`, as wgmma sees it.

    Attributes:
      sources: in device memory: one, or one for each factor (schedule.py).
      tile: the layout of one stage of a source.
      smem: the stages in shared memory; the tiles of one step are adjacent.
      multicast: whether the CTAs of a cluster load halves of each stage for each other.
    """

    sources: tuple[Source, ...]
    tile: SmemTile
    smem: Any
    multicast: bool

    def load(self, batch: Any, corner: tuple[Any, Any], stage: Any, full: Any) -> None:
        """Loads the tile at `corner` of each source into a stage, and signals the barrier `full`."""
        for factor, source in enumerate(self.sources):
            slot = self._slot(stage, factor)
            for index, box in self.tile.boxes(*source.at(*corner)):
                plgpu.copy_gmem_to_smem(
                    source.array.at[(batch, *box) if source.batched else box],
                    self.smem.at[slot, *index],
                    full,
                    collective_axes="cluster" if self.multicast else None,
                )

    def clear(self, part: Any, first: Any) -> None:
        """Sets the rows from `first` on of a part, in the untiled layout, to zero."""
        untiled_swizzled.clear_rows(part, first, self.tile.swizzle)

    def part(self, factor: int, stage: Any, rows: Any, columns: Any) -> Any:
        """Returns some rows or columns of a stage of one factor; all factors share a single source."""
        return self.tile.part(self.smem, self._slot(stage, factor), rows, columns)

    def _slot(self, stage: Any, factor: int) -> Any:
        count = len(self.sources)
        return stage if count == 1 else stage * count + factor


# ------------------------------------------------------------------------------
# Scales of a matmul's operands: per block of k, applied in each step of k, or per row, applied in the epilogue.
#
# ``c[i, j] = sum over blocks of k (a_scale[i, block] * b_scale[j / 128, block] * sum within it a[i, k] * b[j, k])``.
# The wgmma accumulators of one block are multiplied by its scales and added to float32 sums in registers (two sets of
# accumulators), as in DeepSeek-V3 (arXiv:2412.19437, 3.3.2): wgmma keeps about 14 bits of 8-bit products, in sums of
# 128.

Scale = Literal["blocks", "rows"]


@dataclasses.dataclass(frozen=True)
class Scaling:
    """The granularity of a launch's scales.

    Attributes:
      a: "blocks", an array ``[blocks of k, m]``; or "rows", ``[m]``. Both are padded to the end of the last tile.
      b: "blocks", ``[blocks of n, blocks of k]``; or "rows", ``[n]``, padded to the end of the last tile.
      block: number of elements of k, and of columns of the result, that share a scale.
    """

    a: Scale
    b: Scale
    block: int

    @property
    def by_steps(self) -> bool:
        """Whether each step of k has its own scales."""
        return "blocks" in (self.a, self.b)


class Scales(NamedTuple):
    """The scales of a launch, in device memory."""

    scaling: Scaling
    a: Any
    b: Any

    def of_step(self, row: Any, rows: int, column: Any, step: Any) -> list[jax.Array]:
        """Returns the scales of one block of k; the product of them scales the step's accumulators ``[rows, columns]``.

        A vector ``[rows]`` if `a` has blocks, and a scalar if `b` has: the columns from `column` on lie in one block.
        """
        found = []
        if self.scaling.a == "blocks":
            found.append(_by_row(self.a.at[step, pl.ds(row, rows)]))
        if self.scaling.b == "blocks":
            found.append(self.b[lax.div(column, self.scaling.block), step])
        return found

    def apply(self, acc: jax.Array, row: Any, column: Any) -> jax.Array:
        """Multiplies the sums ``[rows, columns]`` of all steps by the per-row scales of `a` and of `b`."""
        rows, columns = acc.shape
        if self.scaling.a == "rows":
            acc = times(acc, _by_row(self.a.at[pl.ds(row, rows)]), 0)
        if self.scaling.b == "rows":
            by_column = load(self.b.at[pl.ds(column, columns)], plgpu.Layout.WGMMA.reduce(0))
            acc = times(acc, by_column, 1)
        return acc


def times(acc: jax.Array, scale: jax.Array, axis: int) -> jax.Array:
    """Multiplies each row (axis 0) or column (axis 1) by its scale, or all elements by a scalar."""
    if scale.ndim:
        scale = lax.broadcast_in_dim(scale, acc.shape, (axis,))
    return acc * scale


def _by_row(ref: Any) -> jax.Array:
    return load(ref, plgpu.Layout.WGMMA.reduce(1))


# ------------------------------------------------------------------------------
# A CTA of a launch and its consumer warpgroups: their buffers in shared memory and device memory, and offsets.


@dataclasses.dataclass(frozen=True)
class Cta:
    """A CTA of a launch, as seen by its warpgroups.

    Attributes:
      plan: of the launch.
      a, b: the operands.
      pipeline: shared by both operands.
      biases: in device memory, one for each factor; empty without a bias.
      residual: in device memory; None if there is none.
      scales: of the operands, in device memory; None if there are none.
      results: in device memory.
      out_smem: stages of each consumer's epilogue subtiles.
      others: scratch of the epilogue's operands and of a reduction, by name.
      mailbox: of a reduction, for the interpreter.
      tail: the partial sums that CTAs exchange for the tiles of the last wave; None if these tiles are not split.
      rank: of the CTA in its cluster.
      warpgroup: index of the current warpgroup; the consumers come first in a CTA.
      tiles: the work tiles that the CTA computes.
    """

    plan: Plan
    a: Operand
    b: Operand
    pipeline: Pipeline
    biases: tuple[Source, ...]
    residual: Any
    scales: Scales | None
    results: tuple[Any, ...]
    out_smem: Any
    others: dict[str, Any]
    mailbox: list[Any]
    tail: TailReduction | None
    rank: Any
    warpgroup: Any
    tiles: TileScheduler


@dataclasses.dataclass(frozen=True)
class Consumer:
    """One consumer warpgroup of a CTA.

    Attributes:
      cta: its CTA.
      first_row, first_column: offset of its part of the CTA's tile, as wgmma sees the tile (after `swap_ab`).
      first_own: offset of the columns for which it runs the epilogue; differs from `first_column` only in cluster
        split-K.
      loads: the loads of its epilogue's operands, for each factor.
    """

    cta: Cta
    first_row: Any
    first_column: Any
    first_own: Any
    loads: tuple[EpilogueLoads, ...]

    @property
    def subtile_columns(self) -> int:
        """Columns of an epilogue subtile, as wgmma sees them."""
        return self.cta.plan.out_n if self.cta.plan.s.swap_ab else self.cta.plan.s.epi_tile_n

    @property
    def subtiles(self) -> list[tuple[int, int]]:
        """First row and column of each subtile, in the part that the consumer finishes."""
        t, out_n = self.cta.plan.t, self.cta.plan.out_n
        return [(m, n) for m in range(0, t.wg_m, WGMMA_ROWS) for n in range(0, out_n, self.subtile_columns)]

    def corner(self, work: WorkTile, m: int, n: int) -> tuple[Any, Any]:
        """Returns the first row and column of a subtile in the result."""
        corner = work.row + self.first_row + m, work.column + self.first_own + n
        return corner[::-1] if self.cta.plan.s.swap_ab else corner

    def has_rows(self, work: WorkTile) -> Any:
        """Returns whether the consumer's part has a row before `work.end_row`; None if every consumer has one.

        Consumers that take turns always multiply: the order of turns depends on their steps.
        """
        s = self.cta.plan.s
        along, first = ("n", work.column + self.first_column) if s.swap_ab else ("m", work.row + self.first_row)
        divided = s.consumers == f"cooperative_{along}" or (s.cluster == along and s.consumers != "ordered_ping_pong")
        return first < work.end_row if work.end_row is not None and divided else None

    def fetch_residual(self, count: int, work: WorkTile) -> None:
        """Starts the load of the residual for the `count`-th subtile."""
        stage = count % int(self.cta.plan.tiling.epi_stages)
        self.loads[0].fetch_residual(stage, work.product, *self.corner(work, *self.subtiles[count]))


def main_loop(consumer: Consumer, work: WorkTile, turns: Turns | None = None) -> tuple[jax.Array, ...]:
    """Computes each factor's accumulators of a work tile, or of the consumer's half of it.

    With `turns`, the wgmmas are issued in this consumer's turn, and the turn ends before the wgmmas do.
    """
    cta, p, s, t = consumer.cta, consumer.cta.plan.p, consumer.cta.plan.s, consumer.cta.plan.t
    pipeline, delay, untiled = cta.pipeline, s.delay_release, cta.plan.tiling.untiled
    rows, columns = pl.ds(consumer.first_row, t.wg_m), pl.ds(consumer.first_column, t.wg_n)
    whole, count = slice(None), len(cta.plan.factors)

    def stage_of(k_step: Any) -> Any:
        return pipeline.stage(work.start + k_step)

    def start(k_step: Any, references: Any, values: Any, *, ends: bool = False) -> Any:
        """Accumulates a step in place into `references`, or into `values`, and returns the new `values`.

        If the work tile `ends` in this step, elements of k from there on are set to zero in shared memory. Each
        consumer does so in all that it reads: cooperative consumers both write the same zeros to what both read.
        """
        stage = stage_of(k_step)
        parts = [
            (
                cta.a.part(factor, stage, *((whole, rows) if p.transpose_a else (rows, whole))),
                cta.b.part(factor, stage, *((columns, whole) if p.transpose_b else (whole, columns))),
            )
            for factor in range(count)
        ]
        pipeline.consumer_wait(work.number, stage)
        if ends:
            left = lax.clamp(0, work.end_k - work.first_k - k_step * s.tile_k, s.tile_k)
            for a, b in parts:
                cta.a.clear(a, left)
                cta.b.clear(b, left)
            plgpu.commit_smem()
        for acc, (a, b) in zip(references, parts, strict=not untiled):
            plgpu.wgmma(acc, a.T if p.transpose_a else a, b.T if p.transpose_b else b)
        transposes = {"transpose_a": p.transpose_a, "transpose_b": p.transpose_b}
        return tuple(
            untiled_swizzled.wgmma(acc, a, b, cta.a.tile.swizzle, **transposes)
            for acc, (a, b) in zip(values, parts, strict=untiled)
        )

    def release(stage: Any, pending: int) -> None:
        """Releases a stage when at most `pending` later steps are still running."""
        plgpu.wgmma_wait(pending * count)
        pipeline.consumer_release(stage)

    def steps(*references: Any, values: tuple[jax.Array, ...] = ()) -> tuple[jax.Array, ...]:
        # The last wgmma of a turn still runs after the turn ends: the next consumer zeros its accumulators and passes a
        # barrier meanwhile.
        in_turns, ends = turns is not None, work.end_k is not None
        ahead = delay + in_turns

        def step(k_step: Any, values: Any, *, ends: bool = False) -> Any:
            if in_turns:
                release(stage_of(k_step - ahead), delay)
            values = start(k_step, references, values, ends=ends)
            if not in_turns:
                release(stage_of(k_step - ahead), delay)
            return values

        if turns is not None:
            turns.take()
        for k_step in range(ahead):
            values = start(k_step, references, values, ends=ends)
        values = lax.fori_loop(ahead, work.steps - ends, step, values)
        if ends:
            values = step(work.steps - 1, values, ends=True)
        if turns is not None:
            turns.give()
        for pending in range(ahead - 1, -1, -1):
            release(stage_of(work.steps - 1 - pending), pending)
        return (
            tuple(synchronization.wait_wgmma(0, acc) for acc in values)
            if untiled
            else tuple(acc[...] for acc in references)
        )

    shape, accumulators = (t.wg_m, t.wg_n), cta.plan.p.acc_dtype

    def zeros() -> tuple[jax.Array, ...]:
        return tuple(untiled_swizzled.zeros(shape, accumulators) for _ in range(count))

    def idle() -> tuple[jax.Array, ...]:
        def step(k_step: Any, _: None) -> None:
            pipeline.consumer_wait(work.number, stage_of(k_step))
            pipeline.consumer_release(stage_of(k_step))

        lax.fori_loop(0, work.steps, step, None)
        return zeros()

    if (has_rows := consumer.has_rows(work)) is not None:
        found: tuple[jax.Array, ...] = lax.cond(has_rows, lambda: steps(values=zeros()), idle)
        return found
    if untiled:
        return steps(values=zeros())
    return pl.run_scoped(steps, *(plgpu.ACC(shape, accumulators) for _ in range(count)))


def scaled_main_loop(consumer: Consumer, work: WorkTile, turns: Turns | None = None) -> jax.Array:
    """Computes the scaled sums of a work tile, or of the consumer's half; each step is a block of k.

    While one consumer scales its accumulators, the wgmmas of the other one run.
    """
    cta, p, t = consumer.cta, consumer.cta.plan.p, consumer.cta.plan.t
    pipeline, untiled, scales = cta.pipeline, cta.plan.tiling.untiled, cta.scales
    assert scales is not None
    row, column = work.row + consumer.first_row, work.column + consumer.first_column
    if not scales.scaling.by_steps:
        (acc,) = main_loop(consumer, work, turns)
        return scales.apply(acc, row, column)
    shape, whole = (t.wg_m, t.wg_n), slice(None)
    rows, columns = pl.ds(consumer.first_row, t.wg_m), pl.ds(consumer.first_column, t.wg_n)

    def multiply(stage: Any) -> jax.Array:
        a, b = cta.a.part(0, stage, rows, whole), cta.b.part(0, stage, columns, whole)
        if untiled:
            zeros = untiled_swizzled.zeros(shape, p.acc_dtype)
            acc = untiled_swizzled.wgmma(zeros, a, b, cta.a.tile.swizzle, transpose_b=True)
            done: jax.Array = synchronization.wait_wgmma(0, acc)
            return done

        def in_place(acc: Any) -> jax.Array:
            plgpu.wgmma(acc, a, b.T)
            return acc[...]

        product: jax.Array = pl.run_scoped(in_place, plgpu.ACC(shape, p.acc_dtype))
        return product

    def ask(k_step: Any) -> tuple[jax.Array, ...]:
        first = lax.div(work.first_k, cta.plan.s.tile_k)
        return tuple(scales.of_step(row, t.wg_m, column, first + lax.min(k_step, work.steps - 1)))

    def step(k_step: Any, carried: Any) -> Any:
        total, factors = carried
        stage = pipeline.stage(work.start + k_step)
        asked = ask(k_step + 1)  # one step ahead, otherwise wgmma would wait for the scales
        pipeline.consumer_wait(work.number, stage)
        acc = multiply(stage)
        pipeline.consumer_release(stage)
        return total + times(acc, math.prod(factors[1:], start=factors[0]), 0), asked

    start = plgpu.layout_cast(jnp.zeros(shape, p.acc_dtype), plgpu.Layout.WGMMA)
    total, _ = lax.fori_loop(0, work.steps, step, (start, ask(0)))
    return scales.apply(total, row, column)
