"""The buffers of a bench: how many sets of operands and results it rotates, and the memory that they need."""

from __future__ import annotations

import math

from scheduler.core.hardware import Hardware
from scheduler.core.records import L2, Clock
from scheduler.measure.verification import compared_elements
from scheduler.model.traffic import L2_RESIDENT
from search_spaces.problem import SLAB, Problem, nbytes

# Rotating more than these 64 buffer sets costs more memory traffic at set-up than it improves the measurement. Smaller
# operands stay in the cache, as the cost model assumes.
MOST_SETS = round(2 / L2_RESIDENT)
# Memory that libraries and kernels may use besides operands and results: workspaces, padded copies, partial reductions.
SCRATCH_BYTES = 2**28
# An allocator that grows by doubling its regions leaves part of them unused.
FRAGMENTED = 1.25
# XLA's autotuner adds a guard on both sides of each buffer (RedzoneAllocator, kDefaultRedzoneSize), so a power-of-two
# buffer does not fit into a region of its size.
REDZONE_BYTES = 2 * 2**23


def condition(problem: Problem, hardware: Hardware, l2: L2 = "cold") -> tuple[Clock, L2]:
    """Returns the clock and the cache state (cold or warm) with which a bench times this problem."""
    exceeds = _operand_bytes(problem) * rotating_sets(problem, hardware) > 2 * hardware.l2_bytes
    return (
        hardware.abilities.clock,
        "cold" if l2 == "cold" and hardware.abilities.cold and exceeds else "warm",
    )


def rotating_sets(problem: Problem, hardware: Hardware) -> int:
    """Returns how many sets of operands make each access miss the last-level cache; at most `MOST_SETS`."""
    return min(MOST_SETS, math.floor(2 * hardware.l2_bytes / max(1, _operand_bytes(problem))) + 1)


def rotating_results(problem: Problem, hardware: Hardware, sets: int) -> int:
    """Returns how many result buffers are rotated.

    One buffer suffices if it exceeds twice the last-level cache, because each write then misses the cache.
    """
    return 1 if _result_bytes(problem) > 2 * hardware.l2_bytes else max(2, sets)


def least_bytes(problem: Problem) -> int:
    """Returns the minimum device memory to run `problem`: its operands and its results."""
    return _operand_bytes(problem) + _result_bytes(problem)


def needed_bytes(problem: Problem, hardware: Hardware, l2: L2 = "cold") -> int:
    """Returns an upper estimate of the device memory that a bench of `problem` takes.

    A bench holds its rotating operands, its results and a reference. While a finalist is confirmed, it also holds the
    operands and the reference of a second draw, and temporarily random numbers and operands in float32. While XLA
    autotunes a library program, the bench holds no results. XLA then allocates two results of its own, and its own
    operands, which take less memory than the second draw.
    """
    sets = rotating_sets(problem, hardware) if condition(problem, hardware, l2)[1] == "cold" else 1
    operands, result = _operand_bytes(problem), _result_bytes(problem)
    elements = [math.prod(x.shape) for x in problem.operands()]
    compared = 4 * compared_elements(problem)
    # For one slab: random bits, their halves, and float32 numbers.
    drawn = operands + max(12 * min(SLAB, max(elements)) + max(map(nbytes, problem.operands())), 4 * sum(elements))
    each = [nbytes(x) for x in problem.results()]
    rotating = sum(map(_region, each)) + max(1, rotating_results(problem, hardware, sets) - 1) * result
    autotuned = 2 * sum(_region(size + REDZONE_BYTES) for size in each)
    return round(FRAGMENTED * (sets * operands + drawn + 3 * compared)) + max(rotating, autotuned) + SCRATCH_BYTES


def _region(size: int) -> int:
    """Returns the region that XLA's allocator (BFCAllocator::Extend) makes for `size` bytes: a power of two."""
    return 2 ** math.ceil(math.log2(max(size, 1)))


def _operand_bytes(problem: Problem) -> int:
    return sum(map(nbytes, problem.operands()))


def _result_bytes(problem: Problem) -> int:
    return sum(map(nbytes, problem.results()))
