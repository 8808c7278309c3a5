"""Thread layouts: how the threads of a warpgroup hold fragments of rows, load and store them, and reduce them."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.mosaic import gpu as mgpu
from jax.experimental.mosaic.gpu import fragmented_array
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import arith, llvm, vector

from search_spaces.hopper import SMEM_ALIGNMENT, WARP, WARPS
from search_spaces.hopper.synchronization import ARRIVE, WAIT, ptx
from search_spaces.jax_compat import interprets, load, load_run, mosaic_gpu_code, plgpu, store, store_run
from search_spaces.rows.elementwise import REDUCTIONS
from search_spaces.rows.stages import Stage, Statistics
from search_spaces.space import round_up

REDUCTION_BYTES = 2048  # SMEM that Mosaic GPU takes for reductions across the warps of a CTA


@dataclasses.dataclass(frozen=True)
class ThreadLayout:
    """The assignment of rows to a warpgroup's four warps, which share a row or have a row each.

    A fragment consists of one access per thread: `columns` contiguous elements of each of `rows` rows, as a float32
    array of `shape` in registers. Consecutive threads have consecutive vectors, so that a warp's access is one run of
    bytes.

    Attributes:
      warps: warps that share a row: 1 or 4.
      vector: elements of one access of one thread.
    """

    warps: int
    vector: int

    @property
    def rows(self) -> int:
        return WARPS // self.warps

    @property
    def columns(self) -> int:
        return WARP * self.warps * self.vector

    @property
    def shape(self) -> tuple[int, ...]:
        return (self.columns,) if self.warps == WARPS else (self.rows, self.columns)

    @functools.cached_property
    def layout(self) -> Any:
        """The layout as a Mosaic GPU type."""
        if self.warps == WARPS:
            return plgpu.Layout.WG_STRIDED(self.shape, vec_size=self.vector)
        return tiled(((WARPS, self.columns), (1, self.columns), (self.vector,)), warps=-5, lanes=-2)

    def load(self, ref: Any, row: Any, column: Any) -> jax.Array:
        """Loads the fragment of ``ref[rows, columns]`` that starts at `row` and `column`, in its dtype in memory."""
        return load(ref.at[self._window(row, column)], self.layout)

    def load_flat(self, ref: Any, start: Any) -> jax.Array:
        """Loads a fragment with contiguous rows from the flat ``ref``, starting at `start`, in its dtype in memory."""
        return load_run(ref, start, self.shape, self.layout)

    def load_shared(self, ref: Any, column: Any) -> jax.Array:
        """Loads the fragment of ``ref[columns]`` that starts at `column`, the same for all rows."""
        if self.warps == WARPS:
            return load(ref.at[pl.ds(column, self.columns)], self.layout)
        # Each warp loads all of it.
        layout = tiled(((self.columns,), (self.vector,)), warps=plgpu.Replicated(WARPS), lanes=-2)
        fragment = load(ref.at[pl.ds(column, self.columns)], layout)
        return lax.broadcast_in_dim(fragment, self.shape, (1,))

    def store(self, ref: Any, row: Any, column: Any, fragment: jax.Array) -> None:
        store(ref.at[self._window(row, column)], fragment.astype(ref.dtype))

    def store_flat(self, ref: Any, start: Any, fragment: jax.Array) -> None:
        store_run(ref, start, fragment.astype(ref.dtype))

    def load_scalars(self, ref: Any, row: Any) -> jax.Array:
        """Loads the elements of these rows from ``ref[rows]``."""
        if self.warps == WARPS:
            element: jax.Array = ref[row]
            return element
        return load(ref.at[pl.ds(row, self.rows)], OF_WARPS)

    def store_scalars(self, ref: Any, row: Any, by_row: jax.Array) -> None:
        """Stores one value per row to ``ref[rows]``."""
        if self.warps == WARPS:
            store(ref.at[pl.ds(row, 1)], lax.broadcast_in_dim(by_row.astype(ref.dtype), (1,), ()))
        else:
            store(ref.at[pl.ds(row, self.rows)], by_row.astype(ref.dtype))

    def full(self, value: float) -> jax.Array:
        """Returns a fragment of equal elements."""
        return plgpu.layout_cast(jnp.full(self.shape, value, jnp.float32), self.layout)

    def reduce(self, name: str, fragment: jax.Array) -> jax.Array:
        """Returns the reduction of each row by this name."""
        return REDUCTIONS[name].along(fragment, axis=-1)

    def broadcast(self, by_row: jax.Array) -> jax.Array:
        """Broadcasts one value per row to all elements of the row."""
        return lax.broadcast_in_dim(by_row, self.shape, tuple(range(by_row.ndim)))

    def iota(self, axis: int) -> jax.Array:
        """Returns the index of each element along `axis` of the fragment."""
        return plgpu.broadcasted_iota(jnp.int32, self.shape, axis, layout=self.layout)

    def element(self) -> jax.Array:
        """Returns the index of each element of a fragment with rows that are one run, a line of each warp."""
        return self.iota(0) * self.columns + self.iota(1)

    def _window(self, row: Any, column: Any) -> tuple[Any, Any]:
        return (row if self.warps == WARPS else pl.ds(row, self.rows)), pl.ds(column, self.columns)


@dataclasses.dataclass(frozen=True)
class ChunkLayout:
    """A warpgroup's share of a chunk as one array: contiguous elements, several accesses per thread.

    Each access is like that of a `ThreadLayout` of one warp to contiguous rows. One array is traced and compiled faster
    than separate accesses; it has no rows.
    """

    vector: int
    accesses: int

    @functools.cached_property
    def layout(self) -> Any:
        """The layout as a Mosaic GPU type."""
        row = WARP * self.vector
        return tiled(((WARPS * row,), (row,), (self.vector,)), warps=-3, lanes=-2)

    @property
    def shape(self) -> tuple[int, ...]:
        return (WARPS * WARP * self.vector * self.accesses,)

    def iota(self, axis: int) -> jax.Array:
        return plgpu.broadcasted_iota(jnp.int32, self.shape, axis, layout=self.layout)

    def load(self, ref: Any, start: Any) -> jax.Array:
        """Loads the share in its dtype in memory."""
        return load(ref.at[pl.ds(start, *self.shape)], self.layout)

    def store(self, ref: Any, start: Any, elements: jax.Array) -> None:
        store(ref.at[pl.ds(start, elements.size)], elements.astype(ref.dtype))


@dataclasses.dataclass(frozen=True)
class AllWarps:
    """All warps that share a row, with one number each in SMEM, which every thread reads and reduces.

    Attributes:
      warps: a power of two.
    """

    warps: int

    def load(self, ref: Any) -> jax.Array:
        """Loads all of ``ref[warps]``."""
        each = max(1, self.warps // WARP)
        lanes = (plgpu.Replicated(WARP * each // self.warps), -2)
        return load(ref, tiled(((self.warps,), (each,)), warps=plgpu.Replicated(WARPS), lanes=lanes))

    def reduce(self, name: str, numbers: jax.Array) -> jax.Array:
        return REDUCTIONS[name].along(numbers)

    def broadcast(self, number: jax.Array) -> jax.Array:
        return number


def tiled(tiles: tuple[tuple[int, ...], ...], *, warps: Any, lanes: Any) -> Any:
    """Returns the layout of an array cut into nested tiles. Their last axis is one thread's vector.

    `warps` and `lanes` are the axes of the nested tiles, counted from the end, over which these are distributed.
    """
    layout = fragmented_array.TiledLayout(
        fragmented_array.Tiling(tiles),
        warp_dims=(warps,),
        lane_dims=lanes if isinstance(lanes, tuple) else (lanes,),
        vector_dim=-1,
        _check_canonical=False,
    ).canonicalize()
    return plgpu.Layout.TILED(
        layout.tiling, warp_dims=layout.warp_dims, lane_dims=layout.lane_dims, vector_dim=layout.vector_dim
    )


# One number of each of a warpgroup's warps.
OF_WARPS = tiled(((WARPS,), (1,)), warps=-2, lanes=plgpu.Replicated(WARP))


# ------------------------------------------------------------------------------
# All-reduce of statistics over the warps that share a row: through SMEM in a CTA, through DSMEM in a cluster.

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

    def wait(self, stage: Stage, partials: Any, barrier: Any) -> Statistics:
        """Waits until all warps have arrived, and returns the statistics of the whole row."""
        if self.cluster > 1:
            self._wait_for_cluster(barrier)
        else:
            plgpu.barrier_wait(barrier)
        warps = AllWarps(self.warps * self.cluster)
        of_all = tuple(warps.load(partials.at[number]) for number in range(stage.count))
        return stage.reduce(of_all, warps)

    def _arrive_at_cluster(self, of_warps: Sequence[jax.Array], first: Any, partials: Any, barrier: Any) -> None:
        """Writes from a lane of each warp to the buffer of each CTA; all threads of all CTAs then arrive at a barrier.

        So no warp writes to the memory of a CTA that has ended: no CTA ends before all have written.
        """

        def meaning(partials: Any, first: Any, *of_warps: jax.Array) -> None:
            for number, numbers in enumerate(of_warps):
                store(partials.at[number, pl.ds(first, WARPS)], numbers)
            plgpu.barrier_arrive(barrier)

        @mosaic_gpu_code(meaning, arg_types=(plgpu.RefType(), plgpu.Layout.WG_SPLAT, *[OF_WARPS for _ in of_warps]))
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
