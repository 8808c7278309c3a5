"""SMEM-resident rows: a block, or a cluster, loads all of a row at once into SMEM and registers.

Several blocks share a core, each at its own phase, so that one computes while others load:

    producer (a thread of warpgroup 0)   | consumers (all warpgroups)
    -------------------------------------|--------------------------------------------------------------
    TMA of all chunks for SMEM           | load the register-cached chunks, and the row's ends
                                         | update with these; with each chunk in SMEM as its stage is full;
                                     | store the row itself, if that is a result
                                         | all-reduce across the CTAs of the cluster: arrive, wait
                                         | apply and store, chunk by chunk; then the ends

Each stage is filled once, so there are no empty barriers.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl

from search_spaces.hopper.limits import BARRIER_BYTES, SMEM_ALIGNMENT, WARPS
from search_spaces.jax_compat import plgpu
from search_spaces.rowwise.hopper.chunked_row import Cta, launch
from search_spaces.rowwise.hopper.row_ends import RowStart
from search_spaces.rowwise.hopper.row_partition import RowPartition, Scratch
from search_spaces.rowwise.hopper.thread_layout import REDUCTION_BYTES
from search_spaces.rowwise.reduction import Reduction, Statistics
from search_spaces.space import round_up


@dataclasses.dataclass(frozen=True)
class SmemResident(RowPartition):
    """Where the chunks of a CTA's part of a row are kept; fields may be `Columns` of schedules.

    Attributes:
      register_chunks: chunks kept in registers, in their dtype in memory; the others are in SMEM.
    """

    register_chunks: Any

    @classmethod
    def of(cls, columns: int, s: Any) -> SmemResident:
        """Returns the plan of a `RowSchedule`, or of `Columns` of them, for rows of `columns` columns."""
        return cls(columns, s.vector, s.warps // WARPS, s.accesses, s.cluster, s.register_chunks)

    @property
    def stages(self) -> Any:
        """Chunks in SMEM."""
        return self.chunks - self.register_chunks

    def smem_bytes(self, itemsize: int, operands: int, statistics: int) -> Any:
        stages = operands * round_up(self.stages * self.chunk * itemsize, SMEM_ALIGNMENT)
        barriers = (self.stages + (self.cluster == 1)) * BARRIER_BYTES
        return stages + self.partials(statistics).smem_bytes(1) + REDUCTION_BYTES + barriers

    def scratch(self, dtype: Any, operands: int, statistics: int) -> Scratch:
        stages, buffer = int(self.stages), self.partials(statistics)
        return Scratch(
            arrived=buffer.barrier(),
            full=plgpu.Barrier(num_arrivals=operands, num_barriers=stages) if stages else None,
            empty=None,
            stages=tuple(plgpu.SMEM((stages, self.chunk), dtype) for _ in range(operands)) if stages else None,
            partials=buffer.scratch(1),
        )


def smem_resident(
    reduction: Reduction,
    plan: SmemResident,
    results: Sequence[jax.ShapeDtypeStruct],
    by_row: Sequence[jax.Array],
    shared: Sequence[jax.Array],
) -> list[jax.Array]:
    """Runs the kernel, with a CTA for each part of a row."""
    return launch(_row, reduction, plan, results, by_row, shared, row=results[0].shape[0])


def _row(cta: Cta[SmemResident]) -> None:
    """Processes one row, from its first load to its last store."""
    plan = cta.plan
    row = lax.axis_index("row")
    start = plan.row_start(row)
    _produce(cta, start)
    kept = [
        [cta.load_narrow(start.lines + cta.start_of(jnp.int32(chunk)) + at) for at in cta.starts]
        for chunk in range(plan.register_chunks)
    ]
    ends = plan.load_ends(cta.xs, start, cta.warpgroup)
    statistics = _reduce_stages(cta, start, _reduce_registers(cta, start, kept))
    final = cta.wait(cta.arrive(statistics, ends, row, 0))
    _apply(cta, start, kept, final)
    cta.apply_ends(ends, start, final)


def _produce(cta: Cta[SmemResident], start: RowStart) -> None:
    """Starts the copies of all chunks for SMEM."""
    plan = cta.plan
    if not plan.stages:
        return

    def copy(stage: Any, _: None) -> None:
        cta.copy(start.lines + cta.start_of(stage + plan.register_chunks), stage)

    @pl.when(cta.warpgroup == 0)
    def produce() -> None:
        lax.fori_loop(0, int(plan.stages), copy, None)


def _reduce_registers(cta: Cta[SmemResident], start: RowStart, kept: list[list[jax.Array]]) -> Statistics:
    """Returns the statistics of the register-cached chunks."""
    statistics = cta.init()
    for chunk, narrow in enumerate(kept):
        fragments = [fragment.astype(jnp.float32) for fragment in narrow]
        cta.store_row(start.lines + cta.start_of(jnp.int32(chunk)), fragments)
        statistics = cta.update(statistics, fragments, cta.overlap_of(chunk))
    return statistics


def _reduce_stages(cta: Cta[SmemResident], start: RowStart, statistics: Statistics) -> Statistics:
    """Adds the chunks in SMEM to the statistics."""
    plan, stages = cta.plan, int(cta.plan.stages)

    def update(stage: Any, statistics: Statistics, *, overlap: Any = 0) -> Statistics:
        plgpu.barrier_wait(cta.scratch.full.at[stage])
        fragments = cta.load(stage)
        cta.store_row(start.lines + cta.start_of(stage + plan.register_chunks), fragments)
        return cta.update(statistics, fragments, overlap)

    if not stages:
        return statistics
    first = 0
    if plan.part_overlap and not plan.register_chunks and stages > 1:
        statistics, first = update(jnp.int32(0), statistics, overlap=cta.overlap_of(0)), 1
    statistics = lax.fori_loop(first, stages - 1, update, statistics)
    return update(jnp.int32(stages - 1), statistics, overlap=cta.overlap_of(int(plan.chunks) - 1))


def _apply(cta: Cta[SmemResident], start: RowStart, kept: list[list[jax.Array]], final: Statistics) -> None:
    """Computes and stores the results of all chunks."""
    plan, layout, chunk_layout = cta.plan, cta.plan.layout, cta.plan.chunk_layout
    copy = plan.aligned_copy(start)

    def apply_registers(chunk: Any, fragments: list[jax.Array]) -> None:
        first = cta.start_of(chunk)
        shared: list[Any] = [None] * len(cta.starts)
        if cta.shared is not None:
            shared = [layout.load_flat(cta.shared, copy + first + at) for at in cta.starts]
        for at, fragment, other in zip(cta.starts, fragments, shared, strict=True):
            layout.store_flat(cta.out, start.lines + first + at, cta.reduction.apply(fragment, other, final))

    def apply_stage(stage: Any, _: None) -> None:
        first = cta.start_of(stage + plan.register_chunks) + cta.share
        shared = chunk_layout.load(cta.shared, copy + first) if cta.shared is not None else None
        elements = cta.load_share(stage)
        chunk_layout.store(cta.out, start.lines + first, cta.reduction.apply(elements, shared, final))

    for chunk, narrow in enumerate(kept):
        apply_registers(jnp.int32(chunk), [fragment.astype(jnp.float32) for fragment in narrow])
    if plan.stages:
        lax.fori_loop(0, int(plan.stages), apply_stage, None)
