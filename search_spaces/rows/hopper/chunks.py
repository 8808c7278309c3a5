"""Rows in chunks: a block, or a cluster, keeps a row in SMEM and registers, or streams rows through a pipeline.

**SMEM-resident rows.** A block or a cluster loads all of a row at once. Several blocks share a core, each at its own
phase, so that one computes while others load:

    producer (a thread of warpgroup 0)   | consumers (all warpgroups)
    -------------------------------------|--------------------------------------------------------------
    TMA of all chunks for SMEM           | load the register-cached chunks, and the row's ends
                                         | first stage: these; then each chunk in SMEM as it arrives
                                         | all-reduce across the CTAs of the cluster: arrive, wait
                                         | further stages: the same chunks, and another all-reduce
                                         | compute and store the results, chunk by chunk; then the ends

**Persistent pipeline.** A CTA or a cluster takes row after row, and applies one while it reduces another. Three
successive rows r - 1, r and r + 1 of one CTA, with chunks c and a prefetch distance of 1:

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
import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Generic, TypeVar

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl

from search_spaces.hopper import BARRIER_BYTES, MAX_CLUSTER, SMEM_ALIGNMENT, WARPS
from search_spaces.hopper.synchronization import Pipeline
from search_spaces.jax_compat import plgpu
from search_spaces.rows.hopper.partition import LAYOUT, End, RowPartition, Rows, RowStart, Scratch
from search_spaces.rows.hopper.registers import BUFFERS, COMPILER_PARAMS
from search_spaces.rows.hopper.thread_layout import CLUSTER_RANK, REDUCTION_BYTES, PartialsBuffer, ThreadLayout
from search_spaces.rows.program import Program, Values, narrowed, within
from search_spaces.rows.stages import Stage, Statistics, with_scalars
from search_spaces.space import round_up

Plan = TypeVar("Plan", bound=RowPartition)


def row_inputs(program: Program) -> tuple[int, ...]:
    """Returns the inputs that are rows, each with chunks of its own."""
    found = [x for x, read in enumerate(program.inputs) if program.operands[read.operand].kind == "row"]
    return tuple(found)


def chunk_bytes(program: Program) -> int:
    """Returns the bytes of one element of all inputs that are rows."""
    return sum(jnp.dtype(program.operands[program.inputs[x].operand].dtype).itemsize for x in row_inputs(program))


def statistics(program: Program) -> int:
    """Returns the most statistics of a stage."""
    return max(Stage(program, number).count for number in range(len(program.stages)))


def _stage_arrays(program: Program, stages: int, chunk: int) -> tuple[Any, ...]:
    dtypes = [program.operands[program.inputs[x].operand].dtype for x in row_inputs(program)]
    return tuple(plgpu.SMEM((stages, chunk), jnp.dtype(dtype)) for dtype in dtypes)


def _stages_bytes(program: Program, stages: Any, chunk: Any) -> Any:
    dtypes = [program.operands[program.inputs[x].operand].dtype for x in row_inputs(program)]
    return sum(round_up(stages * chunk * jnp.dtype(dtype).itemsize, SMEM_ALIGNMENT) for dtype in dtypes)


@dataclasses.dataclass(frozen=True)
class Row:
    """A row that a CTA computes.

    Attributes:
      index: its index.
      start: where it and its lines start, in rows without gaps.
      scalars: the scalars known so far.
    """

    index: Any
    start: RowStart
    scalars: Mapping[int, jax.Array]


@dataclasses.dataclass(frozen=True)
class Cta(Generic[Plan]):
    """The values that one warpgroup of a CTA works with.

    Attributes:
      plan: the division of rows.
      program: the function of one row.
      buffer: the all-reduce of the cluster.
      refs: references to all operands: rows flat, shared vectors as `RowPartition.aligned_copies`.
      outs: references to all results, rows flat.
      mailbox: reference to the interpreter's substitute for DSMEM, or None.
      warpgroup: index of the warpgroup.
      starts: element offsets in each chunk at which its fragments start.
      share: the first of these offsets.
      start_of, overlap_of: see `RowPartition.chunks_of_rank`.
      scratch: SMEM.
    """

    plan: Plan
    program: Program
    buffer: PartialsBuffer
    refs: Sequence[Any]
    outs: Sequence[Any]
    mailbox: Any
    warpgroup: Any
    starts: list[Any]
    share: Any
    start_of: Callable[[Any], Any]
    overlap_of: Callable[[int], Any]
    scratch: Scratch

    def rows(self, row: Any) -> Rows:
        return Rows(self.program, self.refs, row, row_inputs(self.program))

    def row(self, index: Any) -> Row:
        """Returns a row with the scalars that it has from the start."""
        found = {}
        for number, read in enumerate(self.program.inputs):
            kind = self.program.operands[read.operand].kind
            if kind in ("scalar", "number"):
                element: jax.Array = self.refs[read.operand][index if kind == "scalar" else 0]
                found[number] = element.astype(within(str(element.dtype)))
        return Row(index, self.plan.row_start(index), with_scalars(self.program, 0, found))

    def copy(self, row: Any, first: Any, stage: Any) -> None:
        """Starts the TMA bulk copies of a chunk into a stage; `first` is its index in rows without gaps."""
        rows = self.rows(row)
        for value, stages in zip(rows.values, self.scratch.stages, strict=True):
            ref, index = rows.at(value, first)
            plgpu.copy_gmem_to_smem(
                ref.at[pl.ds(index, self.plan.chunk)],
                stages.at[stage],
                self.scratch.full.at[stage],
                oob_mode=plgpu.OOBFillMode.PROMISE_IN_BOUNDS,  # one run of bytes: a copy of any length
            )

    def values(
        self, row: Row, offset: Any, layout: Any, loaded: Callable[[int], jax.Array], columns: Callable[[], jax.Array]
    ) -> Values:
        """Returns the values of some elements.

        Args:
          offset: column of the first of them.
          loaded: returns an input that is a row.
          columns: returns the column of each element relative to the first.
        """

        def load(value: int) -> jax.Array:
            if value >= len(self.program.inputs):
                return columns() + offset
            read = self.program.inputs[value]
            if self.program.operands[read.operand].kind == "row":
                fragment = loaded(value)
            else:
                at = read.part * self.plan.columns + offset
                fragment = self._load_shared(layout, self.refs[read.operand], row, at)
            return fragment.astype(within(str(fragment.dtype)))

        def broadcast(scalar: jax.Array) -> jax.Array:
            return lax.broadcast_in_dim(scalar, layout.shape, ())

        return Values(self.program, row.scalars, load, broadcast)

    def _load_shared(self, layout: Any, ref: Any, row: Row, column: Any) -> jax.Array:
        if layout is LAYOUT:  # the ends of a row: one element each
            return layout.load_flat(ref, column)  # type: ignore[no-any-return]
        at = self.plan.aligned_copy(row.start) + column - (row.start.lines - row.start.row)
        loaded: jax.Array = layout.load_flat(ref, at) if isinstance(layout, ThreadLayout) else layout.load(ref, at)
        return loaded

    def fragments(self, row: Row, first: Any, loaded: Callable[[int, int], jax.Array]) -> list[Values]:
        """Returns this warpgroup's fragments of a chunk, which starts at `first` of the row's lines."""
        layout = self.plan.layout

        def columns() -> jax.Array:
            return layout.iota(0) * layout.columns + layout.iota(1)

        begin = row.start.lines - row.start.row + first
        return [
            self.values(row, begin + at, layout, functools.partial(loaded, number), columns)
            for number, at in enumerate(self.starts)
        ]

    def in_stage(self, row: Row, first: Any, stage: Any) -> list[Values]:
        """Returns this warpgroup's fragments of the chunk in a stage."""
        stages = dict(zip(row_inputs(self.program), self.scratch.stages, strict=True))
        layout = self.plan.layout
        return self.fragments(
            row, first, lambda number, value: layout.load_flat(stages[value].at[stage], self.starts[number])
        )

    def share_of_stage(self, row: Row, first: Any, stage: Any) -> Values:
        """Returns this warpgroup's share of the chunk in a stage as one array."""
        stages = dict(zip(row_inputs(self.program), self.scratch.stages, strict=True))
        layout = self.plan.chunk_layout
        loaded = {value: layout.load(ref.at[stage], self.share) for value, ref in stages.items()}
        offset = row.start.lines - row.start.row + first + self.share
        return self.values(row, offset, layout, loaded.__getitem__, lambda: layout.iota(0))

    def update(self, stage: Stage, found: Statistics, fragments: Sequence[Values], overlap: Any) -> Statistics:
        """Adds this warpgroup's fragments of a chunk, except the first `overlap` elements, counted in another chunk."""
        masks = self.plan.masks(self.starts, overlap)
        return stage.update(found, list(zip(fragments, masks, strict=True)))

    def init(self, stage: Stage) -> Statistics:
        return stage.init(self.plan.layout.full)

    def end_values(self, row: Row, end: End) -> Values:
        def columns() -> jax.Array:
            return LAYOUT.iota(0) * LAYOUT.columns + LAYOUT.iota(1)

        return self.values(row, end.start - row.start.row, LAYOUT, end.loaded.__getitem__, columns)

    def arrive(self, stage: Stage, found: Statistics, ends: list[End], row: Row, number: Any) -> tuple[Any, Any]:
        """Starts the all-reduce of a row in the buffer of this number; returns the argument of `wait`."""
        many = len(self.program.stages)
        partials = (
            self.scratch.partials.at[number]
            if self.mailbox is None
            else self.mailbox.at[row.index * many + stage.number]
        )
        barrier = None if self.scratch.arrived is None else self.scratch.arrived.at[0]
        of_warps = stage.reduce(found, self.plan.layout)
        if ends:
            each = [(self.end_values(row, end), end.mask()) for end in ends]
            of_ends = stage.update(stage.init(LAYOUT.full), each)
            of_warps = stage.combine(of_warps, stage.reduce(of_ends, LAYOUT))
        self.buffer.arrive(of_warps, self.warpgroup, partials, barrier)
        return partials, barrier

    def wait(self, stage: Stage, row: Row, arrival: tuple[Any, Any]) -> Row:
        """Finishes the all-reduce; returns the row with the scalars that follow."""
        found = self.buffer.wait(stage, *arrival)
        return dataclasses.replace(row, scalars=stage.finish(found, dict(row.scalars)))

    def store(self, row: Row, index: Any, values: Values, store: Callable[[Any, Any, jax.Array], None]) -> None:
        """Stores the results of some elements, the first of which is at `index` in rows without gaps."""
        for result, ref in zip(self.program.results, self.outs, strict=True):
            for part, atom in enumerate(result.values if result.kind == "row" else ()):
                parts = len(result.values)
                shift = 0 if parts == 1 else (row.index * (parts - 1) + part) * self.program.columns
                store(ref, index + shift, narrowed(values, atom, result.dtype))

    def store_fragments(self, row: Row, first: Any, fragments: Sequence[Values]) -> None:
        for at, values in zip(self.starts, fragments, strict=True):
            self.store(row, row.start.lines + first + at, values, self.plan.layout.store_flat)

    def store_share(self, row: Row, first: Any, values: Values) -> None:
        self.store(row, row.start.lines + first + self.share, values, self.plan.chunk_layout.store)

    def finish(self, row: Row, ends: list[End]) -> None:
        """Stores the results of the ends of a row, and those of the row as a whole."""
        for end in ends:

            @pl.when(end.exists)
            def store(end: End = end) -> None:
                self.store(row, end.start, self.end_values(row, end), LAYOUT.store_flat)

        scalars = [(x, ref) for x, ref in zip(self.program.results, self.outs, strict=True) if x.kind == "scalar"]
        if not scalars:
            return
        rank = lax.axis_index(CLUSTER_RANK) if self.plan.cluster > 1 else 0

        @pl.when((self.warpgroup == 0) & (rank == 0))
        def store_scalars() -> None:
            known = Values(self.program, row.scalars, _no_load, lambda x: x)
            for result, ref in scalars:
                ThreadLayout(WARPS, 1).store_scalars(ref, row.index, jnp.asarray(known[result.values[0]]))


def _no_load(value: int) -> jax.Array:
    raise AssertionError(f"value {value} is no scalar")


def launch(
    run: Callable[[Cta[Plan]], None],
    program: Program,
    plan: Plan,
    results: Sequence[jax.ShapeDtypeStruct],
    arrays: Sequence[jax.Array],
    **grid: int,
) -> list[jax.Array]:
    """Returns the results of a kernel.

    Args:
      run: the code of each warpgroup of a CTA.
      grid: number of CTAs, or of clusters, by the name of their axis.
    """
    buffer = plan.partials(statistics(program))
    rows = next(x.shape[0] for x, o in zip(arrays, program.operands, strict=True) if o.kind == "row")

    def kernel(*refs: Any) -> None:
        operands, outs, mailbox = (
            refs[: len(arrays)],
            refs[len(arrays) : len(arrays) + len(results)],
            refs[len(arrays) + len(results) :],
        )
        warpgroup = lax.axis_index("warpgroup")
        start_of, overlap_of = plan.chunks_of_rank()
        cta = functools.partial(
            Cta,
            plan=plan,
            program=program,
            buffer=buffer,
            refs=operands,
            outs=outs,
            mailbox=mailbox[0] if mailbox else None,
            warpgroup=warpgroup,
            starts=plan.fragment_starts(warpgroup),
            share=plan.share(warpgroup),
            start_of=start_of,
            overlap_of=overlap_of,
        )
        pl.run_scoped(lambda scratch: run(cta(scratch=scratch)), plan.scratch(program), collective_axes="warpgroup")

    def prepared(x: jax.Array, kind: str) -> jax.Array:
        return plan.aligned_copies(x) if kind == "shared" else x.reshape(-1)

    in_cluster = {"cluster": (plan.cluster,), "cluster_names": (CLUSTER_RANK,)} if plan.cluster > 1 else {}
    flat = [jax.ShapeDtypeStruct((result.size,), result.dtype) for result in results]
    made = plgpu.kernel(
        kernel,
        out_type=(*flat, *buffer.mailbox(rows * len(program.stages))),
        grid=tuple(grid.values()),
        grid_names=tuple(grid),
        num_threads=plan.warpgroups,
        thread_name="warpgroup",
        compiler_params=COMPILER_PARAMS,
        **in_cluster,
    )(*(prepared(x, o.kind) for x, o in zip(arrays, program.operands, strict=True)))
    return [x.reshape(result.shape) for x, result in zip(made, results, strict=False)]  # without a mailbox


# ------------------------------------------------------------------------------
# SMEM-resident rows. Each stage is filled once, so there are no empty barriers.


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

    def smem_bytes(self, program: Program) -> Any:
        barriers = (self.stages + (self.cluster == 1)) * BARRIER_BYTES
        buffers = self.partials(statistics(program)).smem_bytes(len(program.stages))
        return _stages_bytes(program, self.stages, self.chunk) + buffers + REDUCTION_BYTES + barriers

    def scratch(self, program: Program) -> Scratch:
        stages, buffer = int(self.stages), self.partials(statistics(program))
        return Scratch(
            arrived=buffer.barrier(),
            full=plgpu.Barrier(num_arrivals=len(row_inputs(program)), num_barriers=stages) if stages else None,
            empty=None,
            stages=_stage_arrays(program, stages, self.chunk) if stages else None,
            partials=buffer.scratch(len(program.stages)),
        )


def smem_resident(
    program: Program,
    plan: SmemResident,
    results: Sequence[jax.ShapeDtypeStruct],
    arrays: Sequence[jax.Array],
    rows: int,
) -> list[jax.Array]:
    """Runs the kernel, with a CTA for each part of a row."""
    return launch(_one_row, program, plan, results, arrays, row=rows)


def _one_row(cta: Cta[SmemResident]) -> None:
    """Processes one row, from its first load to its last store."""
    plan = cta.plan
    row = cta.row(lax.axis_index("row"))
    stages = int(plan.stages)

    def copy(stage: Any, _: None) -> None:
        cta.copy(row.index, row.start.lines + cta.start_of(stage + plan.register_chunks), stage)

    if stages:

        @pl.when(cta.warpgroup == 0)
        def produce() -> None:
            lax.fori_loop(0, stages, copy, None)

    rows = cta.rows(row.index)
    kept = [
        [
            {
                v: plan.layout.load_flat(*rows.at(v, row.start.lines + cta.start_of(jnp.int32(chunk)) + at))
                for v in rows.values
            }
            for at in cta.starts
        ]
        for chunk in range(plan.register_chunks)
    ]
    ends = plan.load_ends(rows, row.start, cta.warpgroup)

    def in_registers(row: Row, chunk: int) -> list[Values]:
        return cta.fragments(row, cta.start_of(jnp.int32(chunk)), lambda number, value: kept[chunk][number][value])

    for number in range(len(cta.program.stages)):
        stage = Stage(cta.program, number)
        found = cta.init(stage)
        for chunk in range(len(kept)):
            found = cta.update(stage, found, in_registers(row, chunk), cta.overlap_of(chunk))
        found = _reduce_chunks(cta, row, stage, found)
        row = cta.wait(stage, row, cta.arrive(stage, found, ends, row, number))

    for chunk in range(len(kept)):
        cta.store_fragments(row, cta.start_of(jnp.int32(chunk)), in_registers(row, chunk))

    def apply(stage: Any, _: None) -> None:
        first = cta.start_of(stage + plan.register_chunks)
        cta.store_share(row, first, cta.share_of_stage(row, first, stage))

    if stages:
        lax.fori_loop(0, stages, apply, None)
    cta.finish(row, ends)


def _reduce_chunks(cta: Cta[SmemResident], row: Row, stage: Stage, found: Statistics) -> Statistics:
    """Adds the chunks in SMEM to the statistics."""
    plan, stages = cta.plan, int(cta.plan.stages)

    def update(place: Any, found: Statistics, *, overlap: Any = 0) -> Statistics:
        if stage.number == 0:
            plgpu.barrier_wait(cta.scratch.full.at[place])
        fragments = cta.in_stage(row, cta.start_of(place + plan.register_chunks), place)
        return cta.update(stage, found, fragments, overlap)

    if not stages:
        return found
    first = 0
    if plan.part_overlap and not plan.register_chunks and stages > 1:
        found, first = update(jnp.int32(0), found, overlap=cta.overlap_of(0)), 1
    found = lax.fori_loop(first, stages - 1, update, found)
    return update(jnp.int32(stages - 1), found, overlap=cta.overlap_of(int(plan.chunks) - 1))


# ------------------------------------------------------------------------------
# The persistent pipeline, of programs with one stage.


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

    def smem_bytes(self, program: Program) -> Any:
        barriers = (2 * self.stages + (self.cluster == 1)) * BARRIER_BYTES
        buffers = self.partials(statistics(program)).smem_bytes(BUFFERS)
        return _stages_bytes(program, self.stages, self.chunk) + buffers + REDUCTION_BYTES + barriers

    def scratch(self, program: Program) -> Scratch:
        buffer = self.partials(statistics(program))
        return Scratch(
            arrived=buffer.barrier(),
            full=plgpu.Barrier(num_arrivals=len(row_inputs(program)), num_barriers=self.stages),
            empty=plgpu.Barrier(num_arrivals=self.warpgroups, num_barriers=self.stages),
            stages=_stage_arrays(program, self.stages, self.chunk),
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
    program: Program,
    plan: PersistentPipeline,
    cores: int,
    results: Sequence[jax.ShapeDtypeStruct],
    arrays: Sequence[jax.Array],
    rows: int,
) -> list[jax.Array]:
    """Runs the kernel. Persistent CTAs, or clusters of them, take the rows in turn, with a fixed stride.

    All should fit the chip at once. If they do not, the last ones start when the first have ended.
    """
    run = functools.partial(_rows, of_array=rows)
    return launch(run, program, plan, results, arrays, persistent_cta=plan.persistent_ctas(cores, rows))


@dataclasses.dataclass(frozen=True)
class _Waves:
    """The rows of a persistent CTA, one per wave, and the steps of its pipeline, one per chunk of these rows.

    Attributes:
      cta: the values that its warpgroups share.
      first, stride: first row of the array, and distance to the next.
      waves: number of rows of this CTA.
      pipeline: pipeline of the CTA's stages.
    """

    cta: Cta[PersistentPipeline]
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


def _rows(cta: Cta[PersistentPipeline], of_array: int) -> None:
    """Processes all rows of a persistent CTA."""
    first, stride = lax.axis_index("persistent_cta"), lax.axis_size("persistent_cta")
    waves = lax.div(of_array - 1 - first + stride, stride)
    pipeline = Pipeline(cta.plan.stages, 1, cta.scratch.full, cta.scratch.empty)
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
    ends = plan.load_ends(cta.rows(row.index), row.start, cta.warpgroup)
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
        first = lax.min(rows.waves * rows.chunks, rows.cta.plan.stages)
        lax.fori_loop(0, first, lambda load, _: _copy(rows, load), None)


def _produce(rows: _Waves, wave: Any, chunk: Any) -> None:
    """Refills the stage that was applied in the previous step of the pipeline."""
    cta, plan = rows.cta, rows.cta.plan
    load = wave * rows.chunks + chunk - (1 + rows.chunks + plan.prefetch) + plan.stages

    @pl.when((cta.warpgroup == 0) & (load >= plan.stages) & (load < rows.waves * rows.chunks))
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
