"""All-reduce of statistics over the warps that share a row: through SMEM in a CTA, through DSMEM in a cluster."""

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
from search_spaces.hopper.limits import SMEM_ALIGNMENT, WARP, WARPS
from search_spaces.jax_compat import interprets, mosaic_gpu_code, plgpu, store
from search_spaces.rowwise.hopper.thread_layout import AllWarps, tiled
from search_spaces.rowwise.reduction import Reduction, Statistics
from search_spaces.space import round_up

CLUSTER_RANK = "cluster_rank"  # the axis of CTAs in a cluster


@dataclasses.dataclass(frozen=True)
class PartialsBuffer:
    """One number per statistic from each warp that has a part of a row, for all of these warps to read.

    Each CTA has a buffer in its SMEM. Warps of a cluster write to all of these buffers. The all-reduce has two phases,
    so that warps can do other work between `arrive` and `wait`. A warp that has arrived must wait before it arrives
    again, at another buffer.

    Attributes:
      statistics: number of statistics.
      warps: warps of one CTA; may be a `Column`, and so may `cluster`.
      cluster: CTAs that share a row; 1 if a CTA has rows of its own.
    """

    statistics: int
    warps: Any
    cluster: Any = 1

    @property
    def shape(self) -> tuple[int, Any]:
        return self.statistics, self.warps * self.cluster

    def smem_bytes(self, buffers: int) -> Any:
        """Returns the bytes of this many buffers, without barriers."""
        return round_up(4 * self.statistics * self.warps * self.cluster * buffers, SMEM_ALIGNMENT)

    def scratch(self, buffers: int) -> Any:
        """Returns the SMEM allocation of this many buffers."""
        return plgpu.SMEM((buffers, *self.shape), jnp.float32)

    def barrier(self) -> Any:
        """Returns the barrier at which warps arrive; None if that is the cluster's hardware barrier."""
        arrivals = {"num_arrivals": self.warps // WARPS, "num_barriers": 1}
        if self.cluster == 1:
            return plgpu.Barrier(**arrivals)
        return plgpu.ClusterBarrier(collective_axes=(CLUSTER_RANK,), **arrivals) if interprets() else None

    def mailbox(self, rows: int) -> tuple[jax.ShapeDtypeStruct, ...]:
        """Returns an extra kernel result for the interpreter, which has no DSMEM: a cluster's buffer for each row."""
        return (jax.ShapeDtypeStruct((rows, *self.shape), jnp.float32),) if self.cluster > 1 and interprets() else ()

    def arrive(self, of_warps: Statistics, warpgroup: Any, partials: Any, barrier: Any) -> None:
        """Writes the statistics of each warp to the buffer `partials`."""
        first = warpgroup * WARPS
        if self.cluster > 1:
            self._arrive_at_cluster(of_warps, lax.axis_index(CLUSTER_RANK) * self.warps + first, partials, barrier)
            return
        for number, numbers in enumerate(of_warps):
            store(partials.at[number, pl.ds(first, WARPS)], numbers)
        plgpu.barrier_arrive(barrier)

    def wait(self, reduction: Reduction, partials: Any, barrier: Any) -> Statistics:
        """Waits until all warps have arrived, and returns the values of the whole row that `Reduction.apply` needs."""
        if self.cluster > 1:
            self._wait_for_cluster(barrier)
        else:
            plgpu.barrier_wait(barrier)
        warps = AllWarps(self.warps * self.cluster)
        of_all = tuple(warps.load(partials.at[number]) for number in range(self.statistics))
        return reduction.finalize(reduction.reduce(of_all, warps))

    def _arrive_at_cluster(self, of_warps: Sequence[jax.Array], first: Any, partials: Any, barrier: Any) -> None:
        """Writes from a lane of each warp to the buffer of each CTA; all threads of all CTAs then arrive at a barrier.

        So no warp writes to the memory of a CTA that has ended: no CTA ends before all have written.
        """

        def meaning(partials: Any, first: Any, *of_warps: jax.Array) -> None:
            for number, numbers in enumerate(of_warps):
                store(partials.at[number, pl.ds(first, WARPS)], numbers)
            plgpu.barrier_arrive(barrier)

        of_warp = tiled(((WARPS,), (1,)), warps=-2, lanes=plgpu.Replicated(WARP))

        @mosaic_gpu_code(meaning, arg_types=(plgpu.RefType(), plgpu.Layout.WG_SPLAT, *[of_warp for _ in of_warps]))
        def write_to_all(_: Any, partials: Any, first: Any, *of_warps: Any) -> None:
            bits = ir.IntegerType.get_signless(32)
            thread = mgpu.thread_idx()
            lane = arith.remui(thread, mgpu.c(WARP, bits))
            warp = arith.remui(arith.divui(thread, mgpu.c(WARP, bits)), mgpu.c(WARPS, bits))
            writes = arith.cmpi(arith.CmpIPredicate.ult, lane, mgpu.c(self.cluster, bits))
            column = arith.addi(first.registers.item(), warp)
            buffer = mgpu.utils.memref_ptr(partials)
            for number, numbers in enumerate(of_warps):
                place = arith.addi(column, mgpu.c(number * self.shape[1], bits))
                address = llvm.ptrtoint(bits, mgpu.utils.getelementptr(buffer, [place], ir.F32Type.get()))
                number_of_warp = vector.extract(numbers.registers.item(), [], [0])
                ptx(STORE_TO_RANK, [writes, address, lane, number_of_warp], "b,r,r,f")
            ptx(ARRIVE)

        write_to_all(partials, first, *of_warps)

    def _wait_for_cluster(self, barrier: Any) -> None:
        """Waits for the cluster's barrier, which makes writes before arrival visible to all threads of the cluster."""

        @mosaic_gpu_code(lambda: plgpu.barrier_wait(barrier))
        def wait_for_all(_: Any) -> None:
            ptx(WAIT)

        wait_for_all()


# PTX ISA, mapa and st: stores to the same address in the CTA of this rank in the cluster.
STORE_TO_RANK = """{
    .reg .b32 there;
    @$0 mapa.shared::cluster.u32 there, $1, $2;
    @$0 st.shared::cluster.f32 [there], $3;
}"""
