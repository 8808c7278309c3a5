"""How warps that share a row tell each other what their parts came to: within a block, or across a cluster of them."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.mosaic import gpu as mgpu
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import arith, llvm, vector

from search_spaces.hopper.dsmem import ARRIVE, WAIT, ptx
from search_spaces.jax_compat import interprets, mosaic_gpu_code, plgpu, store
from search_spaces.rowwise.chunks import ALIGNMENT, round_up
from search_spaces.rowwise.reduction import Reduction, Statistics
from search_spaces.rowwise.team import LANES, WARPS, Everyone, tiled

PART = "part"  # the axis of blocks in a cluster: which part of a row each has


@dataclasses.dataclass(frozen=True)
class Board:
    """One number of each statistic from each warp that has a part of a row, for all of them to read.

    Each block has one in its on-chip memory. Warps of a cluster write to all of them.

    Attributes:
      statistics: how many.
      warps: of one block; may be a `Column`, and so may `blocks`.
      blocks: of a cluster; 1 where a block has rows of its own.
    """

    statistics: int
    warps: Any
    blocks: Any = 1

    @property
    def shape(self) -> tuple[int, Any]:
        return self.statistics, self.warps * self.blocks

    def onchip_bytes(self, boards: int = 1) -> Any:
        """Of so many, without barriers."""
        return round_up(4 * self.statistics * self.warps * self.blocks * boards, ALIGNMENT)

    def elsewhere(self, rows: int) -> tuple[jax.ShapeDtypeStruct, ...]:
        """What a kernel has to have for a further result: on a device nothing.

        The interpreter reaches no other block's on-chip memory: there a cluster's blocks have a board for each row in
        device memory.
        """
        return (jax.ShapeDtypeStruct((rows, *self.shape), jnp.float32),) if self.blocks > 1 and interprets() else ()

    def on_chip(self, boards: int = 1) -> dict[str, Any]:
        """So many: the boards themselves, and a barrier where blocks meet at none of the hardware's."""
        parts = {"told": plgpu.SMEM((boards, *self.shape), jnp.float32)}
        arrivals = {"num_arrivals": self.warps // WARPS, "num_barriers": 1}
        if self.blocks == 1:
            parts["all_told"] = plgpu.Barrier(**arrivals)
        elif interprets():
            parts["all_told"] = plgpu.ClusterBarrier(collective_axes=(PART,), **arrivals)
        return parts

    def agreed(
        self, reduction: Reduction, of_warps: Statistics, warpgroup: Any, told: Any, all_told: Any
    ) -> Statistics:
        """What `finish` needs of the whole row, from the statistics of each warp.

        Each leaves its own on the board `told`, and reads all of them once everyone has arrived at a barrier.
        """
        self.tell(of_warps, warpgroup, told, all_told)
        return self.heard(reduction, told, all_told)

    def tell(self, of_warps: Statistics, warpgroup: Any, told: Any, all_told: Any) -> None:
        """The first half of `agreed`. Whoever has told must hear before telling again, on another board."""
        first = warpgroup * WARPS
        if self.blocks > 1:
            self._tell_cluster(of_warps, lax.axis_index(PART) * self.warps + first, told, all_told)
        else:
            for number, numbers in enumerate(of_warps):
                store(told.at[number, pl.ds(first, WARPS)], numbers)
            plgpu.barrier_arrive(all_told)

    def heard(self, reduction: Reduction, told: Any, all_told: Any) -> Statistics:
        """The second half: waits until all have told."""
        if self.blocks > 1:
            self._hear_cluster(all_told)
        else:
            plgpu.barrier_wait(all_told)
        everyone = Everyone(self.warps * self.blocks)
        of_all = tuple(everyone.read(told.at[number]) for number in range(self.statistics))
        return reduction.settle(reduction.join(of_all, everyone))

    def _tell_cluster(self, of_warps: Sequence[jax.Array], first: Any, told: Any, all_told: Any) -> None:
        """A lane of each warp writes to each block's board, and all threads of all blocks arrive at a barrier.

        So none writes to the memory of a block that has ended: none has before all have written.
        """

        def meaning(told: Any, first: Any, *of_warps: jax.Array) -> None:
            for number, numbers in enumerate(of_warps):
                store(told.at[number, pl.ds(first, WARPS)], numbers)
            plgpu.barrier_arrive(all_told)

        of_warp = tiled(((WARPS,), (1,)), warps=-2, lanes=plgpu.Replicated(LANES))

        @mosaic_gpu_code(meaning, arg_types=(plgpu.RefType(), plgpu.Layout.WG_SPLAT, *[of_warp for _ in of_warps]))
        def tell_all(_: Any, told: Any, first: Any, *of_warps: Any) -> None:
            bits = ir.IntegerType.get_signless(32)
            thread = mgpu.thread_idx()
            lane = arith.remui(thread, mgpu.c(LANES, bits))
            warp = arith.remui(arith.divui(thread, mgpu.c(LANES, bits)), mgpu.c(WARPS, bits))
            speaks = arith.cmpi(arith.CmpIPredicate.ult, lane, mgpu.c(self.blocks, bits))
            column = arith.addi(first.registers.item(), warp)
            board = mgpu.utils.memref_ptr(told)
            for number, numbers in enumerate(of_warps):
                place = arith.addi(column, mgpu.c(number * self.shape[1], bits))
                address = llvm.ptrtoint(bits, mgpu.utils.getelementptr(board, [place], ir.F32Type.get()))
                number_of_warp = vector.extract(numbers.registers.item(), [], [0])
                operands = [speaks, address, lane, number_of_warp]
                ptx(WRITE_TO_BLOCK, operands, "b,r,r,f")
            ptx(ARRIVE)

        tell_all(told, first, *of_warps)

    def _hear_cluster(self, all_told: Any) -> None:
        """What threads have written before they arrived, all threads of the cluster see after."""

        @mosaic_gpu_code(lambda: plgpu.barrier_wait(all_told))
        def hear_all(_: Any) -> None:
            ptx(WAIT)

        hear_all()


# PTX ISA, mapa and st: to the place in the block of this number in the cluster that the address is in this block.
WRITE_TO_BLOCK = """{
    .reg .b32 there;
    @$0 mapa.shared::cluster.u32 there, $1, $2;
    @$0 st.shared::cluster.f32 [there], $3;
}"""
