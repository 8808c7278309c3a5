"""Row-wise reductions on Hopper: schedules that hold a row in registers or on chip, or let it flow through.

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
from search_spaces.rowwise.parts import Parts, lines_of
from search_spaces.rowwise.problem import RowProblem
from search_spaces.rowwise.reduction import Reduction
from search_spaces.rowwise.registers import registers
from search_spaces.rowwise.team import LANES, WARPS, Team
from search_spaces.space import Columns, Space

P = TypeVar("P", bound=RowProblem)

THREADS = LANES * WARPS
WIDEST_BYTES = 16  # of one access of a thread
SECTOR_BYTES = 32  # the unit in which device memory and its caches move data (CUDA C++ Best Practices Guide, 13.2)
MOST_ELEMENTS = 2**31 - 1  # that 32-bit indices reach
MOST_BARRIERS = 32  # of one group, in Mosaic GPU
KIB = 1024


@dataclasses.dataclass(frozen=True)
class RowSchedule:
    """How rows are laid over blocks and threads, and where a row waits until all of it has been seen.

    Attributes:
      hold: where it waits: in "registers"; "onchip", in on-chip memory and registers, of blocks of its own; or in the
        "flow" of rows through the on-chip memory of blocks that stay.
      warps: that share a row, or a block's part of it: in registers one or a warpgroup's four, else all of the block.
      vector: elements of one access of one thread.
      rows: in registers, rows that a team loads before it computes; else 1.
      pieces: accesses of a thread to one chunk; 0 in registers, where there are no chunks.
      slots: of a flow, chunks that a block has room for; else 0.
      ahead: of a flow, chunks of the next row that are gathered before statistics of this one are needed; else 0.
      held: of a row on chip, chunks that threads hold in registers; else 0.
      cluster: blocks that share a row, each of which has a part of it; 1 in registers.
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
        row_bytes = p.columns * p.itemsize

        def in_registers(s: Any) -> Any:
            return s.hold == "registers"

        def on_chip(s: Any) -> Any:
            return s.hold == "onchip"

        def flows(s: Any) -> Any:
            return s.hold == "flow"

        def chunks(s: Any) -> Any:
            return _parts(p, s).chunks

        def chunk_bytes(s: Any) -> Any:
            parts = _parts(p, s)
            return parts.elements * p.itemsize

        # What figures the rules give for reasons is in docs/rows.md.
        return Space(
            RowSchedule,
            choices={
                "hold": ("registers", "onchip", "flow"),
                "warps": (16, 8, 4, 1),
                "vector": tuple(dict.fromkeys((WIDEST_BYTES // p.itemsize, *vectors(p)))),
                "rows": (1, 2, 4),
                "pieces": (0, 2, 4, 8),
                "slots": (0, 13, 6),
                "ahead": (0, 1),
                "held": (0, 1, 2),
                "cluster": (1, 2, 4, 8),
            },
            rules={
                "registers hold rows of a warp or a warpgroup, without chunks": lambda s: (
                    ~in_registers(s) | ((s.warps <= WARPS) & (s.pieces + s.held == 0) & (s.cluster == 1))
                ),
                "a row is one piece at least, and a problem one block": lambda s: (
                    ~in_registers(s) | ((LANES * s.warps * s.vector <= p.columns) & (_rows_of_block(s) <= p.rows))
                ),
                "more rows a block leave cores idle": lambda s: (s.rows == 1) | (p.rows >= _rows_of_block(s) * cores),
                "a thread holds a few hundred elements at most": lambda s: (
                    ~in_registers(s) | (s.rows * _pieces_of_row(p, s) * s.vector <= 256)
                ),
                "chunks are for whole warpgroups, a row at a time": lambda s: (
                    in_registers(s) | ((s.warps >= WARPS) & (s.pieces > 0) & (s.rows == 1))
                ),
                "rows in registers start at multiples of an access": lambda s: (
                    ~in_registers(s) | (p.columns % s.vector == 0)
                ),
                "a row in chunks is whole lines of a warp, or has ends beside lines of the widest accesses": lambda s: (
                    in_registers(s) | (p.columns % (LANES * s.vector) == 0) | (s.vector * p.itemsize == WIDEST_BYTES)
                ),
                "a chunk is no longer than what a block has of a row": lambda s: (
                    in_registers(s) | (_parts(p, s).chunk <= _parts(p, s).lines)
                ),
                "a row of under 64 elements for each of 128 threads needs no chunks": lambda s: (
                    in_registers(s) | (p.columns >= 64 * THREADS)
                ),
                "a chunk costs each thread so much that it should have 16 elements of it": lambda s: (
                    in_registers(s) | (s.pieces * s.vector >= 16) | (s.pieces == 8)
                ),
                "chunks are read by the widest accesses that fit their lines: narrower ones were no faster": lambda s: (
                    in_registers(s)
                    | (p.columns % (LANES * s.vector * 2) != 0)
                    | (s.vector * 2 * p.itemsize > WIDEST_BYTES)
                ),
                "a row on chip is 32 chunks at most, none of them held twice": lambda s: (
                    ~on_chip(s) | ((chunks(s) - s.held <= MOST_BARRIERS) & (s.held <= chunks(s)))
                ),
                "chunks of a row on chip that a thread holds take 16 of its registers: more was slower": lambda s: (
                    s.held * s.pieces * s.vector * p.itemsize <= 16 * 4
                ),
                "a row that two blocks a core have room for waits in one block, a longer one in a cluster": lambda s: (
                    ~on_chip(s) | ((s.cluster > 1) == (row_bytes > 112 * KIB))
                ),
                "on chip a block of a cluster has 24 to 80 KiB of a row, or an eighth of it": lambda s: (
                    ~on_chip(s)
                    | (s.cluster == 1)
                    | ((row_bytes >= s.cluster * 24 * KIB) & ((row_bytes <= s.cluster * 80 * KIB) | (s.cluster == 8)))
                ),
                "on chip a block of a cluster has four chunks or more, of 8 to 16 KiB, and one or two warpgroups": (
                    lambda s: (
                        ~on_chip(s)
                        | (s.cluster == 1)
                        | (
                            (s.warps <= 8)
                            & (s.held <= 1)
                            & (chunks(s) >= 4)
                            & (chunk_bytes(s) <= 16 * KIB)
                            & ((chunk_bytes(s) >= 8 * KIB) | (s.warps * s.pieces == 64))
                        )
                    )
                ),
                "slots are those of a flow, which holds no chunks": lambda s: np.where(
                    flows(s), (s.slots > 0) & (s.held == 0), s.slots + s.ahead == 0
                ),
                "a flow has room for its part of a row, for what it gathers ahead, and for the next chunk": lambda s: (
                    ~flows(s) | (chunks(s) + s.ahead < s.slots)
                ),
                "a flow of under 160 KiB keeps too little in flight, and a core has no more than 256 KiB": lambda s: (
                    ~flows(s) | ((s.slots * chunk_bytes(s) >= 160 * KIB) & (s.slots * chunk_bytes(s) <= 256 * KIB))
                ),
                "chunks of a flow are shared by two warpgroups or four": lambda s: ~flows(s) | (s.warps >= 8),
                "rows of which a core has room for three wait on chip, or in registers": lambda s: (
                    ~flows(s) | (row_bytes > 72 * KIB)
                ),
                "a cluster that shares a flow has no more blocks than it needs": lambda s: (
                    ~flows(s) | (s.cluster == 1) | (row_bytes > s.cluster * 80 * KIB)
                ),
            },
        )

    def footprint(self, problem: P, schedules: Columns, target: Target) -> Footprint:
        p, s = problem, schedules
        w, f, statistics = _whole(p, s), _flow(p, s), len(self.reduction(p).start)
        on_chip, flows = s.hold == "onchip", s.hold == "flow"
        in_chunks = on_chip | flows
        rows = np.where(in_chunks, 1, np.minimum(_rows_of_block(s), p.rows))
        blocks = -(-p.rows // rows)
        parts = blocks * s.cluster
        steps = np.where(flows, f.chunks, 1)
        row_bytes = p.columns * p.itemsize
        shared_bytes, shared_itemsize = _shared_bytes(p), max((x.dtype.itemsize for x in p.operands()[1:]), default=0)
        special = np.where(in_chunks, self.special_ops[1], self.special_ops[0])
        accesses = _accesses(p, s, w, shared=-(-s.vector * shared_itemsize // WIDEST_BYTES))
        vector_ops = np.where(in_chunks, self.vector_ops[1], self.vector_ops[0]) * rows * p.columns / s.cluster
        vector_ops = vector_ops + LANES * accesses
        # What all rows share is held as it comes, in its own dtype, until it is used.
        shared_words = shared_itemsize / 4
        held_words = 1.0 if self.widens else p.itemsize / 4
        registers_held = np.where(
            in_chunks,
            _CHUNK_REGISTERS + (statistics + s.pieces * (1 + shared_words + s.held * held_words)) * s.vector,
            _OTHER_REGISTERS + (s.rows + shared_words) * _pieces_of_row(p, s) * s.vector,
        ).astype(np.int64)
        threads = np.where(in_chunks, s.warps * LANES, THREADS)
        onchip_bytes = [where.onchip_bytes(p.itemsize, statistics) for where in (w, f)]
        shifted = in_chunks & (w.shifts > 1) & (shared_bytes > 0)
        read_twice = np.select([on_chip, flows], [w.slots / w.chunks, 1.0], 0.0)
        return Footprint(
            arithmetic=p.arithmetic,
            grid=(blocks, s.cluster),
            minor=1,
            operands=(
                Operand(bytes=p.rows / parts * row_bytes / steps, axes=(0, 1)),
                Operand(bytes=shared_bytes / s.cluster / steps, axes=(1,)),
            ),
            flops=p.flops / p.rows * rows / s.cluster / steps,
            bytes_written=p.rows / parts * row_bytes,
            onchip_bytes=np.select([on_chip, flows], onchip_bytes, REDUCTION_BYTES),
            steps=steps,
            stages=np.where(flows, s.slots, 1),
            threads=threads,
            registers=registers_held,
            registers_per_block=threads * round_up(registers_held, 8),
            onchip_bytes_read=read_twice * 2 * row_bytes / s.cluster / steps,
            special_ops=special * rows * p.columns / s.cluster / steps,
            vector_ops=vector_ops / steps,
            cluster=s.cluster,
            persistent=flows,
            copied_bytes=np.where(shifted, (1 + w.shifts) * shared_bytes, 0.0),
            launches=np.where(shifted, 2, 1),
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
            return flow(reduction, _flow(p, s), target.cores, p.result(), *args)


# What a thread holds besides its elements (ptxas; see docs/rows.md).
_OTHER_REGISTERS = 24
_CHUNK_REGISTERS = 32


def refusal(p: RowProblem, target: Target) -> str | None:
    """Why the row kernels of this architecture cannot do `p`, or None."""
    if target.platform != "cuda" or target.architecture != "sm_90":
        return f"is written for NVIDIA Hopper (sm_90), not for {target.kind} ({target.architecture})"
    if p.columns < (LANES if p.rows >= WARPS else THREADS):
        return f"{p.rows} rows of {p.columns} elements are less than a warpgroup loads at once"
    if max(x.size for x in p.operands()) > MOST_ELEMENTS:
        return "an array has more elements than 32-bit indices reach"
    return None


def vectors(p: RowProblem) -> tuple[int, ...]:
    """Elements of one access, widest first: at most 16 bytes, such that rows start at multiples of it.

    The widest that a warp's 32 fit a row with, and half of it; the widest of which a row is whole lines, for chunks; of
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


def _parts(p: RowProblem, s: Any) -> Parts:
    """What a block has of a row in chunks; without chunks something that divides, and means nothing."""
    at_least_one = np.maximum if isinstance(s, Columns) else max
    line = LANES * s.vector
    return Parts(
        row=p.columns,
        columns=-(-lines_of(p.columns, s.vector) // s.cluster) * line,
        vector=s.vector,
        warpgroups=at_least_one(s.warps // WARPS, 1),
        pieces=at_least_one(s.pieces, 1),
        cluster=s.cluster,
    )


def _whole(p: RowProblem, s: Any) -> Whole:
    return Whole(**vars(_parts(p, s)), held=s.held)


def _flow(p: RowProblem, s: Any) -> Flow:
    return Flow(**vars(_parts(p, s)), slots=s.slots, ahead=s.ahead)


def _shared_bytes(p: RowProblem) -> int:
    """Of the operands that all rows share."""
    return sum(x.size * x.dtype.itemsize for x in p.operands()[1:])


def _rows_of_block(s: Any) -> Any:
    return np.where(s.warps == 1, WARPS, 1) * s.rows


def _pieces_of_row(p: RowProblem, s: Any) -> Any:
    return -(-p.columns // (LANES * s.warps * s.vector))


def _accesses(p: RowProblem, s: Any, w: Whole, *, shared: Any) -> Any:
    """Accesses of whole warps to device memory, and copies, of one block: loads and stores, overlaps included.

    `shared` of them are to what all rows share, beside one access to a row.
    """
    of_row = _pieces_of_row(p, s) * s.warps
    in_registers = np.where(s.warps == 1, WARPS, 1) * of_row * (2 * s.rows + shared)
    ends = w.ends.pieces * WARPS * (2 + (shared > 0)) / s.cluster
    in_chunks = w.slots + w.held * w.chunk + w.chunks * w.chunk * (1 + shared) + ends
    return np.where(s.hold == "registers", in_registers, in_chunks)
