"""A row program on a block of rows in VMEM of a TPU: what is loaded, reductions, and results."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, Literal, TypeVar

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl

from search_spaces.contrib.tpu.vmem import LANES, SUBLANES
from search_spaces.rows.builder import online
from search_spaces.rows.elementwise import REDUCTIONS
from search_spaces.rows.program import Atom, Program, Values
from search_spaces.rows.stages import Stage, Statistics, with_scalars
from search_spaces.space import round_up

C = TypeVar("C")
# Up to this number of steps through a row, the loop is unrolled: the compiler then fills the stalls of one step with
# the next (softmax of 256 x 4096, 16 rows a step: 9,084 cycles, and 18,190 in a loop; libtpu 0.0.48's static schedule,
# v6e).
UNROLLED = 32


# ------------------------------------------------------------------------------
# What a kernel reads, and what it keeps of it.


@dataclasses.dataclass(frozen=True)
class Window:
    """A window of the pipeline, into an operand.

    Attributes:
      part: of the vectors that all rows share, each has a window.
      when: of long rows, the chunks that it follows: those that are reduced ("early"), computed ("late"), or "both".
    """

    operand: int
    part: int = 0
    when: Literal["early", "late", "both"] = "both"


@dataclasses.dataclass(frozen=True)
class Plan:
    """The windows of a program, and the vectors that a scratch array keeps between the two passes over a long row."""

    program: Program
    windows: tuple[Window, ...]
    kept: tuple[int, ...] = ()

    def window(self, value: int, *, late: bool) -> int:
        """Returns the number of the window from which a pass reads an input."""
        read = self.program.inputs[value]
        part = read.part if self.program.operands[read.operand].kind == "shared" else 0
        other = "early" if late else "late"
        return next(
            n for n, x in enumerate(self.windows) if (x.operand, x.part) == (read.operand, part) and x.when != other
        )

    def kept_dtype(self, value: int) -> Any:
        """Returns the narrowest dtype that holds a kept vector."""
        program, equation = self.program, self.program.equation(value)
        if equation is None:
            return jnp.dtype(program.source(value).dtype)
        if equation.name == "round" and equation.params[0] == "bfloat16":
            return jnp.dtype(jnp.bfloat16)
        return jnp.dtype("int32" if equation.dtype == "bool" else equation.dtype)


@functools.lru_cache(maxsize=1024)
def plan(program: Program, residency: str) -> Plan:
    """Returns the plan of a program, with sums of exponentials computed along with maxima."""
    program = online(program)
    plain = Plan(program, ())
    scalars = [x for x in range(len(program.inputs)) if not program.vector(x)]
    first, last = program.reads[0], program.reads[-1]
    if residency in ("window", "elements"):
        return Plan(program, _windows(program, (*frozenset().union(*program.reads), *scalars), "both"))
    if residency == "reread":
        both, either = first & last, first | last
        parts = (both.union(scalars), "both"), (either - last, "early"), (either - first, "late")
        return Plan(program, tuple(x for values, when in parts for x in _windows(program, values, when)))
    of_rows = {x for x in first if program.source(x).kind == "row"}
    inputs = tuple(sorted(of_rows & last))
    # Vectors from which those after the reductions follow; they may have fewer bytes than what they are computed from.
    computed = [x for x in program.needed(program.written) if program.levels[x]]
    followed = {x for v in computed for x in program.equation(v).inputs} | set(program.written)  # type: ignore[union-attr]
    border = {x for x in followed if isinstance(x, int) and program.vector(x) and not program.levels[x]}
    made = tuple(x for x in sorted(border) if _rows_of(program, [x]) and _rows_of(program, [x]) <= of_rows)
    late = {x for x in program.needed(program.written, made) - set(made) if x < len(program.inputs)}

    def size(values: Iterable[int]) -> int:
        return sum(plain.kept_dtype(x).itemsize for x in values)

    if late & of_rows or size(made) >= size(inputs):
        made, late = inputs, set(last) - set(inputs)
    early, after = (first.union(scalars), "early"), (late.union(scalars), "late")
    return Plan(program, (*_windows(program, *early), *_windows(program, *after)), made)


def _rows_of(program: Program, values: Sequence[int]) -> set[int]:
    """Returns the inputs with a row of their own from which values follow."""
    found = program.needed(values)
    return {x for x in found if x < len(program.inputs) and program.source(x).kind == "row"}


def _windows(program: Program, values: Iterable[int], when: Any) -> tuple[Window, ...]:
    """Returns the windows of these inputs."""
    reads = [program.inputs[x] for x in values]
    found = {(x.operand, x.part if program.operands[x.operand].kind == "shared" else 0) for x in reads}
    return tuple(Window(*x, when=when) for x in sorted(found))


# ------------------------------------------------------------------------------
# Loops over a block in VMEM, and values of fragments.

# First column and number of columns of a fragment: a multiple of 128 except for the last fragment of a row.
Place = tuple[Any, int]


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
    fragments: int = 1

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

    def apply(self, write: Callable[[Place], None]) -> None:
        """Calls `write` for each fragment."""

        def visit(carry: int, places: Sequence[Place]) -> int:
            for place in places:
                write(place)
            return carry

        self.over_fragments(visit, 0)
        if self.tail is not None:
            write(self.tail)


@dataclasses.dataclass(frozen=True)
class Step:
    """Some rows of a block in one pass.

    Attributes:
      at: slice of these rows, of `rows` rows.
      refs: for each window.
      first: first column of the windows in the row; `chunk`: index of the scratch array.
      kept: scratch array of each vector that is kept.
    """

    plan: Plan
    at: Any
    rows: int
    refs: Sequence[Any]
    late: bool = False
    first: Any = 0
    chunk: Any = 0
    kept: Sequence[Any] = ()

    def values(self, known: Mapping[int, jax.Array], place: Place, shift: int = 0) -> Values:
        """Returns the values of a fragment, `shift` columns behind its place."""
        program, (start, width) = self.plan.program, place
        known = dict(known)
        if self.late:
            for value, ref in zip(self.plan.kept, self.kept, strict=True):
                known[value] = _widened(ref[self.chunk, self.at, pl.ds(start, width)], program.dtype(value))

        def load(value: int) -> jax.Array:
            if program.equation(value) is not None:
                column = lax.broadcasted_iota(jnp.int32, (self.rows, width), 1)
                return column + (self.first + start + shift)
            operand = program.source(value)
            rows = self.at if operand.kind == "row" else slice(None)
            # Loads start at a register: the columns before those of the fragment are dropped.
            before = shift + (program.inputs[value].part * program.columns if operand.kind == "row" else 0)
            skipped = before % LANES
            ref = self.refs[self.plan.window(value, late=self.late)]
            loaded = _widened(ref[rows, pl.ds(before - skipped + start, skipped + width)], program.dtype(value))
            return loaded[:, skipped:] if skipped else loaded

        def broadcast(x: jax.Array) -> jax.Array:
            # The compiler broadcasts no truth values.
            return jnp.broadcast_to(jnp.where(x, 1, 0), (self.rows, width)) != 0 if x.dtype == jnp.bool_ else x

        return Values(program, known, load, broadcast)

    def vector(self, values: Values, atom: Atom, width: int) -> jax.Array:
        """Returns a value with all rows and columns of its fragment."""
        return jnp.broadcast_to(values.vector(atom), (self.rows, width))

    def keep(self, values: Values, place: Place) -> None:
        """Stores the vectors that the scratch arrays keep."""
        for value, ref in zip(self.plan.kept, self.kept, strict=True):
            vector = self.vector(values, value, place[1])
            vector = jnp.where(vector, 1, 0) if vector.dtype == jnp.bool_ else vector
            ref[self.chunk, self.at, pl.ds(*place)] = vector.astype(ref.dtype)

    def scalars(self) -> dict[int, jax.Array]:
        """Returns the scalars that operands have, and those that follow from these."""
        program, known = self.plan.program, {}
        for value, read in enumerate(program.inputs):
            if not program.vector(value):
                ref = self.refs[self.plan.window(value, late=self.late)]
                number = program.operands[read.operand].kind == "number"
                loaded = jnp.full((self.rows, 1), ref[0, 0]) if number else ref[self.at, :]
                known[value] = _widened(loaded, program.dtype(value))
        return with_scalars(program, 0, known)


def _widened(x: jax.Array, dtype: str) -> jax.Array:
    return x != 0 if dtype == "bool" else x.astype(dtype)


class _Lanes:
    """The reductions of lanes to one number of each row."""

    def reduce(self, name: str, parts: jax.Array) -> jax.Array:
        return REDUCTIONS[name].along(parts, axis=-1, keepdims=True)

    def broadcast(self, reduced: jax.Array) -> jax.Array:
        return reduced


def empty(stage: Stage, rows: int, columns: int) -> Statistics:
    """Returns the statistics of no element."""
    return stage.init(functools.partial(jnp.full, (rows, columns), dtype=jnp.float32))


def reduce_rows(stage: Stage, step: Step, loop: RowLoop, known: Mapping[int, jax.Array]) -> Statistics:
    """Returns the statistics of these rows, which have been accumulated for each lane."""

    def update(before: Statistics, places: Sequence[Place]) -> Statistics:
        elements = []
        for place in places:
            values = step.values(known, place)
            step.keep(values, place)
            elements.append((functools.partial(step.vector, values, width=place[1]), None))
        return stage.update(before, elements)

    found = []
    if loop.columns >= loop.lanes:
        found.append(stage.reduce(loop.over_fragments(update, empty(stage, step.rows, loop.lanes)), _Lanes()))
    if loop.tail is not None:
        found.append(stage.reduce(update(empty(stage, step.rows, loop.tail[1]), [loop.tail]), _Lanes()))
    return functools.reduce(stage.combine, found)


# ------------------------------------------------------------------------------
# Results of some rows. Stores start at a register of 128 columns. If a part of a row does not, each part is computed in
# a pass of its own from its first register on, and registers with columns of two parts are joined.


def compute(step: Step, loop: RowLoop, known: Mapping[int, jax.Array], outs: Sequence[Any], counted: Any) -> None:
    """Stores the results.

    Args:
      counted: number of these rows, from the first on, that sums over rows include; None includes all.
    """
    program = step.plan.program
    declared = list(zip(program.results, outs, strict=True))
    split = [x for x in declared if x[0].kind == "row" and len(x[0].values) > 1 and program.columns % LANES]
    plain = [x for x in declared if x[0].kind != "scalar" and x not in split]

    def write(place: Place) -> None:
        values, (start, width) = step.values(known, place), place
        for result, out in plain:
            apart = program.columns if result.kind == "row" else round_up(program.columns, LANES)
            for part, atom in enumerate(result.values):
                vector, there = step.vector(values, atom, width), pl.ds(part * apart + start, width)
                if result.kind == "row":
                    out[step.at, there] = vector.astype(out.dtype)
                else:
                    out[:, there] += _of_eight_rows(vector, counted)

    if plain:
        loop.apply(write)
    for result, out in split:
        _write_parts(step, loop.lanes, known, result.values, out)
    for result, out in declared:
        if result.kind == "scalar":
            value: Any = Values(program, known, lambda value: known[value], lambda x: x)[result.values[0]]
            value = jnp.where(value, 1, 0) if value.dtype == jnp.bool_ else value
            out[step.at, :] = jnp.broadcast_to(jnp.asarray(value), (step.rows, 1))


def _of_eight_rows(x: jax.Array, counted: Any) -> jax.Array:
    """Returns sums over rows, in eight parts: adding registers needs no operation across their sublanes."""
    if counted is not None:
        x = jnp.where(lax.broadcasted_iota(jnp.int32, x.shape, 0) < counted, x, 0)
    return functools.reduce(jnp.add, [x[row : row + SUBLANES] for row in range(0, x.shape[0], SUBLANES)])


def _write_parts(step: Step, lanes: int, known: Any, atoms: Sequence[Atom], out: Any) -> None:
    columns, total = step.plan.program.columns, out.shape[-1]
    for part, atom in enumerate(atoms):
        begin, end = part * columns, (part + 1) * columns
        inside, last = round_up(begin, LANES), total if end == total else end // LANES * LANES
        if inside >= last:
            continue

        def write(place: Place, atom: Atom = atom, inside: int = inside, shift: int = inside - begin) -> None:
            vector = step.vector(step.values(known, place, shift), atom, place[1])
            out[step.at, pl.ds(inside + place[0], place[1])] = vector.astype(out.dtype)

        RowLoop(last - inside, lanes).apply(write)
    seams = {part * columns // LANES * LANES for part in range(1, len(atoms)) if part * columns % LANES}
    for start in sorted(seams):
        pieces = []
        for part, atom in enumerate(atoms):
            begin = max(start - part * columns, 0)
            width = min(start + LANES - part * columns, columns) - begin
            if width > 0:
                pieces.append(step.vector(step.values(known, (0, width), begin), atom, width))
        seam = jnp.concatenate(pieces, axis=-1)
        out[step.at, pl.ds(start, seam.shape[-1])] = seam.astype(out.dtype)


def zero(ref: Any) -> None:
    ref[...] = jnp.zeros_like(ref)


def restored(x: jax.Array, shape: jax.ShapeDtypeStruct, kind: str, columns: int) -> jax.Array:
    """Returns a result in its declared shape."""
    if kind == "scalar":
        return x[:, 0].astype(shape.dtype)
    if kind == "row sum":
        parts = jnp.sum(x, axis=0).reshape(-1, round_up(columns, LANES))
        return parts[:, :columns].reshape(-1)
    return x


# ------------------------------------------------------------------------------
# The order of chunks.


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
        """Returns the chunk that is reduced."""
        if not self.keeps:
            return outer, jnp.where(step > 0, self.chunks - 1, chunk)
        block = outer * self.each + jnp.minimum(step, self._of_core(outer) - 1)
        return block, jnp.where(self.takes_in(outer, step), chunk, self.chunks - 1)

    def target(self, outer: Any, step: Any, chunk: Any) -> tuple[Any, Any]:
        """Returns the chunk that is computed."""
        if not self.keeps:
            return outer, jnp.where(step > 0, chunk, 0)
        last = self._of_core(outer)
        block = outer * self.each + jnp.clip(step - 1, 0, last - 1)
        return block, jnp.where(step == 0, 0, jnp.where(step > last, self.chunks - 1, chunk))

    def at(self, when: str) -> Callable[..., tuple[Any, Any]]:
        """Returns the block and chunk of a window by grid step."""
        both = {"early": self.source, "late": self.target}
        return both.get(when, lambda outer, step, chunk: (outer, chunk))
