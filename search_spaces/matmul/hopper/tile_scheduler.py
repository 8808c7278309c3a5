"""The work tiles that a CTA computes in turn: whole tiles of the result, and parts of tiles in the last wave.

CTAs, or clusters of CTAs, take tiles in turn: the first of C takes tiles 0, C, 2 C, ... All are busy in each wave but
the last. If the last wave has few tiles, it ends sooner if several CTAs share each tile along k (`tail_split_k`). CTAs
0 to R - 1 then have the first part of its R tiles, the next R the second, and so on. The CTA with the last part adds
the partial sums of the others, which all started before it.

Stream-K (Osama et al., arXiv:2301.03598), which cuts the steps of two waves into C ranges of equal length, was
implemented and was slower. Its CTAs are at C different positions of k, whereas those of a wave read the same columns of
`a` and rows of `b` at about the same time, from the L2 cache (see docs/kernels/matmul-hopper.md for the figures).
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.mosaic import gpu as mgpu
from jaxlib.mlir.dialects import llvm, vector

from search_spaces.hopper import ACCESS_BYTES, WARPGROUP
from search_spaces.hopper.untiled_swizzled import ACCESS, access, load_words, of_words, pointer, words
from search_spaces.jax_compat import interprets, mosaic_gpu_code, plgpu
from search_spaces.matmul.hopper.plan import Plan
from search_spaces.matmul.tiles import planar_snake
from search_spaces.space import cdiv


@dataclasses.dataclass(frozen=True)
class WorkTile:
    """A unit of work of a CTA.

    Attributes:
      number: index among the CTA's work tiles.
      product: index of the product in the launch: an element of the batch, or of a split of k.
      batch: index in the batch of the operands.
      row, column: the first row and column of the result, as wgmma sees it.
      first_k: the first element of k.
      steps: number of steps of k.
      start: number of steps of the CTA's pipeline before this tile.
      end_row: rows of the result from this one on belong to another tile; None if the tile ends with the array.
      end_k: elements of k from this one on belong to another tile, and count as zeros; None likewise.
      leaves: whether this is a part that another CTA adds; False if tiles are whole.
      adds: whether this is the last part, with which the CTA finishes the tile; False if tiles are whole.
    """

    number: Any
    product: Any
    batch: Any
    row: Any
    column: Any
    first_k: Any
    steps: Any
    start: Any
    end_row: Any = None
    end_k: Any = None
    leaves: Any = False
    adds: Any = False


@dataclasses.dataclass(frozen=True)
class TileScheduler:
    """The work tiles of one CTA of a launch of whole tiles.

    Attributes:
      plan: of the launch.
      cluster, clusters: index of the CTA's cluster in the grid, and the number of clusters.
      rank: of the CTA in its cluster.
    """

    plan: Plan
    cluster: Any
    clusters: int
    rank: Any

    @property
    def count(self) -> Any:
        """Number of work tiles of this CTA."""
        return lax.div(self.plan.t.tiles - 1 - self.cluster + self.clusters, self.clusters)

    def steps_before(self, number: Any, first: Any = 0, before: Any = 0) -> Any:
        """Returns the steps of the CTA's pipeline before a work tile, given those `before` work tile `first`.

        The number of work tiles stands for the end of all work.
        """
        return number * self.plan.t.steps

    def work_tile(self, number: Any, start: Any) -> WorkTile:
        """Returns a work tile of the CTA, by number; `start` are the steps of the pipeline before it."""
        return self._of_tile(self.cluster + number * self.clusters, number, 0, self.plan.t.steps, start)

    def _of_tile(self, tile: Any, number: Any, first_step: Any, steps: Any, start: Any, **shared: Any) -> WorkTile:
        """Returns the work tile for a tile of the launch, by its index in launch order."""
        p, s, t = self.plan.p, self.plan.s, self.plan.t
        product, row, column = planar_snake(tile, (t.grid_m, t.grid_n), s.grid_minor_dim, s.grid_tile_width)
        row = 2 * row + self.rank if s.cluster == "m" else row
        column = 2 * column + self.rank if s.cluster == "n" else column
        batch = product
        if s.split_k > 1:
            batch, first_step = lax.rem(product, p.batch), lax.div(product, p.batch) * t.steps
        if s.cluster == "split_k":
            first_step = self.rank * t.steps
        place = (product, batch, row * s.tile_m, column * s.tile_n)
        return WorkTile(number, *place, first_step * s.tile_k, steps, start, **shared)

    def zero_tiles(self, store: Callable[[WorkTile], None]) -> None:
        """Calls `store` with each tile of zeros that the CTA writes after its work tiles; by default there is none."""


@dataclasses.dataclass(frozen=True)
class SplitTailScheduler(TileScheduler):
    """The work tiles of one CTA of a launch that splits its last wave along k; there are enough CTAs for all parts."""

    @property
    def _waves(self) -> int:
        """Number of whole waves."""
        return int(self.plan.t.tiles // self.clusters)

    @property
    def tail(self) -> int:
        """Number of tiles in the last wave."""
        return int(self.plan.t.tiles % self.clusters)

    @property
    def _has_part(self) -> Any:
        return self.cluster < self.tail * self.plan.s.tail_split_k

    @property
    def _part(self) -> tuple[Any, Any]:
        """The index of the CTA's part of a tile of the last wave, and the first step of the part."""
        number = lax.div(self.cluster, self.tail)
        return number, number * cdiv(self.plan.t.steps, self.plan.s.tail_split_k)

    @property
    def _steps_of_part(self) -> Any:
        steps = self.plan.t.steps
        return lax.min(cdiv(steps, self.plan.s.tail_split_k), steps - self._part[1])

    @property
    def count(self) -> Any:
        return self._waves + self._has_part.astype(jnp.int32)

    def steps_before(self, number: Any, first: Any = 0, before: Any = 0) -> Any:
        steps = self.plan.t.steps
        return number * steps - jnp.where(number > self._waves, steps - self._steps_of_part, 0)

    def work_tile(self, number: Any, start: Any) -> WorkTile:
        steps, last = self.plan.t.steps, number == self._waves
        part, first_step = self._part
        tile = number * self.clusters + jnp.where(last, lax.rem(self.cluster, self.tail), self.cluster)
        last_part = self.plan.s.tail_split_k - 1
        return self._of_tile(
            tile,
            number,
            jnp.where(last, first_step, 0),
            jnp.where(last, self._steps_of_part, steps),
            start,
            leaves=last & (part < last_part),
            adds=last & (part == last_part),
        )


# Creates the scheduler of a CTA from the plan, its cluster, the number of clusters, its rank, and further operands.
MakeScheduler = Callable[..., TileScheduler]


def tile_scheduler(plan: Plan, cluster: Any, clusters: int, rank: Any) -> TileScheduler:
    """Returns the scheduler of a CTA."""
    return (TileScheduler if plan.s.tail_split_k == 1 else SplitTailScheduler)(plan, cluster, clusters, rank)


# ------------------------------------------------------------------------------
# The reduction of a last wave of tiles that are split along k: CTAs exchange partial sums through device memory.
#
# Partial sums are the accumulators of a part of k. A consumer thread writes its own for the thread that has the same
# elements of the tile in another CTA, in the order of its registers: whole lines, which stay in the L2 cache. A
# semaphore signals that all threads have written. The other CTA adds the partial sums to its own, the first part
# first, so the result is deterministic.
#
# The interpreter has no semaphores. It runs CTAs in order, and no CTA waits for a later one.


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
            return of_words(load_words(_own(place), len(words(acc)), WARPGROUP), acc)

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
