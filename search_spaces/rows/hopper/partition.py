"""The division of a row among the CTAs of a cluster, into chunks, and of chunks among warps, into lines."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from search_spaces.hopper import BARRIER_BYTES, MAX_CLUSTER, SMEM_ALIGNMENT, WARP, WARPS
from search_spaces.jax_compat import plgpu
from search_spaces.rows.hopper.thread_layout import (
    CLUSTER_RANK,
    REDUCTION_BYTES,
    ChunkLayout,
    PartialsBuffer,
    ThreadLayout,
)
from search_spaces.rows.program import Program
from search_spaces.rows.stages import most_statistics
from search_spaces.space import round_up

# ------------------------------------------------------------------------------
# The ends of a row: the few elements besides its lines, which TMA cannot address, loaded and stored one per thread.

LAYOUT = ThreadLayout(warps=1, vector=1)
ELEMENTS = LAYOUT.rows * LAYOUT.columns  # elements of a fragment: one per thread of a warpgroup


class RowStart(NamedTuple):
    """The start of a row, and of its lines, a multiple of an access: element indices of the array."""

    row: Any
    lines: Any


class End(NamedTuple):
    """A fragment of one row's ends, in one warpgroup's registers.

    Attributes:
      start: index of its first element, in rows without gaps.
      loaded: its elements of each input that is a row, in their dtype in memory.
      first, last: half-open range of array indices in which its elements count; others are in a line, too, or unused.
      exists: whether there is such a fragment.
    """

    start: Any
    loaded: Mapping[int, jax.Array]
    first: Any
    last: Any
    exists: Any

    def mask(self) -> jax.Array:
        """Returns which elements count."""
        index = LAYOUT.element() + self.start
        return (index >= self.first) & (index < self.last)


BUFFERS = 2  # of partials: a warp may be one exchange ahead of the others, and no more


def row_dtypes(program: Program) -> tuple[Any, ...]:
    """Returns the dtypes of the inputs that are rows, each with chunks of its own."""
    return tuple(jnp.dtype(program.source(x).dtype) for x in program.inputs_of("row"))


def chunk_bytes(program: Program) -> int:
    """Returns the bytes of one element of all inputs that are rows."""
    return sum(x.itemsize for x in row_dtypes(program))


class Scratch(NamedTuple):
    """SMEM of a CTA, in the order of its layout; None for parts that a kernel lacks.

    Attributes:
      arrived: barrier at which warps arrive with their partials.
      full, empty: barriers of each stage: its chunk has arrived; its last reader is done.
      stages: chunks of rows, for each input that is a row.
      partials: buffers of the cluster's all-reduce.
    """

    arrived: Any
    full: Any
    empty: Any
    stages: Any
    partials: Any


@dataclasses.dataclass(frozen=True)
class RowPartition:
    """A row in parts, one per CTA of a cluster, each in chunks of lines; fields may be `Columns` of schedules.

    A line is one access of all threads of a warp. The last part starts early enough to be whole, as does the last chunk
    of each part. A row need not consist of whole lines, nor start at a multiple of an access: its lines do, and the
    elements before and after them are its ends.

    Attributes:
      columns: columns of a row.
      vector: elements of one access of one thread.
      warpgroups: computing warpgroups of one CTA.
      accesses: accesses of a thread to a chunk: lines of each warp in it.
      cluster: CTAs that share a row.
      register_chunks: chunks kept in registers, in their dtype in memory; the others are in SMEM.
      reread: whether no chunk is kept: each stage reads the row again, from L2 as far as that holds it.
      pipeline: chunks that a CTA of a persistent pipeline has in SMEM at once; 0 if SMEM has all chunks of a row. A
        chunk of one row is applied just before a chunk of the next row is reduced, and the next chunk to load takes its
        stage. So there are stages for a row, for prefetched chunks, and for chunks in flight: more than `chunks` +
        `prefetch`, because otherwise no load would have a stage before it is waited for.
      prefetch: chunks of the next row that are reduced before statistics of this one are needed.
    """

    columns: int
    vector: Any
    warpgroups: Any
    accesses: Any
    cluster: Any
    register_chunks: Any
    reread: Any
    pipeline: Any
    prefetch: Any

    @classmethod
    def of(cls, columns: int, s: Any) -> RowPartition:
        """Returns the partition of a `RowSchedule`, or of `Columns` of them, for rows of `columns` columns."""
        threads, reread = (s.vector, s.warps // WARPS, s.accesses), s.residency == "reread"
        return cls(columns, *threads, s.cluster, s.register_chunks, reread, s.stages, s.prefetch)

    @property
    def line(self) -> Any:
        """Elements of a line."""
        return WARP * self.vector

    @property
    def row_lines(self) -> Any:
        """Lines of a row wherever it starts: the whole lines from the first multiple of an access on."""
        return (self.columns - self._most_before) // self.line

    @property
    def in_lines(self) -> Any:
        """Elements of a row that are in its lines."""
        return self.row_lines * self.line

    @property
    def _fragments_after(self) -> Any:
        return -(-(self.columns - self.in_lines) // ELEMENTS)

    @property
    def end_fragments(self) -> Any:
        """Fragments of a row's ends, of which at most one is before its lines.

        Those after the lines are aligned to the end of the row, and reach back into the lines if they are longer. The
        one before the lines is aligned to the start of the row. Overlapping elements count once, and are stored twice
        with the same bits.
        """
        return self._fragments_after + (self._most_before > 0)

    @property
    def part_lines(self) -> Any:
        return -(-self.row_lines // self.cluster)

    @property
    def part(self) -> Any:
        """Elements of a part."""
        return self.part_lines * self.line

    @property
    def part_overlap(self) -> Any:
        """Elements in both the last part and the one before: fewer lines than CTAs, and than in a chunk."""
        return self.cluster * self.part - self.in_lines

    @property
    def chunk_lines(self) -> Any:
        return WARPS * self.warpgroups * self.accesses

    @property
    def chunk(self) -> Any:
        """Elements of a chunk."""
        return self.chunk_lines * self.line

    @property
    def chunks(self) -> Any:
        """Chunks of a part, the last one starting early enough to be whole."""
        return -(-self.part_lines // self.chunk_lines)

    @property
    def chunk_overlap(self) -> Any:
        """Elements in both the last chunk and the one before."""
        return (self.chunks * self.chunk_lines - self.part_lines) * self.line

    @property
    def layout(self) -> ThreadLayout:
        """Layout of a fragment: one line for each warp of a warpgroup."""
        return ThreadLayout(warps=1, vector=self.vector)

    @property
    def chunk_layout(self) -> ChunkLayout:
        """Layout of a warpgroup's share of a chunk, for code that needs no separate fragments."""
        return ChunkLayout(self.vector, self.accesses)

    @property
    def alignments(self) -> Any:
        """Number of different offsets in a row at which its lines may start."""
        return self.vector // np.gcd(self.columns, self.vector)

    @property
    def _most_before(self) -> Any:
        """Maximum number of elements of a row before its first multiple of an access."""
        return self.vector - np.gcd(self.columns, self.vector)

    @property
    def stages(self) -> Any:
        """Chunks in SMEM."""
        return np.where(self.pipeline > 0, self.pipeline, np.where(self.reread, 0, self.chunks - self.register_chunks))

    def _buffers(self, program: Program) -> Any:
        return np.where(self.pipeline > 0, BUFFERS, len(program.stages))

    def smem_bytes(self, program: Program) -> Any:
        """Returns the SMEM of one CTA, exact to the byte: the size of `scratch`."""
        barriers = (np.where(self.pipeline > 0, 2, 1) * self.stages + (self.cluster == 1)) * BARRIER_BYTES
        chunks = sum(round_up(self.stages * self.chunk * x.itemsize, SMEM_ALIGNMENT) for x in row_dtypes(program))
        return chunks + self.partials(program).smem_bytes(self._buffers(program)) + REDUCTION_BYTES + barriers

    def scratch(self, program: Program) -> Scratch:
        """Returns the SMEM to allocate. If SMEM has all chunks of a row, each stage is filled once, and never empty."""
        stages, buffer, dtypes = int(self.stages), self.partials(program), row_dtypes(program)
        return Scratch(
            arrived=buffer.barrier(),
            full=plgpu.Barrier(num_arrivals=len(dtypes), num_barriers=stages) if stages else None,
            empty=plgpu.Barrier(num_arrivals=self.warpgroups, num_barriers=stages) if self.pipeline else None,
            stages=tuple(plgpu.SMEM((stages, self.chunk), dtype) for dtype in dtypes) if stages else None,
            partials=buffer.scratch(int(self._buffers(program))),
        )

    def partials(self, program: Program) -> PartialsBuffer:
        return PartialsBuffer(most_statistics(program), WARPS * self.warpgroups, self.cluster)

    # The methods below are for the code of a kernel.

    def share(self, warpgroup: Any) -> Any:
        """Returns the offset in each chunk at which the share of this warpgroup starts."""
        return warpgroup * (WARPS * self.accesses * self.line)

    def fragment_starts(self, warpgroup: Any) -> list[Any]:
        """Returns the offsets in each chunk at which fragments of this warpgroup start."""
        return [self.share(warpgroup) + WARPS * self.line * access for access in range(self.accesses)]

    def chunks_of_rank(self) -> tuple[Callable[[Any], Any], Callable[[int], Any]]:
        """Returns, for chunks of this CTA, the start in the row's lines, and the elements that another chunk counts.

        Both are in elements, and multiples of a line.
        """
        first, overlap_of_part = self._part_of_rank()

        def start_of(chunk: Any) -> Any:
            return first + lax.min(chunk * self.chunk, self.part - self.chunk)

        def overlap_of(chunk: int) -> Any:
            return overlap_of_part if chunk == 0 else self.chunk_overlap if chunk == int(self.chunks) - 1 else 0

        return start_of, overlap_of

    def _part_of_rank(self) -> tuple[Any, Any]:
        """Returns the start of this CTA's part in the row's lines, and its elements that the previous part counts."""
        if self.cluster == 1:
            return 0, 0
        rank = lax.axis_index(CLUSTER_RANK)
        last = rank == self.cluster - 1
        return (
            lax.min(rank * self.part, self.in_lines - self.part),
            jnp.where(last, self.part_overlap, 0) if self.part_overlap else 0,
        )

    def masks(self, starts: Sequence[Any], overlap: Any) -> list[jax.Array | None]:
        """Returns, for each fragment of a chunk, which elements come after the first `overlap`, which another counts.

        If `overlap` is a Python 0, not traced, all do: None.
        """
        if isinstance(overlap, int) and overlap == 0:
            return [None] * len(starts)
        line_start = self.layout.iota(0) * self.line
        return [line_start + start >= overlap for start in starts]

    def row_start(self, row: Any) -> RowStart:
        """Returns the start of the row with this index."""
        first = row * self.columns
        if not self._most_before:
            return RowStart(first, first)
        return RowStart(first, lax.div(first + self.vector - 1, self.vector) * self.vector)

    def load_ends(self, load: Callable[[Any], Mapping[int, jax.Array]], start: RowStart, warpgroup: Any) -> list[End]:
        """Returns the ends of a row that belong to this warpgroup of this CTA.

        All warpgroups have the same number of fragments; some may not exist.

        Args:
          load: loads the fragment at an index, for each input that is a row.
        """
        rank = lax.axis_index(CLUSTER_RANK) * self.warpgroups if self.cluster > 1 else 0
        own, warpgroups = rank + warpgroup, self.warpgroups * self.cluster
        after, fragments = int(self._fragments_after), int(self.end_fragments)
        ends = []
        for offset in range(0, fragments, warpgroups):
            number = own + offset
            is_after, end_of_row = number < after, start.row + self.columns
            begin = jnp.where(is_after, end_of_row - (number + 1) * ELEMENTS, start.row)
            first = jnp.where(is_after, start.lines + self.in_lines, start.row)
            last = jnp.where(is_after, end_of_row, jnp.where(number == after, start.lines, start.row))
            ends.append(End(begin, load(begin), first, last, number < fragments))
        return ends

    def aligned_copies(self, shared: jax.Array) -> jax.Array:
        """Returns the operand that all rows share, once for each of the `alignments`, concatenated.

        Each copy can be read by accesses as wide as the row's, at multiples of their width. The first copy is complete.
        """
        if self.alignments == 1:
            return shared
        step, length = self.vector // self.alignments, round_up(self.columns, self.vector)
        padded = jnp.pad(shared, (0, length + self.vector - self.columns))
        return jnp.concatenate([padded[copy * step : copy * step + length] for copy in range(self.alignments)])

    def aligned_copy(self, start: RowStart) -> Any:
        """Returns the offset in `aligned_copies` of the copy that matches the start of these lines."""
        if self.alignments == 1:
            return 0
        return lax.div(start.lines - start.row, self.vector // self.alignments) * round_up(self.columns, self.vector)


# ------------------------------------------------------------------------------
# Rows in registers.


@dataclasses.dataclass(frozen=True)
class RegisterPlan:
    """The rows and columns of a block over its threads; fields may be `Columns` of schedules.

    Attributes:
      columns: columns of a row.
      warps: warps that share a row: 1, or all of the block: 4, 8 or 16.
      vector: elements of one access of one thread.
      rows: rows of which each thread has a part.
      span_accesses: accesses of a thread to a span of a row; 0 if a block has whole rows.
      stages: groups of rows in SMEM; 0 if rows are loaded into registers.
      blocks: persistent blocks per core; 0 if each group of rows has a block.
    """

    columns: int
    warps: Any
    vector: Any
    rows: Any
    span_accesses: Any = 0
    stages: Any = 0
    blocks: Any = 0

    @classmethod
    def of(cls, columns: int, s: Any) -> RegisterPlan:
        """Returns the plan of a `RowSchedule`, or of `Columns` of them, for rows of `columns` columns."""
        return cls(columns, s.warps, s.vector, s.rows, s.accesses, s.stages, s.blocks)

    @property
    def in_ring(self) -> Any:
        return self.stages > 0

    @property
    def warpgroups(self) -> Any:
        return np.maximum(1, self.warps // WARPS)

    @property
    def layout(self) -> ThreadLayout:
        """Layout of a fragment. In a ring, warps that share a row have a line of it each."""
        return ThreadLayout(1 if self.stages else self.warps, self.vector)

    @property
    def width(self) -> Any:
        """Columns of one access of all threads that share a row."""
        return WARP * self.vector * self.warps

    @property
    def accesses(self) -> Any:
        """Accesses of a thread to each of its rows."""
        return np.where(self.span_accesses > 0, self.span_accesses, -(-self.columns // self.width))

    @property
    def span(self) -> Any:
        """Columns of a block."""
        return np.where(self.span_accesses > 0, self.span_accesses * self.width, self.columns)

    @property
    def spans(self) -> Any:
        """Blocks that share a row."""
        return -(-self.columns // self.span)

    @property
    def group(self) -> Any:
        """Rows that a block computes at the same time."""
        return np.where(self.warps == 1, WARPS, 1) * self.rows

    @property
    def elements(self) -> Any:
        """Elements that a thread has in registers of one row operand."""
        return self.rows * self.accesses * self.vector

    def grid(self, rows: int, cores: int) -> Any:
        """Returns the number of blocks for each span of columns."""
        groups = -(-rows // self.group)
        return np.where(self.blocks > 0, np.minimum(groups, cores * self.blocks), groups)

    def smem_bytes(self, program: Program) -> Any:
        """Returns the SMEM of one block."""
        ring = sum(
            round_up(
                self.stages * self.group * operand.parts * self.columns * jnp.dtype(operand.dtype).itemsize,
                SMEM_ALIGNMENT,
            )
            for operand in program.operands
            if operand.kind == "row"
        )
        buffers = np.where(self.in_ring & (self.warps > 1), self.partials(program).smem_bytes(BUFFERS), 0)
        reductions = REDUCTION_BYTES if program.stages else 0
        barriers = (2 * self.stages + (self.warps > 1)) * BARRIER_BYTES * self.in_ring
        return reductions + ring + buffers + barriers

    def partials(self, program: Program) -> PartialsBuffer:
        return PartialsBuffer(most_statistics(program), self.warps)


def persistent_ctas(cluster: int, cores: int, tasks: int) -> int:
    """Returns the number of CTAs or clusters that share the tasks: the fewest with the minimum number of waves.

    Hopper's cores come in pairs, and pairs in groups that a cluster cannot span. The groups differ in size, so some
    cores are left over if clusters have more than two CTAs (docs/kernels/rows-hopper.md).
    """
    unit = 2 if cluster <= 2 else MAX_CLUSTER  # cores
    most = max(1, cores // unit * unit // cluster)
    waves = -(-tasks // most)
    return -(-tasks // waves)
