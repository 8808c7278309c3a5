"""Combines the results of splits of the keys: through DSMEM within a cluster, by an XLA fusion across clusters.

Each split computes ``o = sum(exp2(x - m) v)``, ``m = max(x)`` and ``l = sum(exp2(x - m))`` over its keys; x are logits
times log2(e). The CTAs of a cluster write these to their SMEM and synchronize. Each CTA then reads some fragments from
the SMEM of all CTAs, combines them and stores the result. With several clusters, the stored results are partial results
in float32. Each element has the base-2 log-sum-exp of its row, which is minus infinity if a split had no key.

The interpreter does not support DSMEM. It exchanges a cluster's partial results through a mailbox, an array in device
memory.
"""

from __future__ import annotations

import dataclasses
import functools
import math
import operator
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental.mosaic import gpu as mgpu
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import arith, llvm, vector

from search_spaces.attention import hopper
from search_spaces.flash_attention.problem import FlashAttentionProblem
from search_spaces.hopper import WARP, WARPGROUP, WGMMA_ROWS
from search_spaces.hopper.smem_layout import SmemTile, Tiled, Untiled
from search_spaces.hopper.synchronization import ARRIVE, WAIT, ptx
from search_spaces.jax_compat import interprets, mosaic_gpu_code, plgpu, store_run
from search_spaces.rows.hopper.thread_layout import tiled
from search_spaces.space import cdiv, round_up

RANK = "cluster_rank"  # the axis of CTAs in a cluster
# Less than any logit, but finite, so that differences are finite.
LOWEST = -1e30

# Loads from the shared memory of the CTA of rank $2, at the place that $1 addresses in this CTA (PTX ISA, mapa and ld).
LOAD_FROM_RANK = """{
    .reg .b32 there;
    mapa.shared::cluster.u32 there, $1, $2;
    ld.shared::cluster.f32 $0, [there];
}"""


@dataclasses.dataclass(frozen=True)
class SplitCombine:
    """Exchange and combination of partial results in a cluster.

    Attributes:
      cluster: number of CTAs that combine their results; 1 means that each CTA stores its own.
      rows: rows of a partial result in SMEM, the first rows of the accumulators.
      columns: columns of a partial result.
    """

    cluster: int
    rows: int
    columns: int

    def scratch(self) -> tuple[Any, ...]:
        """Returns the scratch types of o, and of m and l; for the interpreter also a cluster barrier."""
        f32 = jnp.float32
        arrays = (plgpu.SMEM((self.rows, self.columns), f32), plgpu.SMEM((2, WGMMA_ROWS), f32))
        barrier = plgpu.ClusterBarrier(collective_axes=(RANK,), num_arrivals=1, num_barriers=2)
        return (*arrays, barrier) if self._mailed else arrays

    def mailbox(self, clusters: int) -> tuple[jax.ShapeDtypeStruct, ...]:
        """Returns the additional outputs of a launch of `clusters` clusters; empty outside the interpreter."""
        count = clusters * self.cluster
        arrays = ((count, self.rows, self.columns), (count, 2, WGMMA_ROWS))
        return tuple(jax.ShapeDtypeStruct(each, jnp.float32) for each in arrays) if self._mailed else ()

    @property
    def _mailed(self) -> bool:
        return self.cluster > 1 and interprets()

    def publish(self, values: Sequence[jax.Array], smem: Sequence[Any], mailbox: Sequence[Any], cluster: Any) -> None:
        """Writes o, m and l for the other CTAs and waits for theirs; `cluster` is the index of this cluster."""
        o, m, total = values
        _store_rows(smem[0], o)
        smem[1][0], smem[1][1] = m, total
        if self._mailed:
            for box, ref in zip(mailbox, smem, strict=False):
                box[cluster * self.cluster + lax.axis_index(RANK)] = ref[...]
        plgpu.commit_smem()
        self._meet(0, *smem[2:])

    def leave(self, smem: Sequence[Any]) -> None:
        """Waits until no CTA reads the SMEM of this CTA."""
        self._meet(1, *smem[2:])

    def _meet(self, number: int, barrier: Any = None) -> None:
        if self.cluster == 1:
            return

        def meaning() -> None:
            plgpu.barrier_arrive(barrier.at[number])
            plgpu.barrier_wait(barrier.at[number])

        mosaic_gpu_code(meaning)(lambda _: ptx(ARRIVE + WAIT))()

    def meet(self) -> None:
        """Runs the barriers of `publish` and `leave`, for threads without a partial result."""
        if self.cluster > 1:
            mosaic_gpu_code(lambda: None)(lambda _: ptx(2 * (ARRIVE + WAIT)))()

    def fragment(
        self, start: Any, count: int, smem: Sequence[Any], mailbox: Sequence[Any], cluster: Any, *, output: bool = True
    ) -> tuple[Any, Any]:
        """Returns `count` elements of the combined result from `start` on, and the base-2 log-sum-exps of their rows.

        Args:
          output: whether to index the flat result ``[rows, columns]``. Otherwise elements are rows, and the result is
            None.
        """
        each = self.columns if output else 1
        read = functools.partial(self._load, start, count, smem=smem, mailbox=mailbox, cluster=cluster)
        ranks = range(self.cluster)
        maxima, sums = ([read(number, rank, each) for rank in ranks] for number in (1, 2))
        m = functools.reduce(jnp.maximum, maxima)
        weights = [jnp.exp2(one - m) for one in maxima]
        total = functools.reduce(operator.add, [x * w for x, w in zip(sums, weights, strict=True)])
        lse = m + jnp.log2(total)  # minus infinity if the total is 0
        if not output:
            return None, lse
        o = functools.reduce(operator.add, [read(0, rank, 1) * weights[rank] for rank in ranks])
        return jnp.where(total != 0, o / total, 0.0), lse  # NaN logits give NaN results

    def _load(
        self,
        start: Any,
        count: int,
        number: int,
        rank: int,
        each: int,
        *,
        smem: Sequence[Any],
        mailbox: Sequence[Any],
        cluster: Any,
    ) -> jax.Array:
        """Returns the elements ``(start + i) // each`` of o, m or l (`number` 0, 1 or 2) of the CTA with this rank."""

        def meaning(ref: Any, start: Any) -> jax.Array:
            whole = mailbox[min(number, 1)][cluster * self.cluster + rank] if self._mailed else ref[...]
            whole = whole[number - 1] if number else whole
            return jnp.take(whole.reshape(-1), (start + lax.iota(jnp.int32, count)) // each)

        layout = fragment_layout(count)

        @mosaic_gpu_code(
            meaning,
            arg_types=(plgpu.RefType(), plgpu.Layout.WG_SPLAT),
            return_type=plgpu.ShapeDtypeStruct((count,), jnp.float32, layout=layout),
        )
        def load(_: Any, ref: Any, start: Any) -> Any:
            bits, f32 = ir.IntegerType.get_signless(32), ir.F32Type.get()
            element = arith.remui(mgpu.thread_idx(), mgpu.c(count, bits))
            index = arith.divui(arith.addi(start.registers.item(), element), mgpu.c(each, bits))
            index = arith.addi(index, mgpu.c(max(number - 1, 0) * WGMMA_ROWS, bits))
            place = mgpu.utils.getelementptr(mgpu.utils.memref_ptr(ref), [index], f32)
            if self.cluster == 1:
                value: Any = llvm.load(f32, place)
            else:
                operands = [llvm.ptrtoint(bits, place), mgpu.c(rank, bits)]
                value = llvm.inline_asm(f32, operands, LOAD_FROM_RANK, "=f,r,r,~{memory}", has_side_effects=True)
            registers = np.empty(layout.to_mgpu().registers_shape((count,)), dtype=object)
            registers.flat[0] = vector.from_elements(ir.VectorType.get((1,), f32), [value])
            return mgpu.FragmentedArray(_registers=registers, _layout=layout.to_mgpu(), _is_signed=None)

        loaded: jax.Array = load(smem[min(number, 1)], start)
        return loaded


def _store_rows(ref: Any, value: jax.Array) -> None:
    """Stores the first rows of accumulators to `ref` in SMEM."""
    rows, columns = ref.shape

    def meaning(ref: Any, value: jax.Array) -> None:
        ref[...] = value[:rows]

    @mosaic_gpu_code(meaning, arg_types=(plgpu.RefType(), plgpu.Layout.WGMMA))
    def store(_: Any, ref: Any, value: Any) -> None:
        bits = ir.IntegerType.get_signless(32)
        buffer = mgpu.utils.memref_ptr(ref)

        def store_one(element: Any, place: tuple[Any, Any]) -> None:
            row, column = (arith.index_cast(bits, number) for number in place)
            index = arith.addi(arith.muli(row, mgpu.c(columns, bits)), column)
            address = llvm.ptrtoint(bits, mgpu.utils.getelementptr(buffer, [index], ir.F32Type.get()))
            there = arith.cmpi(arith.CmpIPredicate.ult, row, mgpu.c(rows, bits))
            ptx("@$0 st.shared.f32 [$1], $2;", [there, address, element], "b,r,f")

        value.foreach(store_one)

    store(ref, value)


def fragment_layout(count: int) -> Any:
    """Returns the layout with one element per thread of a warpgroup, or one per lane, replicated over warps."""
    if count == WARPGROUP:
        return tiled(((WARPGROUP,), (WARP,), (1,)), warps=-3, lanes=-2)
    return tiled(((WARP,), (1,)), warps=plgpu.Replicated(WARPGROUP // WARP), lanes=-2)


def store_fragment(ref: Any, start: Any, value: jax.Array) -> None:
    """Stores a fragment to a flat array in device memory."""
    store_run(ref, start, value.astype(ref.dtype))


def combine(out: jax.Array, lse: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Combines partial results ``[splits, ...]`` and their base-2 log-sum-exps, in a form that XLA fuses.

    The splits are unrolled, and each element has its own log-sum-exp. XLA would compute reductions and their broadcast
    results in a separate kernel.
    """
    splits = range(lse.shape[0])
    m = functools.reduce(jnp.maximum, [lse[split] for split in splits])
    m = jnp.maximum(m, LOWEST)
    weights = [jnp.exp2(lse[split] - m) for split in splits]
    total = functools.reduce(operator.add, weights)
    whole = functools.reduce(operator.add, [out[split] * weights[split] for split in splits])
    return jnp.where(total != 0, whole / total, 0.0), m + jnp.log2(total)


def natural(lse: jax.Array) -> jax.Array:
    """Converts a base-2 logarithm to a natural one."""
    return lse * math.log(2)


# ------------------------------------------------------------------------------
# The plan of a flash decoding launch: packed rows, splits of the keys, and results of the kernel.

# Registers per thread if two CTAs, of 256 threads each, share an SM. ptxas respects the limit of the consumer.
CONSUMER_REGISTERS = 128
PRODUCER_REGISTERS = 24
# Registers of a consumer thread besides its accumulators (ptxas totals: 124 for 96, 158 for 128, 190 for 160).
OTHER_REGISTERS = 32


@dataclasses.dataclass(frozen=True)
class DecodePlan:
    """One launch, or columns of launches if the fields of the schedule are `Columns`.

    Attributes:
      p: the problem.
      block_kv: keys per pipeline stage.
      stages: stages of each pipeline.
      split_kv: number of CTAs that share the keys of a sequence.
      cluster: CTAs per cluster, which combine their results through DSMEM.
    """

    p: FlashAttentionProblem
    block_kv: Any
    stages: Any
    split_kv: Any
    cluster: Any

    @classmethod
    def of(cls, p: FlashAttentionProblem, s: Any) -> DecodePlan:
        """Returns the plan of a schedule, or of `Columns` of schedules."""
        return cls(p, s.block_kv, s.stages, s.split_kv, s.cluster)

    @property
    def dtype(self) -> Any:
        return jnp.dtype(self.p.dtype)

    @property
    def rows(self) -> int:
        """Packed rows per key head: query t of head g of the group is row ``t * group + g``."""
        return self.p.q_len * self.p.group

    @property
    def tiles(self) -> int:
        """Tiles of packed rows per key head; each tile reads all keys."""
        return cdiv(self.rows, WGMMA_ROWS)

    @property
    def q_rows(self) -> int:
        """Rows of the packed array in device memory: fewer than 8, or a multiple of 8."""
        return self.rows if self.rows < 8 else round_up(self.rows, 8)

    @property
    def tile_rows(self) -> int:
        """Rows of a tile that the kernel stores, rounded up to whole fragments."""
        if self.tiles > 1:
            return WGMMA_ROWS
        return self.rows if self.rows * self.p.value_dim % WARP == 0 else round_up(self.rows, 8)

    @property
    def smem_rows(self) -> int:
        """Rows of a partial result in shared memory."""
        return round_up(self.tile_rows, 8)

    @property
    def registers(self) -> Any:
        """Registers of a consumer thread, including those of logits and output."""
        return (np.asarray(self.block_kv) + self.p.value_dim) // 2 + OTHER_REGISTERS

    @property
    def two_ctas(self) -> Any:
        """Whether an SM has registers for two CTAs."""
        return self.registers <= CONSUMER_REGISTERS

    @property
    def fragment(self) -> int:
        """Elements that a warpgroup stores at a time: one per thread, or one per lane, replicated over warps."""
        return WARPGROUP if self.tile_rows * self.p.value_dim % WARPGROUP == 0 else WARP

    @property
    def partials(self) -> Any:
        """Number of partial results per result that the kernel stores; a second kernel combines several."""
        return self.split_kv // self.cluster

    @property
    def second_launch(self) -> Any:
        """Whether a second kernel combines partial results."""
        return np.asarray(self.partials) > 1

    @property
    def groups(self) -> int:
        """Number of tiles of results; each has `partials` partial results."""
        return self.p.batch * self.p.kv_heads * self.tiles

    @property
    def blocks(self) -> Any:
        """Blocks of keys per sequence."""
        return cdiv(self.p.kv_len, self.block_kv)

    @property
    def swizzle(self) -> int:
        """Bytes of a swizzled row of q, k and v."""
        return math.gcd(self.p.head_dim * self.dtype.itemsize, self.p.value_dim * self.dtype.itemsize, 128)

    @property
    def layout(self) -> type[SmemTile]:
        """Layout of tiles of keys and values in shared memory."""
        few = self.p.kv_len < hopper.HEAD_ROWS  # Tiles of 8 rows also work for fewer keys than `HEAD_ROWS`.
        return Tiled if few else hopper.head_layout(self.p.kv_len)

    @property
    def kv_rows(self) -> int:
        """Number of keys of the arrays in device memory."""
        few = self.p.kv_len < hopper.HEAD_ROWS
        return self.p.kv_len if few else hopper.head_length(self.layout, self.p.kv_len)

    @property
    def untiled(self) -> bool:
        return self.layout is Untiled

    @property
    def q_tile(self) -> SmemTile:
        return Tiled(WGMMA_ROWS, self.p.head_dim, self.dtype, self.swizzle)

    @property
    def k_tile(self) -> SmemTile:
        """The keys of one stage."""
        return self.layout(self.block_kv, self.p.head_dim, self.dtype, self.swizzle)

    @property
    def v_tile(self) -> SmemTile:
        return self.layout(self.block_kv, self.p.value_dim, self.dtype, self.swizzle)

    @property
    def ctas(self) -> Any:
        return self.p.batch * self.p.kv_heads * self.tiles * np.asarray(self.split_kv)
