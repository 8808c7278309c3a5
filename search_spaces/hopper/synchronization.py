"""PTX for access to the shared memory of other CTAs in a cluster (DSMEM), and for cluster barriers.

PTX ISA: mapa, st.shared::cluster, barrier.cluster.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import jax
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.mosaic import gpu as mgpu
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import arith, llvm

from search_spaces.hopper import WARPGROUP
from search_spaces.jax_compat import HAS_ONE_WARP, mosaic_gpu_code, plgpu

# All threads of all CTAs of a cluster arrive and wait. Data written before the arrival is visible to all of them after
# the wait.
ARRIVE = "barrier.cluster.arrive.release.aligned;"
WAIT = "barrier.cluster.wait.acquire.aligned;"


def ptx(text: str, operands: Sequence[Any] = (), constraints: str = "") -> None:
    """Emits PTX without a result, ordered with respect to the memory accesses around it."""
    clobbers = ",".join(filter(None, [constraints, "~{memory}"]))
    llvm.inline_asm(ir.Type.parse("!llvm.void"), list(operands), text, clobbers, has_side_effects=True)


# ------------------------------------------------------------------------------
# Hardware barriers of a CTA: for warpgroups that take turns, and for a single warpgroup.
#
# PTX ISA: barrier (bar.sync, bar.arrive). There are 16; Mosaic GPU uses low numbers, one for each warpgroup.

FIRST = 8


@dataclasses.dataclass(frozen=True)
class Turns:
    """The order in which `warpgroups`, the first of a CTA, issue their wgmmas: 0, 1, ..., 0, 1, ...

    Each warpgroup waits at its own barrier, where its predecessor arrives. Results do not depend on the order, so the
    interpreter ignores it.
    """

    warpgroups: int

    def start(self, warpgroup: Any) -> None:
        """Gives warpgroup 0 the first turn."""

        @pl.when(warpgroup == self.warpgroups - 1)
        def give() -> None:
            self.give()

    def take(self) -> None:
        """Waits for this warpgroup's turn."""
        self._barrier(0, "sync")

    def give(self) -> None:
        """Gives the next warpgroup its turn."""
        self._barrier(1, "arrive")

    def end(self, warpgroup: Any, taken: Any = 0) -> None:
        """Takes the last turn that was given, after `taken` turns in all.

        0 means that each warpgroup took the same number.
        """

        @pl.when(warpgroup == lax.rem(taken, self.warpgroups))
        def take() -> None:
            self.take()

    def _barrier(self, offset: int, operation: str) -> None:
        @mosaic_gpu_code(lambda: None)
        def barrier(_: Any) -> None:
            i32 = ir.IntegerType.get_signless(32)

            def number(value: int) -> Any:
                return mgpu.utils.c(value, i32)

            index = mgpu.utils.warpgroup_idx(sync=True)
            if offset:
                index = arith.remui(arith.addi(index, number(offset)), number(self.warpgroups))
            threads = 2 * WARPGROUP
            llvm.inline_asm(
                ir.Type.parse("!llvm.void"),
                [arith.addi(index, number(FIRST))],
                f"bar.{operation} $0, {threads};",
                "r",
                has_side_effects=True,
            )

        barrier()


def synchronize_warpgroup() -> None:
    """Synchronizes all threads of this warpgroup."""

    @mosaic_gpu_code(lambda: None)
    def synchronize(_: Any) -> None:
        mgpu.warpgroup_barrier()

    synchronize()


# ------------------------------------------------------------------------------
# A pipeline of shared-memory stages between a producer warpgroup and its consumers.
#
# Both sides count steps over all tiles of the CTA, so that the pipeline stays full from one tile to the next. Barriers
# are mbarriers; the operations are named as in CUTLASS (`PipelineTmaAsync`). JAX calls empty barriers "consumed".


@dataclasses.dataclass(frozen=True)
class Pipeline:
    """One pipeline for all operands of a step.

    Attributes:
      stages: number of steps that shared memory holds.
      groups: number of consumer groups. Groups that take tiles in turn (ping-pong) have separate full barriers, because
        a barrier only works for threads that wait for each of its phases.
      full: ``groups * stages`` barriers, completed when TMA has filled a stage.
      empty: ``stages`` barriers, completed when the consumers have read a stage.
    """

    stages: int
    groups: int
    full: Any
    empty: Any

    def stage(self, step: Any) -> Any:
        return lax.rem(step, self.stages)

    def full_barrier(self, tile: Any, stage: Any) -> Any:
        """Returns the barrier on which the consumers of this CTA's `tile`-th tile wait for a stage."""
        return self.full.at[lax.rem(tile, self.groups) * self.stages + stage if self.groups > 1 else stage]

    def producer_acquire(self, step: Any, stage: Any) -> None:
        """Waits until the `stage` of a `step` may be filled; initially all stages may."""

        @pl.when(step >= self.stages)
        def wait() -> None:
            plgpu.barrier_wait(self.empty.at[stage])

    def producer_tail(self, steps: Any) -> None:
        """Waits after `steps` steps until all stages are read: other CTAs of a cluster write and arrive there."""

        def wait(step: Any, _: None) -> None:
            plgpu.barrier_wait(self.empty.at[self.stage(step)])

        lax.fori_loop(lax.max(steps - self.stages, 0), steps, wait, None)

    def consumer_wait(self, tile: Any, stage: Any) -> None:
        plgpu.barrier_wait(self.full_barrier(tile, stage))

    def consumer_release(self, stage: Any) -> None:
        plgpu.barrier_arrive(self.empty.at[stage])


def by_one_warp(do: Callable[[], None]) -> None:
    """Runs `do` in the first warp of this warpgroup; the others wait for it. Without `HAS_ONE_WARP`, all warps run it.

    With all four warps, each would wait for each stage, and for the others at each copy. That is a third of the
    instructions of a launch, and takes power from the tensor cores.
    """

    def of_each(warp: Any) -> None:
        pl.when(warp == 0)(do)

    if HAS_ONE_WARP:
        plgpu.warp_map(of_each)
    else:
        do()


# ------------------------------------------------------------------------------
# Accumulators as values: a loop may carry them while wgmmas that add to them are in flight.
#
# They must not be used in computations before `wait` has returned them.


def wait_wgmma(groups: int, *accumulators: jax.Array) -> Any:
    """Waits until at most the last `groups` wgmma groups are in flight; returns the accumulators, ready for use."""
    layout = plgpu.Layout.WGMMA

    @mosaic_gpu_code(
        lambda *values: values if len(values) != 1 else values[0],
        arg_types=(layout,) * len(accumulators),
        return_type=tuple(plgpu.ShapeDtypeStruct(x.shape, x.dtype, layout=layout) for x in accumulators)
        if len(accumulators) != 1
        else plgpu.ShapeDtypeStruct(accumulators[0].shape, accumulators[0].dtype, layout=layout),
    )
    def finish(_: Any, *values: Any) -> Any:
        ptx(f"wgmma.wait_group.sync.aligned {groups};")
        if not values:
            return ()
        return mgpu.optimization_barrier(*values)

    return finish(*accumulators)
