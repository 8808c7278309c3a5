"""Rows through a persistent pipeline: a CTA or a cluster takes row after row, and applies one while it reduces another.

Three successive rows r - 1, r and r + 1 of one CTA, with chunks c and a prefetch distance of 1:

    producer (a thread of warpgroup 0)   | consumers (all warpgroups)
    -------------------------------------|--------------------------------------------------------------
    TMA of the first chunks, as many as there are stages
    step 1..chunks - 1 of row r:         |
      wait until the stage of the step   | apply chunk c - 1 of row r - 1, and arrive: its stage is empty
      before is empty; TMA of the next   | wait until chunk c of row r is full, and update its statistics
      chunk into it                      |
    end of row r                         | arrive with the statistics of row r (all-reduce across the cluster)
    step 0 of row r + 1: as above        | apply the last chunk of row r - 1, update with the first of row r + 1
                                         | wait for the statistics of row r; apply its ends
    wait until all stages are empty      | apply the chunks of the last row

SMEM always holds one row's worth of chunks of the two rows, loads and stores are always in flight, and the additional
stages are for loads ahead. With a prefetch distance of 0, consumers wait as soon as they have arrived. No warp is a
dedicated producer: a producer warpgroup was no faster (docs/experiments.md). `plgpu.emit_pipeline_warp_specialized`
releases a block of an operand after its step; here a chunk is read in two steps, a row apart.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl

from search_spaces.hopper.synchronization import Pipeline
from search_spaces.jax_compat import plgpu
from search_spaces.rows.hopper.chunks import Cta, Row
from search_spaces.rows.hopper.partition import BUFFERS
from search_spaces.rows.stages import Stage, Statistics


@dataclasses.dataclass(frozen=True)
class _Waves:
    """The rows of a persistent CTA, one per wave, and the steps of its pipeline, one per chunk of these rows.

    Attributes:
      cta: the values that its warpgroups share.
      first, stride: first row of the array, and distance to the next.
      waves: number of rows of this CTA.
      pipeline: pipeline of the CTA's stages.
    """

    cta: Cta
    first: Any
    stride: Any
    waves: Any
    pipeline: Pipeline

    @property
    def chunks(self) -> int:
        return int(self.cta.plan.chunks)

    @property
    def reduction(self) -> Stage:
        return Stage(self.cta.program, 0)

    def row(self, wave: Any) -> Any:
        return self.first + wave * self.stride

    def bare(self, wave: Any) -> Row:
        """Returns a row without what all-reduces give."""
        return self.cta.row(lax.min(self.row(wave), self.first + (self.waves - 1) * self.stride))

    def done(self, wave: Any, scalars: tuple[jax.Array, ...]) -> Row:
        """Returns a row with its final scalars, which a loop carries in order of their number."""
        row = self.bare(wave)
        return dataclasses.replace(row, scalars=dict(zip(self.names(row), scalars, strict=True)))

    def names(self, row: Row) -> list[int]:
        """Returns the numbers of all scalars of a row."""
        program = self.cta.program
        scalars = (x for x in range(len(program.inputs), len(program.levels)) if not program.vector(x))
        return sorted({*row.scalars, *scalars})

    def stage(self, wave: Any, chunk: Any) -> Any:
        return self.pipeline.stage(wave * self.chunks + chunk)


def all_rows(cta: Cta, of_array: int) -> None:
    """Processes all rows of a persistent CTA. Persistent CTAs, or clusters of them, take the rows in turn."""
    first, stride = lax.axis_index("persistent_cta"), lax.axis_size("persistent_cta")
    waves = lax.div(of_array - 1 - first + stride, stride)
    pipeline = Pipeline(cta.plan.pipeline, 1, cta.scratch.full, cta.scratch.empty)
    rows = _Waves(cta, first, stride, waves, pipeline)
    _produce_first(rows)
    found = cta.init(rows.reduction)
    for chunk in range(cta.plan.prefetch):
        found = _reduce(rows, jnp.int32(0), jnp.int32(chunk), found, cta.overlap_of(chunk))
    begun = _wave(rows, jnp.int32(0), None, found)
    final, _ = lax.fori_loop(1, waves, lambda wave, carry: _wave(rows, wave, *carry), begun)
    last = rows.done(waves - 1, final)
    lax.fori_loop(0, rows.chunks, lambda chunk, _: _apply(rows, waves - 1, chunk, last), None)

    @pl.when(cta.warpgroup == 0)
    def drain() -> None:
        # Every arrival is matched by a wait.
        pipeline.producer_tail(waves * rows.chunks)


def _wave(
    rows: _Waves, wave: Any, before: tuple[jax.Array, ...] | None, found: Statistics
) -> tuple[tuple[jax.Array, ...], Statistics]:
    """Reduces the rest of a row and prefetches the next one, while it applies the previous row.

    Args:
      before: scalars of the previous row; None in the first wave.
      found: statistics of the chunks of this row that the previous wave prefetched.

    Returns:
      The same two values for the next wave.
    """
    cta, plan, chunks, prefetch = rows.cta, rows.cta.plan, rows.chunks, rows.cta.plan.prefetch
    previous = None if before is None else rows.done(wave - 1, before)

    def step(chunk: Any, found: Statistics, *, overlap: Any = 0) -> Statistics:
        _produce(rows, wave, chunk)
        if previous is not None:
            _apply(rows, wave - 1, chunk - prefetch, previous)
        return _reduce(rows, wave, chunk, found, overlap)

    row = cta.row(rows.row(wave))
    ends = cta.load_ends(row)
    first = prefetch
    if not prefetch and plan.part_overlap:
        found, first = step(jnp.int32(0), found, overlap=cta.overlap_of(0)), 1
    found = lax.fori_loop(first, chunks - 1, step, found)
    found = step(jnp.int32(chunks - 1), found, overlap=cta.overlap_of(chunks - 1))
    arrival = cta.arrive(rows.reduction, found, ends, row, lax.rem(wave, BUFFERS))
    prefetched = cta.init(rows.reduction)
    for chunk in range(prefetch):
        _produce(rows, wave + 1, chunk)
        if previous is not None:
            _apply(rows, wave - 1, jnp.int32(chunks - prefetch + chunk), previous)
        prefetched = _reduce(rows, wave + 1, jnp.int32(chunk), prefetched, cta.overlap_of(chunk))
    done = cta.wait(rows.reduction, row, arrival)
    cta.finish(done, ends)
    return tuple(done.scalars[x] for x in rows.names(done)), prefetched


def _copy(rows: _Waves, load: Any) -> None:
    """Starts the copy of the chunk with this number, for all operands of the CTA."""
    cta = rows.cta
    stage, wave, chunk = rows.pipeline.stage(load), lax.div(load, rows.chunks), lax.rem(load, rows.chunks)
    row = rows.row(wave)
    cta.copy(row, cta.plan.row_start(row).lines + cta.start_of(chunk), stage)


def _produce_first(rows: _Waves) -> None:
    """Fills all stages."""

    @pl.when(rows.cta.warpgroup == 0)
    def fill() -> None:
        first = lax.min(rows.waves * rows.chunks, rows.cta.plan.pipeline)
        lax.fori_loop(0, first, lambda load, _: _copy(rows, load), None)


def _produce(rows: _Waves, wave: Any, chunk: Any) -> None:
    """Refills the stage that was applied in the previous step of the pipeline."""
    cta, plan = rows.cta, rows.cta.plan
    load = wave * rows.chunks + chunk - (1 + rows.chunks + plan.prefetch) + plan.pipeline

    @pl.when((cta.warpgroup == 0) & (load >= plan.pipeline) & (load < rows.waves * rows.chunks))
    def refill() -> None:
        plgpu.barrier_wait(rows.pipeline.empty.at[rows.pipeline.stage(load)])
        plgpu.commit_smem()  # orders the reads before a write by TMA
        _copy(rows, load)


def _reduce(rows: _Waves, wave: Any, chunk: Any, found: Statistics, overlap: Any) -> Statistics:
    """Adds a chunk of a wave's row to the statistics, without its first `overlap` elements.

    Another chunk counts these elements.
    """
    cta, stage = rows.cta, rows.stage(wave, chunk)

    @pl.when(wave < rows.waves)  # Beyond the last row nothing is loaded, and the statistics are not used.
    def wait() -> None:
        rows.pipeline.consumer_wait(0, stage)

    fragments = cta.in_stage(rows.bare(wave), cta.start_of(chunk), stage)
    return cta.update(rows.reduction, found, fragments, overlap)


def _apply(rows: _Waves, wave: Any, chunk: Any, row: Row) -> None:
    """Computes and stores the results of a chunk, and releases its stage."""
    cta, stage, first = rows.cta, rows.stage(wave, chunk), rows.cta.start_of(chunk)
    values = cta.share_of_stage(row, first, stage)
    rows.pipeline.consumer_release(stage)
    cta.store_share(row, first, values)
