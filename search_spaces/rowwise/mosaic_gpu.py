"""Row-wise reductions on Hopper: schedules that hold a row in registers, on chip or in a ring, and what they demand.

What to expect of them on a device is in docs/rows.md.
"""

from __future__ import annotations

import abc
import dataclasses
from typing import Any, ClassVar, Generic, TypeVar

import jax
import numpy as np

from search_spaces.kernel import Footprint, Kernel, Operand, Target
from search_spaces.rowwise.chunks import REDUCTION_BYTES, round_up
from search_spaces.rowwise.flow import Flow, flow
from search_spaces.rowwise.onchip import Whole, onchip
from search_spaces.rowwise.problem import RowProblem
from search_spaces.rowwise.reduction import Reduction
from search_spaces.rowwise.registers import registers
from search_spaces.rowwise.ring import Ring, ring
from search_spaces.rowwise.slots import COMPUTE_REGISTERS, COPY_REGISTERS
from search_spaces.rowwise.stream import Stream, stream
from search_spaces.rowwise.team import LANES, WARPS, Team
from search_spaces.space import Columns, Space

P = TypeVar("P", bound=RowProblem)

THREADS = LANES * WARPS
WIDEST_BYTES = 16  # of one access of a thread
SECTOR_BYTES = 32  # the unit in which device memory and its caches move data (CUDA C++ Best Practices Guide, 13.2)
MOST_ELEMENTS = 2**31 - 1  # that 32-bit indices reach
MOST_BARRIERS = 32  # of one group, in Mosaic GPU


@dataclasses.dataclass(frozen=True)
class RowSchedule:
    """How rows are laid over blocks and threads, and where a row waits until all of it has been seen.

    Attributes:
      hold: where it waits: "registers"; "onchip", in on-chip memory and registers, a block each; or, where blocks stay,
        in a "stream" of rows through on-chip memory, two at a time, or in a "ring" there, one after the other.
      warps: that share a row: in registers one or a warpgroup's four, else all that compute.
      vector: elements of one access of one thread.
      rows: in registers, rows that a team loads before it computes; else 1.
      pieces: accesses of a thread to one chunk; 0 in registers, where there are no chunks.
      slots: of a ring or stream, chunks that it has room for; else 0.
      ahead: of a row longer than the ring, slots left free to load ahead; else 0.
      held: chunks that threads hold in registers: of a row on chip, or longer than the ring; else 0.
      cluster: blocks that share a row on chip, each of which has a part of it; else 1.
    """

    hold: str
    warps: int
    vector: int
    rows: int
    pieces: int
    slots: int
    ahead: int
    held: int
    cluster: int = 1
    blocks: int = 1


class MosaicGpuRows(Kernel[P, RowSchedule], Generic[P]):
    """One reduction a row, on Hopper.

    Attributes:
      special_ops: exponentials and the like of one element, its row held in registers and in chunks.
      vector_ops: other instructions of one element, likewise, accesses not counted.
      widens: whether ptxas keeps chunks of a row on chip that a thread holds as float32 (docs/rows.md).
    """

    backend = "mosaic_gpu"
    version = 1
    verified_on = frozenset({"sm_90"})  # tests/device on an NVIDIA H200

    special_ops: ClassVar[tuple[float, float]]
    vector_ops: ClassVar[tuple[float, float]]
    widens: ClassVar[bool]

    @abc.abstractmethod
    def reduction(self, problem: P, **params: Any) -> Reduction:
        """The formula."""

    def supports(self, problem: P, target: Target) -> str | None:
        return refusal(problem, target)

    def space(self, problem: P, target: Target) -> Space[RowSchedule]:
        p, cores = problem, target.cores

        def in_registers(s: Any) -> Any:
            return s.hold == "registers"

        def on_ring(s: Any) -> Any:
            return s.hold == "ring"

        def stays(s: Any) -> Any:
            return on_ring(s) | (s.hold == "stream")

        def of(s: Any) -> Ring:
            return _ring(p, s)

        # What figures the rules give for reasons is in docs/rows.md.
        return Space(
            RowSchedule,
            choices={
                "hold": ("registers", "onchip", "stream", "ring"),
                "warps": (16, 8, 4, 1),
                "vector": vectors(p),
                "rows": (1, 2, 4),
                "pieces": (0, 2, 4, 8),
                "slots": (0, 13, 6, 11, 5, 27, 20),
                "ahead": (0, 1, 2),
                "held": (0, 1, 2, 4),
                "cluster": (1, 2, 4, 8),
            },
            rules={
                "registers hold rows of a warp or a warpgroup, without chunks": lambda s: (
                    ~in_registers(s) | ((s.warps <= WARPS) & (s.pieces + s.held == 0))
                ),
                "chunks are for whole warpgroups, a row at a time": lambda s: (
                    in_registers(s) | ((s.warps >= WARPS) & (s.pieces > 0) & (s.rows == 1))
                ),
                "a chunk costs each thread so much that it should have 16 elements of it": lambda s: (
                    in_registers(s) | (s.pieces * s.vector >= 16) | (s.pieces == 8)
                ),
                "chunks are read by the widest accesses that fit their lines: narrower ones were no faster": lambda s: (
                    in_registers(s)
                    | (p.columns % (LANES * s.vector * 2) != 0)
                    | (s.vector * 2 * p.itemsize > WIDEST_BYTES)
                ),
                "a cluster shares a row on chip, each block of it a part of whole lines": lambda s: (
                    (s.cluster == 1) | ((s.hold == "onchip") & (p.columns >= s.cluster * 64 * THREADS))
                ),
                "only where blocks stay are there slots, and only a ring holds chunks or leaves some free": lambda s: (
                    np.select(
                        [on_ring(s), stays(s)],
                        [(s.slots > s.ahead) & (s.ahead > 0), (s.slots > 0) & (s.ahead + s.held == 0)],
                        s.slots + s.ahead == 0,
                    )
                ),
                "a stream has room for a row and the next chunk": lambda s: (
                    (s.hold != "stream") | (of(s).chunks < s.slots)
                ),
                "a row is one piece at least, and a problem one block": lambda s: (
                    ~in_registers(s) | ((LANES * s.warps * s.vector <= p.columns) & (_rows_of_block(s) <= p.rows))
                ),
                "more rows a block leave cores idle": lambda s: (s.rows == 1) | (p.rows >= _rows_of_block(s) * cores),
                "a thread holds a few hundred elements at most": lambda s: (
                    ~in_registers(s) | (s.rows * _pieces_of_row(p, s) * s.vector <= 256)
                ),
                "a row in chunks is whole lines of a warp": lambda s: (
                    in_registers(s) | (p.columns % (LANES * s.vector) == 0)
                ),
                "a chunk is no longer than a row": lambda s: in_registers(s) | (of(s).chunk <= of(s).lines),
                "a row of under 64 elements for each of 128 threads needs no chunks": lambda s: (
                    in_registers(s) | (p.columns >= 64 * THREADS)
                ),
                "a row on chip is 32 chunks at most, none of them held twice": lambda s: (
                    (s.hold != "onchip") | ((of(s).chunks - s.held <= MOST_BARRIERS) & (s.held <= of(s).chunks))
                ),
                "chunks that a thread holds take 64 of its registers beside a ring and 16 on chip: more was slower": (
                    lambda s: s.held * s.pieces * s.vector * p.itemsize <= np.where(on_ring(s), 64, 16) * 4
                ),
                "a ring of under 160 KiB keeps too little in flight, one of over 256 KiB nothing more": lambda s: (
                    ~stays(s)
                    | (
                        (s.slots * of(s).chunk * of(s).line * p.itemsize >= 160 * 1024)
                        & (s.slots * of(s).chunk * of(s).line * p.itemsize <= 256 * 1024)
                    )
                ),
                "rows of which a core has room for three wait on chip, or in registers": lambda s: (
                    ~stays(s) | (p.columns * p.itemsize > 72 * 1024)
                ),
                "what is left free matters only to rows longer than the ring": lambda s: (
                    ~on_ring(s) | (s.ahead <= 1) | (of(s).chunks > s.slots - s.ahead)
                ),
                "of a row on a ring something is left for the ring": lambda s: ~on_ring(s) | (s.held < of(s).chunks),
            },
        )

    def footprint(self, problem: P, schedules: Columns, target: Target) -> Footprint:
        p, s = problem, schedules
        r, w, f, statistics = _ring(p, s), _whole(p, s), _stream(p, s), len(self.reduction(p).start)
        on_ring, on_chip, in_stream = s.hold == "ring", s.hold == "onchip", s.hold == "stream"
        stays = on_ring | in_stream
        in_chunks = stays | on_chip
        rows = np.where(in_chunks, 1, np.minimum(_rows_of_block(s), p.rows))
        blocks = -(-p.rows // rows)
        parts = blocks * s.cluster
        steps = np.select([on_ring, in_stream], [r.loads, f.chunks], 1)
        row_bytes = p.columns * p.itemsize
        shared_bytes = _shared_bytes(p)
        # All chunks count as often as they are loaded: whether the cache has them again is not known.
        again = np.where(stays, steps / r.chunks, 1.0)
        special = np.where(in_chunks, self.special_ops[1], self.special_ops[0])
        accesses = _accesses(p, s, r, w, f, shared=bool(shared_bytes))
        vector_ops = np.where(in_chunks, self.vector_ops[1], self.vector_ops[0]) * rows * p.columns / s.cluster
        vector_ops = vector_ops + LANES * accesses
        # What all rows share is held as it comes, in its own dtype, until it is used.
        shared_words = p.itemsize / 4 if shared_bytes else 0.0
        held_words = np.where(on_chip & self.widens, 1.0, p.itemsize / 4)
        registers_held = np.where(
            in_chunks,
            _CHUNK_REGISTERS + (statistics + s.pieces * (1 + shared_words + s.held * held_words)) * s.vector,
            _OTHER_REGISTERS + (s.rows + shared_words) * _pieces_of_row(p, s) * s.vector,
        ).astype(np.int64)
        threads = np.where(in_chunks, s.warps * LANES, THREADS)
        places = [on_ring, on_chip, in_stream]
        onchip_bytes = [place.onchip_bytes(p.itemsize, statistics) for place in (r, w, f)]
        read_twice = [1.0, w.slots / w.chunks, 1.0]
        return Footprint(
            arithmetic=p.arithmetic,
            grid=(blocks, s.cluster),
            minor=1,
            operands=(
                Operand(bytes=p.rows / parts * row_bytes * again / steps, axes=(0, 1)),
                Operand(bytes=shared_bytes / s.cluster / steps, axes=(1,)),
            ),
            flops=p.flops / p.rows * rows / s.cluster / steps,
            bytes_written=p.rows / parts * row_bytes,
            onchip_bytes=np.select(places, onchip_bytes, REDUCTION_BYTES),
            steps=steps,
            stages=np.where(stays, s.slots, 1),
            threads=threads,
            registers=registers_held,
            registers_per_block=np.where(
                stays, _registers_of_ring(threads, registers_held), threads * round_up(registers_held, 8)
            ),
            onchip_bytes_read=np.select(places, read_twice, 0.0) * 2 * row_bytes / s.cluster / steps,
            special_ops=special * rows * p.columns / s.cluster / steps,
            vector_ops=vector_ops / steps,
            cluster=s.cluster,
            persistent=stays,
            transactions=accesses / steps,
            coalescing=coalescing(p.columns * p.itemsize, s.vector * p.itemsize),
            access_bytes=s.vector * p.itemsize,
        )

    def run(self, problem: P, schedule: RowSchedule, target: Target, /, *args: Any, **params: Any) -> jax.Array:
        p, s = problem, schedule
        reduction = self.reduction(p, **params)
        # Indices are 32 bits wide, whatever the user's default.
        with jax.enable_x64(False):
            if s.hold == "registers":
                return registers(reduction, Team(s.warps, s.vector), s.rows, p.result(), *args)
            if s.hold == "onchip":
                return onchip(reduction, _whole(p, s), p.result(), *args)
            if s.hold == "flow":
                cores = target.cores if s.rows == 2 else target.cores // 8 * 8 or s.cluster
                return flow(reduction, _flow(p, s), s.blocks * cores // s.cluster, p.result(), *args)
            if s.hold == "stream":
                return stream(reduction, _stream(p, s), target.cores, p.result(), *args)
            return ring(reduction, _ring(p, s), target.cores, p.result(), *args)


# What a thread holds besides its elements (ptxas; see docs/rows.md).
_OTHER_REGISTERS = 24
_CHUNK_REGISTERS = 32


def refusal(p: RowProblem, target: Target) -> str | None:
    """Why the row kernels of this architecture cannot do `p`, or None."""
    if target.platform != "cuda" or target.architecture != "sm_90":
        return f"is written for NVIDIA Hopper (sm_90), not for {target.kind} ({target.architecture})"
    if p.columns < (LANES if p.rows >= WARPS else THREADS):
        return f"{p.rows} rows of {p.columns} elements are less than a warpgroup loads at once"
    if max(int(np.prod(x.shape, dtype=np.int64)) for x in p.operands()) > MOST_ELEMENTS:
        return "an array has more elements than 32-bit indices reach"
    return None


def vectors(p: RowProblem) -> tuple[int, ...]:
    """Elements of one access, widest first: at most 16 bytes, such that rows start at multiples of it.

    The widest that a warp's 32 fit a row with, and half of it; the widest of which a row is whole lines, for a ring; of
    rows so short that a warpgroup's accesses may not fit, all narrower ones.
    """
    widest = int(np.gcd(p.columns, WIDEST_BYTES // p.itemsize))
    fitting = [vector for vector in (8, 4, 2, 1) if vector <= widest and LANES * vector <= p.columns]
    in_lines = int(np.gcd(p.columns, LANES * widest)) // LANES
    short = p.columns < THREADS * widest
    return tuple(vector for vector in fitting if short or vector in (*fitting[:2], in_lines))


def coalescing(row_bytes: Any, access_bytes: Any) -> Any:
    """Share of the sectors that warps' accesses touch which they want, on average over where rows may start.

    A warp's 32 accesses are one run of bytes. Where rows start at multiples of a sector they touch no other, else each
    run reaches into one more.
    """
    run = LANES * access_bytes
    return np.where(row_bytes % SECTOR_BYTES == 0, 1.0, run / (run + SECTOR_BYTES))


def _ring(p: RowProblem, s: Any) -> Ring:
    """The ring of a schedule that has one; of others something that divides, and means nothing."""
    at_least_one = np.maximum if isinstance(s, Columns) else max
    line = LANES * s.vector
    return Ring(
        columns=-(-(p.columns // line) // s.cluster) * line,
        vector=s.vector,
        warpgroups=at_least_one(s.warps // WARPS, 1),
        pieces=at_least_one(s.pieces, 1),
        slots=at_least_one(s.slots, 2),
        ahead=s.ahead,
        held=s.held,
    )


def _whole(p: RowProblem, s: Any) -> Whole:
    """The same of a row that waits on chip."""
    r = _ring(p, s)
    return Whole(
        row=p.columns,
        columns=r.columns,
        vector=r.vector,
        warpgroups=r.warpgroups,
        pieces=r.pieces,
        cluster=s.cluster,
        held=s.held,
    )


def _stream(p: RowProblem, s: Any) -> Stream:
    """The same of rows that stream."""
    r = _ring(p, s)
    return Stream(columns=r.columns, vector=r.vector, warpgroups=r.warpgroups, pieces=r.pieces, slots=r.slots)


def _flow(p: RowProblem, s: Any) -> Flow:
    """The same of rows that flow."""
    r = _ring(p, s)
    return Flow(
        row=p.columns,
        columns=r.columns,
        vector=r.vector,
        warpgroups=r.warpgroups,
        pieces=r.pieces,
        cluster=s.cluster,
        slots=r.slots,
        early=s.ahead,
        blocks=s.blocks,
    )


def _shared_bytes(p: RowProblem) -> int:
    """Of the operands that all rows share."""
    return sum(int(np.prod(x.shape)) for x in p.operands()[1:]) * p.itemsize


def _registers_of_ring(threads: Any, each: Any) -> Any:
    """What all threads of a block start with, so that those who compute can have `each` of it when the copier has left.

    Where no registers are handed over, all have the same.
    """
    all_threads = threads + THREADS
    handed_over = round_up(-(-(threads * round_up(each, 8) + THREADS * COPY_REGISTERS) // all_threads), 8)
    start = np.where(np.isin(threads // THREADS, list(COMPUTE_REGISTERS)), handed_over, round_up(each, 8))
    return all_threads * start


def _rows_of_block(s: Any) -> Any:
    return np.where(s.warps == 1, WARPS, 1) * s.rows


def _pieces_of_row(p: RowProblem, s: Any) -> Any:
    return -(-p.columns // (LANES * s.warps * s.vector))


def _accesses(p: RowProblem, s: Any, r: Ring, w: Whole, f: Stream, *, shared: bool) -> Any:
    """Accesses of whole warps to device memory, and copies, of one block: loads and stores, overlaps included."""
    of_row = _pieces_of_row(p, s) * s.warps
    in_registers = np.where(s.warps == 1, WARPS, 1) * of_row * (2 * s.rows + shared)
    of_chunks = r.chunks * r.chunk * (1 + shared)
    on_chip = w.slots + w.held * r.chunk + of_chunks
    loads = [r.loads + of_chunks, on_chip, f.chunks + of_chunks]
    return np.select([s.hold == "ring", s.hold == "onchip", s.hold == "stream"], loads, in_registers)
