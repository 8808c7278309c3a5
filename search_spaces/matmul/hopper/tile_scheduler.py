"""Which work tiles a CTA computes, one after the other: whole tiles of the result, and parts of those of the last wave.

CTAs, or clusters of them, take tiles in turn: 0, C, 2 C, ... is what the first of C has, so that all are busy in each
wave but the last. Where that has few tiles, it is over sooner if several CTAs share each along k (`tail_split_k`): CTAs
0 to R - 1 have the first part of its R tiles, the next R the second, and so on; who has the last part adds what the
others leave (tail_reduction.py), all of which started before it.

Not by Stream-K (Osama et al., arXiv:2301.03598), which cuts the steps of two waves into C ranges of the same length. It
has been built, and lost to this: CTAs are then at C different places of k, where those of a wave read the same columns
of `a` and rows of `b` at about the same time, from the L2 cache (docs/kernels/matmul-hopper.md has the figures).
"""

from __future__ import annotations

import dataclasses
from typing import Any

import jax.numpy as jnp
from jax import lax

from search_spaces.matmul.hopper.plan import Plan
from search_spaces.matmul.rasterization import planar_snake
from search_spaces.space import cdiv


@dataclasses.dataclass(frozen=True)
class WorkTile:
    """What a CTA computes at a time.

    Attributes:
      number: among those of its CTA.
      product: of the launch: an element of the batch, or of a split of k.
      batch: of the operands.
      row, column: the first of the result, as wgmma sees it.
      first_step: of k.
      steps: of k.
      start: steps that the CTA's pipeline had before it.
      leaves: a part that another CTA adds; False where tiles are whole.
      adds: the last part, with which the CTA finishes the tile; False where tiles are whole.
    """

    number: Any
    product: Any
    batch: Any
    row: Any
    column: Any
    first_step: Any
    steps: Any
    start: Any
    leaves: Any = False
    adds: Any = False


@dataclasses.dataclass(frozen=True)
class TileScheduler:
    """Of one CTA of a launch of whole tiles.

    Attributes:
      plan: of the launch.
      cluster, clusters: number of its cluster in the grid, and how many there are.
      rank: of the CTA in its cluster.
    """

    plan: Plan
    cluster: Any
    clusters: int
    rank: Any

    @property
    def count(self) -> Any:
        """Work tiles of this CTA."""
        return lax.div(self.plan.t.tiles - 1 - self.cluster + self.clusters, self.clusters)

    @property
    def steps(self) -> Any:
        """Of all of them."""
        return self.count * self.plan.t.steps

    def work_tile(self, number: Any) -> WorkTile:
        steps = self.plan.t.steps
        return self._of_tile(self.cluster + number * self.clusters, number, 0, steps, number * steps)

    def _of_tile(self, tile: Any, number: Any, first_step: Any, steps: Any, start: Any, **shared: Any) -> WorkTile:
        """Of a tile of the launch, in its order."""
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
        return WorkTile(number, *place, first_step, steps, start, **shared)


@dataclasses.dataclass(frozen=True)
class SplitTailScheduler(TileScheduler):
    """Of one CTA of a launch that splits the tiles of its last wave along k: there are enough CTAs for all parts."""

    @property
    def _waves(self) -> int:
        """Whole ones."""
        return int(self.plan.t.tiles // self.clusters)

    @property
    def tail(self) -> int:
        """Tiles of the last wave."""
        return int(self.plan.t.tiles % self.clusters)

    @property
    def _has_part(self) -> Any:
        return self.cluster < self.tail * self.plan.s.tail_split_k

    @property
    def _part(self) -> tuple[Any, Any]:
        """Which part of a tile of the last wave the CTA has: its number, and its first step."""
        number = lax.div(self.cluster, self.tail)
        return number, number * cdiv(self.plan.t.steps, self.plan.s.tail_split_k)

    @property
    def _steps_of_part(self) -> Any:
        steps = self.plan.t.steps
        return lax.min(cdiv(steps, self.plan.s.tail_split_k), steps - self._part[1])

    @property
    def count(self) -> Any:
        return self._waves + self._has_part.astype(jnp.int32)

    @property
    def steps(self) -> Any:
        return self._waves * self.plan.t.steps + jnp.where(self._has_part, self._steps_of_part, 0)

    def work_tile(self, number: Any) -> WorkTile:
        steps, last = self.plan.t.steps, number == self._waves
        part, first_step = self._part
        tile = number * self.clusters + jnp.where(last, lax.rem(self.cluster, self.tail), self.cluster)
        last_part = self.plan.s.tail_split_k - 1
        return self._of_tile(
            tile,
            number,
            jnp.where(last, first_step, 0),
            jnp.where(last, self._steps_of_part, steps),
            number * steps,
            leaves=last & (part < last_part),
            adds=last & (part == last_part),
        )


def tile_scheduler(plan: Plan, cluster: Any, clusters: int, rank: Any) -> TileScheduler:
    """Of a CTA of a launch."""
    return (TileScheduler if plan.s.tail_split_k == 1 else SplitTailScheduler)(plan, cluster, clusters, rank)
