"""How the blocks of a cluster share a row, each a part of it in chunks, and how kernels of such blocks are launched."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from search_spaces.jax_compat import plgpu
from search_spaces.rowwise.chunks import Chunks
from search_spaces.rowwise.exchange import PART, Board
from search_spaces.rowwise.registers import COMPILER
from search_spaces.rowwise.team import WARPS


@dataclasses.dataclass(frozen=True)
class Parts(Chunks):
    """A part of a row as chunks; fields may be `Columns` of schedules.

    The last part starts early enough to be whole, as does the last chunk of each.

    Attributes:
      columns: of a part.
      row: columns of a row.
      cluster: blocks that share a row, each of which has a part of it.
    """

    row: int
    cluster: Any

    @property
    def lines_of_row(self) -> Any:
        return self.row // self.line

    @property
    def repeated(self) -> Any:
        """Lines that the last part and the one before have both: fewer than blocks, and than lines of a chunk."""
        return self.cluster * self.lines - self.lines_of_row

    def part(self) -> tuple[Callable[[Any], Any], Callable[[int], Any]]:
        """In a kernel, of this block's chunks: the line of the row at which each starts, and its first that counts."""
        first_line, repeated = self._begins()

        def start_of(chunk: Any) -> Any:
            return first_line + lax.min(chunk * self.chunk, self.lines - self.chunk)

        def since(chunk: int) -> Any:
            return repeated if chunk == 0 else self.overlap if chunk == int(self.chunks) - 1 else 0

        return start_of, since

    def _begins(self) -> tuple[Any, Any]:
        """The line of the row at which this block's part starts, and its first one that counts."""
        if self.cluster == 1:
            return 0, 0
        part = lax.axis_index(PART)
        last = part == self.cluster - 1
        return (
            lax.min(part * self.lines, self.lines_of_row - self.lines),
            jnp.where(last, self.repeated, 0) if self.repeated else 0,
        )

    def board(self, statistics: int) -> Board:
        return Board(statistics, WARPS * self.warpgroups, self.cluster)

    def launch(
        self,
        kernel: Callable[..., None],
        board: Board,
        result: jax.ShapeDtypeStruct,
        x: jax.Array,
        shared: Sequence[jax.Array],
        **blocks: int,
    ) -> jax.Array:
        """The kernel's result, of rows in lines.

        Args:
          kernel: of references to `x`, what is shared, the result and what `board` has elsewhere.
          blocks: so many blocks, or clusters of them, by the name of their axis.
        """
        rows, lines = result.shape[0], self.lines_of_row
        parts = {"cluster": (self.cluster,), "cluster_names": (PART,)} if self.cluster > 1 else {}
        made: jax.Array = plgpu.kernel(
            kernel,
            out_type=(jax.ShapeDtypeStruct((rows * lines, self.line), result.dtype), *board.elsewhere(rows)),
            grid=tuple(blocks.values()),
            grid_names=tuple(blocks),
            num_threads=self.warpgroups,
            thread_name="warpgroup",
            compiler_params=COMPILER,
            **parts,
        )(x.reshape(rows * lines, self.line), *(each.reshape(lines, self.line) for each in shared))[0]
        return made.reshape(result.shape)
