"""An operand of wgmma in a launch: its arrays in device memory, and its stages in shared memory."""

from __future__ import annotations

import dataclasses
from typing import Any

from search_spaces.hopper.smem_layout import SmemTile
from search_spaces.jax_compat import plgpu
from search_spaces.matmul.hopper.factors import Source


@dataclasses.dataclass(frozen=True)
class Operand:
    """`a` or `b`, as wgmma sees it.

    Attributes:
      sources: in device memory: one, or one for each factor (factors.py).
      batched: whether the sources have a batch axis.
      tile: the layout of one stage of a source.
      smem: the stages in shared memory; the tiles of one step are adjacent.
      multicast: whether the CTAs of a cluster load halves of each stage for each other.
    """

    sources: tuple[Source, ...]
    batched: bool
    tile: SmemTile
    smem: Any
    multicast: bool

    def load(self, batch: Any, corner: tuple[Any, Any], stage: Any, full: Any) -> None:
        """Loads the tile at `corner` of each source into a stage, and signals the barrier `full`."""
        for factor, source in enumerate(self.sources):
            slot = self._slot(stage, factor)
            for index, box in self.tile.boxes(*source.at(*corner)):
                plgpu.copy_gmem_to_smem(
                    source.array.at[(batch, *box) if self.batched else box],
                    self.smem.at[slot, *index],
                    full,
                    collective_axes="cluster" if self.multicast else None,
                )

    def part(self, factor: int, stage: Any, rows: Any, columns: Any) -> Any:
        """Returns some rows or columns of a stage of one factor; all factors share a single source."""
        return self.tile.part(self.smem, self._slot(stage, factor), rows, columns)

    def _slot(self, stage: Any, factor: int) -> Any:
        count = len(self.sources)
        return stage if count == 1 else stage * count + factor
