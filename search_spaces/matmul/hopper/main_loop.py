"""The main loop of a consumer: accumulates a tile from the steps that the producer loads."""

from __future__ import annotations

import math
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl

from search_spaces.hopper import untiled_swizzled, wgmma_async
from search_spaces.hopper.named_barriers import Turns
from search_spaces.jax_compat import plgpu
from search_spaces.matmul.hopper.cta import Consumer
from search_spaces.matmul.hopper.scales import times
from search_spaces.matmul.hopper.tile_scheduler import WorkTile


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

    def start(stage: Any, references: Any, values: Any) -> Any:
        """Accumulates the next step in place into `references`, or into `values`, and returns the new `values`."""
        parts = [
            (
                cta.a.part(factor, stage, *((whole, rows) if p.transpose_a else (rows, whole))),
                cta.b.part(factor, stage, *((columns, whole) if p.transpose_b else (whole, columns))),
            )
            for factor in range(count)
        ]
        pipeline.consumer_wait(work.number, stage)
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
        in_turns = turns is not None
        ahead = delay + in_turns

        def step(k_step: Any, values: Any) -> Any:
            if in_turns:
                release(stage_of(k_step - ahead), delay)
            values = start(stage_of(k_step), references, values)
            if not in_turns:
                release(stage_of(k_step - ahead), delay)
            return values

        if turns is not None:
            turns.take()
        for k_step in range(ahead):
            values = start(stage_of(k_step), references, values)
        values = lax.fori_loop(ahead, work.steps, step, values)
        if turns is not None:
            turns.give()
        for pending in range(ahead - 1, -1, -1):
            release(stage_of(work.steps - 1 - pending), pending)
        return tuple(wgmma_async.wait(0, acc) for acc in values) if untiled else tuple(acc[...] for acc in references)

    shape, accumulators = (t.wg_m, t.wg_n), cta.plan.p.acc_dtype
    if untiled:
        return steps(values=tuple(untiled_swizzled.zeros(shape, accumulators) for _ in range(count)))
    return pl.run_scoped(steps, *(plgpu.ACC(shape, accumulators) for _ in range(count)))


def scaled_main_loop(consumer: Consumer, work: WorkTile, turns: Turns | None = None) -> jax.Array:
    """Computes the scaled sums of a work tile, or of the consumer's half; each step is a block of k (scales.py).

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
            done: jax.Array = wgmma_async.wait(0, acc)
            return done

        def in_place(acc: Any) -> jax.Array:
            plgpu.wgmma(acc, a, b.T)
            return acc[...]

        product: jax.Array = pl.run_scoped(in_place, plgpu.ACC(shape, p.acc_dtype))
        return product

    def ask(k_step: Any) -> tuple[jax.Array, ...]:
        return tuple(scales.of_step(row, t.wg_m, column, work.first_step + lax.min(k_step, work.steps - 1)))

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
