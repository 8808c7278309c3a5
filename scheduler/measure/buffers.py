"""The buffers of a bench and the memory that they need, and the compiled programs that fill them and check results."""

from __future__ import annotations

import contextlib
import functools
import math
import random
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from scheduler.core.chip_table import Clock
from scheduler.core.hardware import Hardware
from scheduler.core.records import L2
from scheduler.measure.verification import Rows, compared_elements, compared_rows, comparisons
from scheduler.model.cost import CostModel
from scheduler.model.traffic import L2_RESIDENT
from search_spaces import checking
from search_spaces.checking import program_of
from search_spaces.problem import SLAB, Problem, as_tuple, nbytes

Copy = Callable[[Sequence[jax.Array]], tuple[jax.Array, ...]]
Poison = Callable[..., tuple[jax.Array, ...]]
# A time below this share of the lower bound is rejected. The margin allows for clocks above their rated boost.
PLAUSIBLE_SHARE_OF_BOUND = 0.9
# Fills floating-point results in which NaN may be correct. Each dtype can represent this number.
OTHER = -96.0


def copying(arrays: Sequence[jax.Array | jax.ShapeDtypeStruct]) -> Copy:
    """Returns a function that copies arrays like these.

    If processes share programs, the function is compiled now, so that a call only copies.
    """
    copies = [program_of(_copied, x) for x in arrays]
    return lambda arrays: tuple(copy(x) for copy, x in zip(copies, arrays, strict=True))


def poisoning(problem: Problem) -> Poison:
    """Returns a function that creates result buffers in which no element is correct: ``poison(other=False)``.

    The buffers hold NaN, or the least number of a dtype without NaN. With ``other=True`` they hold a finite number, or
    the largest number of the dtype, for results in which the first value may be correct. The function is compiled like
    that of `copying`.
    """
    each = [program_of(_poisoned, np.bool_(False), shape=s.shape, dtype=s.dtype) for s in problem.results()]
    return lambda other=False: jax.block_until_ready(tuple(poison(np.bool_(other)) for poison in each))


@jax.jit
def _copied(x: jax.Array) -> jax.Array:
    return jnp.copy(x)


@functools.partial(jax.jit, static_argnames=("shape", "dtype"))
def _poisoned(other: jax.Array, *, shape: tuple[int, ...], dtype: Any) -> jax.Array:
    values: tuple[Any, Any] = (jnp.nan, OTHER)
    if jnp.issubdtype(dtype, jnp.bool_):
        values = False, True
    elif not jnp.issubdtype(dtype, jnp.inexact):
        values = jnp.iinfo(dtype).min, jnp.iinfo(dtype).max
    first, second = (jnp.asarray(value, dtype) for value in values)
    return jnp.full(shape, jnp.where(other, second, first), dtype)


# ------------------------------------------------------------------------------
# The buffers of a bench: how many sets of operands and results it rotates, and the memory that they need.

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


def timing_conditions(problem: Problem, hardware: Hardware, l2: L2 = "cold") -> tuple[Clock, L2]:
    """Returns the clock and the cache state (cold or warm) with which a bench times this problem."""
    exceeds = _operand_bytes(problem) * rotating_sets(problem, hardware) > 2 * hardware.l2_bytes
    return (
        hardware.abilities.clock,
        "cold" if l2 == "cold" and hardware.abilities.cold and exceeds else "warm",
    )


def least_plausible_s(problem: Problem, hardware: Hardware, l2: L2) -> float:
    """Returns a time in seconds that no measurement of `problem` can be below, or 0 if only a time of 0 is implausible.

    The roofline time assumes operands in memory. Cached operands ("warm") may arrive faster.
    """
    bounded = l2 == "cold" and not hardware.extrapolated and problem.arithmetic in hardware.flops_per_s
    return PLAUSIBLE_SHARE_OF_BOUND * CostModel(hardware).lower_bound(problem) if bounded else 0.0


def rotating_sets(problem: Problem, hardware: Hardware) -> int:
    """Returns how many sets of operands make each access miss the last-level cache; at most `MOST_SETS`."""
    return min(MOST_SETS, math.floor(2 * hardware.l2_bytes / max(1, _operand_bytes(problem))) + 1)


# Sets of operands that are few enough, and small enough, for times to depend on their addresses.
MOST_MOVED_SETS, MOST_MOVED_BYTES = 8, 2**30
# Copies start at a random multiple of a page (CUDA Driver API, cuMemCreate) within this range.
MOVE_PAGE_BYTES, MOST_MOVE_PAGES = 2**21, 8


def moves(problem: Problem, sets: int) -> bool:
    """Returns whether a bench moves its operands and results before each round of a run-off."""
    return sets <= MOST_MOVED_SETS and sets * _operand_bytes(problem) <= MOST_MOVED_BYTES


@contextlib.contextmanager
def elsewhere(order: random.Random) -> Iterator[None]:
    """Context manager in which arrays are created at other addresses: a random number of pages is allocated before."""
    pages = order.randrange(MOST_MOVE_PAGES + 1)
    before = jax.device_put(np.zeros(pages * MOVE_PAGE_BYTES, np.uint8))
    yield
    before.delete()


def rotating_results(problem: Problem, hardware: Hardware, sets: int) -> int:
    """Returns how many result buffers are rotated.

    One buffer suffices if it exceeds twice the last-level cache, because each write then misses the cache.
    """
    return 1 if _result_bytes(problem) > 2 * hardware.l2_bytes else max(2, sets)


def least_buffer_bytes(problem: Problem) -> int:
    """Returns the minimum device memory to run `problem`: its operands and its results."""
    return _operand_bytes(problem) + _result_bytes(problem)


def needed_buffer_bytes(problem: Problem, hardware: Hardware, l2: L2 = "cold") -> int:
    """Returns an upper estimate of the device memory that a bench of `problem` takes.

    A bench holds its rotating operands, its results, and a reference for each variant of the operands. While a finalist
    is confirmed, it also holds the operands and the reference of a second draw, and temporarily random numbers and
    operands in float32. While XLA autotunes a library program, the bench holds no results. XLA then allocates two
    results of its own, and its own operands, which take less memory than the second draw. A bench that moves keeps the
    operands of its draws, and copies one set at a time.
    """
    sets = rotating_sets(problem, hardware) if timing_conditions(problem, hardware, l2)[1] == "cold" else 1
    operands, result = _operand_bytes(problem), _result_bytes(problem)
    elements = [math.prod(x.shape) for x in problem.operands()]
    compared = 4 * compared_elements(problem)
    # For one slab: random bits, their halves, and float32 numbers.
    drawn = operands + max(12 * min(SLAB, max(elements)) + max(map(nbytes, problem.operands())), 4 * sum(elements))
    if moves(problem, sets):
        drawn = max(drawn, 2 * operands + MOST_MOVE_PAGES * MOVE_PAGE_BYTES)
    each = [nbytes(x) for x in problem.results()]
    rotating = sum(map(_region, each)) + max(1, rotating_results(problem, hardware, sets) - 1) * result
    autotuned = 2 * sum(_region(size + REDZONE_BYTES) for size in each)
    return (
        round(FRAGMENTED * (sets * operands + drawn + (2 + problem.variant_count) * compared))
        + max(rotating, autotuned)
        + SCRATCH_BYTES
    )


def _region(size: int) -> int:
    """Returns the region that XLA's allocator (BFCAllocator::Extend) makes for `size` bytes: a power of two."""
    return 2 ** math.ceil(math.log2(max(size, 1)))


def _operand_bytes(problem: Problem) -> int:
    return sum(map(nbytes, problem.operands()))


def _result_bytes(problem: Problem) -> int:
    return sum(map(nbytes, problem.results()))


# ------------------------------------------------------------------------------
# The compiled programs that check the results of a problem; compile processes prepare them.

Results = tuple[jax.Array, ...]
Compiled = Callable[..., Results]


class Checks(NamedTuple):
    """Compiled programs that check results.

    Attributes:
      rows: the rows that are compared if the results are large; None compares all.
      reference: computes the expected results, of those rows.
      comparisons: the programs that compare each result with its reference.
      poison: creates result buffers with wrong values (`buffers.poisoning`).
    """

    rows: Rows | None
    reference: Compiled
    comparisons: tuple[Any, ...]
    poison: Poison


def compiled_checks(problem: Problem, seed: int) -> tuple[Checks, tuple[jax.Array, ...]]:
    """Returns the programs that check the results of `problem`, and its operands."""
    rows = compared_rows(problem)
    reference, expected = _reference(problem, rows)
    checks = Checks(
        rows,
        checking.compiled_program(reference, problem.operands()),
        comparisons(problem, expected, rows),
        poisoning(problem),
    )
    return checks, jax.block_until_ready(problem.inputs(seed))


# `prepare` compiles in this many parts, so that processes can compile them in parallel. The neighbour of a problem has
# no special operands, so the last part is not needed there.
PARTS = 4


def prepare(problem: Problem, device: jax.Device, part: int) -> None:
    """Compiles programs of `compiled_checks` and of special operands, for processes that share the directory.

    Args:
      device: the device to compile for; nothing runs on it.
      part: the part to compile, from 0 to `PARTS` - 1; the parts that are needed first come first.
    """
    with checking.program_compiled_for(device):
        for compile_some in _check_part(problem, part):
            with contextlib.suppress(Exception):  # custom drawing code failed: its user reports the error
                compile_some()


def _check_part(problem: Problem, part: int) -> Iterator[Callable[[], Any]]:
    if part == 0:
        yield lambda: copying(problem.inputs(0))
    elif part < 3:
        rows = compared_rows(problem)
        reference, expected = _reference(problem, rows)
        if part == 1:
            yield lambda: checking.compiled_program(reference, problem.operands())
        else:
            yield lambda: poisoning(problem)
            yield lambda: comparisons(problem, expected, rows)
    else:
        for kind in problem.special():
            yield lambda kind=kind: problem.special_inputs(kind, 0)  # type: ignore[misc]


def _reference(problem: Problem, rows: Rows | None) -> tuple[Compiled, tuple[jax.ShapeDtypeStruct, ...]]:
    """Returns the reference as a function of all operands, and the shapes of its results.

    With `rows`, the function computes those rows only.
    """
    part = None if rows is None else problem.at_rows(rows)

    def reference(*args: jax.Array) -> Results:
        if part is None:
            return as_tuple(problem.reference(*args))
        below, take = part
        return as_tuple(below.reference(*take(args)))

    return reference, jax.eval_shape(reference, *problem.operands())
