"""Rows in chunks: a block, or a cluster, keeps a row in SMEM and registers.

A block or a cluster loads all of a row at once. Several blocks share a core, each at its own phase, so that one
computes while others load:

    producer (a thread of warpgroup 0)   | consumers (all warpgroups)
    -------------------------------------|--------------------------------------------------------------
    TMA of all chunks for SMEM           | load the register-cached chunks, and the row's ends
                                         | first stage: these; then each chunk in SMEM as it arrives
                                         | all-reduce across the CTAs of the cluster: arrive, wait
                                         | further stages: the same chunks, and another all-reduce
                                         | compute and store the results, chunk by chunk; then the ends
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl

from search_spaces.hopper import WARPS
from search_spaces.jax_compat import plgpu
from search_spaces.rows.hopper.partition import (
    LAYOUT,
    End,
    RowPartition,
    RowStart,
    Scratch,
)
from search_spaces.rows.hopper.registers import gpu_kernel
from search_spaces.rows.hopper.thread_layout import CLUSTER_RANK, PartialsBuffer, ThreadLayout
from search_spaces.rows.program import Program, Values, narrowed, within
from search_spaces.rows.stages import Stage, Statistics, with_scalars


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
class Cta:
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

    plan: RowPartition
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

    def at(self, row: Any, value: int, index: Any) -> tuple[Any, Any]:
        """Returns the reference of an input, and the index there of the element at `index` of rows without gaps."""
        read, columns = self.program.inputs[value], self.program.columns
        parts = self.program.operands[read.operand].parts
        return self.refs[read.operand], index + _part_offset(columns, row, parts, read.part)

    def load(self, layout: ThreadLayout, row: Any, index: Any) -> dict[int, jax.Array]:
        """Loads the fragment at `index` of rows without gaps, for each input that is a row."""
        return {x: layout.load_flat(*self.at(row, x, index)) for x in self.program.inputs_of("row")}

    def load_ends(self, row: Row) -> list[End]:
        return self.plan.load_ends(functools.partial(self.load, LAYOUT, row.index), row.start, self.warpgroup)

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
        for value, stages in zip(self.program.inputs_of("row"), self.scratch.stages, strict=True):
            ref, index = self.at(row, value, first)
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
            return layout.load_flat(ref, column)
        at = self.plan.aligned_copy(row.start) + column - (row.start.lines - row.start.row)
        loaded: jax.Array = layout.load_flat(ref, at) if isinstance(layout, ThreadLayout) else layout.load(ref, at)
        return loaded

    def fragments(self, row: Row, first: Any, loaded: Callable[[int, int], jax.Array]) -> list[Values]:
        """Returns this warpgroup's fragments of a chunk, which starts at `first` of the row's lines."""
        layout = self.plan.layout
        begin = row.start.lines - row.start.row + first
        return [
            self.values(row, begin + at, layout, functools.partial(loaded, number), layout.element)
            for number, at in enumerate(self.starts)
        ]

    def in_stage(self, row: Row, first: Any, stage: Any) -> list[Values]:
        """Returns this warpgroup's fragments of the chunk in a stage."""
        stages = dict(zip(self.program.inputs_of("row"), self.scratch.stages, strict=True))
        layout = self.plan.layout
        return self.fragments(
            row, first, lambda number, value: layout.load_flat(stages[value].at[stage], self.starts[number])
        )

    def share_of_stage(self, row: Row, first: Any, stage: Any) -> Values:
        """Returns this warpgroup's share of the chunk in a stage as one array."""
        stages = dict(zip(self.program.inputs_of("row"), self.scratch.stages, strict=True))
        layout = self.plan.chunk_layout
        loaded = {value: layout.load(ref.at[stage], self.share) for value, ref in stages.items()}
        offset = row.start.lines - row.start.row + first + self.share
        return self.values(row, offset, layout, loaded.__getitem__, lambda: layout.iota(0))

    def update(self, stage: Stage, found: Statistics, fragments: Sequence[Values], overlap: Any) -> Statistics:
        """Adds this warpgroup's fragments of a chunk, except the first `overlap` elements, counted in another chunk."""
        masks = self.plan.masks(self.starts, overlap)
        return stage.update(found, [(x.vector, mask) for x, mask in zip(fragments, masks, strict=True)])

    def init(self, stage: Stage) -> Statistics:
        return stage.init(self.plan.layout.full)

    def end_values(self, row: Row, end: End) -> Values:
        return self.values(row, end.start - row.start.row, LAYOUT, end.loaded.__getitem__, LAYOUT.element)

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
            each = [(self.end_values(row, end).vector, end.mask()) for end in ends]
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
                shift = _part_offset(self.program.columns, row.index, len(result.values), part)
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


def _part_offset(columns: int, row: Any, parts: int, part: int) -> Any:
    """Returns the distance of an element of a part of a row from its index in rows of a single part."""
    return 0 if parts == 1 else (row * (parts - 1) + part) * columns


def _no_load(value: int) -> jax.Array:
    raise AssertionError(f"value {value} is no scalar")


def launch(
    run: Callable[[Cta], None],
    program: Program,
    plan: RowPartition,
    results: Sequence[jax.ShapeDtypeStruct],
    arrays: Sequence[jax.Array],
    **grid: int,
) -> list[jax.Array]:
    """Returns the results of a kernel.

    Args:
      run: the code of each warpgroup of a CTA.
      grid: number of CTAs, or of clusters, by the name of their axis.
    """
    buffer = plan.partials(program)
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

    flat = [jax.ShapeDtypeStruct((result.size,), result.dtype) for result in results]
    made = gpu_kernel(
        kernel, [*flat, *buffer.mailbox(rows * len(program.stages))], grid, plan.warpgroups, plan.cluster
    )(*(prepared(x, o.kind) for x, o in zip(arrays, program.operands, strict=True)))
    return [x.reshape(result.shape) for x, result in zip(made, results, strict=False)]  # without a mailbox


# ------------------------------------------------------------------------------
# SMEM-resident rows.


def one_row(cta: Cta) -> None:
    """Processes one row, or a CTA's part of it, from its first load to its last store."""
    plan = cta.plan
    row = cta.row(lax.axis_index("row"))
    stages = int(plan.stages)

    def copy(stage: Any, _: None) -> None:
        cta.copy(row.index, row.start.lines + cta.start_of(stage + plan.register_chunks), stage)

    if stages:

        @pl.when(cta.warpgroup == 0)
        def produce() -> None:
            lax.fori_loop(0, stages, copy, None)

    kept = [
        [cta.load(plan.layout, row.index, row.start.lines + cta.start_of(jnp.int32(chunk)) + at) for at in cta.starts]
        for chunk in range(plan.register_chunks)
    ]
    ends = cta.load_ends(row)

    def in_registers(row: Row, chunk: int) -> list[Values]:
        return cta.fragments(row, cta.start_of(jnp.int32(chunk)), lambda number, value: kept[chunk][number][value])

    def in_memory(chunk: Any) -> list[Values]:
        first = cta.start_of(chunk)
        return cta.fragments(
            row,
            first,
            lambda n, v: plan.layout.load_flat(*cta.at(row.index, v, row.start.lines + first + cta.starts[n])),
        )

    for number in range(len(cta.program.stages)):
        stage = Stage(cta.program, number)
        found = cta.init(stage)
        for chunk in range(len(kept)):
            found = cta.update(stage, found, in_registers(row, chunk), cta.overlap_of(chunk))
        found = _reduce_chunks(cta, row, stage, found, in_memory)
        row = cta.wait(stage, row, cta.arrive(stage, found, ends, row, number))

    for chunk in range(len(kept)):
        cta.store_fragments(row, cta.start_of(jnp.int32(chunk)), in_registers(row, chunk))

    def apply_again(chunk: Any, _: None) -> None:
        cta.store_fragments(row, cta.start_of(chunk), in_memory(chunk))

    if plan.reread:
        lax.fori_loop(0, int(plan.chunks), apply_again, None)

    def apply(stage: Any, _: None) -> None:
        first = cta.start_of(stage + plan.register_chunks)
        cta.store_share(row, first, cta.share_of_stage(row, first, stage))

    if stages:
        lax.fori_loop(0, stages, apply, None)
    cta.finish(row, ends)


def _reduce_chunks(
    cta: Cta, row: Row, stage: Stage, found: Statistics, in_memory: Callable[[Any], list[Values]]
) -> Statistics:
    """Adds the chunks in SMEM, or in memory, to the statistics."""
    plan = cta.plan
    stages = int(plan.chunks if plan.reread else plan.stages)

    def update(place: Any, found: Statistics, *, overlap: Any = 0) -> Statistics:
        if plan.reread:
            return cta.update(stage, found, in_memory(place), overlap)
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
