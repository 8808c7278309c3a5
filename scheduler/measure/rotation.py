"""The buffers of a bench: how many sets of operands and results take turns, and what memory all that takes."""

from __future__ import annotations

import math

from scheduler.core.hardware import Hardware
from scheduler.core.records import L2, Clock
from scheduler.measure.verification import compared_elements
from scheduler.model.traffic import L2_RESIDENT
from search_spaces.problem import SLAB, Problem, nbytes

# Rotating more buffer sets than these 64 costs more memory traffic at set-up than it tells: smaller operands stay in
# the cache, as the model has it.
MOST_SETS = round(2 / L2_RESIDENT)
# What libraries and kernels may use beside operands and results: workspaces, padded copies, parts of a reduction.
SCRATCH_BYTES = 2**28
# An allocator that grows by doubling its regions leaves part of them unused.
FRAGMENTED = 1.25
# XLA's autotuner guards each of its buffers on both sides (RedzoneAllocator, kDefaultRedzoneSize): what is a power of
# two does not fit into a region of that size.
REDZONE_BYTES = 2 * 2**23


def condition(problem: Problem, hardware: Hardware, l2: L2 = "cold") -> tuple[Clock, L2]:
    """How a bench times this problem there: by which clock, and with operands in memory or in the cache."""
    exceeds = _operand_bytes(problem) * rotating_sets(problem, hardware) > 2 * hardware.l2_bytes
    return (
        hardware.abilities.clock,
        "cold" if l2 == "cold" and hardware.abilities.cold and exceeds else "warm",
    )


def rotating_sets(problem: Problem, hardware: Hardware) -> int:
    """How many copies of the operands make a rotation through them miss the last-level cache, as far as it pays."""
    return min(MOST_SETS, math.floor(2 * hardware.l2_bytes / max(1, _operand_bytes(problem))) + 1)


def rotating_results(problem: Problem, hardware: Hardware, sets: int) -> int:
    """How many buffers results take turns in: one that the last-level cache cannot hold rotates by itself."""
    return 1 if _result_bytes(problem) > 2 * hardware.l2_bytes else max(2, sets)


def least_bytes(problem: Problem) -> int:
    """Device memory without which `problem` cannot run at all: its operands and its results."""
    return _operand_bytes(problem) + _result_bytes(problem)


def needed_bytes(problem: Problem, hardware: Hardware, l2: L2 = "cold") -> int:
    """Device memory that a bench of `problem` takes at most, an estimate from above.

    It holds its rotating operands, results and a reference. When a finalist is confirmed, there are besides these the
    operands and the reference of a second draw, and, while they are made, numbers and operands in float32. While XLA's
    autotuner compares algorithms for its own program, there are no results but two of its own, and its own operands,
    which take less than that second draw.
    """
    sets = rotating_sets(problem, hardware) if condition(problem, hardware, l2)[1] == "cold" else 1
    operands, result = _operand_bytes(problem), _result_bytes(problem)
    elements = [math.prod(x.shape) for x in problem.operands()]
    compared = 4 * compared_elements(problem)
    # Of a slab: random bits, their halves, and float32 numbers.
    drawn = operands + max(12 * min(SLAB, max(elements)) + max(map(nbytes, problem.operands())), 4 * sum(elements))
    each = [nbytes(x) for x in problem.results()]
    rotating = sum(map(_region, each)) + max(1, rotating_results(problem, hardware, sets) - 1) * result
    autotuned = 2 * sum(_region(size + REDZONE_BYTES) for size in each)
    return round(FRAGMENTED * (sets * operands + drawn + 3 * compared)) + max(rotating, autotuned) + SCRATCH_BYTES


def _region(size: int) -> int:
    """Bytes of the region that XLA's allocator (BFCAllocator::Extend) makes for an array of `size`: a power of two."""
    return 2 ** math.ceil(math.log2(max(size, 1)))


def _operand_bytes(problem: Problem) -> int:
    return sum(map(nbytes, problem.operands()))


def _result_bytes(problem: Problem) -> int:
    return sum(map(nbytes, problem.results()))
