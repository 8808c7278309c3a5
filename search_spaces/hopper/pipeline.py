"""A pipeline of shared-memory stages between a producer warpgroup and its consumers.

Both sides count steps from the CTA's first to its last, over all of its tiles, so that the pipeline stays full from one
tile to the next. Barriers are mbarriers; the operations have the names of CUTLASS (`PipelineTmaAsync`). JAX calls empty
barriers "consumed".
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

from jax import lax
from jax.experimental import pallas as pl

from search_spaces.jax_compat import HAS_ONE_WARP, plgpu


@dataclasses.dataclass(frozen=True)
class Pipeline:
    """One for all operands of a step.

    Attributes:
      stages: steps that shared memory has room for.
      groups: of consumers. Groups that take tiles in turn (ping-pong) have full barriers of their own, for a barrier
        tells only who waits for each of its phases.
      full: ``groups * stages`` barriers: TMA has filled a stage.
      empty: ``stages`` barriers: its consumers have read it.
    """

    stages: int
    groups: int
    full: Any
    empty: Any

    def stage(self, step: Any) -> Any:
        return lax.rem(step, self.stages)

    def full_barrier(self, tile: Any, stage: Any) -> Any:
        """That on which the consumers of this CTA's `tile`-th tile wait for a stage."""
        return self.full.at[lax.rem(tile, self.groups) * self.stages + stage if self.groups > 1 else stage]

    def producer_acquire(self, step: Any, stage: Any) -> None:
        """Waits until the `stage` of a `step` may be filled; at first all may."""

        @pl.when(step >= self.stages)
        def wait() -> None:
            plgpu.barrier_wait(self.empty.at[stage])

    def producer_tail(self, steps: Any) -> None:
        """Waits, after so many steps, until all stages are read: other CTAs of a cluster write to them, and arrive."""

        def wait(step: Any, _: None) -> None:
            plgpu.barrier_wait(self.empty.at[self.stage(step)])

        lax.fori_loop(lax.max(steps - self.stages, 0), steps, wait, None)

    def consumer_wait(self, tile: Any, stage: Any) -> None:
        plgpu.barrier_wait(self.full_barrier(tile, stage))

    def consumer_release(self, stage: Any) -> None:
        plgpu.barrier_arrive(self.empty.at[stage])


def by_one_warp(do: Callable[[], None]) -> None:
    """The first warp of this warpgroup does it, and the others wait for that one; all do on JAX without `HAS_ONE_WARP`.

    All four would wait for each stage, and for each other at each copy: a third of the instructions of a launch, whose
    power tensor cores could use.
    """

    def of_each(warp: Any) -> None:
        pl.when(warp == 0)(do)

    if HAS_ONE_WARP:
        plgpu.warp_map(of_each)
    else:
        do()
