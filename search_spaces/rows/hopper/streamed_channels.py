"""Rows of `group` adjacent channels at all positions of a sample: a cluster reads a sample once for each stage.

Each CTA has a part of the positions, which it streams through registers in chunks. The first stage reads the chunks
from device memory, and later ones from L2, each in the opposite order of the one before: the chunks read last are the
likeliest to be there. After each stage but the last, warps exchange their statistics through SMEM, and CTAs through
DSMEM. A CTA keeps at most a part of its chunks in SMEM, so that several CTAs share a core, each at its own
phase.
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
from search_spaces.jax_compat import interprets, load, load_run, plgpu, store, store_run
from search_spaces.rows.hopper.channel_layout import (
    ROWS,
    AdjacentChannels,
    ChannelLayout,
    ChannelPlan,
    SeveralParts,
    exchange,
    kept_inputs,
    opaque,
)
from search_spaces.rows.hopper.registers import gpu_kernel
from search_spaces.rows.hopper.thread_layout import CLUSTER_RANK
from search_spaces.rows.program import Program, Values, narrowed, within
from search_spaces.rows.stages import Stage, Statistics, most_statistics, with_scalars


@dataclasses.dataclass(frozen=True)
class Cta:
    """The values that one warpgroup of a CTA works with.

    Attributes:
      refs, outs: references to operands and results: rows flat, or ``[positions of all samples, blocks, *unit]``;
        shared vectors ``[blocks, *unit]``, or ``[positions]`` if that is their axis; scalars
        ``[samples * blocks, numbers]``.
      block, sample, warpgroup, rank: indices of the block of channels, and so on.
      chunks: chunks in SMEM, for each input of `kept_inputs`.
      partials, exchanged: numbers of each warp of the CTA, and of each CTA of the cluster.
      arrived: barriers at which the warpgroups of the CTA, and the CTAs in the interpreter, arrive.
    """

    plan: ChannelPlan
    program: Program
    refs: Sequence[Any]
    outs: Sequence[Any]
    block: Any
    sample: Any
    warpgroup: Any
    rank: Any
    chunks: Mapping[int, Any]
    partials: Any
    exchanged: Any
    arrived: Sequence[Any]

    @property
    def layout(self) -> ChannelLayout:
        return self.plan.layout

    @property
    def part(self) -> Any:
        """Index of the part of the positions."""
        return self.rank

    def run(self) -> None:
        scalars = self._first_scalars()
        of_channels = self.plan.shared_axis == "channels"
        shared = {x: self._shared(x) for x in self.program.inputs_of("shared") if of_channels}
        for number in range(len(self.program.stages)):
            stage = Stage(self.program, number)
            found = self._reduce(stage, scalars, shared, backwards=bool(number % 2))
            scalars = stage.finish(self._all_reduce(stage, found), scalars)
        self._store_scalars(scalars)
        if any(x.kind == "row" for x in self.program.results):
            self._apply(scalars, shared, backwards=bool(len(self.program.stages) % 2))

    def _apply(self, scalars: Any, shared: Any, *, backwards: bool) -> None:
        """Computes and stores results that are rows."""

        def apply(chunk: Any, _: tuple[()], *, kept: bool) -> tuple[()]:
            stage = len(self.program.stages)
            for position, values in self._chunk(chunk, scalars, shared, stage, kept=kept):
                for result, ref in zip(self.program.results, self.outs, strict=True):
                    if result.kind == "row":
                        self._store(ref, position, narrowed(values, result.values[0], result.dtype))
            return ()

        self._over(0, int(self.plan.chunks), apply, (), backwards=backwards)

    def _over(self, first: int, last: int, body: Callable[..., Any], carry: Any, *, backwards: bool) -> Any:
        """Runs ``body(chunk, carry, kept=...)`` for a range of chunks."""
        middle = min(max(first, int(self.plan.kept_chunks)), last)
        loops = [(first, middle, True), (middle, last, False)]
        for begin, end, kept in reversed(loops) if backwards else loops:

            def step(i: Any, carry: Any, begin: int = begin, end: int = end, kept: bool = kept) -> Any:
                return body(begin + end - 1 - i if backwards else i, carry, kept=kept)

            carry = lax.fori_loop(begin, opaque(end), step, carry) if end > begin else carry
        return carry

    def _first_scalars(self) -> dict[int, jax.Array]:
        found = {}
        for x in self.program.inputs_of("number"):
            found[x] = self.refs[self.program.inputs[x].operand][0]
        for x in self.program.inputs_of("scalar"):
            ref = self.refs[self.program.inputs[x].operand]
            found[x] = load(ref.at[self.sample * int(self.plan.blocks) + self.block], self.layout.of_numbers())
        found = {x: value.astype(within(str(value.dtype))) for x, value in found.items()}
        return with_scalars(self.program, 0, found)

    def _shared(self, value: int) -> jax.Array:
        """Loads this block's channels of a vector that all samples share, in its dtype in memory."""
        return load(self.refs[self.program.inputs[value].operand].at[self.block], self.layout.shared)

    def _of_positions(self, value: int, position: Any) -> jax.Array:
        """Loads a fragment's positions of a vector that all rows share, in its dtype in memory."""
        ref = self.refs[self.program.inputs[value].operand]
        return load_run(ref, position, self.layout.shape[: self.layout.axis], self.layout.of_positions)

    def _reduce(self, stage: Stage, scalars: Any, shared: Any, *, backwards: bool) -> Statistics:
        """Returns the statistics of this warpgroup's elements."""
        plan, chunks = self.plan, int(self.plan.chunks)
        chunk_overlap = chunks * int(plan.chunk) - int(plan.part)
        first = -(-int(plan.part_overlap) // int(plan.chunk))  # chunks with positions of another part
        last = max(first, chunks - (chunk_overlap > 0))

        def update(chunk: Any, found: Statistics, *, kept: bool, masked: bool = False) -> Statistics:
            each = self._chunk(chunk, scalars, shared, stage.number, kept=kept)
            return stage.update(found, [(v.vector, self._mask(chunk, at) if masked else None) for at, v in each])

        def loop(found: Statistics) -> Statistics:
            statistics: Statistics = self._over(first, last, update, found, backwards=backwards)
            return statistics

        def alone(chunk: int) -> Callable[[Statistics], Statistics]:
            return lambda found: update(jnp.int32(chunk), found, kept=chunk < plan.kept_chunks, masked=True)

        steps = [*map(alone, range(min(first, chunks))), loop, *map(alone, range(last, chunks))]
        found = stage.init(self.layout.full)
        for each in reversed(steps) if backwards else steps:
            found = each(found)
        return found

    def _mask(self, chunk: Any, position: Any) -> jax.Array:
        """Returns which elements of a fragment no other chunk, and no other part, counts."""
        plan = self.plan
        before = jnp.where(self.part == plan.parts - 1, int(plan.part_overlap), 0) if plan.part_overlap else 0
        begin = position - self._part_start()
        return self.layout.position() + begin >= lax.max(chunk * int(plan.chunk), jnp.int32(before))

    def _part_start(self) -> Any:
        return lax.min(self.part * int(self.plan.part), self.plan.positions - int(self.plan.part))

    def _chunk_start(self, chunk: Any) -> Any:
        """Returns the first position of a chunk in its sample."""
        return self._part_start() + lax.min(chunk * int(self.plan.chunk), int(self.plan.part) - int(self.plan.chunk))

    def _positions(self, chunk: Any) -> list[Any]:
        """Returns the first position of each fragment of this warpgroup in its sample."""
        start = self._chunk_start(chunk) + self.warpgroup * int(self.plan.fragment * self.plan.accesses)
        return [start + access * int(self.plan.fragment) for access in range(self.plan.accesses)]

    def _chunk(self, chunk: Any, scalars: Any, shared: Any, stage: int, *, kept: bool) -> list[tuple[Any, Values]]:
        """Loads a chunk for a stage; returns the first position of each fragment in its sample, and its values."""
        positions = self._positions(chunk)
        fragments = self._loaded(chunk, positions, stage, kept=kept)
        return [(at, self._values(at, each, scalars, shared)) for at, each in zip(positions, fragments, strict=True)]

    def _loaded(self, chunk: Any, positions: Sequence[Any], stage: int, *, kept: bool) -> list[dict[int, jax.Array]]:
        """Loads the fragments of the rows that a stage reads."""
        fragments = []
        for access, position in enumerate(positions):
            loaded = {}
            for x in self.program.inputs_of("row"):
                if x in self.program.reads[stage]:
                    in_smem = self._in_smem(x, chunk, access) if kept and stage else None
                    loaded[x] = self._load(x, position) if in_smem is None else load(in_smem, self.layout.layout)
            fragments.append(loaded)
        for access, loaded in enumerate(fragments if kept and not stage else ()):
            for x in self.chunks:
                store(self._in_smem(x, chunk, access), loaded[x])
        return fragments

    def _in_smem(self, value: int, chunk: Any, access: int) -> Any:
        """Returns where a fragment is in SMEM; None if the input is not kept. Each thread reads what it has written."""
        if value not in self.chunks:
            return None
        return self.chunks[value].at[chunk, self.warpgroup * self.plan.accesses + access]

    def _values(self, position: Any, loaded: Mapping[int, jax.Array], scalars: Any, shared: Any) -> Values:
        def value(x: int) -> jax.Array:
            if x >= len(self.program.inputs):
                return self._index(position)
            if x in loaded:
                return loaded[x].astype(within(str(loaded[x].dtype)))
            axes = tuple(range(self.layout.axis, len(self.layout.shape)))
            if x not in shared:
                axes = tuple(range(self.layout.axis))
            vector = shared[x] if x in shared else self._of_positions(x, position)
            return lax.broadcast_in_dim(vector.astype(within(str(vector.dtype))), self.layout.shape, axes)

        return Values(self.program, scalars, value, self.layout.broadcast)

    def _index(self, position: Any) -> jax.Array:
        """Returns the column of each element of its row."""
        layout = self.layout
        channel = plgpu.broadcasted_iota(jnp.int32, layout.shape, len(layout.shape) - 1, layout=layout.layout)
        if layout.splits_vector:
            channel = lax.rem(channel, layout.group)
        return (layout.position() + position) * layout.group + channel

    def _load(self, value: int, position: Any) -> jax.Array:
        ref, position = self.refs[self.program.inputs[value].operand], self.sample * self.plan.positions + position
        if self.plan.blocks == 1:
            return load_run(ref, position * self.plan.channels, self.layout.shape, self.layout.layout)
        return load(ref.at[pl.ds(position, WARPS), self.block], self.layout.layout)

    def _store(self, ref: Any, position: Any, fragment: jax.Array) -> None:
        position = self.sample * self.plan.positions + position
        if self.plan.blocks == 1:
            store_run(ref, position * self.plan.channels, fragment)
        else:
            store(ref.at[pl.ds(position, WARPS), self.block], fragment)

    def _store_scalars(self, scalars: dict[int, jax.Array]) -> None:
        results = [(x, ref) for x, ref in zip(self.program.results, self.outs, strict=True) if x.kind == "scalar"]
        if not results:
            return

        @pl.when((self.warpgroup == 0) & (self.rank == 0))
        def store_numbers() -> None:
            row = self.sample * int(self.plan.blocks) + self.block
            for result, ref in results:
                values = Values(self.program, scalars, scalars.__getitem__, lambda x: x)
                store(ref.at[row], jnp.asarray(values[result.values[0]]).astype(ref.dtype))

    # ------------------------------------------------------------------------------
    # All-reduce of a stage: lanes of each warp, warps of the CTA through SMEM, and CTAs of the cluster through DSMEM.

    def _all_reduce(self, stage: Stage, found: Statistics) -> Statistics:
        layout, plan, place = self.layout, self.plan, self._place(stage.number)
        of_warps = stage.reduce(found, layout)
        for number, numbers in enumerate(of_warps):
            store(self.partials.at[place, number, pl.ds(self.warpgroup * ROWS, WARPS)], numbers)
        plgpu.barrier_arrive(self.arrived[0].at[0])
        plgpu.barrier_wait(self.arrived[0].at[0])
        several = SeveralParts()
        parts = []
        for warpgroup in range(int(plan.warpgroups)):
            rows = [self.partials.at[place, i, pl.ds(warpgroup * ROWS, WARPS)] for i in range(stage.count)]
            parts.append(stage.reduce(tuple(load(x, layout.of_numbers(WARPS)) for x in rows), several))
        totals = functools.reduce(stage.combine, parts)
        if plan.cluster > 1:
            buffer = self._buffer(stage.number)
            exchange(layout, buffer, self.rank, totals, int(plan.cluster), self._wait_for_cluster)
            loaded = [load(buffer.at[i], layout.of_numbers(plan.cluster)) for i in range(stage.count)]
            totals = stage.reduce(tuple(loaded), several)
        if layout.splits_vector and layout.group > 1:
            totals = stage.reduce(totals, AdjacentChannels(layout))
        return totals

    def _place(self, stage: int) -> Any:
        """Returns the index of the buffers of a stage."""
        return stage

    def _buffer(self, stage: int) -> Any:
        if not interprets():
            return self.exchanged.at[self._place(stage)]
        many = self.sample * int(self.plan.blocks) + self.block
        return self.exchanged.at[many * len(self.program.stages) + stage]

    def _wait_for_cluster(self) -> None:
        plgpu.barrier_arrive(self.arrived[1].at[0])
        plgpu.barrier_wait(self.arrived[1].at[0])


def streamed_channels(
    program: Program, plan: ChannelPlan, results: Sequence[jax.ShapeDtypeStruct], arrays: Sequence[jax.Array]
) -> list[jax.Array]:
    """Runs the kernel, with a cluster for each sample and block of channels."""
    blocks, samples = int(plan.blocks), samples_of(program, arrays)

    def run(values: Mapping[str, Any]) -> None:
        Cta(**values, block=lax.axis_index("block"), sample=lax.axis_index("sample")).run()

    kept = [x for x in kept_inputs(program) if plan.kept_chunks]
    in_smem = (int(plan.kept_chunks), int(plan.warpgroups) * int(plan.accesses), *plan.layout.shape)
    return launch(
        run,
        program,
        plan,
        results,
        arrays,
        of_row=(-1,) if blocks == 1 else (samples * plan.positions, blocks, *plan.layout.unit),
        scratch={"chunks": {x: plgpu.SMEM(in_smem, arrays[program.inputs[x].operand].dtype) for x in kept}},
        grid={"block": blocks, "sample": samples},
    )


def samples_of(program: Program, arrays: Sequence[jax.Array]) -> int:
    return next(x.shape[0] for x, o in zip(arrays, program.operands, strict=True) if o.kind == "row")


def launch(
    run: Callable[[Mapping[str, Any]], None],
    program: Program,
    plan: ChannelPlan,
    results: Sequence[jax.ShapeDtypeStruct],
    arrays: Sequence[jax.Array],
    *,
    of_row: tuple[int, ...],
    scratch: Mapping[str, Any],
    grid: Mapping[str, int],
) -> list[jax.Array]:
    """Returns the results of a kernel.

    Args:
      run: the code of each warpgroup, for the fields of a `Cta` but its block and its sample.
      of_row: shape of rows in device memory.
      scratch: SMEM and barriers besides those of the all-reduce, by the name of the field.
      grid: number of CTAs, or of clusters, by the name of their axis.
    """
    numbers, cluster, warpgroups = int(plan.numbers), int(plan.cluster), int(plan.warpgroups)
    rows, stages = samples_of(program, arrays) * int(plan.blocks), len(program.stages)
    of_shared = (int(plan.blocks), *plan.layout.unit) if plan.shared_axis == "channels" else (-1,)
    shapes = {"row": of_row, "shared": of_shared, "scalar": (rows, numbers), "number": (1,)}

    def shape(x: Any, kind: str) -> tuple[int, ...]:
        return (x.size,) if shapes[kind] == (-1,) else shapes[kind]

    outs = [jax.ShapeDtypeStruct(shape(x, o.kind), x.dtype) for x, o in zip(results, program.results, strict=True)]
    in_memory = cluster > 1 and interprets()  # the interpreter has no DSMEM
    buffers, many = int(plan.buffers) * stages, most_statistics(program)
    if in_memory:
        outs.append(jax.ShapeDtypeStruct((rows * max(1, stages), many, cluster, numbers), jnp.float32))
    of_cluster = plgpu.ClusterBarrier(collective_axes=(CLUSTER_RANK,), num_arrivals=warpgroups, num_barriers=1)
    of_all_reduce = {
        "partials": plgpu.SMEM((buffers, many, ROWS * warpgroups, numbers), jnp.float32),
        "exchanged": plgpu.SMEM((buffers, many, cluster, numbers), jnp.float32)
        if cluster > 1 and not in_memory
        else None,
        "arrived": (
            plgpu.Barrier(num_arrivals=warpgroups, num_barriers=1),
            of_cluster if in_memory else None,
        ),
    }

    def kernel(*refs: Any) -> None:
        refs, out = refs[: len(arrays)], refs[len(arrays) :]
        values = {
            "plan": plan,
            "program": program,
            "refs": refs,
            "outs": out[: len(results)],
            "warpgroup": lax.axis_index("warpgroup"),
            "rank": lax.axis_index(CLUSTER_RANK) if cluster > 1 else 0,
        }

        def body(allocated: Mapping[str, Any]) -> None:
            run({**values, **allocated, **({"exchanged": out[-1]} if in_memory else {})})

        if stages:
            pl.run_scoped(body, {**scratch, **of_all_reduce}, collective_axes="warpgroup")
        else:
            body({"chunks": {}, "partials": None, "exchanged": None, "arrived": ()})

    inputs = (x.reshape(shape(x, o.kind)) for x, o in zip(arrays, program.operands, strict=True))
    made = gpu_kernel(kernel, outs, grid, warpgroups, cluster)(*inputs)
    return [x.reshape(s.shape) for x, s in zip(made, results, strict=False)]
