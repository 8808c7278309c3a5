"""How the blocks of a cluster share a row, each a part of it in chunks, and how kernels of such blocks are launched."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from search_spaces.jax_compat import plgpu
from search_spaces.rowwise.chunks import Chunks, round_up
from search_spaces.rowwise.ends import End, Ends, Start
from search_spaces.rowwise.exchange import PART, Board
from search_spaces.rowwise.reduction import Reduction, Statistics
from search_spaces.rowwise.registers import COMPILER
from search_spaces.rowwise.team import LANES, WARPS


@dataclasses.dataclass(frozen=True)
class Parts(Chunks):
    """A part of a row as chunks; fields may be `Columns` of schedules.

    The last part starts early enough to be whole, as does the last chunk of each. A row need not be whole lines, nor
    start at a multiple of an access: its lines do, and what it has before and after them are its `ends`.

    Attributes:
      columns: of a part, without ends.
      row: columns of a row.
      cluster: blocks that share a row, each of which has a part of it.
    """

    row: int
    cluster: Any

    @property
    def in_lines(self) -> Any:
        """Elements of a row that are in its lines."""
        return lines_of(self.row, self.vector) * self.line

    @property
    def ends(self) -> Ends:
        return Ends(self.row, self.in_lines, _most_before(self.row, self.vector))

    @property
    def repeated(self) -> Any:
        """Elements that the last part and the one before have both: fewer lines than blocks, and than in a chunk."""
        return self.cluster * self.columns - self.in_lines

    def part(self) -> tuple[Callable[[Any], Any], Callable[[int], Any]]:
        """In a kernel, of this block's chunks: where each starts in the row's lines, and its first element that counts.

        Both are elements, and starts of lines.
        """
        first, repeated = self._begins()

        def start_of(chunk: Any) -> Any:
            return first + lax.min(chunk * self.elements, self.columns - self.elements)

        def since(chunk: int) -> Any:
            return repeated if chunk == 0 else self.overlap if chunk == int(self.chunks) - 1 else 0

        return start_of, since

    def _begins(self) -> tuple[Any, Any]:
        """The element of the row's lines at which this block's part starts, and its first one that counts."""
        if self.cluster == 1:
            return 0, 0
        part = lax.axis_index(PART)
        last = part == self.cluster - 1
        return (
            lax.min(part * self.columns, self.in_lines - self.columns),
            jnp.where(last, self.repeated, 0) if self.repeated else 0,
        )

    def start(self, row: Any) -> Start:
        """In a kernel, of the row of this number."""
        first = row * self.row
        if not _most_before(self.row, self.vector):
            return Start(first, first)
        return Start(first, lax.div(first + self.vector - 1, self.vector) * self.vector)

    def read_ends(self, x: Any, start: Start, warpgroup: Any) -> list[End]:
        """In a kernel, those of a row that this warpgroup of this block has."""
        part = lax.axis_index(PART) * self.warpgroups if self.cluster > 1 else 0
        return self.ends.read(x, start, part + warpgroup, self.warpgroups * self.cluster)

    def of_warps(self, reduction: Reduction, statistics: Statistics, ends: list[End]) -> Statistics:
        """Of each warp, what its threads have gathered of chunks, and what it has of the row's ends."""
        gathered = reduction.join(statistics, self.team)
        return reduction.merge(gathered, self.ends.statistics(reduction, ends)) if ends else gathered

    @property
    def shifts(self) -> Any:
        """At how many elements of a row its lines may start."""
        return self.vector // np.gcd(self.row, self.vector)

    def shifted(self, shared: jax.Array) -> jax.Array:
        """What all rows share, once for each of the `shifts`, one after the other.

        So each is read by accesses as wide as those of the row, at multiples of these. The first is whole.
        """
        if self.shifts == 1:
            return shared
        step, length = self.vector // self.shifts, round_up(self.row, self.vector)
        padded = jnp.pad(shared, (0, length + self.vector - self.row))
        return jnp.concatenate([padded[shift * step : shift * step + length] for shift in range(self.shifts)])

    def shift(self, start: Start) -> Any:
        """In a kernel, where in `shifted` that begins which belongs to the lines that start there."""
        if self.shifts == 1:
            return 0
        return lax.div(start.lines - start.row, self.vector // self.shifts) * round_up(self.row, self.vector)

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
        """The kernel's result.

        Args:
          kernel: of references to `x`, what is `shifted`, the result, all of them flat, and what `board` has elsewhere.
          blocks: so many blocks, or clusters of them, by the name of their axis.
        """
        parts = {"cluster": (self.cluster,), "cluster_names": (PART,)} if self.cluster > 1 else {}
        made: jax.Array = plgpu.kernel(
            kernel,
            out_type=(jax.ShapeDtypeStruct((result.size,), result.dtype), *board.elsewhere(result.shape[0])),
            grid=tuple(blocks.values()),
            grid_names=tuple(blocks),
            num_threads=self.warpgroups,
            thread_name="warpgroup",
            compiler_params=COMPILER,
            **parts,
        )(x.reshape(-1), *map(self.shifted, shared))[0]
        return made.reshape(result.shape)


def lines_of(columns: int, vector: Any) -> Any:
    """Lines of a row wherever it starts: from the first multiple of an access on, as many as are whole."""
    return (columns - _most_before(columns, vector)) // (LANES * vector)


def _most_before(columns: int, vector: Any) -> Any:
    """The most elements that a row has before its first multiple of an access."""
    return vector - np.gcd(columns, vector)
