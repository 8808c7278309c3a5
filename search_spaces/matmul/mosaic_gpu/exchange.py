"""How two blocks that share a tile add up their parts of k: each sends the other the half that the other finishes.

A computing thread writes its sums straight into the on-chip memory of the other block, for the thread there that has
the same places of the tile: no pass through device memory, no launch, and the same bits each time, as there are two
addends. They take the room of operands, which nobody needs any more: blocks along k have one tile each. All threads of
both blocks meet at a barrier of the hardware's, once before, when all operands have been read, and once when all sums
are written, so that nobody writes to the memory of a block that has ended either.

The interpreter knows no other block's memory. There the sums go through an array in device memory.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental.mosaic import gpu as mgpu
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import llvm, vector

from search_spaces.cluster import ARRIVE, WAIT, ptx
from search_spaces.jax_compat import interprets, mosaic_gpu_code, plgpu
from search_spaces.matmul.mosaic_gpu.geometry import THREADS, Geometry
from search_spaces.matmul.mosaic_gpu.schedule import HopperSchedule, mirrored
from search_spaces.matmul.problem import MatmulProblem

MEET = ARRIVE + WAIT
ACCESS = 4  # sums of 32 bits in the widest access of a thread


@dataclasses.dataclass(frozen=True)
class Exchange:
    """What the warpgroups of a block get from those of the other.

    Attributes:
      rows, columns: of a warpgroup's sums the half that it finishes.
      dtype: of the sums.
      warpgroups: those of a block that compute.
    """

    rows: int
    columns: int
    dtype: Any
    warpgroups: int

    @property
    def onchip_bytes(self) -> int:
        """What all warpgroups of a block get, in bytes."""
        return self.warpgroups * self.rows * self.columns * self.dtype.itemsize

    def on_chip(self) -> dict[str, Any]:
        """The barriers of a block, by the names that `add` has for them: none but the hardware's on a device."""
        arrivals = {"num_arrivals": 1, "num_barriers": self.warpgroups}
        return {"arrived": plgpu.ClusterBarrier(collective_axes=("pair",), **arrivals)} if interprets() else {}

    def in_device_memory(self, workers: int) -> tuple[jax.ShapeDtypeStruct, ...]:
        """What a launch of so many clusters returns beside its result: for the interpreter alone."""
        shape = (workers, 2, self.warpgroups, self.rows, self.columns)
        return (jax.ShapeDtypeStruct(shape, self.dtype),) if interprets() else ()

    def add(
        self,
        sums: jax.Array,
        warpgroup: Any,
        room: Any,
        transforms: tuple[Any, ...],
        mail: list[Any],
        *,
        arrived: Any = None,
    ) -> jax.Array:
        """The half that this block finishes, of both blocks' sums. The threads that compute nothing call `meet`.

        Args:
          sums: ``[rows, 2 * columns]`` of this block's part of k, in the layout of wgmma's accumulators.
          warpgroup: its number among those that compute, which are the first of the block.
          room: an array on chip that nobody needs any more, of as many bytes as half of all sums, or more.
          transforms: what Mosaic GPU has to know of the order of `room`.
          mail: see `in_device_memory`.
          arrived: see `on_chip`.
        """
        pair = lax.axis_index("pair")
        first, second = sums[:, : self.columns], sums[:, self.columns :]
        own, other = lax.cond(pair == 0, lambda: (first, second), lambda: (second, first))

        def meaning(other: jax.Array, room: Any) -> jax.Array:
            (boxes,) = mail
            boxes = boxes.at[lax.axis_index("worker")]
            boxes[1 - pair, warpgroup] = other
            plgpu.barrier_arrive(arrived.at[warpgroup])
            plgpu.barrier_wait(arrived.at[warpgroup])
            received: jax.Array = boxes[pair, warpgroup]
            return received

        @mosaic_gpu_code(
            meaning,
            arg_types=(plgpu.Layout.WGMMA, plgpu.RefType(transforms)),
            return_type=plgpu.ShapeDtypeStruct((self.rows, self.columns), self.dtype, layout=plgpu.Layout.WGMMA),
        )
        def swap(_: Any, other: Any, room: Any) -> Any:
            return _swap(other, mgpu.utils.memref_ptr(room), self.warpgroups * THREADS)

        received: jax.Array = swap(other, room)
        return own + received

    def meet(self) -> None:
        """The barriers of all threads, for those that compute nothing."""

        @mosaic_gpu_code(lambda: None)
        def meet(_: Any) -> None:
            ptx(MEET + MEET)

        meet()


def exchange(problem: MatmulProblem, schedule: HopperSchedule) -> Exchange | None:
    """What the blocks of a cluster send each other; None where they share no tile."""
    if schedule.cluster != "split_k":
        return None
    p, s = mirrored(problem, schedule) if schedule.swap_ab else (problem, schedule)
    g = Geometry(p, s)
    return Exchange(g.wg_m, g.wg_n // g.pair_k, jnp.dtype(p.sums_dtype), g.warpgroups)


# PTX ISA, mapa: the address in the other block of a pair, of what is at an address in this one.
OTHER_BLOCK = """{
    .reg .b32 rank;
    mov.u32 rank, %cluster_ctarank;
    xor.b32 rank, rank, 1;
    mapa.shared::cluster.u32 $0, $1, rank;
}"""


def _swap(other: Any, room: Any, threads: int) -> Any:
    """Writes registers to `room` in the other block, and reads here what the other block has written."""
    bits = ir.IntegerType.get_signless(32)
    words = [
        vector.extract(vector.bitcast(ir.VectorType.get(register.type.shape, bits), register), [], [position])
        for register in other.registers.flat
        for position in range(register.type.shape[0])
    ]
    own = mgpu.utils.getelementptr(room, [mgpu.thread_idx()], ir.VectorType.get((ACCESS,), bits))
    there = llvm.inline_asm(bits, [llvm.ptrtoint(bits, own)], OTHER_BLOCK, "=r,r", has_side_effects=True)
    ptx(MEET)
    for first in range(0, len(words), ACCESS):
        store = f"st.shared::cluster.v4.b32 [$0+{first * 4 * threads}], {{$1, $2, $3, $4}};"
        ptx(store, [there, *words[first : first + ACCESS]], "r,r,r,r,r")
    ptx(MEET)
    got = []
    for first in range(0, len(words), ACCESS):
        place = mgpu.utils.getelementptr(own, [first * 4 * threads], ir.IntegerType.get_signless(8))
        loaded = llvm.load(ir.VectorType.get((ACCESS,), bits), place, alignment=16)
        got += [vector.extract(loaded, [], [position]) for position in range(ACCESS)]
    registers = np.empty_like(other.registers)
    for number, register in enumerate(other.registers.flat):
        width = register.type.shape[0]
        pair = vector.from_elements(ir.VectorType.get((width,), bits), got[number * width : (number + 1) * width])
        registers.flat[number] = vector.bitcast(register.type, pair)
    return mgpu.FragmentedArray(_registers=registers, _layout=other.layout, _is_signed=other.is_signed)
