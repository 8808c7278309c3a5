"""Predicts the time of the library, XLA: what its programs have to do, and how the constants turn that into seconds."""

from __future__ import annotations

import dataclasses
import math
from typing import TYPE_CHECKING, Any

import numpy as np

from scheduler.core.hardware import Hardware
from search_spaces.problem import Problem, nbytes
from search_spaces.row_alignment import ROW_BYTES, row_alignment

if TYPE_CHECKING:
    from scheduler.model.cost import Constants


@dataclasses.dataclass(frozen=True)
class LibraryWork:
    """The work of a library's programs for one problem, or for several: then each attribute is an array.

    Attributes:
      arithmetic_s: arithmetic, if the rows of all operands are aligned (`problem.row_alignment`), in seconds.
      memory_s: compulsory traffic, in seconds.
      following_s: traffic and launches of further kernels, in seconds.
      stores_s: stores of results with unaligned rows, in seconds.
      unaligned: number of operands with unaligned rows.
      halvings: halvings of their alignments below 8 bytes, in all.
    """

    arithmetic_s: Any
    memory_s: Any
    following_s: Any
    stores_s: Any
    unaligned: Any
    halvings: Any

    @classmethod
    def of(cls, problem: Problem, hardware: Hardware, constants: Constants) -> LibraryWork:
        """Returns the work of one problem, at the library's fractions of the chip's peaks.

        A small result cannot keep all cores busy, so its arithmetic runs at a lower rate. Alignment counts for products
        on tensor cores. XLA's fused row kernels take at most 1.4 times as long with unaligned rows (H200), which is
        left to the errors by problem.
        """
        h, c = hardware, constants
        results = float(sum(np.prod(s.shape, dtype=np.float64) for s in problem.results()))
        busy = results / (results + c.library_grain * h.cores) if results else 1.0
        rate, hbm_rate = c.library_e_mma * h.peak(problem.arithmetic), c.library_e_hbm * h.hbm_bytes_per_s
        further_bytes = problem.library_bytes_moved - problem.bytes_moved + problem.library_bytes_read_again
        following_s = further_bytes / hbm_rate
        operands, stored = [], 0
        if problem.arithmetic != "float32":  # FP32 lanes, no tensor cores
            operands = [each for x in problem.matrices if (each := row_alignment(x)) < ROW_BYTES]
            stored = sum(nbytes(x) for x in problem.results() if row_alignment(x) < ROW_BYTES)
        return cls(
            arithmetic_s=problem.library_flops(h.platform) / (busy * rate),
            memory_s=problem.bytes_moved / hbm_rate,
            following_s=following_s + c.launch_share * h.launch_s if following_s else 0.0,
            stores_s=stored / hbm_rate,
            unaligned=len(operands),
            halvings=sum(math.log2(ROW_BYTES / 2 / each) for each in operands),
        )

    def seconds(self, c: Constants | Any) -> Any:
        """Returns the predicted time in seconds.

        It is the p-norm of arithmetic and memory time, plus fixed overheads. Intermediate arrays between two kernels
        add to the time without overlap, because XLA's kernels run one after another. Unaligned rows of an operand slow
        down the arithmetic, and those of a result its stores.

        Args:
          c: constants, or an object with arrays in place of some of them, which broadcast with the work.
        """
        slowdown = 1.0 + c.library_unaligned * self.unaligned + c.library_halving * self.halvings
        slowdown += c.library_no_tma * np.minimum(self.unaligned, 1)
        arithmetic_s, p = self.arithmetic_s * slowdown, c.library_p
        largest = np.maximum(arithmetic_s, self.memory_s)
        overlapped_s = largest * ((arithmetic_s / largest) ** p + (self.memory_s / largest) ** p) ** (1 / p)
        stores_s = c.library_store * self.stores_s
        return c.library_scale * (overlapped_s + stores_s + self.following_s + c.library_s)
