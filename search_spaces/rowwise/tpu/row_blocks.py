"""The TPU kernels on rows: blocks of whole rows, long rows in chunks, and the loops over a block in VMEM."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from search_spaces.rowwise import Reduction, Statistics
from search_spaces.rowwise.tpu.space import RowSchedule
from search_spaces.tpu import limit_or_none

C = TypeVar("C")
# Up to this number of steps through a row, the loop is unrolled: the compiler then fills the stalls of one step with
# the next (softmax of 256 x 4096, 16 rows a step: 9,084 cycles, and 18,190 in a loop; libtpu 0.0.48's static schedule,
# v6e).
UNROLLED = 32
# First column and number of columns of a fragment: a multiple of 128 except for the last fragment of a row.
Place = tuple[Any, int]


class Lanes:
    """A `Reducer` over the columns of an array."""

    def max(self, parts: jax.Array, /) -> jax.Array:
        return parts.max(axis=-1, keepdims=True)

    def sum(self, parts: jax.Array, /) -> jax.Array:
        return parts.sum(axis=-1, keepdims=True)

    def broadcast(self, reduced: jax.Array, /) -> jax.Array:
        return reduced


def over_rows(rows: int, step_rows: int, body: Callable[[Any], None]) -> None:
    """Calls `body` with each slice of `step_rows` rows."""
    if rows == step_rows:
        body(pl.ds(0, rows))
        return

    def one(step: Any, carry: int) -> int:
        body(pl.ds(pl.multiple_of(step * step_rows, step_rows), step_rows))
        return carry

    lax.fori_loop(0, rows // step_rows, one, 0)


@dataclasses.dataclass(frozen=True)
class RowLoop:
    """A pass over `columns` columns: steps of `fragments` fragments of `lanes` columns, the rest, and the tail."""

    columns: int
    lanes: int
    fragments: int

    @property
    def tail(self) -> Place | None:
        """The last fragment, if it is narrower than `lanes`."""
        width = self.columns % self.lanes
        return (self.columns - width, width) if width else None

    def over_fragments(self, visit: Callable[[C, Sequence[Place]], C], carry: C) -> C:
        """Folds `visit` over the steps, starting with `carry`; without the tail."""
        step = self.lanes * self.fragments
        steps = self.columns // step

        def places(start: Any, count: int) -> list[Place]:
            return [(start + number * self.lanes, self.lanes) for number in range(count)]

        if steps == 1:
            carry = visit(carry, places(0, self.fragments))
        elif steps:
            if steps <= UNROLLED:
                for number in range(steps):
                    carry = visit(carry, places(number * step, self.fragments))
            else:
                whole: Any = lax.fori_loop(
                    0, steps, lambda j, c: visit(c, places(pl.multiple_of(j * step, step), self.fragments)), carry
                )
                carry = whole
        left = (self.columns - steps * step) // self.lanes
        return visit(carry, places(steps * step, left)) if left else carry

    def statistics(self, reduction: Reduction, rows: int, read: Callable[[Place], jax.Array]) -> Statistics:
        """Returns the statistics of `rows` rows, from the fragments that `read` returns."""

        def initial(columns: int) -> Statistics:
            return tuple(jnp.full((rows, columns), value, jnp.float32) for value in reduction.init)

        found = []
        if self.columns >= self.lanes:
            lanes = self.over_fragments(
                lambda statistics, places: reduction.update(statistics, [read(place) for place in places]),
                initial(self.lanes),
            )
            found.append(reduction.reduce(lanes, Lanes()))
        if self.tail is not None:
            narrower = reduction.update(initial(self.tail[1]), [read(self.tail)])
            found.append(reduction.reduce(narrower, Lanes()))
        return found[0] if len(found) == 1 else reduction.combine(*found)

    def apply(self, write: Callable[[Place], None]) -> None:
        """Calls `write` for each fragment."""

        def visit(carry: int, places: Sequence[Place]) -> int:
            for place in places:
                write(place)
            return carry

        self.over_fragments(visit, 0)
        if self.tail is not None:
            write(self.tail)


# ------------------------------------------------------------------------------
# Blocks of whole rows: each row is reduced and computed in the pipeline's window.


def whole_rows(
    reduction: Reduction,
    s: RowSchedule,
    results: Sequence[jax.ShapeDtypeStruct],
    by_row: Sequence[jax.Array],
    shared: Sequence[jax.Array],
    name: str,
) -> Sequence[jax.Array]:
    """Returns all results, given row operands and ``float32[1, columns]`` operands that all rows share."""
    rows, columns = by_row[0].shape
    loop = RowLoop(columns, s.lanes, s.fragments)

    def kernel(*refs: Any) -> None:
        operands, weights = refs[: len(by_row)], refs[len(by_row) : -len(results)]
        out, *row = refs[-len(results) :]
        reduced = row[0] if row else operands[0]

        def step(at: Any) -> None:
            def first(place: Place) -> jax.Array:
                there = (at, pl.ds(*place))
                fragment = reduction.prologue(*(ref[there] for ref in operands))
                if row:
                    reduced[there] = fragment
                return fragment.astype(jnp.float32)

            final = reduction.finalize(loop.statistics(reduction, s.step_rows, first))

            def second(place: Place) -> None:
                there = (at, pl.ds(*place))
                weight = weights[0][:, pl.ds(*place)] if weights else None
                out[there] = reduction.apply(reduced[there].astype(jnp.float32), weight, final).astype(out.dtype)

            loop.apply(second)

        over_rows(s.rows, s.step_rows, step)

    block = pl.BlockSpec((s.rows, columns), lambda i: (i, 0))
    call = pl.pallas_call(
        kernel,
        grid=(pl.cdiv(rows, s.rows),),
        in_specs=[*(block for _ in by_row), *(pl.BlockSpec((1, columns), lambda i: (0, 0)) for _ in shared)],
        out_specs=[block for _ in results],
        out_shape=list(results),
        compiler_params=pltpu.CompilerParams(
            dimension_semantics=("parallel",), vmem_limit_bytes=limit_or_none(s.vmem_limit_mib)
        ),
        name=name,
    )
    made: Sequence[jax.Array] = call(*by_row, *shared)
    return made


# ------------------------------------------------------------------------------
# Rows too long for one window, in chunks: reduced chunk by chunk, and computed after all chunks have been read.
#
# With a scratch array for a block's rows, a grid step computes a chunk of one block and reads the same chunk of the
# next block into its place. Loads and stores are then always in flight, and each element moves once. Without it, the
# chunks of a block are loaded twice.


@dataclasses.dataclass(frozen=True)
class ChunkGrid:
    """The chunks that a grid step reads and computes.

    Attributes:
      blocks: blocks of rows.
      chunks: chunks of each block.
      keeps: whether a scratch array keeps the rows of a block: a step then reads one chunk and computes another.
      cores: cores that may share the blocks.
    """

    blocks: int
    chunks: int
    keeps: bool
    cores: int

    @property
    def each(self) -> int:
        """Blocks of a core; the last core may have fewer."""
        return pl.cdiv(self.blocks, min(self.cores, self.blocks))

    @property
    def grid(self) -> tuple[int, int, int]:
        if self.keeps:
            return pl.cdiv(self.blocks, self.each), self.each + 1, self.chunks
        return self.blocks, 2, self.chunks

    def _of_core(self, core: Any) -> Any:
        """Returns the number of blocks of this core."""
        return jnp.minimum(self.each, self.blocks - core * self.each)

    def takes_in(self, outer: Any, step: Any) -> Any:
        return step < (self._of_core(outer) if self.keeps else 1)

    def computes(self, outer: Any, step: Any) -> Any:
        return (step > 0) & (step <= self._of_core(outer)) if self.keeps else step > 0

    # If a step has nothing to read or compute, the window stays at the previous or next chunk.
    def source(self, outer: Any, step: Any, chunk: Any) -> tuple[Any, Any]:
        """Returns the chunk of the operands."""
        if not self.keeps:
            return outer, chunk
        block = outer * self.each + jnp.minimum(step, self._of_core(outer) - 1)
        return block, jnp.where(self.takes_in(outer, step), chunk, self.chunks - 1)

    def target(self, outer: Any, step: Any, chunk: Any) -> tuple[Any, Any]:
        """Returns the chunk of the results."""
        if not self.keeps:
            return outer, jnp.where(step > 0, chunk, 0)
        last = self._of_core(outer)
        block = outer * self.each + jnp.clip(step - 1, 0, last - 1)
        return block, jnp.where(step == 0, 0, jnp.where(step > last, self.chunks - 1, chunk))


@dataclasses.dataclass(frozen=True)
class _Block:
    """The state of a grid step: windows, and VMEM arrays that persist between steps.

    Attributes:
      chunk: index of the row's chunk in the windows.
      row: window of the reduced row if it is a result.
      running: statistics of the chunks so far; `seen`: those of whole rows.
      kept: the chunks of whole rows; None if these are loaded again.
    """

    reduction: Reduction
    step_rows: int
    chunk: Any
    operands: Sequence[Any]
    weight: Any | None
    out: Any
    row: Any | None
    running: Sequence[Any]
    seen: Sequence[Any]
    kept: Any | None

    def start(self) -> None:
        for ref, value in zip(self.running, self.reduction.init, strict=True):
            ref[...] = jnp.full_like(ref, value)

    def take_in(self, loop: RowLoop, at: Any) -> None:
        """Adds some rows of the chunk to their statistics."""

        def read(place: Place) -> jax.Array:
            there = (at, pl.ds(*place))
            taken = self._fragment(there)
            if self.kept is not None:
                self.kept[(self.chunk, *there)] = taken
            return taken.astype(jnp.float32)

        found = loop.statistics(self.reduction, self.step_rows, read)
        before = tuple(ref[at, :] for ref in self.running)
        for ref, value in zip(self.running, self.reduction.combine(before, found), strict=True):
            ref[at, :] = value

    def end(self) -> None:
        """Saves the statistics after the last chunk, so that the next rows can be read."""
        if self.kept is not None:
            for done, ref in zip(self.seen, self.running, strict=True):
                done[...] = ref[...]

    def compute(self, loop: RowLoop, at: Any) -> None:
        """Computes the results of some rows of the chunk."""
        final = self.reduction.finalize(tuple(ref[at, :] for ref in self.seen))

        def write(place: Place) -> None:
            there = (at, pl.ds(*place))
            fragment = self._fragment(there) if self.kept is None else self.kept[(self.chunk, *there)]
            weight = None if self.weight is None else self.weight[:, pl.ds(*place)]
            self.out[there] = self.reduction.apply(fragment.astype(jnp.float32), weight, final).astype(self.out.dtype)
            if self.row is not None:
                self.row[there] = fragment

        loop.apply(write)

    def _fragment(self, there: Any) -> jax.Array:
        return self.reduction.prologue(*(ref[there] for ref in self.operands))


def chunked_rows(
    reduction: Reduction,
    s: RowSchedule,
    cores: int,
    results: Sequence[jax.ShapeDtypeStruct],
    by_row: Sequence[jax.Array],
    shared: Sequence[jax.Array],
    name: str,
) -> Sequence[jax.Array]:
    """Returns all results, given row operands and ``float32[1, columns]`` operands that all rows share."""
    rows, columns = by_row[0].shape
    blocks, keeps = pl.cdiv(rows, s.rows), s.residency == "scratch"
    over = ChunkGrid(blocks, pl.cdiv(columns, s.columns), keeps, cores)
    loop = RowLoop(s.columns, s.lanes, s.fragments)
    last = RowLoop(columns - (over.chunks - 1) * s.columns, s.lanes, s.fragments)
    count = len(reduction.init)

    def kernel(*refs: Any) -> None:
        operands, refs = refs[: len(by_row)], refs[len(by_row) :]
        weights, refs = refs[: len(shared)], refs[len(shared) :]
        (out, *row), scratch = refs[: len(results)], refs[len(results) :]
        outer, step, chunk = pl.program_id(0), pl.program_id(1), pl.program_id(2)
        block = _Block(
            reduction,
            s.step_rows,
            chunk,
            operands,
            weights[0] if weights else None,
            out,
            row[0] if row else None,
            running=scratch[:count],
            seen=scratch[count : 2 * count] if keeps else scratch[:count],
            kept=scratch[-1] if keeps else None,
        )
        takes_in = over.takes_in(outer, step)

        # Before the same chunk of the next block replaces it.
        @pl.when(over.computes(outer, step))
        def _() -> None:
            over_rows(s.rows, s.step_rows, lambda at: block.compute(loop, at))

        @pl.when(takes_in & (chunk == 0))
        def _() -> None:
            block.start()

        @pl.when(takes_in & (chunk < over.chunks - 1))
        def _() -> None:
            over_rows(s.rows, s.step_rows, lambda at: block.take_in(loop, at))

        @pl.when(takes_in & (chunk == over.chunks - 1))
        def _() -> None:
            over_rows(s.rows, s.step_rows, lambda at: block.take_in(last, at))
            block.end()

    def chunks_of(index: Callable[..., tuple[Any, Any]]) -> pl.BlockSpec:
        return pl.BlockSpec((s.rows, s.columns), index)

    weight = pl.BlockSpec((1, s.columns), lambda *at: (0, over.target(*at)[1]))
    statistics = [pltpu.VMEM((s.rows, 1), jnp.float32)] * (count * (2 if keeps else 1))
    kept = [pltpu.VMEM((over.chunks, s.rows, s.columns), by_row[0].dtype)] if keeps else []
    call = pl.pallas_call(
        kernel,
        grid=over.grid,
        in_specs=[*(chunks_of(over.source) for _ in by_row), *(weight for _ in shared)],
        out_specs=[chunks_of(over.target) for _ in results],
        out_shape=list(results),
        scratch_shapes=[*statistics, *kept],
        compiler_params=pltpu.CompilerParams(
            dimension_semantics=("parallel", "arbitrary", "arbitrary"),
            vmem_limit_bytes=limit_or_none(s.vmem_limit_mib),
        ),
        name=name,
    )
    made: Sequence[jax.Array] = call(*by_row, *shared)
    return made
