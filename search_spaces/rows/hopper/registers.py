"""Rows in registers: a block loads some rows, or a span of their columns, computes all stages, and stores the results.

Three kinds of blocks: one for each group of rows; persistent blocks that take group after group, and add up the sums
over rows that are results; and persistent blocks with groups that arrive in SMEM by TMA, in a ring of stages.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental import pallas as pl

from search_spaces.hopper import WARPS
from search_spaces.hopper.synchronization import Pipeline
from search_spaces.jax_compat import plgpu, store
from search_spaces.rows.hopper.partition import BUFFERS, RegisterPlan
from search_spaces.rows.hopper.thread_layout import CLUSTER_RANK, ThreadLayout
from search_spaces.rows.program import Program, Values, narrowed, within
from search_spaces.rows.stages import Stage, Statistics, with_scalars

# Exponentials use the hardware unit. Exchanges between warps use explicit barriers, so stores need no automatic ones.
COMPILER_PARAMS = plgpu.CompilerParams(
    lowering_semantics=plgpu.LoweringSemantics.Warpgroup, approx_math=True, unsafe_no_auto_barriers=True
)


def gpu_kernel(
    body: Callable[..., None],
    outs: Sequence[jax.ShapeDtypeStruct],
    grid: Mapping[str, int],
    warpgroups: int,
    cluster: int = 1,
) -> Callable[..., Sequence[jax.Array]]:
    """Returns a kernel with this code for each warpgroup; `grid` has CTAs, or clusters, by the name of their axis."""
    in_cluster = {"cluster": (cluster,), "cluster_names": (CLUSTER_RANK,)} if cluster > 1 else {}
    return plgpu.kernel(
        body,
        out_type=tuple(outs),
        grid=tuple(grid.values()),
        grid_names=tuple(grid),
        num_threads=warpgroups,
        thread_name="warpgroup",
        compiler_params=COMPILER_PARAMS,
        **in_cluster,
    )


def run_in_registers(
    program: Program,
    plan: RegisterPlan,
    cores: int,
    results: Sequence[jax.ShapeDtypeStruct],
    arrays: Sequence[jax.Array],
    rows: int,
) -> list[jax.Array]:
    """Runs the kernel, which issues all loads of a group of rows before it computes.

    Rows may have any number and any length of at least one fragment. The last group starts early enough that its last
    row is the last of the array, as do the last span of columns and the last fragment of a row. Overlapping elements
    are stored twice, with the same bits, and count once in reductions.
    """
    blocks, spans = int(plan.grid(rows, cores)), int(plan.spans)
    outs = []
    for result, declared in zip(results, program.results, strict=True):
        sums = declared.kind == "row sum"
        own = WARPS if plan.warps == 1 else 1  # sums over rows of one block
        outs.append(jax.ShapeDtypeStruct((blocks, own, *result.shape), jnp.float32) if sums else result)

    def kernel(*refs: Any) -> None:
        operands, out = refs[: len(arrays)], refs[len(arrays) : len(arrays) + len(outs)]
        block = _Block(program, plan, rows, blocks, spans, operands, out)
        if not plan.in_ring:
            block.run()
            return
        pl.run_scoped(block.run_ring, *block.scratch(), collective_axes="warpgroup")

    numbers = [x.reshape(1) if x.ndim == 0 else x for x in arrays]
    made = gpu_kernel(kernel, outs, {"block": blocks * spans}, int(plan.warpgroups))(*numbers)
    return [
        jnp.sum(x, axis=(0, 1)) if declared.kind == "row sum" else x
        for x, declared in zip(made, program.results, strict=True)
    ]


@dataclasses.dataclass(frozen=True)
class _Block:
    """What the code of one block knows: warps share a row, or those of a warpgroup have a row each.

    In a ring, warps that share a row have a line each of a fragment: its "rows" are then parts of one row.

    Attributes:
      rows: rows of the arrays.
      blocks, spans: blocks for each span of columns, and spans of a row.
      operands, out: references to all arrays.
      partials, arrived: SMEM and barrier of the all-reduce of a ring; None without it.
    """

    program: Program
    plan: RegisterPlan
    rows: int
    blocks: int
    spans: int
    operands: Sequence[Any]
    out: Sequence[Any]
    warpgroup: Any = 0
    partials: Any = None
    arrived: Any = None

    @property
    def layout(self) -> ThreadLayout:
        return self.plan.layout

    @property
    def group(self) -> int:
        return int(self.plan.group)

    def scratch(self) -> list[Any]:
        """Returns the SMEM of a ring: a buffer for each row operand, barriers, and partials of the all-reduce."""
        plan, by_row = self.plan, self._by_row
        copies = len(by_row) * self.group
        buffers = [
            plgpu.SMEM((plan.stages, self.group, self.program.operands[i].parts * plan.columns), self.operands[i].dtype)
            for i in by_row
        ]
        partials = plan.partials(self.program)
        shared = plan.warps > 1
        return [
            tuple(buffers),
            plgpu.Barrier(num_arrivals=copies, num_barriers=plan.stages),
            plgpu.Barrier(num_arrivals=int(plan.warpgroups), num_barriers=plan.stages),
            partials.scratch(BUFFERS) if shared else None,
            partials.barrier() if shared else None,
        ]

    @property
    def _by_row(self) -> list[int]:
        return [i for i, operand in enumerate(self.program.operands) if operand.kind == "row"]

    def _span_start(self) -> Any:
        """Returns the first column of this block."""
        if self.spans == 1:
            return 0
        start = lax.rem(lax.axis_index("block"), self.spans) * int(self.plan.span)
        return lax.min(start, self.plan.columns - int(self.plan.span))

    def _starts(self) -> list[Any]:
        """Returns the first column of each fragment, relative to the span."""
        plan, width = self.plan, int(self.plan.width)
        return [min(start, int(plan.span) - width) for start in range(0, int(plan.span), width)]

    def _rows_of(self, group: Any) -> tuple[Any, Any]:
        """Returns the first row of a group that no group before has, and the first row of the group."""
        begin = group * self.group
        return begin, lax.min(begin, self.rows - self.group)

    def run(self) -> None:
        """Computes one group of rows after the other, with loads into registers."""
        first = lax.div(lax.axis_index("block"), self.spans) if self.spans > 1 else lax.axis_index("block")
        groups = -(-self.rows // self.group)

        def load(group: Any) -> tuple[Any, Any, Callable[[int, int, int], jax.Array]]:
            begin, row = self._rows_of(group)
            return begin, row, lambda value, step, start: self._from_memory(value, row, step, start)

        if not self.plan.blocks:
            self._compute(*load(first), sums=())
            return
        waves = lax.div(groups - 1 - first + self.blocks, self.blocks)

        def body(wave: Any, sums: tuple[jax.Array, ...]) -> tuple[jax.Array, ...]:
            return self._compute(*load(first + wave * self.blocks), sums=sums)

        self._store_sums(first, lax.fori_loop(0, waves, body, self._no_sums()))

    def run_ring(self, buffers: Any, full: Any, empty: Any, partials: Any, arrived: Any) -> None:
        """Computes one group of rows after the other, with loads by TMA into a ring of stages."""
        plan = self.plan
        first, groups = lax.axis_index("block"), -(-self.rows // self.group)
        waves = lax.div(groups - 1 - first + self.blocks, self.blocks)
        warpgroup = lax.axis_index("warpgroup")
        block = dataclasses.replace(self, warpgroup=warpgroup, partials=partials, arrived=arrived)
        pipeline = Pipeline(plan.stages, 1, full, empty)

        def copy(wave: Any) -> None:
            stage = pipeline.stage(wave)
            _, begin = self._rows_of(first + wave * self.blocks)
            for number, operand in enumerate(self._by_row):
                for row in range(self.group):
                    plgpu.copy_gmem_to_smem(
                        self.operands[operand].at[begin + row],
                        buffers[number].at[stage, row],
                        full.at[stage],
                        oob_mode=plgpu.OOBFillMode.PROMISE_IN_BOUNDS,  # one run of bytes: a copy of any length
                    )

        @pl.when(warpgroup == 0)
        def fill() -> None:
            lax.fori_loop(0, lax.min(waves, plan.stages), lambda wave, _: copy(wave), None)

        def body(wave: Any, sums: tuple[jax.Array, ...]) -> tuple[jax.Array, ...]:
            stage = pipeline.stage(wave)
            load = wave - 1 + plan.stages

            @pl.when((warpgroup == 0) & (wave > 0) & (load < waves))
            def refill() -> None:
                plgpu.barrier_wait(empty.at[pipeline.stage(load)])
                plgpu.commit_smem()  # orders the reads before a write by TMA
                copy(load)

            plgpu.barrier_wait(full.at[stage])
            loaded = {
                (value, step, start): block._from_stage(buffers, stage, value, step, start)
                for value in self._vectors("row")
                for step in range(plan.rows)
                for start in range(int(plan.accesses))
            }
            plgpu.barrier_arrive(empty.at[stage])
            begin, row = self._rows_of(first + wave * self.blocks)

            def at(value: int, step: int, start: int) -> jax.Array:
                if (value, step, start) in loaded:
                    return loaded[value, step, start]
                return block._from_memory(value, row, step, start)

            return block._compute(begin, row, at, sums=sums, exchanges=wave * len(self.program.stages))

        sums = lax.fori_loop(0, waves, body, self._no_sums(), unroll=False)
        block._store_sums(first, sums)

        @pl.when(warpgroup == 0)
        def drain() -> None:
            pipeline.producer_tail(waves)

    def _vectors(self, kind: str) -> list[int]:
        """Returns the inputs of this kind that a stage reads."""
        read = sorted(frozenset().union(*self.program.reads))
        return [x for x in read if self.program.source(x).kind == kind]

    def _from_memory(self, value: int, row: Any, step: int, start: int) -> jax.Array:
        """Loads a fragment of an input from device memory."""
        read = self.program.inputs[value]
        operand = self.program.operands[read.operand]
        column = read.part * self.plan.columns + self._span_start() + self._starts()[start] + self.offset
        if operand.kind == "shared":
            return self._load_shared(self.operands[read.operand], column)
        return self.layout.load(self.operands[read.operand], row + step * self.layout.rows, column)

    def _load_shared(self, ref: Any, column: Any) -> jax.Array:
        if self.plan.in_ring and self.plan.warps > 1:  # warps have a line each
            return self.layout.load_flat(ref, column)
        return self.layout.load_shared(ref, column)

    def _from_stage(self, buffers: Any, stage: Any, value: int, step: int, start: int) -> jax.Array:
        """Loads a fragment of an input from a stage of the ring."""
        read = self.program.inputs[value]
        buffer = buffers[self._by_row.index(read.operand)].at[stage]
        column = read.part * self.plan.columns + self._starts()[start] + self.offset
        if self.plan.warps == 1:
            return self.layout.load(buffer, step * self.layout.rows, column)
        return self.layout.load_flat(buffer.at[step], column)

    # ------------------------------------------------------------------------------

    def _compute(
        self,
        begin: Any,
        row: Any,
        load: Callable[[int, int, int], jax.Array],
        *,
        sums: tuple[jax.Array, ...],
        exchanges: Any = 0,
    ) -> tuple[jax.Array, ...]:
        """Computes and stores a group of rows; returns the sums over rows with those of this group.

        Args:
          begin: the first row that no group before has; from `row` to there, rows count in another group.
        """
        plan, program = self.plan, self.program
        starts = range(int(plan.accesses))
        first = [
            {(x, start): load(x, step, start) for x in self._vectors("row") for start in starts}
            for step in range(plan.rows)
        ]
        shared = {(x, start): load(x, 0, start) for x in self._vectors("shared") for start in starts}
        for step in range(plan.rows):
            at = row + step * self.fragment_rows
            scalars = with_scalars(program, 0, self._scalars(at))
            known = {**first[step], **shared}
            each = [self._values(scalars, known, start) for start in starts]
            masks = self._masks()
            for number in range(len(program.stages)):
                stage = Stage(program, number)
                elements = list(zip(each, masks, strict=True))
                statistics = self._all_reduce(stage, elements, exchanges + number)
                scalars = stage.finish(statistics, scalars)
                for values in each:
                    values.known.update(scalars)
            self._store(at, each)
            sums = self._add(sums, each, at, begin)
        return sums

    def _values(self, scalars: dict[int, jax.Array], known: Any, start: int) -> Values:
        def load(value: int) -> jax.Array:
            if value >= len(self.program.inputs):
                return self._columns() + (self._span_start() + self._starts()[start])
            loaded: jax.Array = known[value, start]
            return loaded.astype(within(str(loaded.dtype)))

        return Values(self.program, scalars, load, self._broadcast)

    def _masks(self) -> list[jax.Array | None]:
        """Returns, for each fragment, which elements no fragment before has; None if all are new."""
        starts, span = self._starts(), int(self.plan.span)
        overlap = len(starts) * int(self.plan.width) - span
        last = self._columns() >= overlap if overlap else None
        return [*(None for _ in starts[1:]), last]

    def _scalars(self, row: Any) -> dict[int, jax.Array]:
        found = {}
        for number, read in enumerate(self.program.inputs):
            kind, ref = self.program.operands[read.operand].kind, self.operands[read.operand]
            if kind == "scalar":
                found[number] = self._load_scalars(ref, row)
            elif kind == "number":
                found[number] = ref[0]
        return {x: array.astype(within(str(array.dtype))) for x, array in found.items()}

    def _store(self, row: Any, each: Sequence[Values]) -> None:
        for result, ref in zip(self.program.results, self.out, strict=True):
            if result.kind == "scalar":
                self._store_scalars(ref, row, jnp.asarray(each[0][result.values[0]]))
                continue
            for part, atom in enumerate(result.values if result.kind == "row" else ()):
                for start, values in enumerate(each):
                    column = part * self.plan.columns + self._span_start() + self._starts()[start]
                    self._store_fragment(ref, row, column, narrowed(values, atom, result.dtype))

    def _no_sums(self) -> tuple[jax.Array, ...]:
        count = sum(len(result.values) for result in self.program.results if result.kind == "row sum")
        return tuple(self.layout.full(0.0) for _ in range(count * int(self.plan.accesses)))

    def _add(self, sums: tuple[jax.Array, ...], each: Sequence[Values], row: Any, begin: Any) -> tuple[jax.Array, ...]:
        """Adds the elements of these rows to the sums over rows."""
        rest = list(sums)
        found = []
        for result in self.program.results:
            for atom in result.values if result.kind == "row sum" else ():
                for values in each:
                    vector = values.vector(atom)
                    if self.rows % self.group:
                        vector = jnp.where(self._row_numbers(row) >= begin, vector, np.float32(0))
                    found.append(rest.pop(0) + vector)
        return tuple(found)

    def _store_sums(self, block: Any, sums: tuple[jax.Array, ...]) -> None:
        rest, offset = list(sums), self.offset
        for result, ref in zip(self.program.results, self.out, strict=True):
            for part in range(len(result.values)) if result.kind == "row sum" else ():
                for start in self._starts():
                    column = part * self.plan.columns + self._span_start() + start + offset
                    fragment = rest.pop(0)
                    if self.plan.warps == 1:
                        self.layout.store(ref.at[block], 0, column, fragment)
                    elif self.plan.in_ring:
                        self.layout.store_flat(ref.at[block, 0], column, fragment)
                    else:
                        store(ref.at[block, 0, pl.ds(column, self.layout.columns)], fragment)

    # ------------------------------------------------------------------------------
    # Fragments.

    @property
    def lines(self) -> bool:
        """Whether warps have lines of the same row."""
        return self.partials is not None

    @property
    def fragment_rows(self) -> int:
        """Rows of a fragment."""
        return 1 if self.lines else self.layout.rows

    @property
    def offset(self) -> Any:
        """Columns of a fragment before those of this warpgroup."""
        return self.warpgroup * (self.layout.rows * self.layout.columns) if self.lines else 0

    def _columns(self) -> jax.Array:
        """Returns the column of each element of a fragment."""
        layout = self.layout
        if not self.lines:
            return layout.iota(len(layout.shape) - 1)
        return layout.element() + self.offset

    def _row_numbers(self, row: Any) -> jax.Array:
        """Returns the row of each element of a fragment that starts at `row`."""
        layout = self.layout
        if self.lines or len(layout.shape) == 1:
            return layout.iota(0) * 0 + row
        return layout.iota(0) + row

    def _broadcast(self, by_row: jax.Array) -> jax.Array:
        if self.lines:
            return lax.broadcast_in_dim(by_row, self.layout.shape, ())
        return self.layout.broadcast(by_row)

    def _load_scalars(self, ref: Any, row: Any) -> jax.Array:
        if self.lines:
            element: jax.Array = ref[row]
            return element
        return self.layout.load_scalars(ref, row)

    def _store_scalars(self, ref: Any, row: Any, by_row: jax.Array) -> None:
        if not self.lines:
            self.layout.store_scalars(ref, row, by_row)
            return

        @pl.when(self.warpgroup == 0)
        def store_them() -> None:
            ThreadLayout(WARPS, 1).store_scalars(ref, row, by_row)

    def _store_fragment(self, ref: Any, row: Any, column: Any, fragment: jax.Array) -> None:
        if self.lines:
            self.layout.store_flat(ref.at[row], column + self.offset, fragment)
        else:
            self.layout.store(ref, row, column, fragment)

    def _all_reduce(
        self, stage: Stage, elements: Sequence[tuple[Values, jax.Array | None]], exchange: Any
    ) -> Statistics:
        """Returns the statistics of each row."""
        of_rows = stage.reduce(stage.of([(x.vector, mask) for x, mask in elements]), self.layout)
        if not self.lines:
            return of_rows
        buffer = self.plan.partials(self.program)
        partials = self.partials.at[lax.rem(exchange, BUFFERS)]
        buffer.arrive(of_rows, self.warpgroup, partials, self.arrived.at[0])
        return buffer.wait(stage, partials, self.arrived.at[0])
