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
    ...                                  |
    wait until all stages are empty      | apply the chunks of the last row

SMEM always holds one row's worth of chunks of the two rows, loads and stores are always in flight, and the additional
stages are for loads ahead. With a prefetch distance of 0, consumers wait as soon as they have arrived. No warp is a
dedicated producer: a producer warpgroup was no faster (docs/experiments.md).

**Why not `plgpu.emit_pipeline_warp_specialized`.** It releases a block of an operand after its step. Here a chunk is
read in two steps, a row apart: it is reduced, and once the whole row is reduced, it is applied from the same stage.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl

from search_spaces.hopper import BARRIER_BYTES, MAX_CLUSTER, SMEM_ALIGNMENT, WARPS
from search_spaces.hopper.synchronization import Pipeline
from search_spaces.jax_compat import plgpu
from search_spaces.rowwise import Reduction, Statistics
from search_spaces.rowwise.hopper.resident import Cta, launch
from search_spaces.rowwise.hopper.row_partition import RowPartition, Scratch
from search_spaces.rowwise.hopper.thread_layout import REDUCTION_BYTES
from search_spaces.space import round_up

BUFFERS = 2  # of partials: a CTA may be one row ahead of the others of its cluster, and no more.


@dataclasses.dataclass(frozen=True)
class PersistentPipeline(RowPartition):
    """The parameters of the pipeline; fields may be `Columns` of schedules.

    A chunk of one row is applied just before a chunk of the next row is reduced, and the next chunk to load takes its
    stage. So there are stages for a row, for prefetched chunks, and for chunks in flight: more than `chunks` +
    `prefetch`, because otherwise no load would have a stage before it is waited for.

    Attributes:
      stages: chunks that a CTA has in SMEM at once.
      prefetch: chunks of the next row that are reduced before statistics of this one are needed.
    """

    stages: Any
    prefetch: Any

    @classmethod
    def of(cls, columns: int, s: Any) -> PersistentPipeline:
        """Returns the plan of a `RowSchedule`, or of `Columns` of them, for rows of `columns` columns."""
        return cls(columns, s.vector, s.warps // WARPS, s.accesses, s.cluster, s.stages, s.prefetch)

    def smem_bytes(self, itemsize: int, operands: int, statistics: int) -> Any:
        stages = operands * round_up(self.stages * self.chunk * itemsize, SMEM_ALIGNMENT)
        barriers = (2 * self.stages + (self.cluster == 1)) * BARRIER_BYTES
        return stages + self.partials(statistics).smem_bytes(BUFFERS) + REDUCTION_BYTES + barriers

    def scratch(self, dtype: Any, operands: int, statistics: int) -> Scratch:
        buffer = self.partials(statistics)
        return Scratch(
            arrived=buffer.barrier(),
            full=plgpu.Barrier(num_arrivals=operands, num_barriers=self.stages),
            empty=plgpu.Barrier(num_arrivals=self.warpgroups, num_barriers=self.stages),
            stages=tuple(plgpu.SMEM((self.stages, self.chunk), dtype) for _ in range(operands)),
            partials=buffer.scratch(BUFFERS),
        )

    def persistent_ctas(self, cores: int, rows: int) -> int:
        """Returns the number of CTAs or clusters that share the rows: the fewest with the minimum number of waves.

        Hopper's cores come in pairs, and pairs in groups that a cluster cannot span. The groups differ in size, so some
        cores are left over if clusters have more than two CTAs (docs/kernels/rows-hopper.md).
        """
        unit = 2 if self.cluster <= 2 else MAX_CLUSTER  # cores
        most = max(1, cores // unit * unit // self.cluster)
        waves = -(-rows // most)
        return -(-rows // waves)


def persistent_pipeline(
    reduction: Reduction,
    plan: PersistentPipeline,
    cores: int,
    results: Sequence[jax.ShapeDtypeStruct],
    by_row: Sequence[jax.Array],
    shared: Sequence[jax.Array],
) -> list[jax.Array]:
    """Runs the kernel. Persistent CTAs, or clusters of them, take the rows in turn, with a fixed stride.

    All should fit the chip at once. If they do not, the last ones start when the first have ended.
    """
    ctas = plan.persistent_ctas(cores, results[0].shape[0])
    return launch(_rows, reduction, plan, results, by_row, shared, persistent_cta=ctas)


@dataclasses.dataclass(frozen=True)
class _Rows:
    """The rows of a persistent CTA, one per wave, and the steps of its pipeline, one per chunk of these rows.

    Attributes:
      cta: the values that its warpgroups share.
      first, stride: first row of the array, and distance to the next.
      waves: number of rows of this CTA.
      init: initial statistics.
      pipeline: pipeline of the CTA's stages.
    """

    cta: Cta[PersistentPipeline]
    first: Any
    stride: Any
    waves: Any
    init: Statistics
    pipeline: Pipeline

    @property
    def chunks(self) -> int:
        return int(self.cta.plan.chunks)

    def row(self, wave: Any) -> Any:
        return self.first + wave * self.stride

    def stage(self, wave: Any, chunk: Any) -> Any:
        return self.pipeline.stage(wave * self.chunks + chunk)


def _rows(cta: Cta[PersistentPipeline]) -> None:
    """Processes all rows of a persistent CTA."""
    first, stride = lax.axis_index("persistent_cta"), lax.axis_size("persistent_cta")
    of_array = cta.out.shape[0] // cta.plan.columns
    waves = lax.div(of_array - 1 - first + stride, stride)
    pipeline = Pipeline(cta.plan.stages, 1, cta.scratch.full, cta.scratch.empty)
    rows = _Rows(cta, first, stride, waves, cta.init(), pipeline)
    _produce_first(rows)
    statistics = rows.init
    for chunk in range(cta.plan.prefetch):
        statistics = _reduce(rows, jnp.int32(0), jnp.int32(chunk), statistics, cta.overlap_of(chunk))
    begun = _wave(rows, jnp.int32(0), None, statistics)
    final, _ = lax.fori_loop(1, waves, lambda wave, carry: _wave(rows, wave, *carry), begun)
    lax.fori_loop(0, rows.chunks, lambda chunk, _: _apply(rows, waves - 1, chunk, final), None)
    _drain(rows)


def _wave(rows: _Rows, wave: Any, before: Statistics | None, statistics: Statistics) -> tuple[Statistics, Statistics]:
    """Reduces the rest of a row and prefetches the next one, while it applies the previous row.

    Args:
      before: final statistics of the previous row; None in the first wave.
      statistics: statistics of the chunks of this row that the previous wave prefetched.

    Returns:
      The same two values for the next wave.
    """
    cta, plan, chunks, prefetch = rows.cta, rows.cta.plan, rows.chunks, rows.cta.plan.prefetch

    def step(chunk: Any, statistics: Statistics, *, overlap: Any = 0) -> Statistics:
        _produce(rows, wave, chunk)
        if before is not None:
            _apply(rows, wave - 1, chunk - prefetch, before)
        return _reduce(rows, wave, chunk, statistics, overlap)

    start = plan.row_start(rows.row(wave))
    ends = plan.load_ends(cta.xs, start, cta.warpgroup)
    first = prefetch
    if not prefetch and plan.part_overlap:
        statistics, first = step(jnp.int32(0), statistics, overlap=cta.overlap_of(0)), 1
    statistics = lax.fori_loop(first, chunks - 1, step, statistics)
    statistics = step(jnp.int32(chunks - 1), statistics, overlap=cta.overlap_of(chunks - 1))
    arrival = cta.arrive(statistics, ends, rows.row(wave), lax.rem(wave, BUFFERS))
    prefetched = rows.init
    for chunk in range(prefetch):
        _produce(rows, wave + 1, chunk)
        if before is not None:
            _apply(rows, wave - 1, jnp.int32(chunks - prefetch + chunk), before)
        prefetched = _reduce(rows, wave + 1, jnp.int32(chunk), prefetched, cta.overlap_of(chunk))
    final = cta.wait(arrival)
    cta.apply_ends(ends, start, final)
    return final, prefetched


def _copy(rows: _Rows, load: Any) -> None:
    """Starts the copy of the chunk with this number, for all operands of the CTA."""
    cta = rows.cta
    stage, wave, chunk = rows.pipeline.stage(load), lax.div(load, rows.chunks), lax.rem(load, rows.chunks)
    cta.copy(cta.plan.row_start(rows.row(wave)).lines + cta.start_of(chunk), stage)


def _produce_first(rows: _Rows) -> None:
    """Fills all stages."""

    @pl.when(rows.cta.warpgroup == 0)
    def fill() -> None:
        first = lax.min(rows.waves * rows.chunks, rows.cta.plan.stages)
        lax.fori_loop(0, first, lambda load, _: _copy(rows, load), None)


def _produce(rows: _Rows, wave: Any, chunk: Any) -> None:
    """Refills the stage that was applied in the previous step of the pipeline."""
    cta, plan = rows.cta, rows.cta.plan
    load = wave * rows.chunks + chunk - (1 + rows.chunks + plan.prefetch) + plan.stages

    @pl.when((cta.warpgroup == 0) & (load >= plan.stages) & (load < rows.waves * rows.chunks))
    def refill() -> None:
        plgpu.barrier_wait(rows.pipeline.empty.at[rows.pipeline.stage(load)])
        plgpu.commit_smem()  # orders the reads before a write by TMA
        _copy(rows, load)


def _reduce(rows: _Rows, wave: Any, chunk: Any, statistics: Statistics, overlap: Any) -> Statistics:
    """Adds a chunk of a wave's row to the statistics, without its first `overlap` elements.

    Another chunk counts these elements.
    """
    cta, stage = rows.cta, rows.stage(wave, chunk)

    @pl.when(wave < rows.waves)  # Beyond the last row nothing is loaded, and the statistics are not used.
    def wait() -> None:
        rows.pipeline.consumer_wait(0, stage)

    return cta.update(statistics, cta.load(stage), overlap)


def _apply(rows: _Rows, wave: Any, chunk: Any, final: Statistics) -> None:
    """Computes and stores the results of a chunk, and releases its stage."""
    cta, plan, layout = rows.cta, rows.cta.plan, rows.cta.plan.chunk_layout
    stage, first, start = rows.stage(wave, chunk), cta.start_of(chunk) + cta.share, plan.row_start(rows.row(wave))
    elements = cta.load_share(stage)
    rows.pipeline.consumer_release(stage)
    shared = None if cta.shared is None else layout.load(cta.shared, plan.aligned_copy(start) + first)
    layout.store(cta.out, start.lines + first, cta.reduction.apply(elements, shared, final))
    for ref in cta.row_out:
        layout.store(ref, start.lines + first, elements)


def _drain(rows: _Rows) -> None:
    """Waits in the producer until all stages are empty, so that every arrival is matched by a wait."""

    @pl.when(rows.cta.warpgroup == 0)
    def drain() -> None:
        rows.pipeline.producer_tail(rows.waves * rows.chunks)
