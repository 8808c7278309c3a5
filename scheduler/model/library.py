"""Predicts the time of the library, XLA: what its programs have to do, and how the constants turn that into seconds."""

from __future__ import annotations

import dataclasses
import math
from typing import TYPE_CHECKING, Any

import numpy as np

from scheduler.core.hardware import Hardware
from search_spaces.problem import Problem, nbytes
from search_spaces.row_alignment import ROW_BYTES, contracts_rows, row_alignment

if TYPE_CHECKING:
    from scheduler.model.cost import Constants


@dataclasses.dataclass(frozen=True)
class LibraryWork:
    """The work of a library's programs for one problem, or for several: then each attribute is an array.

    Attributes:
      arithmetic_s: arithmetic, if the rows of all operands are aligned (`problem.row_alignment`), in seconds.
      memory_s: compulsory traffic, in seconds.
      following_s: traffic and launches of further kernels, in seconds.
      fused: one kernel without tensor cores.
      slow_rows: no tensor cores, and unaligned rows.
      stores_s: stores of results with unaligned rows, in seconds.
      unaligned: number of operands whose unaligned rows need other programs (`_slow_rows`).
      halvings: halvings of their alignments below 8 bytes, in all.
    """

    arithmetic_s: Any
    memory_s: Any
    following_s: Any
    fused: Any
    slow_rows: Any
    stores_s: Any
    unaligned: Any
    halvings: Any

    @classmethod
    def of(cls, problem: Problem, hardware: Hardware, constants: Constants) -> LibraryWork:
        """Returns the work of one problem, at the library's fractions of the chip's peaks.

        A small result cannot keep all cores busy, so its arithmetic runs at a lower rate. Kernels without products are
        fused; with unaligned rows they take 0.9 to 4.4 times as long (H200), on average 1.35 times.
        """
        h, c = hardware, constants
        results = float(sum(np.prod(s.shape, dtype=np.float64) for s in problem.results()))
        busy = results / (results + c.library_grain * h.cores) if results else 1.0
        rate, hbm_rate = c.library_e_mma * h.peak(_arithmetic(problem)), c.library_e_hbm * h.hbm_bytes_per_s
        further_bytes = problem.library_bytes_moved - problem.bytes_moved + problem.library_bytes_read_again
        following_s = further_bytes / hbm_rate
        operands, stored, on_tensor_cores = list[int](), 0, problem.arithmetic != "float32"
        if on_tensor_cores:
            operands = _slow_rows(problem)
            stored = sum(nbytes(x) for x in problem.results() if row_alignment(x) < ROW_BYTES)
        rows = problem.operands()[0].shape[:1]  # a sum over them is a kernel of its own
        return cls(
            arithmetic_s=problem.library_flops(h.platform) / (busy * rate),
            memory_s=problem.bytes_moved / hbm_rate,
            following_s=following_s + c.launch_share * h.launch_s if following_s else 0.0,
            fused=not on_tensor_cores and all(x.shape[:1] == rows for x in problem.results()),
            slow_rows=not on_tensor_cores and problem.row_alignment < ROW_BYTES,
            stores_s=stored / hbm_rate,
            unaligned=len(operands),
            halvings=sum(math.log2(ROW_BYTES / 2 / each) for each in operands),
        )

    def seconds(self, c: Constants | Any) -> Any:
        """Returns the predicted time in seconds.

        It is the p-norm of arithmetic and memory time, plus fixed overheads. Intermediate arrays between two kernels
        add to the time without overlap, because XLA's kernels run one after another. Unaligned rows of an operand slow
        down the arithmetic and, less, the traffic; those of a result slow down its stores.

        Args:
          c: constants, or an object with arrays in place of some of them, which broadcast with the work.
        """
        slowdown = c.library_unaligned * self.unaligned + c.library_halving * self.halvings
        arithmetic_s, p = self.arithmetic_s * (1.0 + slowdown), c.library_p
        slower_memory = c.library_unaligned_memory * slowdown + c.library_fused_unaligned * self.slow_rows
        memory_s = self.memory_s * (1.0 + slower_memory)
        largest = np.maximum(arithmetic_s, memory_s)
        overlapped_s = largest * ((arithmetic_s / largest) ** p + (memory_s / largest) ** p) ** (1 / p)
        stores_s = c.library_store * self.stores_s
        fixed_s = np.where(self.fused, c.library_fused_s, c.library_s)
        return c.library_scale * (overlapped_s + stores_s + self.following_s + fixed_s)


def _arithmetic(problem: Problem) -> str:
    """Returns the type that XLA multiplies: WGMMA takes 8-bit operands only with contracted rows."""
    if problem.operands()[0].dtype.itemsize == 1 and not all(contracts_rows(problem, i) for i in (0, 1)):
        return "bfloat16"
    return problem.arithmetic


def _slow_rows(problem: Problem) -> list[int]:
    """Returns the alignments of the operands whose unaligned rows XLA's programs read without TMA.

    A single operand of 16-bit numbers whose rows are not contracted needs an alignment of 4 bytes only (H200: a product
    of 4096 x 4098 x 4096 takes 1.39 times as long as one of aligned rows, and one of 4096 x 4096 x 4098 2.86 times).
    """
    dtype = problem.operands()[0].dtype  # others are scales and row sums
    rows = [(i, row_alignment(x)) for i, x in enumerate(problem.matrices) if x.dtype == dtype]
    unaligned = [(i, each) for i, each in rows if each < ROW_BYTES]
    if len(unaligned) == 1:
        [(index, alignment)] = unaligned
        if alignment >= 4 and problem.matrices[index].dtype.itemsize == 2 and not contracts_rows(problem, index):
            return []
    return [alignment for _, alignment in unaligned]
