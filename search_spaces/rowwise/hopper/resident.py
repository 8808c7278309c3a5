"""Resident rows: a block loads its rows, or parts of a row, into registers or SMEM at once, and reduces them."""

from __future__ import annotations

import dataclasses
import functools
import itertools
from collections.abc import Callable, Sequence
from typing import Any, Generic, TypeVar

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl

from search_spaces.hopper import BARRIER_BYTES, SMEM_ALIGNMENT, WARPS
from search_spaces.jax_compat import plgpu
from search_spaces.rowwise import Reduction, Statistics
from search_spaces.rowwise.hopper.row_partition import End, RowPartition, RowStart, Scratch
from search_spaces.rowwise.hopper.thread_layout import CLUSTER_RANK, REDUCTION_BYTES, PartialsBuffer, ThreadLayout
from search_spaces.space import round_up

# Exponentials use the hardware unit. Exchanges between warps use explicit barriers, so stores need no automatic ones.
COMPILER_PARAMS = plgpu.CompilerParams(
    lowering_semantics=plgpu.LoweringSemantics.Warpgroup, approx_math=True, unsafe_no_auto_barriers=True
)

# Maximum elements of a row per thread: the number of its registers. Where no other residency takes longer rows, a
# search should have no schedules that spill: one with 153 elements does, and norms of sums with 96 take all registers
# (ptxas, sm_80).
MOST_ELEMENTS = 256
MOST_ELEMENTS_BEFORE_HOPPER = 96


@dataclasses.dataclass(frozen=True)
class RegisterResident:
    """The layout of rows over the threads of a block of one warpgroup; fields may be `Columns` of schedules.

    Attributes:
      columns: columns of a row.
      warps: warps that share a row: 1 or 4.
      vector: elements of one access of one thread.
      rows: rows of which each thread has a part.
    """

    columns: int
    warps: Any
    vector: Any
    rows: Any

    @classmethod
    def of(cls, columns: int, s: Any) -> RegisterResident:
        """Returns the layout of a `RowSchedule`, or of `Columns` of them, for rows of `columns` columns."""
        return cls(columns, s.warps, s.vector, s.rows)

    @property
    def layout(self) -> ThreadLayout:
        return ThreadLayout(self.warps, self.vector)

    @property
    def block_rows(self) -> Any:
        return self.layout.rows * self.rows

    @property
    def accesses(self) -> Any:
        """Accesses of a thread to each of its rows."""
        return -(-self.columns // self.layout.columns)

    @property
    def elements(self) -> Any:
        """Elements that a thread has in registers."""
        return self.rows * self.accesses * self.vector


def register_resident(
    reduction: Reduction,
    plan: RegisterResident,
    results: Sequence[jax.ShapeDtypeStruct],
    by_row: Sequence[jax.Array],
    shared: Sequence[jax.Array],
) -> list[jax.Array]:
    """Runs the kernel, which issues all loads of a block before it computes. A row that is a result is stored first.

    Rows may have any number and any length of at least one fragment. The last block starts early enough that its last
    row is the last of the array, as does the last fragment of a row. Overlapping elements are stored twice, with the
    same bits.
    """
    (total_rows, columns), layout, block_rows = results[0].shape, plan.layout, plan.block_rows
    starts = [min(start, columns - layout.columns) for start in range(0, columns, layout.columns)]
    overlap = len(starts) * layout.columns - columns

    def kernel(*refs: Any) -> None:
        rest = iter(refs)
        xs, weights, (out, *row_out) = ([*itertools.islice(rest, len(of))] for of in (by_row, shared, results))
        first = lax.min(lax.axis_index("block") * block_rows, total_rows - block_rows)
        row_of = [first + step * layout.rows for step in range(plan.rows)]
        loaded = [
            [reduction.prologue(*(layout.load_narrow(x, row, at) for x in xs)).astype(jnp.float32) for at in starts]
            for row in row_of
        ]
        others = [layout.load_shared(weights[0], start) for start in starts] if weights else [None] * len(starts)
        for row, fragments in zip(row_of, loaded, strict=True):
            for start, fragment in zip(starts, fragments, strict=True):
                for ref in row_out:
                    layout.store(ref, row, start, fragment)
            masked = fragments
            if overlap:
                new = layout.iota(len(layout.shape) - 1) >= overlap
                masked = [*fragments[:-1], jnp.where(new, fragments[-1], reduction.identity)]
            normed = reduction.whole_row(fragments, masked, others, layout)
            for start, fragment in zip(starts, normed, strict=True):
                layout.store(out, row, start, fragment)

    made = plgpu.kernel(
        kernel,
        out_type=tuple(results),
        grid=(-(-total_rows // block_rows),),
        grid_names=("block",),
        compiler_params=COMPILER_PARAMS,
    )(*by_row, *shared)
    return list(made)


# ------------------------------------------------------------------------------
# Code shared by kernels on rows in chunks: the launch, and the values that one CTA works with.

Plan = TypeVar("Plan", bound=RowPartition)


@dataclasses.dataclass(frozen=True)
class Cta(Generic[Plan]):
    """The values that one warpgroup of a CTA works with.

    Attributes:
      plan: the division of rows.
      reduction: the formula.
      buffer: the all-reduce of the cluster.
      xs: flat references to all rows, one per row operand.
      out: flat reference to the results.
      row_out: flat reference to the reduced rows if these are a result; else empty.
      shared: reference to the aligned copies of the operand that all rows share, or None.
      mailbox: reference to the interpreter's substitute for DSMEM, or None.
      warpgroup: index of the warpgroup.
      starts: element offsets in each chunk at which its fragments start.
      share: the first of these offsets.
      start_of, overlap_of: see `RowPartition.chunks_of_rank`.
      scratch: SMEM.
    """

    plan: Plan
    reduction: Reduction
    buffer: PartialsBuffer
    xs: Sequence[Any]
    out: Any
    row_out: Sequence[Any]
    shared: Any
    mailbox: Any
    warpgroup: Any
    starts: list[Any]
    share: Any
    start_of: Callable[[Any], Any]
    overlap_of: Callable[[int], Any]
    scratch: Scratch

    def copy(self, first: Any, stage: Any) -> None:
        """Starts the TMA bulk copies of a chunk into a stage of each operand; `first` is an element of the array."""
        for x, stages in zip(self.xs, self.scratch.stages, strict=True):
            plgpu.copy_gmem_to_smem(
                x.at[pl.ds(first, self.plan.chunk)],
                stages.at[stage],
                self.scratch.full.at[stage],
                oob_mode=plgpu.OOBFillMode.PROMISE_IN_BOUNDS,  # one run of bytes: a copy of any length
            )

    def init(self) -> Statistics:
        return tuple(self.plan.layout.full(value) for value in self.reduction.init)

    def load_narrow(self, start: Any) -> jax.Array:
        """Loads a fragment of the reduced row from device memory, in its dtype there."""
        return self.reduction.prologue(*(self.plan.layout.load_flat_narrow(x, start) for x in self.xs))

    def load(self, stage: Any) -> list[jax.Array]:
        """Returns this warpgroup's fragments of the chunk in a stage."""
        layout, stages = self.plan.layout, self.scratch.stages
        return [
            self.reduction.prologue(*(layout.load_flat_narrow(each.at[stage], at) for each in stages)).astype(
                jnp.float32
            )
            for at in self.starts
        ]

    def load_share(self, stage: Any) -> jax.Array:
        """Returns this warpgroup's share of the chunk in a stage as one array."""
        layout, stages = self.plan.chunk_layout, self.scratch.stages
        row = self.reduction.prologue(*(layout.load_narrow(each.at[stage], self.share) for each in stages))
        return row.astype(jnp.float32)

    def store_row(self, first: Any, fragments: Sequence[jax.Array]) -> None:
        """Stores fragments of a chunk of the reduced row if it is a result; `first` is the chunk's first element."""
        for ref in self.row_out:
            for at, fragment in zip(self.starts, fragments, strict=True):
                self.plan.layout.store_flat(ref, first + at, fragment)

    def update(self, statistics: Statistics, fragments: Sequence[jax.Array], overlap: Any) -> Statistics:
        """Adds this warpgroup's fragments of a chunk, except the first `overlap` elements, counted in another chunk."""
        return self.reduction.update(statistics, self.plan.masked(self.reduction, self.starts, fragments, overlap))

    def arrive(self, statistics: Statistics, ends: list[End], row: Any, number: Any) -> tuple[Any, Any]:
        """Starts the all-reduce of a row in the buffer of this number; returns the argument of `wait`."""
        partials = self.scratch.partials.at[number] if self.mailbox is None else self.mailbox.at[row]
        barrier = None if self.scratch.arrived is None else self.scratch.arrived.at[0]
        of_warps = self.plan.of_warps(self.reduction, statistics, ends)
        self.buffer.arrive(of_warps, self.warpgroup, partials, barrier)
        return partials, barrier

    def wait(self, arrival: tuple[Any, Any]) -> Statistics:
        """Finishes the all-reduce; returns the values that `Reduction.apply` needs."""
        return self.buffer.wait(self.reduction, *arrival)

    def apply_ends(self, ends: list[End], start: RowStart, final: Statistics) -> None:
        self.plan.ends.apply(self.reduction, ends, start, self.shared, final, self.out, self.row_out)


def launch(
    run: Callable[[Cta[Plan]], None],
    reduction: Reduction,
    plan: Plan,
    results: Sequence[jax.ShapeDtypeStruct],
    by_row: Sequence[jax.Array],
    shared: Sequence[jax.Array],
    **grid: int,
) -> list[jax.Array]:
    """Returns the results of a kernel: the computed elements, and the reduced row if there are two results.

    Args:
      run: the code of each warpgroup of a CTA.
      grid: number of CTAs, or of clusters, by the name of their axis.
    """
    statistics = len(reduction.init)
    buffer = plan.partials(statistics)

    def kernel(*refs: Any) -> None:
        rest = iter(refs)
        xs, weights, outs = ([*itertools.islice(rest, len(of))] for of in (by_row, shared, results))
        mailbox = [*rest]
        warpgroup = lax.axis_index("warpgroup")
        start_of, overlap_of = plan.chunks_of_rank()
        cta = functools.partial(
            Cta,
            plan=plan,
            reduction=reduction,
            buffer=buffer,
            xs=xs,
            out=outs[0],
            row_out=outs[1:],
            shared=weights[0] if weights else None,
            mailbox=mailbox[0] if mailbox else None,
            warpgroup=warpgroup,
            starts=plan.fragment_starts(warpgroup),
            share=plan.share(warpgroup),
            start_of=start_of,
            overlap_of=overlap_of,
        )
        scratch = plan.scratch(xs[0].dtype, len(xs), statistics)
        pl.run_scoped(lambda scratch: run(cta(scratch=scratch)), scratch, collective_axes="warpgroup")

    in_cluster = {"cluster": (plan.cluster,), "cluster_names": (CLUSTER_RANK,)} if plan.cluster > 1 else {}
    flat = [jax.ShapeDtypeStruct((result.size,), result.dtype) for result in results]
    made = plgpu.kernel(
        kernel,
        out_type=(*flat, *buffer.mailbox(results[0].shape[0])),
        grid=tuple(grid.values()),
        grid_names=tuple(grid),
        num_threads=plan.warpgroups,
        thread_name="warpgroup",
        compiler_params=COMPILER_PARAMS,
        **in_cluster,
    )(*(x.reshape(-1) for x in by_row), *map(plan.aligned_copies, shared))
    return [x.reshape(result.shape) for x, result in zip(made, results, strict=False)]  # without a mailbox


# ------------------------------------------------------------------------------
# SMEM-resident rows: a block, or a cluster, loads all of a row at once into SMEM and registers.
#
# Several blocks share a core, each at its own phase, so that one computes while others load:
#
#     producer (a thread of warpgroup 0)   | consumers (all warpgroups)
#     -------------------------------------|--------------------------------------------------------------
#     TMA of all chunks for SMEM           | load the register-cached chunks, and the row's ends
#                                          | update with these; with each chunk in SMEM as its stage is full;
#                                      | store the row itself, if that is a result
#                                          | all-reduce across the CTAs of the cluster: arrive, wait
#                                          | apply and store, chunk by chunk; then the ends
#
# Each stage is filled once, so there are no empty barriers.


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
