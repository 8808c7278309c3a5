"""A CTA of a launch and its consumer warpgroups: their buffers in shared memory and device memory, and offsets."""

from __future__ import annotations

import dataclasses
from typing import Any

from search_spaces.hopper.limits import WGMMA_ROWS
from search_spaces.hopper.pipeline import Pipeline
from search_spaces.matmul.hopper.epilogue_loads import EpilogueLoads
from search_spaces.matmul.hopper.factors import Source
from search_spaces.matmul.hopper.operand import Operand
from search_spaces.matmul.hopper.plan import Plan
from search_spaces.matmul.hopper.scales import Scales
from search_spaces.matmul.hopper.tail_reduction import TailReduction
from search_spaces.matmul.hopper.tile_scheduler import TileScheduler, WorkTile


@dataclasses.dataclass(frozen=True)
class Cta:
    """A CTA of a launch, as seen by its warpgroups.

    Attributes:
      plan: of the launch.
      a, b: the operands.
      pipeline: shared by both operands.
      biases: in device memory, one for each factor; empty without a bias.
      residual: in device memory; None if there is none.
      scales: of the operands, in device memory; None if there are none.
      results: in device memory.
      out_smem: stages of each consumer's epilogue subtiles.
      others: scratch of the epilogue's operands and of a reduction, by name.
      mailbox: of a reduction, for the interpreter.
      tail: the partial sums that CTAs exchange for the tiles of the last wave; None if these tiles are not split.
      rank: of the CTA in its cluster.
      warpgroup: index of the current warpgroup; the consumers come first in a CTA.
      tiles: the work tiles that the CTA computes.
    """

    plan: Plan
    a: Operand
    b: Operand
    pipeline: Pipeline
    biases: tuple[Source, ...]
    residual: Any
    scales: Scales | None
    results: tuple[Any, ...]
    out_smem: Any
    others: dict[str, Any]
    mailbox: list[Any]
    tail: TailReduction | None
    rank: Any
    warpgroup: Any
    tiles: TileScheduler


@dataclasses.dataclass(frozen=True)
class Consumer:
    """One consumer warpgroup of a CTA.

    Attributes:
      cta: its CTA.
      first_row, first_column: offset of its part of the CTA's tile, as wgmma sees the tile (after `swap_ab`).
      first_own: offset of the columns for which it runs the epilogue; differs from `first_column` only in cluster
        split-K.
      loads: the loads of its epilogue's operands, for each factor.
    """

    cta: Cta
    first_row: Any
    first_column: Any
    first_own: Any
    loads: tuple[EpilogueLoads, ...]

    @property
    def subtile_columns(self) -> int:
        """Columns of an epilogue subtile, as wgmma sees them."""
        return self.cta.plan.out_n if self.cta.plan.s.swap_ab else self.cta.plan.s.epi_tile_n

    @property
    def subtiles(self) -> list[tuple[int, int]]:
        """First row and column of each subtile, in the part that the consumer finishes."""
        t, out_n = self.cta.plan.t, self.cta.plan.out_n
        return [(m, n) for m in range(0, t.wg_m, WGMMA_ROWS) for n in range(0, out_n, self.subtile_columns)]

    def corner(self, work: WorkTile, m: int, n: int) -> tuple[Any, Any]:
        """Returns the first row and column of a subtile in the result."""
        corner = work.row + self.first_row + m, work.column + self.first_own + n
        return corner[::-1] if self.cta.plan.s.swap_ab else corner

    def fetch_residual(self, count: int, work: WorkTile) -> None:
        """Starts the load of the residual for the `count`-th subtile."""
        stage = count % int(self.cta.plan.tiling.epi_stages)
        self.loads[0].fetch_residual(stage, work.product, *self.corner(work, *self.subtiles[count]))
