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
from search_spaces.matmul.rasterization import planar_snake


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
      cluster, clusters: number of its cluster in the grid, and how many there are.
      rank: of the CTA in its cluster.
      warpgroup: that asks: the consumers are the first of a CTA.
      tiles: that the cluster computes.
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
    cluster: Any
    clusters: Any
    rank: Any
    warpgroup: Any
    tiles: Any

    def origin(self, tile: Any) -> tuple[Any, Any, Any]:
        """Product, first row and first column of this CTA's `tile`-th tile."""
        s, t = self.plan.s, self.plan.t
        number, grid = self.cluster + tile * self.clusters, (t.grid_m, t.grid_n)
        product, row, column = planar_snake(number, grid, s.grid_minor_dim, s.grid_tile_width)
        row = 2 * row + self.rank if s.cluster == "m" else row
        column = 2 * column + self.rank if s.cluster == "n" else column
        return product, row * s.tile_m, column * s.tile_n


@dataclasses.dataclass(frozen=True)
class Consumer:
    """One consumer warpgroup of a CTA.

    Attributes:
      cta: its CTA.
      first_row, first_column: of a tile, as wgmma sees it, the first that it computes...
      first_own: ...and the first column that it finishes.
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

    def corner(self, row: Any, column: Any, m: int, n: int) -> tuple[Any, Any]:
        """First row and column of the result of a subtile of the tile at `row` and `column`."""
        corner = row + self.first_row + m, column + self.first_own + n
        return corner[::-1] if self.cta.plan.s.swap_ab else corner

    def fetch_residual(self, count: int, product: Any, row: Any, column: Any) -> None:
        """Asks for the `count`-th subtile."""
        stage = count % int(self.cta.plan.tiling.epi_stages)
        self.loads[0].fetch_residual(stage, product, *self.corner(row, column, *self.subtiles[count]))
