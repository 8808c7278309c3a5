"""The reduction of a last wave whose tiles are split along k: CTAs exchange partial sums through device memory.

Partial sums are the accumulators of a part of k. A consumer thread writes its own for the thread that has the same
elements of the tile in another CTA, in the order of its registers: whole lines, which stay in the L2 cache. A semaphore
signals that all threads have written. The other CTA adds the partial sums to its own, the first part first, so the
result is deterministic.

The interpreter has no semaphores. It runs CTAs in order, and no CTA waits for a later one.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.mosaic import gpu as mgpu
from jaxlib.mlir.dialects import llvm, vector

from search_spaces.hopper.limits import ACCESS_BYTES, WARPGROUP
from search_spaces.hopper.register_words import ACCESS, access, load, of_words, pointer, words
from search_spaces.jax_compat import interprets, mosaic_gpu_code, plgpu
from search_spaces.matmul.hopper.plan import Plan
from search_spaces.matmul.hopper.tile_scheduler import SplitTailScheduler, TileScheduler


def workspace(plan: Plan, clusters: int) -> tuple[jax.ShapeDtypeStruct, ...]:
    """Returns the extra outputs of a launch: the partial sums that CTAs leave, ``[ctas, consumers, m, n]``, if any."""
    if plan.s.tail_split_k == 1:
        return ()
    t = plan.t
    leaving = t.tiles % clusters * (plan.s.tail_split_k - 1) * t.cluster_m * t.cluster_n
    return (jax.ShapeDtypeStruct((int(leaving), t.cooperating, int(t.wg_m), int(t.wg_n)), jnp.dtype(plan.p.acc_dtype)),)


@dataclasses.dataclass(frozen=True)
class TailReduction:
    """The reduction, for one consumer of a CTA that has a part of a tile of the last wave.

    Attributes:
      workspace: in device memory: the partial sums of each CTA that leaves some.
      full: a semaphore for each of these CTAs, zero before and after a launch; None in the interpreter.
      cta: index of this CTA.
      ctas: number of CTAs that have the same part of their tiles; their indices are consecutive.
      parts: number of parts of a tile.
      half: index of the consumer's half of the tile, if consumers cooperate; otherwise 0.
    """

    workspace: Any
    full: Any
    cta: Any
    ctas: int
    parts: int
    half: Any

    def leave(self, acc: jax.Array) -> None:
        """Leaves the accumulators of a part for the CTA that has the last part."""
        place, full = self._place(self.cta)

        def meaning(acc: jax.Array, place: Any) -> None:
            place[...] = acc

        @mosaic_gpu_code(meaning, arg_types=(plgpu.Layout.WGMMA, plgpu.RefType()), return_type=None)
        def write(_: Any, acc: Any, place: Any) -> None:
            bits, own = words(acc), _own(place)
            for first in range(0, len(bits), ACCESS):
                some = vector.from_elements(access(), bits[first : first + ACCESS])
                llvm.store(some, pointer(own, first, WARPGROUP), alignment=ACCESS_BYTES)

        write(acc, place)
        if full is not None:
            plgpu.semaphore_signal(full, memory_scope="gpu")

    def add(self, acc: jax.Array) -> jax.Array:
        """Adds the accumulators that other CTAs have left of the same tile to those of the last part."""

        @mosaic_gpu_code(
            lambda acc, place: place[...],
            arg_types=(plgpu.Layout.WGMMA, plgpu.RefType()),
            return_type=plgpu.ShapeDtypeStruct(acc.shape, acc.dtype, layout=plgpu.Layout.WGMMA),
        )
        def read(_: Any, acc: Any, place: Any) -> Any:
            return of_words(load(_own(place), len(words(acc)), WARPGROUP), acc)

        def add_part(part: Any, acc: jax.Array) -> jax.Array:
            place, full = self._place(self.cta - (self.parts - 1 - part) * self.ctas)
            if full is not None:
                plgpu.semaphore_wait(full, memory_scope="gpu")
            return acc + read(acc, place)

        # A loop, because unrolled code spills registers.
        whole: jax.Array = lax.fori_loop(0, self.parts - 1, add_part, acc)
        return whole

    def _place(self, cta: Any) -> tuple[Any, Any]:
        """Returns the workspace of a CTA and its semaphore."""
        return self.workspace.at[cta, self.half], None if self.full is None else self.full.at[cta, self.half]


def tail_reduction(plan: Plan, beside: list[Any], tiles: TileScheduler, warpgroup: Any) -> TailReduction | None:
    """Returns the reduction of a consumer of a launch; None if no tiles are split. `beside` holds the workspace."""
    if not isinstance(tiles, SplitTailScheduler):
        return None
    (partials,) = beside
    full = None if interprets() else pl.get_global(plgpu.SemaphoreType.REGULAR(partials.shape[:2]))
    t = plan.t
    ctas = t.cluster_m * t.cluster_n
    half = warpgroup if t.cooperating > 1 else 0
    return TailReduction(
        partials, full, tiles.cluster * ctas + tiles.rank, tiles.tail * ctas, plan.s.tail_split_k, half
    )


def _own(place: Any) -> Any:
    """Returns the address of this thread's first word."""
    thread = mgpu.FragmentedArray.splat(mgpu.thread_idx(), (), is_signed=False) % WARPGROUP
    return mgpu.utils.getelementptr(mgpu.utils.memref_ptr(place), [thread.registers.item()], access())
