"""What leaves the epilogue: subtiles, from shared memory to the results in device memory, which lie side by side.

Several results are arrays of their own, each with its TMA descriptor. No subtile reaches from one into the next (a rule
of the space), so that its first column tells where it goes; a branch that all threads of a warpgroup take alike. A tile
may reach over several.
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
    """Of one consumer warpgroup.

    Attributes:
      plan: of the launch.
      results: in device memory, or the accumulators of splits of k.
    """

    plan: Plan
    results: tuple[Any, ...]

    def by_threads(self, product: Any, row: Any, column: Any, smem: Any, value: jax.Array) -> None:
        """Stores a subtile by its first row and column, and the number of its product; `smem` is a stage for it."""

        def store(c: Any, column: Any) -> None:
            swizzle, transposed = self.plan.out_tile.swizzle, self.plan.s.swap_ab
            untiled_swizzled.store_to_gmem(c, row, column, smem, value, swizzle, transposed=transposed)

        self._where_it_lies(product, row, column, store)
        plgpu.commit_smem()

    def by_tma(self, product: Any, row: Any, column: Any, smem: Any) -> None:
        """Likewise one that lies in its stage in shared memory; TMA has read it when as many groups have ended."""

        def send(c: Any, column: Any) -> None:
            boxes = self.plan.out_tile.boxes(row, column)
            for number, (index, box) in enumerate(boxes, 1):
                plgpu.copy_smem_to_gmem(smem.at[index] if index else smem, c.at[box], commit_group=number == len(boxes))

        self._where_it_lies(product, row, column, send)

    def _where_it_lies(self, product: Any, row: Any, column: Any, store: Callable[[Any, Any], None]) -> None:
        """Calls ``store(result, column of it)`` for the result that holds a `row` and `column` of the product."""
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

        if not (within := self._to_be_clipped(row, column, ends[-1])):  # TMA writes nothing that lies beyond
            choose()
            return
        here = functools.reduce(operator.and_, within)
        pl.when(here)(choose)
        pl.when(jnp.logical_not(here))(plgpu.commit_smem_to_gmem_group)  # stages are counted in groups

    def _to_be_clipped(self, row: Any, column: Any, end: int) -> list[Any]:
        """What must hold of a subtile that TMA would not clip.

        Mosaic GPU drops an axis of which both an array and a box have no more than one swizzled tile of 8 rows, and
        with it where the box begins (jax 0.11.2, launch_context.py): what lies beyond would be stored at the start.
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
