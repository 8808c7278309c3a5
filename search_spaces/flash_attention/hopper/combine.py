"""How splits of the keys become one result: within a cluster through DSMEM, across clusters by an XLA fusion.

Each split leaves ``o = sum(exp2(x - m) v)``, ``m = max(x)`` and ``l = sum(exp2(x - m))`` of its keys, x being logits
times log2(e). CTAs of a cluster leave these in their SMEM, meet, and each combines and stores some fragments of the
result, reading them from the SMEM of all. What remains are partial results in device memory, in float32, each element
with the log-sum-exp of its row to base 2, minus infinity where a split had no key.

The interpreter knows no DSMEM. There a cluster's partial results go through a mailbox, an array in device memory.
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

from search_spaces.hopper.dsmem import ARRIVE, WAIT, ptx
from search_spaces.hopper.limits import WARP, WARPGROUP, WGMMA_ROWS
from search_spaces.jax_compat import interprets, mosaic_gpu_code, plgpu, store_run
from search_spaces.rowwise.hopper.thread_layout import tiled

RANK = "cluster_rank"  # the axis of CTAs in a cluster
# Below any logit, and so far from minus infinity that differences are numbers.
LOWEST = -1e30

# PTX ISA, mapa and ld: from the place in the CTA of this rank in the cluster that the address is in this CTA.
LOAD_FROM_RANK = """{
    .reg .b32 there;
    mapa.shared::cluster.u32 there, $1, $2;
    ld.shared::cluster.f32 $0, [there];
}"""


@dataclasses.dataclass(frozen=True)
class SplitCombine:
    """What a CTA of a cluster does with its partial result, and those of the others.

    Attributes:
      cluster: CTAs that combine theirs; 1 where each stores its own.
      rows: of a partial result that it leaves in SMEM, the first ones of the accumulators.
      columns: of these.
    """

    cluster: int
    rows: int
    columns: int

    def scratch(self) -> tuple[Any, ...]:
        """o, and m and l; in the interpreter a cluster has a barrier, too."""
        f32 = jnp.float32
        arrays = (plgpu.SMEM((self.rows, self.columns), f32), plgpu.SMEM((2, WGMMA_ROWS), f32))
        barrier = plgpu.ClusterBarrier(collective_axes=(RANK,), num_arrivals=1, num_barriers=2)
        return (*arrays, barrier) if self._mailed else arrays

    def mailbox(self, clusters: int) -> tuple[jax.ShapeDtypeStruct, ...]:
        """What a launch of so many clusters returns beside its results: for the interpreter alone."""
        count = clusters * self.cluster
        arrays = ((count, self.rows, self.columns), (count, 2, WGMMA_ROWS))
        return tuple(jax.ShapeDtypeStruct(each, jnp.float32) for each in arrays) if self._mailed else ()

    @property
    def _mailed(self) -> bool:
        return self.cluster > 1 and interprets()

    def publish(self, values: Sequence[jax.Array], smem: Sequence[Any], mailbox: Sequence[Any], cluster: Any) -> None:
        """Leaves o, m and l for the other CTAs, and waits for theirs; `cluster` is the number of this one."""
        o, m, total = values
        _store_rows(smem[0], o)
        smem[1][0], smem[1][1] = m, total
        if self._mailed:
            for box, ref in zip(mailbox, smem, strict=False):
                box[cluster * self.cluster + lax.axis_index(RANK)] = ref[...]
        plgpu.commit_smem()
        self._meet(0, *smem[2:])

    def leave(self, smem: Sequence[Any]) -> None:
        """Waits until nobody reads the SMEM of this CTA."""
        self._meet(1, *smem[2:])

    def _meet(self, number: int, barrier: Any = None) -> None:
        if self.cluster == 1:
            return

        def meaning() -> None:
            plgpu.barrier_arrive(barrier.at[number])
            plgpu.barrier_wait(barrier.at[number])

        mosaic_gpu_code(meaning)(lambda _: ptx(ARRIVE + WAIT))()

    def meet(self) -> None:
        """`publish` and `leave`, for threads that have no partial result."""
        if self.cluster > 1:
            mosaic_gpu_code(lambda: None)(lambda _: ptx(2 * (ARRIVE + WAIT)))()

    def fragment(
        self, start: Any, count: int, smem: Sequence[Any], mailbox: Sequence[Any], cluster: Any, *, output: bool = True
    ) -> tuple[Any, Any]:
        """The combined result of `count` elements from `start` on, and the log-sum-exp to base 2 of their rows.

        Args:
          output: elements are those of the flat ``[rows, columns]``; else there is one a row, and no result of it.
        """
        each = self.columns if output else 1
        read = functools.partial(self._load, start, count, smem=smem, mailbox=mailbox, cluster=cluster)
        ranks = range(self.cluster)
        maxima, sums = ([read(number, rank, each) for rank in ranks] for number in (1, 2))
        m = functools.reduce(jnp.maximum, maxima)
        weights = [jnp.exp2(one - m) for one in maxima]
        total = functools.reduce(operator.add, [x * w for x, w in zip(sums, weights, strict=True)])
        lse = m + jnp.log2(total)  # Minus infinity where the total is 0.
        if not output:
            return None, lse
        o = functools.reduce(operator.add, [read(0, rank, 1) * weights[rank] for rank in ranks])
        return jnp.where(total != 0, o / total, 0.0), lse  # NaN among logits stays NaN

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
        """Elements ``(start + i) // each`` of o, m or l, by `number`, of the CTA of a rank."""

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
    """The first rows of accumulators, as many as `ref` has in SMEM."""
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
    """One element a thread of a warpgroup, or one a lane, which all warps have alike."""
    if count == WARPGROUP:
        return tiled(((WARPGROUP,), (WARP,), (1,)), warps=-3, lanes=-2)
    return tiled(((WARP,), (1,)), warps=plgpu.Replicated(WARPGROUP // WARP), lanes=-2)


def store_fragment(ref: Any, start: Any, value: jax.Array) -> None:
    """To a flat array in device memory."""
    store_run(ref, start, value.astype(ref.dtype))


def combine(out: jax.Array, lse: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Of partial results ``[splits, ...]`` and their log-sum-exp to base 2, for XLA to make one fusion of.

    Splits are written out one by one, first to last, and each element has a log-sum-exp of its own: reductions, and
    what is then broadcast, XLA would compute in a kernel before.
    """
    splits = range(lse.shape[0])
    m = functools.reduce(jnp.maximum, [lse[split] for split in splits])
    m = jnp.maximum(m, LOWEST)
    weights = [jnp.exp2(lse[split] - m) for split in splits]
    total = functools.reduce(operator.add, weights)
    whole = functools.reduce(operator.add, [out[split] * weights[split] for split in splits])
    return jnp.where(total != 0, whole / total, 0.0), m + jnp.log2(total)


def natural(lse: jax.Array) -> jax.Array:
    """A logarithm to base 2 as a natural one."""
    return lse * math.log(2)
