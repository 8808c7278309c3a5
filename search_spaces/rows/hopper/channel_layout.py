"""The elements of a sample over CTAs and threads, and their reductions to a number for each group of channels."""

from __future__ import annotations

import dataclasses
import functools
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

from search_spaces.hopper import BARRIER_BYTES, SMEM_ALIGNMENT, WARP, WARPS
from search_spaces.hopper.synchronization import ARRIVE, WAIT, ptx
from search_spaces.jax_compat import mosaic_gpu_code, plgpu, store
from search_spaces.rows.elementwise import REDUCTIONS
from search_spaces.rows.hopper.thread_layout import OF_WARPS, REDUCTION_BYTES, STORE_TO_RANK, tiled
from search_spaces.rows.program import Program
from search_spaces.rows.stages import most_statistics
from search_spaces.space import round_up

# Rows of SMEM for the numbers of a warpgroup, which needs one for each warp: with four, Mosaic GPU of JAX 0.11.2 stores
# the numbers of each second warpgroup 64 bytes off (H100).
ROWS = 8


@dataclasses.dataclass(frozen=True)
class ChannelPlan:
    """The elements of a sample over CTAs and threads; fields may be `Columns` of schedules.

    A line is one access of all threads of a warp. It has several positions, or a block of the channels of one: a CTA
    has one block. Each CTA has a part of the positions; in a resident block, each warpgroup has one. The last part
    starts early enough to be whole, as does the last chunk of each part.

    Attributes:
      positions, channels, group: as in `GroupNormProblem`.
      vector: elements of one access of one thread.
      warpgroups: warpgroups of a CTA.
      accesses: accesses of a thread to a chunk.
      cluster: CTAs that share a sample.
      kept: eighths of a CTA's chunks that stay in SMEM after the first stage.
      resident: channels of a block of which SMEM holds all positions of a CTA; 0 if CTAs stream their positions.
      shared_axis: axis of vectors that all rows share: "channels" or "positions".
    """

    positions: int
    channels: int
    group: int
    vector: Any
    warpgroups: Any
    accesses: Any
    cluster: Any
    kept: Any = 0
    resident: Any = 0
    shared_axis: str = "channels"

    @classmethod
    def of(cls, p: Any, s: Any) -> ChannelPlan:
        """Returns the plan of a `ChannelSchedule`, or of `Columns` of them."""
        of_problem = (p.positions, p.channels, p.group)
        of_schedule = (s.vector, s.warps // WARPS, s.accesses, s.cluster, s.kept, s.resident)
        return cls(*of_problem, *of_schedule, p.shared_axis)

    @property
    def block(self) -> Any:
        """Channels of a CTA."""
        return np.where(self.resident, self.resident, np.minimum(self.channels, WARP * self.vector))

    @property
    def blocks(self) -> Any:
        return self.channels // self.block

    @property
    def line_positions(self) -> Any:
        # A rule excludes lines shorter than a resident block.
        return np.maximum(1, WARP * self.vector // self.block)

    @property
    def fragment(self) -> Any:
        """Positions of one access of a warpgroup."""
        return WARPS * self.line_positions

    @property
    def chunk(self) -> Any:
        """Positions of a chunk, which a CTA has, or a warpgroup of a resident block."""
        return self.fragment * self.accesses * np.where(self.resident, 1, self.warpgroups)

    @property
    def parts(self) -> Any:
        return self.cluster * np.where(self.resident, self.warpgroups, 1)

    @property
    def part(self) -> Any:
        """Positions of a part."""
        return -(-self.positions // self.parts)

    @property
    def part_overlap(self) -> Any:
        """Positions in both the last part and the one before: fewer than parts."""
        return self.parts * self.part - self.positions

    @property
    def chunks(self) -> Any:
        return -(-self.part // self.chunk)

    @property
    def kept_chunks(self) -> Any:
        """Chunks in SMEM for each warpgroup that has chunks of its own: the first ones of a part, or all."""
        return np.where(self.resident, self.chunks, self.chunks * self.kept // 8)

    @property
    def buffers(self) -> Any:
        """Buffers of an all-reduce: warps may be one sample apart in a resident block."""
        return np.where(self.resident, 2, 1)

    @property
    def splits_vector(self) -> Any:
        """Whether an access of a thread has several groups, or a channel is one. Statistics are those of channels."""
        return (self.group < self.vector) | (self.group == 1)

    @property
    def numbers(self) -> Any:
        """Numbers of a CTA for each statistic: one for each group of its block, or for each channel."""
        return np.where(self.splits_vector, self.block, self.block // self.group)

    def smem_bytes(self, program: Program) -> Any:
        """Returns the SMEM of one CTA."""
        numbers = 4 * self.buffers * len(program.stages) * most_statistics(program) * self.numbers
        exchanged = np.where(self.cluster > 1, round_up(numbers * self.cluster, SMEM_ALIGNMENT), 0)
        kept = self.kept_chunks * np.where(self.resident, self.warpgroups, 1)
        chunks = sum(
            round_up(kept * self.chunk * self.block * itemsize, SMEM_ALIGNMENT)
            for itemsize in kept_inputs(program).values()
        )
        partials = round_up(numbers * ROWS * self.warpgroups, SMEM_ALIGNMENT)
        barriers = 1 + np.where(self.resident, kept, 0)
        return chunks + partials + exchanged + REDUCTION_BYTES + barriers * BARRIER_BYTES

    @property
    def layout(self) -> ChannelLayout:
        unit = (int(self.block),) if self.splits_vector else (int(self.block) // self.group, self.group)
        return ChannelLayout(unit, int(self.line_positions), int(self.vector), self.group)


def kept_inputs(program: Program) -> dict[int, int]:
    """Returns the rows that the first stage and a later one read: bytes of an element by input."""
    later = frozenset[int]().union(*program.reads[1:])
    kept = program.reads[0] & later
    return {x: jnp.dtype(program.source(x).dtype).itemsize for x in program.inputs_of("row") if x in kept}


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
    def run(self) -> Any:
        """Layout of a fragment as one run of elements, of which each thread has the same ones."""
        line = WARP * self.vector
        return tiled(((WARPS * line,), (line,), (self.vector,)), warps=-3, lanes=-2)

    def of_run(self, run: jax.Array) -> jax.Array:
        """Returns a run of elements as a fragment."""
        return _same_registers(run, self.run, self.shape, self.layout)

    def as_run(self, fragment: jax.Array) -> jax.Array:
        """Returns a fragment as a run of elements."""
        return _same_registers(fragment, self.layout, (fragment.size,), self.run)

    @functools.cached_property
    def shared(self) -> Any:
        """Layout of what all positions share."""
        lanes = self._lanes(*range(-len(self.unit) - 1, -1))
        return tiled((self.unit, (self.vector,)), warps=plgpu.Replicated(WARPS), lanes=lanes)

    @functools.cached_property
    def of_positions(self) -> Any:
        """Layout of what all channels of a position share, with the axes of `shape` before those of `unit`."""
        if self.positions == 1:
            return OF_WARPS
        again = WARP // self.positions
        lanes = (-2, *((plgpu.Replicated(again),) if again > 1 else ()))
        return tiled(((WARPS, self.positions), (1,)), warps=-3, lanes=lanes)

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


def _same_registers(x: jax.Array, layout: Any, shape: tuple[int, ...], made: Any) -> jax.Array:
    """Returns an array of another shape and layout in which each thread has the same elements in the same order."""

    @mosaic_gpu_code(
        lambda x: x.reshape(shape), arg_types=(layout,), return_type=plgpu.ShapeDtypeStruct(shape, x.dtype, made)
    )
    def reshape(_: Any, x: Any) -> Any:
        to = made.to_mgpu()
        registers = x.registers.reshape(to.registers_shape(shape))
        return mgpu.FragmentedArray(_registers=registers, _layout=to, _is_signed=x.is_signed)

    reshaped: jax.Array = reshape(x)
    return reshaped


# ------------------------------------------------------------------------------
# All-reduce over the CTAs of a cluster through DSMEM, and over channels of a thread.


def exchange(
    layout: ChannelLayout, buffer: Any, rank: Any, totals: Sequence[jax.Array], cluster: int, arrive: Callable[[], None]
) -> None:
    """Writes the numbers of this CTA to ``buffer[statistics, cluster, numbers]`` of each CTA of the cluster, and waits.

    Args:
      rank: index of this CTA in the cluster.
      arrive: waits for all others in the interpreter, which has one buffer for all CTAs.
    """

    def meaning(buffer: Any, rank: Any, *totals: jax.Array) -> None:
        @pl.when(lax.axis_index("warpgroup") == 0)
        def write() -> None:
            for number, numbers in enumerate(totals):
                store(buffer.at[number, rank], numbers)

        arrive()

    warps = WARPS * lax.axis_size("warpgroup")

    @mosaic_gpu_code(
        meaning, arg_types=(plgpu.RefType(), plgpu.Layout.WG_SPLAT, *[layout.of_numbers() for _ in totals])
    )
    def write_to_all(_: Any, buffer: Any, rank: Any, *totals: Any) -> None:
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
                    ptx(
                        STORE_TO_RANK,
                        [arith.cmpi(arith.CmpIPredicate.ult, to, c(cluster)), address, to, value],
                        "b,r,r,f",
                    )
        ptx(ARRIVE)
        ptx(WAIT)

    write_to_all(buffer, rank, *totals)


@dataclasses.dataclass(frozen=True)
class SeveralParts:
    """Numbers of several warps or CTAs, all of which each thread has."""

    def reduce(self, name: str, numbers: jax.Array) -> jax.Array:
        return REDUCTIONS[name].along(numbers, axis=0)

    def broadcast(self, numbers: jax.Array) -> jax.Array:
        return lax.broadcast_in_dim(numbers, (1, *numbers.shape), (1,))


@dataclasses.dataclass(frozen=True)
class AdjacentChannels:
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

        reduced: jax.Array = reduce_in_thread(numbers)
        return reduced

    def broadcast(self, numbers: jax.Array) -> jax.Array:
        return numbers


_JOINS: Mapping[str, Callable[[Any, Any], Any]] = {
    "reduce_sum": arith.addf,
    "reduce_max": arith.maximumf,
    "reduce_min": arith.minimumf,
}


def opaque(number: int) -> Any:
    """Returns a number that compilers do not know: they unroll short loops, for twice the registers of a thread."""

    @mosaic_gpu_code(
        lambda: jnp.int32(number), return_type=plgpu.ShapeDtypeStruct((), jnp.int32, plgpu.Layout.WG_SPLAT)
    )
    def read(_: Any) -> Any:
        bits = ir.IntegerType.get_signless(32)
        value: Any = llvm.inline_asm(bits, [mgpu.c(number, bits)], OPAQUE, "=r,r")
        return mgpu.FragmentedArray.splat(value, (), is_signed=True)

    return read()


# PTX ISA, %nsmid: the number of cores, which is not 0.
OPAQUE = """{
    .reg .pred none;
    .reg .b32 cores;
    mov.u32 cores, %nsmid;
    setp.eq.u32 none, cores, 0;
    selp.b32 $0, 0, $1, none;
}"""
