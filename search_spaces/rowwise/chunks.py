"""How a row is cut into chunks that the warps of a block share, and what of it these have in on-chip memory."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp

from search_spaces.rowwise.reduction import Reduction
from search_spaces.rowwise.team import WARPS, Run, Team

# Mosaic GPU gives each on-chip array whole kibibytes, a kernel that reduces two more, and each barrier 8 bytes.
ALIGNMENT = 1024
REDUCTION_BYTES = 2048
BARRIER_BYTES = 8


@dataclasses.dataclass(frozen=True)
class Chunks:
    """A row as chunks of lines; fields may be `Columns` of schedules.

    A line is what one warp gets by one access of its threads, and a row is whole lines.

    Attributes:
      columns: of a row.
      vector: elements of one access of one thread.
      warpgroups: that compute.
      pieces: lines of each warp in a chunk.
    """

    columns: int
    vector: Any
    warpgroups: Any
    pieces: Any

    @property
    def line(self) -> Any:
        """Elements of a line."""
        return 32 * self.vector

    @property
    def lines(self) -> Any:
        """Of a row."""
        return self.columns // self.line

    @property
    def chunk(self) -> Any:
        """Lines of a chunk."""
        return WARPS * self.warpgroups * self.pieces

    @property
    def elements(self) -> Any:
        """Of a chunk."""
        return self.chunk * self.line

    @property
    def chunks(self) -> Any:
        """Of a row, the last one starting early enough to be whole."""
        return -(-self.lines // self.chunk)

    @property
    def overlap(self) -> Any:
        """Elements that the last chunk and the one before have both."""
        return (self.chunks * self.chunk - self.lines) * self.line

    @property
    def team(self) -> Team:
        """Of a piece."""
        return Team(warps=1, vector=self.vector)

    @property
    def run(self) -> Run:
        """All pieces of a warpgroup, for what needs no single ones."""
        return Run(self.vector, self.pieces)

    def share(self, warpgroup: Any) -> Any:
        """The element of each chunk at which the share of this warpgroup starts."""
        return warpgroup * (WARPS * self.pieces * self.line)

    def places(self, warpgroup: Any) -> list[Any]:
        """The elements of each chunk at which pieces of this warpgroup start."""
        return [self.share(warpgroup) + WARPS * self.line * piece for piece in range(self.pieces)]

    def counted(
        self, reduction: Reduction, places: Sequence[Any], pieces: Sequence[jax.Array], since: Any
    ) -> list[jax.Array]:
        """The pieces of a chunk, without its elements before `since`, which starts a line.

        Such as the last chunk has in common with the one before. Where `since` is 0, not traced, nothing is done.
        """
        if isinstance(since, int) and since == 0:
            return list(pieces)
        start = self.team.index(0) * self.line
        return [
            jnp.where(start + place >= since, piece, reduction.outside)
            for place, piece in zip(places, pieces, strict=True)
        ]


def round_up(a: Any, b: int) -> Any:
    return -(-a // b) * b
