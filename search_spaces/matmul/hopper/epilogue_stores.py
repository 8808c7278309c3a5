"""Stores of the epilogue: subtiles go from shared memory to the results in device memory, which split the columns.

Several results are separate arrays, each with its own TMA descriptor. No subtile spans two results (a rule of the
space), so its first column selects the result, by a branch that is uniform in a warpgroup. A tile may span several
results.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
import operator
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl

from search_spaces.hopper import untiled_swizzled
from search_spaces.hopper.smem_layout import Untiled
from search_spaces.jax_compat import plgpu
from search_spaces.matmul.hopper.plan import Plan


@dataclasses.dataclass(frozen=True)
class EpilogueStores:
    """The epilogue stores of one consumer warpgroup.

    Attributes:
      plan: of the launch.
      results: in device memory, or the accumulators of splits of k.
    """

    plan: Plan
    results: tuple[Any, ...]

    def by_threads(self, product: Any, row: Any, column: Any, smem: Any, value: jax.Array) -> None:
        """Stores the subtile at `row` and `column` of a product by ordinary stores; `smem` is a stage for it."""

        def store(c: Any, column: Any) -> None:
            swizzle, transposed = self.plan.out_tile.swizzle, self.plan.s.swap_ab
            untiled_swizzled.store_to_gmem(c, row, column, smem, value, swizzle, transposed=transposed)

        self._where_it_lies(product, row, column, store)
        plgpu.commit_smem()

    def by_tma(self, product: Any, row: Any, column: Any, smem: Any) -> None:
        """Stores a subtile from its stage by TMA, in one commit group, which ends when TMA has read the stage."""

        def send(c: Any, column: Any) -> None:
            boxes = self.plan.out_tile.boxes(row, column)
            for number, (index, box) in enumerate(boxes, 1):
                plgpu.copy_smem_to_gmem(smem.at[index] if index else smem, c.at[box], commit_group=number == len(boxes))

        self._where_it_lies(product, row, column, send)

    def _where_it_lies(self, product: Any, row: Any, column: Any, store: Callable[[Any, Any], None]) -> None:
        """Calls ``store(result, column within it)`` for the result that contains `row` and `column` of the product."""
        several = self.plan.outputs > 1
        of_product = [c.at[product] if several else c for c in self.results]
        ends = list(itertools.accumulate(self.plan.problem.columns))

        def choose() -> None:
            if len(of_product) == 1:
                store(of_product[0], column)
                return
            for number, (c, first, end) in enumerate(zip(of_product, (0, *ends), ends, strict=False)):
                here = (column >= first) & (column < end) if number < len(ends) - 1 else column >= first

                def store_here(c: Any = c, first: int = first) -> None:
                    store(c, column - first)

                pl.when(here)(store_here)

        if not (within := self._to_be_clipped(row, column, ends[-1])):  # TMA clips stores beyond the edge
            choose()
            return
        here = functools.reduce(operator.and_, within)
        pl.when(here)(choose)
        pl.when(jnp.logical_not(here))(plgpu.commit_smem_to_gmem_group)  # stages are counted in groups

    def _to_be_clipped(self, row: Any, column: Any, end: int) -> list[Any]:
        """Returns the conditions under which a subtile lies inside the array, where TMA would not clip it.

        Mosaic GPU drops an axis along which both the array and the box have at most one swizzled tile (8 rows), and
        ignores the offset of the box along that axis (jax 0.11.2, launch_context.py). Elements beyond the edge would be
        stored at the start.
        """
        out, s = self.plan.out_tile, self.plan.s
        if isinstance(out, Untiled):
            return []
        tile_m, tile_n = (s.tile_n, s.tile_m) if s.swap_ab else (s.tile_m, s.tile_n)
        rows, columns = (int(extent) for extent in self.plan.tiling.c_extents[-1])
        width = out.swizzle // out.dtype.itemsize
        within = []
        one_box_high, one_box_wide = out.rows == 8 and rows <= 8, out.columns == width and columns <= width
        if one_box_high and tile_m > out.rows:
            within.append(row < rows)
        if one_box_wide and tile_n > out.columns:
            within.append(column < end)
        return within
