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
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental import pallas as pl

from search_spaces.footprint import Footprint, Operand, Phase
from search_spaces.hopper import ACCESS_BYTES, WARP, WARPS, not_hopper
from search_spaces.jax_compat import interprets, load, load_run, plgpu, store, store_run
from search_spaces.kernel import INDICES_OF_32_BITS, Kernel
from search_spaces.problem import nbytes
from search_spaces.rows.builder import online
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
from search_spaces.rows.hopper.registers import COMPILER_PARAMS
from search_spaces.rows.hopper.thread_layout import CLUSTER_RANK
from search_spaces.rows.program import Program, Values, narrowed, within
from search_spaces.rows.stages import Stage, Statistics, most_statistics, with_scalars
from search_spaces.space import Columns, Space, round_up
from search_spaces.target import Target

if TYPE_CHECKING:
    from search_spaces.rows.channels import GroupNormProblem


@dataclasses.dataclass(frozen=True)
class ChannelSchedule:
    """A schedule.

    Attributes:
      warps: warps of a CTA: 4, 8 or 16.
      vector: elements of one access of one thread.
      accesses: accesses of a thread to a chunk, all of which are in flight at once.
      cluster: CTAs that share a sample, each with a part of its positions.
      kept: eighths of a CTA's chunks that stay in SMEM after the first stage.
    """

    warps: int
    vector: int
    accesses: int
    cluster: int = 1
    kept: int = 0


@dataclasses.dataclass(frozen=True)
class _Cta:
    """The values that one warpgroup of a CTA works with.

    Attributes:
      refs, outs: references to operands and results: rows flat, or ``[positions of all samples, blocks, *unit]``;
        shared vectors ``[blocks, *unit]``; scalars ``[samples * blocks, numbers]``.
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

    def run(self) -> None:
        scalars = self._first_scalars()
        shared = {x: self._shared(x) for x in self._inputs("shared")}
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

        def update(chunk: Any, found: Statistics, *, kept: bool, masked: bool = False) -> Statistics:
            each = self._chunk(chunk, scalars, shared, stage.number, kept=kept)
            return stage.update(found, [(v, self._mask(chunk, at) if masked else None) for at, v in each])

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
        before = jnp.where(self.rank == plan.cluster - 1, int(plan.part_overlap), 0) if plan.part_overlap else 0
        begin = position - self._part_start() - self.sample * plan.positions
        return self.layout.position() + begin >= lax.max(chunk * int(plan.chunk), jnp.int32(before))

    def _part_start(self) -> Any:
        return lax.min(self.rank * int(self.plan.part), self.plan.positions - int(self.plan.part))

    def _chunk(self, chunk: Any, scalars: Any, shared: Any, stage: int, *, kept: bool) -> list[tuple[Any, Values]]:
        """Loads a chunk for a stage; returns the position of each fragment in the array, and its values."""
        plan = self.plan
        start = self._part_start() + lax.min(chunk * int(plan.chunk), int(plan.part) - int(plan.chunk))
        start = start + self.warpgroup * int(plan.fragment * plan.accesses)
        fragments = []
        for access in range(plan.accesses):
            column = start + access * int(plan.fragment)
            position = self.sample * plan.positions + column
            loaded = {}
            for x in self._inputs("row"):
                if x in self.program.reads[stage]:
                    in_smem = self._in_smem(x, chunk, access) if kept and stage else None
                    loaded[x] = self._load(x, position) if in_smem is None else load(in_smem, self.layout.layout)
            fragments.append((position, column, loaded))
        for access, (*_, loaded) in enumerate(fragments if kept and not stage else ()):
            for x in self.chunks:
                store(self._in_smem(x, chunk, access), loaded[x])
        return [(at, self._values(column, loaded, scalars, shared)) for at, column, loaded in fragments]

    def _in_smem(self, value: int, chunk: Any, access: int) -> Any:
        """Returns where a fragment is in SMEM; None if the input is not kept. Each thread reads what it has written."""
        if value not in self.chunks:
            return None
        return self.chunks[value].at[chunk, self.warpgroup * self.plan.accesses + access]

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

    def _load(self, value: int, position: Any) -> jax.Array:
        ref = self.refs[self.program.inputs[value].operand]
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
                values = Values(self.program, scalars, scalars.__getitem__, lambda x: x)
                store(ref.at[row], jnp.asarray(values[result.values[0]]).astype(ref.dtype))

    # ------------------------------------------------------------------------------
    # All-reduce of a stage: lanes of each warp, warps of the CTA through SMEM, and CTAs of the cluster through DSMEM.

    def _all_reduce(self, stage: Stage, found: Statistics) -> Statistics:
        layout, plan, place = self.layout, self.plan, stage.number
        of_warps = stage.reduce(found, layout)
        for number, numbers in enumerate(of_warps):
            store(self.partials.at[place, number, pl.ds(self.warpgroup * ROWS, WARPS)], numbers)
        plgpu.barrier_arrive(self.arrived[0])
        plgpu.barrier_wait(self.arrived[0])
        several = SeveralParts()
        parts = []
        for warpgroup in range(int(plan.warpgroups)):
            rows = [self.partials.at[place, i, pl.ds(warpgroup * ROWS, WARPS)] for i in range(stage.count)]
            parts.append(stage.reduce(tuple(load(x, layout.of_numbers(WARPS)) for x in rows), several))
        totals = functools.reduce(stage.combine, parts)
        if plan.cluster > 1:
            exchange(layout, self._buffer(place), self.rank, totals, int(plan.cluster), self._wait_for_cluster)
            loaded = [load(self._buffer(place).at[i], layout.of_numbers(plan.cluster)) for i in range(stage.count)]
            totals = stage.reduce(tuple(loaded), several)
        if layout.splits_vector and layout.group > 1:
            totals = stage.reduce(totals, AdjacentChannels(layout))
        return totals

    def _buffer(self, place: int) -> Any:
        if not interprets():
            return self.exchanged.at[place]
        many = self.sample * int(self.plan.blocks) + self.block
        return self.exchanged.at[many * len(self.program.stages) + place]

    def _wait_for_cluster(self) -> None:
        plgpu.barrier_arrive(self.arrived[1])
        plgpu.barrier_wait(self.arrived[1])


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
    many = most_statistics(program)
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
            cta(chunks={}, partials=None, exchanged=None, arrived=()).run()
            return
        warpgroups = int(plan.warpgroups)
        kept = [x for x in kept_inputs(program) if plan.kept_chunks]
        in_smem = (int(plan.kept_chunks), warpgroups * int(plan.accesses), *plan.layout.shape)
        scratch = [
            tuple(plgpu.SMEM(in_smem, arrays[program.inputs[x].operand].dtype) for x in kept),
            plgpu.SMEM((stages, many, ROWS * warpgroups, numbers), jnp.float32),
            plgpu.SMEM((stages, many, cluster, numbers), jnp.float32) if cluster > 1 and not in_memory else None,
            plgpu.Barrier(num_arrivals=warpgroups, num_barriers=1),
            plgpu.ClusterBarrier(collective_axes=(CLUSTER_RANK,), num_arrivals=warpgroups, num_barriers=1)
            if in_memory
            else None,
        ]

        def body(chunks: Any, partials: Any, exchanged: Any, of_cta: Any, of_cluster: Any) -> None:
            arrived = [x if x is None else x.at[0] for x in (of_cta, of_cluster)]
            cta(
                chunks=dict(zip(kept, chunks, strict=True)),
                partials=partials,
                exchanged=out[-1] if in_memory else exchanged,
                arrived=arrived,
            ).run()

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


# ------------------------------------------------------------------------------
# The kernel, its space and its footprint.

# Registers of a thread besides those for its elements (ptxas).
_REGISTERS = 40


class HopperChannels(Kernel["GroupNormProblem", ChannelSchedule]):
    """A row program of adjacent channels."""

    backend = "mosaic_gpu"
    version = 1
    most_elements = INDICES_OF_32_BITS

    def supports(self, problem: GroupNormProblem, target: Target) -> str | None:
        p = problem
        if reason := not_hopper(target):
            return reason
        if not _vectors(p):
            return (
                f"{p.positions} positions of {p.channels} channels in groups of {p.group}: a warpgroup loads 4 "
                "positions at least, a warp's line and the channels divide one another, as do a group and an access"
            )
        return None

    def space(self, problem: GroupNormProblem, target: Target) -> Space[ChannelSchedule]:
        p = problem
        word = 4 / jnp.dtype(p.dtype).itemsize  # elements of a register

        def plan(s: Any) -> ChannelPlan:
            return ChannelPlan.of(p, s)

        return Space(
            ChannelSchedule,
            choices={
                "warps": (8, 4, 16),
                "vector": _vectors(p),
                "accesses": (4, 2, 8, 1),
                "cluster": (8, 4, 2, 1),
                "kept": (0, 4, 7, 8),
            },
            rules={
                "a chunk is no longer than a CTA's positions": lambda s: (
                    (plan(s).chunk <= plan(s).part) & (plan(s).part_overlap <= plan(s).part)
                ),
                "SMEM has a chunk or more, or none": lambda s: (s.kept == 0) | (plan(s).chunks * s.kept >= 8),
                "a thread loads 32 registers at once at most, each with up to two elements to widen": lambda s: (
                    s.accesses * s.vector <= 32 * np.minimum(word, 2)
                ),
            },
        )

    def footprint(self, problem: GroupNormProblem, schedules: Columns, target: Target) -> Footprint:
        p, s = problem, schedules
        program, plan = online(p.program_of()), ChannelPlan.of(p, schedules)
        x, weight, bias = p.operands()
        shared = nbytes(weight) + nbytes(bias)
        costs, passes = program.costs(again=True), len(program.stages) + 1
        elements = plan.chunk * plan.block
        loads = s.warps * s.accesses
        itemsize = jnp.dtype(p.dtype).itemsize
        statistics = most_statistics(program) * np.where(plan.splits_vector, s.vector, 1)
        words = s.accesses * itemsize / 4 + most_statistics(program) + 2 * weight.dtype.itemsize / 4
        registers = np.asarray(_REGISTERS + words * s.vector + statistics).astype(np.int64)
        ctas = p.samples * plan.blocks * s.cluster
        return Footprint(
            arithmetic=p.arithmetic,
            grid=(np.full(len(s), p.samples), plan.blocks, s.cluster),
            minor=2,
            axes=("samples", "blocks of channels", "parts of the positions"),
            # Later stages read L2, of which the model has no bandwidth: their accesses count as those of the first.
            step=Phase(
                loads=(Operand(bytes=nbytes(x) / ctas / plan.chunks, axes=(0, 1, 2), name="x"),),
                fp32_ops=costs[0] * elements + WARP * loads * (passes + 1),
                mufu_ops=costs[1] * elements,
                transactions=loads * (passes + 1),
                flops=p.flops / ctas / plan.chunks,
            ),
            tile=Phase(
                loads=(Operand(bytes=shared / plan.blocks, axes=(1,), name="weight and bias"),),
                bytes_written=nbytes(x) / ctas,
            ),
            steps=plan.chunks,
            onchip_bytes=np.asarray(plan.smem_bytes(program), dtype=np.int64),
            threads=s.warps * WARP,
            registers=registers,
            registers_per_block=s.warps * WARP * round_up(registers, 8),
            cluster=s.cluster,
            dsmem_bytes=np.where(
                s.cluster > 1, 4.0 * s.cluster * len(program.stages) * most_statistics(program) * plan.numbers, 0.0
            ),
            access_bytes=s.vector * itemsize,
        )

    def run(
        self, problem: GroupNormProblem, schedule: ChannelSchedule, target: Target, /, *args: Any, **params: Any
    ) -> Any:
        # Indices are 32 bits wide, whatever the user's default.
        with jax.enable_x64(False):
            program = online(problem.program_of(**params))
            return run_channels(program, ChannelPlan.of(problem, schedule), problem.results(), args)[0]


def _vectors(p: GroupNormProblem) -> tuple[int, ...]:
    """Returns the two largest numbers of elements per access for which threads have whole groups, or parts of one."""
    found = []
    for x in (8, 4, 2, 1):
        line = WARP * x
        block = min(p.channels, line)
        divides = max(p.channels, line) % block == 0 and block % p.group == 0
        if divides and max(p.group, x) % min(p.group, x) == 0 and WARPS * line // block <= p.positions:
            found.append(x)
    return tuple(x for x in found if x * jnp.dtype(p.dtype).itemsize <= ACCESS_BYTES)[:2]
