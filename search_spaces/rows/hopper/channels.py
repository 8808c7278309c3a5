"""Rows of `group` adjacent channels at all positions of a sample: a cluster reads a sample once for each stage.

Each CTA has a part of the positions, which it streams through registers in chunks. The first stage reads the chunks
from device memory, and later ones from L2, each in the opposite order of the one before: the chunks read last are the
likeliest to be there. After each stage but the last, warps exchange their statistics through SMEM, and CTAs through
DSMEM. Nothing but these is kept on chip, so that several CTAs share a core, each at its own phase.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.mosaic import gpu as mgpu
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import arith, llvm, vector

from search_spaces.hopper import SMEM_ALIGNMENT, WARP, WARPS
from search_spaces.hopper.synchronization import ARRIVE, WAIT, ptx
from search_spaces.jax_compat import interprets, load, load_run, mosaic_gpu_code, plgpu, store, store_run
from search_spaces.rows.hopper.registers import COMPILER_PARAMS
from search_spaces.rows.hopper.thread_layout import CLUSTER_RANK, STORE_TO_RANK, tiled
from search_spaces.rows.program import REDUCTIONS, Program, Values, narrowed, within
from search_spaces.rows.stages import Stage, Statistics, with_scalars
from search_spaces.space import round_up


@dataclasses.dataclass(frozen=True)
class ChannelPlan:
    """The elements of a sample over CTAs and threads; fields may be `Columns` of schedules.

    A line is one access of all threads of a warp. It has several positions, or a block of the channels of one: a CTA
    has one block. The last part of the positions starts early enough to be whole, as does the last chunk of each part.

    Attributes:
      positions, channels, group: as in `ChannelProblem`.
      vector: elements of one access of one thread.
      warpgroups: warpgroups of a CTA.
      accesses: accesses of a thread to a chunk.
      cluster: CTAs that share a sample.
    """

    positions: int
    channels: int
    group: int
    vector: Any
    warpgroups: Any
    accesses: Any
    cluster: Any

    @property
    def block(self) -> Any:
        """Channels of a CTA."""
        return np.minimum(self.channels, WARP * self.vector)

    @property
    def blocks(self) -> Any:
        return self.channels // self.block

    @property
    def line_positions(self) -> Any:
        return WARP * self.vector // self.block

    @property
    def fragment(self) -> Any:
        """Positions of one access of a warpgroup."""
        return WARPS * self.line_positions

    @property
    def chunk(self) -> Any:
        """Positions of a chunk."""
        return self.fragment * self.warpgroups * self.accesses

    @property
    def part(self) -> Any:
        """Positions of a CTA."""
        return -(-self.positions // self.cluster)

    @property
    def part_overlap(self) -> Any:
        """Positions in both the last part and the one before: fewer than CTAs."""
        return self.cluster * self.part - self.positions

    @property
    def chunks(self) -> Any:
        return -(-self.part // self.chunk)

    @property
    def splits_vector(self) -> Any:
        """Whether an access of a thread has several groups. Statistics are then those of channels."""
        return self.group < self.vector

    @property
    def numbers(self) -> Any:
        """Numbers of a CTA for each statistic: one for each group of its block, or for each channel."""
        return np.where(self.splits_vector, self.block, self.block // self.group)

    def smem_bytes(self, program: Program) -> Any:
        """Returns the SMEM of one CTA."""
        numbers = 4 * len(program.stages) * _statistics(program) * self.numbers
        exchanged = np.where(self.cluster > 1, round_up(numbers * self.cluster, SMEM_ALIGNMENT), 0)
        return round_up(numbers * WARPS * self.warpgroups, SMEM_ALIGNMENT) + exchanged + SMEM_ALIGNMENT

    @property
    def layout(self) -> ChannelLayout:
        unit = (int(self.block),) if self.splits_vector else (int(self.block) // self.group, self.group)
        return ChannelLayout(unit, int(self.line_positions), int(self.vector), self.group)


def _statistics(program: Program) -> int:
    return max([1, *(Stage(program, number).count for number in range(len(program.stages)))])


@dataclasses.dataclass(frozen=True)
class ChannelLayout:
    """How threads hold a fragment: one access of each thread of a warpgroup, a line of each warp.

    Attributes:
      unit: extents of the channels: groups and channels of each, or all channels if an access has several groups.
      positions: positions of a line.
      vector: elements of one access.
      group: channels of a group.
    """

    unit: tuple[int, ...]
    positions: int
    vector: int
    group: int

    @property
    def shape(self) -> tuple[int, ...]:
        return (WARPS, *((self.positions,) if self.positions > 1 else ()), *self.unit)

    @property
    def axis(self) -> int:
        """Axis of the numbers of a statistic."""
        return len(self.shape) - len(self.unit)

    @property
    def splits_vector(self) -> bool:
        return len(self.unit) == 1

    @property
    def numbers(self) -> int:
        return self.unit[0]

    @property
    def numbers_of_thread(self) -> int:
        return self.vector if self.splits_vector else 1

    @property
    def lanes_of_number(self) -> int:
        """Lanes with elements of the same group of one position."""
        return 1 if self.splits_vector else self.unit[1] // self.vector

    def _lanes(self, *dimensions: Any) -> tuple[Any, ...]:
        """Returns the dimensions over lanes, major first, of arrays without an axis of positions."""
        return (plgpu.Replicated(self.positions), *dimensions) if self.positions > 1 else dimensions

    @functools.cached_property
    def layout(self) -> Any:
        rank = len(self.shape)
        return tiled((self.shape, (self.vector,)), warps=-rank - 1, lanes=tuple(range(-rank, -1)))

    @functools.cached_property
    def shared(self) -> Any:
        """Layout of what all positions share."""
        lanes = self._lanes(*range(-len(self.unit) - 1, -1))
        return tiled((self.unit, (self.vector,)), warps=plgpu.Replicated(WARPS), lanes=lanes)

    def of_numbers(self, rows: int = 0) -> Any:
        """Returns the layout of the numbers of a statistic, which all warps have; of several, if `rows` is not 0."""
        each, again = self.numbers_of_thread, self.lanes_of_number
        lanes = self._lanes(-2, *((plgpu.Replicated(again),) if again > 1 else ()))
        shape = (rows, self.numbers) if rows else (self.numbers,)
        return tiled((shape, (each,)), warps=plgpu.Replicated(WARPS), lanes=lanes)

    def full(self, value: float) -> jax.Array:
        return plgpu.layout_cast(jnp.full(self.shape, value, jnp.float32), self.layout)

    def broadcast(self, numbers: jax.Array) -> jax.Array:
        """Broadcasts the numbers of all groups, one for all of them, or one for each warp and group, to a fragment."""
        axes = {0: (), 1: (self.axis,), 2: (0, self.axis)}[numbers.ndim]
        return lax.broadcast_in_dim(numbers, self.shape, axes)

    def reduce(self, name: str, fragment: jax.Array) -> jax.Array:
        """Reduces the elements of each group, or channel, that a warp has."""
        # Mosaic GPU reduces one axis at a time.
        for axis in reversed(range(1, len(self.shape))):
            fragment = fragment if axis == self.axis else REDUCTIONS[name].along(fragment, axis=axis)
        return fragment

    def position(self) -> jax.Array:
        """Returns the position of each element, relative to the first one of the fragment."""
        warp = plgpu.broadcasted_iota(jnp.int32, self.shape, 0, layout=self.layout)
        if self.positions == 1:
            return warp
        return warp * self.positions + plgpu.broadcasted_iota(jnp.int32, self.shape, 1, layout=self.layout)


@dataclasses.dataclass(frozen=True)
class _Cta:
    """The values that one warpgroup of a CTA works with.

    Attributes:
      refs, outs: references to operands and results: rows flat, or ``[positions of all samples, blocks, *unit]``;
        shared vectors ``[blocks, *unit]``; scalars ``[samples * blocks, numbers]``.
      block, sample, warpgroup, rank: indices of the block of channels, and so on.
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
    partials: Any
    exchanged: Any
    arrived: Sequence[Any]

    @property
    def layout(self) -> ChannelLayout:
        return self.plan.layout

    def run(self) -> None:
        scalars = self._first_scalars()
        shared = {x: self._shared(x) for x in self._inputs("shared")}
        for number in range(len(self.program.stages)):
            stage = Stage(self.program, number)
            found = self._reduce(stage, scalars, shared, backwards=bool(number % 2))
            scalars = stage.finish(self._all_reduce(stage, found), scalars)
        self._store_scalars(scalars)
        chunks, backwards = int(self.plan.chunks), bool(len(self.program.stages) % 2)
        if not any(x.kind == "row" for x in self.program.results):
            return

        def apply(step: Any, _: None) -> None:
            chunk = chunks - 1 - step if backwards else step
            for position, values in self._chunk(chunk, scalars, shared, self._last_reads):
                for result, ref in zip(self.program.results, self.outs, strict=True):
                    if result.kind == "row":
                        self._store(ref, position, narrowed(values, result.values[0], result.dtype))

        lax.fori_loop(0, chunks, apply, None)

    @property
    def _last_reads(self) -> frozenset[int]:
        return self.program.reads[-1]

    def _inputs(self, kind: str) -> list[int]:
        found = enumerate(self.program.inputs)
        return [x for x, read in found if self.program.operands[read.operand].kind == kind]

    def _first_scalars(self) -> dict[int, jax.Array]:
        found = {}
        for x in self._inputs("number"):
            found[x] = self.refs[self.program.inputs[x].operand][0]
        for x in self._inputs("scalar"):
            ref = self.refs[self.program.inputs[x].operand]
            found[x] = load(ref.at[self.sample * int(self.plan.blocks) + self.block], self.layout.of_numbers())
        found = {x: value.astype(within(str(value.dtype))) for x, value in found.items()}
        return with_scalars(self.program, 0, found)

    def _shared(self, value: int) -> jax.Array:
        """Loads this block's channels of a vector that all samples share, in its dtype in memory."""
        return load(self.refs[self.program.inputs[value].operand].at[self.block], self.layout.shared)

    def _reduce(self, stage: Stage, scalars: Any, shared: Any, *, backwards: bool) -> Statistics:
        """Returns the statistics of this warpgroup's elements."""
        plan, chunks = self.plan, int(self.plan.chunks)
        chunk_overlap = chunks * int(plan.chunk) - int(plan.part)
        first = -(-int(plan.part_overlap) // int(plan.chunk))  # chunks with positions of another part
        last = max(first, chunks - (chunk_overlap > 0))

        def update(chunk: Any, found: Statistics, *, masked: bool = False) -> Statistics:
            each = self._chunk(chunk, scalars, shared, self.program.reads[stage.number])
            return stage.update(found, [(v, self._mask(chunk, at) if masked else None) for at, v in each])

        def loop(found: Statistics) -> Statistics:
            def step(chunk: Any, found: Statistics) -> Statistics:
                return update(first + last - 1 - chunk if backwards else chunk, found)

            return lax.fori_loop(first, last, step, found) if last > first else found

        def alone(chunk: int) -> Callable[[Statistics], Statistics]:
            return lambda found: update(jnp.int32(chunk), found, masked=True)

        steps = [*map(alone, range(min(first, chunks))), loop, *map(alone, range(last, chunks))]
        found = stage.init(self.layout.full)
        for each in reversed(steps) if backwards else steps:
            found = each(found)
        return found

    def _mask(self, chunk: Any, position: Any) -> jax.Array:
        """Returns which elements of a fragment no other chunk, and no other part, counts."""
        plan = self.plan
        before = jnp.where(self.rank == plan.cluster - 1, int(plan.part_overlap), 0) if plan.part_overlap else 0
        begin = position - self._part_start() - self.sample * plan.positions
        return self.layout.position() + begin >= lax.max(chunk * int(plan.chunk), jnp.int32(before))

    def _part_start(self) -> Any:
        return lax.min(self.rank * int(self.plan.part), self.plan.positions - int(self.plan.part))

    def _chunk(self, chunk: Any, scalars: Any, shared: Any, reads: frozenset[int]) -> list[tuple[Any, Values]]:
        """Loads a chunk; returns the position of each fragment in the array, and its values."""
        plan = self.plan
        start = self._part_start() + lax.min(chunk * int(plan.chunk), int(plan.part) - int(plan.chunk))
        start = start + self.warpgroup * int(plan.fragment * plan.accesses)
        fragments = []
        for access in range(plan.accesses):
            column = start + access * int(plan.fragment)
            position = self.sample * plan.positions + column
            loaded = {x: self._load(self.refs[self.program.inputs[x].operand], position) for x in self._inputs("row") if x in reads}
            fragments.append((position, column, loaded))
        return [(at, self._values(column, loaded, scalars, shared)) for at, column, loaded in fragments]

    def _values(self, column: Any, loaded: Mapping[int, jax.Array], scalars: Any, shared: Any) -> Values:
        def value(x: int) -> jax.Array:
            if x >= len(self.program.inputs):
                return self._index(column)
            if x in loaded:
                return loaded[x].astype(within(str(loaded[x].dtype)))
            vector_of_channels = shared[x].astype(within(str(shared[x].dtype)))
            axes = tuple(range(self.layout.axis, len(self.layout.shape)))
            return lax.broadcast_in_dim(vector_of_channels, self.layout.shape, axes)

        return Values(self.program, scalars, value, self.layout.broadcast)

    def _index(self, position: Any) -> jax.Array:
        """Returns the column of each element of its row."""
        layout = self.layout
        channel = plgpu.broadcasted_iota(jnp.int32, layout.shape, len(layout.shape) - 1, layout=layout.layout)
        if layout.splits_vector:
            channel = lax.rem(channel, layout.group)
        return (layout.position() + position) * layout.group + channel

    def _load(self, ref: Any, position: Any) -> jax.Array:
        if self.plan.blocks == 1:
            return load_run(ref, position * self.plan.channels, self.layout.shape, self.layout.layout)
        return load(ref.at[pl.ds(position, WARPS), self.block], self.layout.layout)

    def _store(self, ref: Any, position: Any, fragment: jax.Array) -> None:
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
                (value,) = result.values
                store(ref.at[row], scalars[value].astype(ref.dtype))

    # ------------------------------------------------------------------------------
    # All-reduce of a stage: lanes of each warp, warps of the CTA through SMEM, and CTAs of the cluster through DSMEM.

    def _all_reduce(self, stage: Stage, found: Statistics) -> Statistics:
        layout, plan, place = self.layout, self.plan, stage.number
        of_warps = stage.reduce(found, layout)
        for number, numbers in enumerate(of_warps):
            store(self.partials.at[place, number, pl.ds(self.warpgroup * WARPS, WARPS)], numbers)
        plgpu.barrier_arrive(self.arrived[0])
        plgpu.barrier_wait(self.arrived[0])
        rows = WARPS * plan.warpgroups
        several = _Several(layout)
        totals = stage.reduce(
            tuple(load(self.partials.at[place, i], layout.of_numbers(rows)) for i in range(stage.count)), several
        )
        if plan.cluster > 1:
            self._exchange(place, totals)
            loaded = [load(self._buffer(place).at[i], layout.of_numbers(plan.cluster)) for i in range(stage.count)]
            totals = stage.reduce(tuple(loaded), several)
        if layout.splits_vector and layout.group > 1:
            totals = stage.reduce(totals, _Adjacent(layout))
        return totals

    def _buffer(self, place: int) -> Any:
        if not interprets():
            return self.exchanged.at[place]
        many = self.sample * int(self.plan.blocks) + self.block
        return self.exchanged.at[many * len(self.program.stages) + place]

    def _exchange(self, place: int, totals: Statistics) -> None:
        """Writes the numbers of this CTA to the buffer of each CTA of the cluster, and waits for all others."""
        layout, cluster, warps = self.layout, int(self.plan.cluster), WARPS * int(self.plan.warpgroups)
        warpgroup, arrived = self.warpgroup, self.arrived

        def meaning(buffer: Any, rank: Any, *totals: jax.Array) -> None:
            @pl.when(warpgroup == 0)
            def write() -> None:
                for number, numbers in enumerate(totals):
                    store(buffer.at[number, rank], numbers)

            plgpu.barrier_arrive(arrived[1])
            plgpu.barrier_wait(arrived[1])

        types = (plgpu.RefType(), plgpu.Layout.WG_SPLAT, *[layout.of_numbers() for _ in totals])

        @mosaic_gpu_code(meaning, arg_types=types)
        def exchange(_: Any, buffer: Any, rank: Any, *totals: Any) -> None:
            bits = ir.IntegerType.get_signless(32)

            def c(x: int) -> Any:
                return mgpu.c(x, bits)

            thread = mgpu.thread_idx()
            lane, warp = arith.remui(thread, c(WARP)), arith.divui(thread, c(WARP))
            of_position = arith.remui(lane, c(WARP // layout.positions))
            index = arith.muli(arith.divui(of_position, c(layout.lanes_of_number)), c(layout.numbers_of_thread))
            index = arith.addi(index, arith.muli(rank.registers.item(), c(layout.numbers)))
            start = mgpu.utils.memref_ptr(buffer)
            for number, total in enumerate(totals):
                (register,) = total.registers.flat
                for i in range(layout.numbers_of_thread):
                    at = arith.addi(index, c(number * cluster * layout.numbers + i))
                    address = llvm.ptrtoint(bits, mgpu.utils.getelementptr(start, [at], ir.F32Type.get()))
                    value = vector.extract(register, [], [i])
                    for first in range(0, cluster, warps):
                        to = arith.addi(warp, c(first))
                        writes = arith.cmpi(arith.CmpIPredicate.ult, to, c(cluster))
                        ptx(STORE_TO_RANK, [writes, address, to, value], "b,r,r,f")
            ptx(ARRIVE)
            ptx(WAIT)

        exchange(self._buffer(place), self.rank, *totals)


@dataclasses.dataclass(frozen=True)
class _Several:
    """Numbers of several warps or CTAs, which each thread has."""

    layout: ChannelLayout

    def reduce(self, name: str, numbers: jax.Array) -> jax.Array:
        return REDUCTIONS[name].along(numbers, axis=0)

    def broadcast(self, numbers: jax.Array) -> jax.Array:
        return lax.broadcast_in_dim(numbers, (1, *numbers.shape), (1,))


@dataclasses.dataclass(frozen=True)
class _Adjacent:
    """Numbers of channels, of which a thread has those of whole groups: each channel gets its group's."""

    layout: ChannelLayout

    def reduce(self, name: str, numbers: jax.Array) -> jax.Array:
        group = self.layout.group

        def meaning(numbers: jax.Array) -> jax.Array:
            return jnp.repeat(REDUCTIONS[name].along(numbers.reshape(-1, group), axis=1), group)

        layout = self.layout.of_numbers()
        result = plgpu.ShapeDtypeStruct((self.layout.numbers,), jnp.float32, layout)

        @mosaic_gpu_code(meaning, arg_types=(layout,), return_type=result)
        def reduce_in_thread(_: Any, numbers: Any) -> Any:
            def joined(register: Any) -> Any:
                found = []
                for first in range(0, self.layout.vector, group):
                    each = [vector.extract(register, [], [first + i]) for i in range(group)]
                    found += [functools.reduce(_JOINS[name], each)] * group
                return vector.from_elements(register.type, found)

            made = numbers.registers.copy()
            made[...] = np.vectorize(joined, otypes=[object])(made)
            return mgpu.FragmentedArray(_registers=made, _layout=numbers.layout, _is_signed=None)

        return reduce_in_thread(numbers)  # type: ignore[no-any-return]

    def broadcast(self, numbers: jax.Array) -> jax.Array:
        return numbers


_JOINS: Mapping[str, Callable[[Any, Any], Any]] = {
    "reduce_sum": arith.addf,
    "reduce_max": arith.maximumf,
    "reduce_min": arith.minimumf,
}


def run_channels(
    program: Program, plan: ChannelPlan, results: Sequence[jax.ShapeDtypeStruct], arrays: Sequence[jax.Array]
) -> list[jax.Array]:
    """Runs the kernel, with a cluster for each sample and block of channels.

    Args:
      results: shapes and dtypes: rows ``[samples, positions, channels]``, scalars ``[samples, channels // group]``.
      arrays: operands in the same form, and shared vectors ``[channels]``.
    """
    blocks, unit, numbers = int(plan.blocks), plan.layout.unit, int(plan.numbers)
    rows = next(x for x, o in zip(arrays, program.operands, strict=True) if o.kind == "row")
    samples, stages, cluster = rows.shape[0], len(program.stages), int(plan.cluster)
    of_row = (rows.size,) if blocks == 1 else (samples * plan.positions, blocks, *unit)
    shapes = {"row": of_row, "shared": (blocks, *unit), "scalar": (samples * blocks, numbers), "number": (1,)}
    many = _statistics(program)
    outs = [jax.ShapeDtypeStruct(shapes[o.kind], x.dtype) for x, o in zip(results, program.results, strict=True)]
    in_memory = cluster > 1 and interprets()  # the interpreter has no DSMEM
    if in_memory:
        outs.append(jax.ShapeDtypeStruct((samples * blocks * max(1, stages), many, cluster, numbers), jnp.float32))

    def kernel(*refs: Any) -> None:
        refs, out = refs[: len(arrays)], refs[len(arrays) :]
        cta = functools.partial(
            _Cta,
            plan=plan,
            program=program,
            refs=refs,
            outs=out[: len(results)],
            block=lax.axis_index("block"),
            sample=lax.axis_index("sample"),
            warpgroup=lax.axis_index("warpgroup"),
            rank=lax.axis_index(CLUSTER_RANK) if cluster > 1 else 0,
        )
        if not stages:
            cta(partials=None, exchanged=None, arrived=()).run()
            return
        warpgroups = int(plan.warpgroups)
        scratch = [
            plgpu.SMEM((stages, many, WARPS * warpgroups, numbers), jnp.float32),
            plgpu.SMEM((stages, many, cluster, numbers), jnp.float32) if cluster > 1 and not in_memory else None,
            plgpu.Barrier(num_arrivals=warpgroups, num_barriers=1),
            plgpu.ClusterBarrier(collective_axes=(CLUSTER_RANK,), num_arrivals=warpgroups, num_barriers=1)
            if in_memory
            else None,
        ]

        def body(partials: Any, exchanged: Any, of_cta: Any, of_cluster: Any) -> None:
            arrived = [x if x is None else x.at[0] for x in (of_cta, of_cluster)]
            cta(partials=partials, exchanged=out[-1] if in_memory else exchanged, arrived=arrived).run()

        pl.run_scoped(body, *scratch, collective_axes="warpgroup")

    in_cluster = {"cluster": (cluster,), "cluster_names": (CLUSTER_RANK,)} if cluster > 1 else {}
    made = plgpu.kernel(
        kernel,
        out_type=tuple(outs),
        grid=(blocks, samples),
        grid_names=("block", "sample"),
        num_threads=int(plan.warpgroups),
        thread_name="warpgroup",
        compiler_params=COMPILER_PARAMS,
        **in_cluster,
    )(*(x.reshape(shapes[o.kind]) for x, o in zip(arrays, program.operands, strict=True)))
    return [x.reshape(s.shape) for x, s in zip(made, results, strict=False)]
