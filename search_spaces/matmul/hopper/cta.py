"""A CTA of a launch, and a consumer warpgroup of it: what each has in shared memory and in device memory, and where."""

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
    """A CTA of a launch, as its warpgroups see it.

    Attributes:
      plan: of the launch.
      a, b: the operands, and the pipeline that they share.
      biases: in device memory, one for each factor; none without a bias.
      residual: in device memory; None where there is none.
      scales: of the operands, in device memory; None where there are none.
      results: in device memory.
      out_smem: stages of each consumer's epilogue subtiles.
      others: scratch of the epilogue's operands and of a reduction, by name.
      mailbox: of a reduction, for the interpreter.
      tail: what CTAs leave for each other of the tiles of the last wave; None where these are whole.
      rank: of the CTA in its cluster.
      warpgroup: that asks: the consumers are the first of a CTA.
      tiles: which work tiles it computes.
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
      first_row, first_column: offset of what it multiplies within the CTA's tile, as wgmma sees that (after `swap_ab`).
      first_own: offset of the columns whose epilogue it runs; another than `first_column` only in cluster split-K.
      loads: of its epilogue's operands, for each factor.
    """

    cta: Cta
    first_row: Any
    first_column: Any
    first_own: Any
    loads: tuple[EpilogueLoads, ...]

    @property
    def subtile_columns(self) -> int:
        """Of an epilogue subtile, as wgmma sees them."""
        return self.cta.plan.out_n if self.cta.plan.s.swap_ab else self.cta.plan.s.epi_tile_n

    @property
    def subtiles(self) -> list[tuple[int, int]]:
        """First row and column of each, in what the consumer finishes."""
        t, out_n = self.cta.plan.t, self.cta.plan.out_n
        return [(m, n) for m in range(0, t.wg_m, WGMMA_ROWS) for n in range(0, out_n, self.subtile_columns)]

    def corner(self, work: WorkTile, m: int, n: int) -> tuple[Any, Any]:
        """First row and column of the result of a subtile of a tile."""
        corner = work.row + self.first_row + m, work.column + self.first_own + n
        return corner[::-1] if self.cta.plan.s.swap_ab else corner

    def fetch_residual(self, count: int, work: WorkTile) -> None:
        """Asks for the `count`-th subtile."""
        stage = count % int(self.cta.plan.tiling.epi_stages)
        self.loads[0].fetch_residual(stage, work.product, *self.corner(work, *self.subtiles[count]))
