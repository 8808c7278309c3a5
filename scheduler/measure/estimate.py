"""Estimates the time of a candidate with the compiler of an absent chip, or returns why it does not compile."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax

from scheduler.core.errors import CandidateFailed
from scheduler.core.hardware import Hardware
from scheduler.core.identity import label_of
from scheduler.core.records import Failure, Measurement, Outcome, Schedule, Stage
from scheduler.measure import static_loops, static_profile
from scheduler.measure.bench import Bench
from scheduler.measure.blame import blamed
from scheduler.measure.build import Step
from scheduler.measure.reduced import reduced, smaller, steps
from scheduler.measure.static_profile import OutOfOnchipMemory
from scheduler.model.cost import CostModel
from scheduler.model.feasibility import illegal
from search_spaces import interpreters
from search_spaces.operation import Operation
from search_spaces.problem import Problem, nbytes

# The estimator executes all steps of a grid, at 5 to 40 ms each. Above `STEPS_AT_ONCE` steps, it estimates smaller
# problems with the same tiles. If there are none, it gives up above `MOST_STEPS` steps, which take a minute or more.
STEPS_AT_ONCE, MOST_STEPS = 64, 2048
# The same limit for library programs, in cycles of the lower bound of the problem.
LIBRARY_CYCLES_AT_ONCE = 2**15
# A finalist is interpreted on a problem with at most this many steps and operations. Each load and store of a step
# takes a millisecond.
INTERPRETED_STEPS, INTERPRETED_FLOPS = 4, 2**31


def estimate(
    operation: Operation[Any],
    problem: Problem,
    hardware: Hardware,
    backend: str,
    schedule: Schedule,
    *,
    announce: Callable[[Step], None] = lambda step: None,
    raising: bool = False,
) -> Outcome:
    """Returns the compiler's cycles of one candidate at the highest clock as a time, or why it does not compile.

    The time is at least that of the reads, the writes or the arithmetic of the problem alone. Must run in a process
    started with `static_profile.environment`. Nothing runs, so the results are not verified.

    Args:
      announce, raising: as in `Bench`.
    """
    kernel, model = operation.kernel(backend), CostModel(hardware)
    part = None
    if kernel.library:
        # The steps of a library program are unknown. Its size is taken as proportional to the cycles of the lower
        # bound.
        share = model.lower_bound(problem) * hardware.clock_hz / LIBRARY_CYCLES_AT_ONCE
        if share > 1:
            part = reduced(operation, problem, lambda like: like.flops or None, problem.flops / share)
    elif (have := steps(kernel, problem, schedule, hardware) or 0) > STEPS_AT_ONCE:
        part = reduced(operation, problem, lambda like: steps(kernel, like, schedule, hardware), STEPS_AT_ONCE)
        if part is None and have > MOST_STEPS:
            return Failure(
                "estimate", f"its grid has {have:.0f} steps; the compiler's estimate goes through {MOST_STEPS}"
            )
    cycles: list[int] = []
    for each in (problem,) if part is None else (part.larger, part.smaller):
        found = _cycles(operation, each, hardware, backend, schedule, announce, raising=raising)
        if isinstance(found, Failure):
            return found
        cycles.append(found)
    told_s = (cycles[0] if part is None else part.whole(*cycles)) / hardware.clock_hz
    seconds = max(told_s, _one_way(problem, hardware))
    return Measurement(seconds, (seconds,), hardware.abilities.clock, "cold")


def _one_way(problem: Problem, hardware: Hardware) -> float:
    """Returns a lower bound in seconds, with reads, writes and arithmetic fully overlapped.

    The compiler's cycles do not include the copies into on-chip memory that XLA starts concurrently with other
    operations.
    """
    written = sum(map(nbytes, problem.results()))
    moved_s = max(problem.bytes_moved - written, written) / hardware.hbm_bytes_per_s
    return max(moved_s, problem.flops / hardware.peak(problem.arithmetic))


def _cycles(
    operation: Operation[Any],
    problem: Problem,
    hardware: Hardware,
    backend: str,
    schedule: Schedule,
    announce: Callable[[Step], None],
    *,
    raising: bool,
) -> int | Failure:
    kernel, target = operation.kernel(backend), hardware.target
    point = kernel.space(problem, target).decode(schedule)

    def failed(stage: Stage, error: Exception) -> Failure:
        said = str(error) if isinstance(error, OutOfOnchipMemory) else blamed(error)
        failure = Failure(stage, said)
        if raising:
            raise CandidateFailed(f"{label_of(backend, schedule)}: {failure}") from error
        return failure

    def run(*args: jax.Array) -> tuple[jax.Array, ...]:
        return kernel.results(problem, point, target, *args)

    announce("lower")
    try:
        traced = static_profile.traced(run, problem.operands(), hardware)
        if static_loops.miscounted(traced.jaxpr):
            return Failure("estimate", "it has a loop within a loop, which the compiler's estimate does not count")
        lowered = traced.lower()
    except Exception as error:  # only code of the kernel and of JAX runs here
        return failed("lower", error)
    announce("compile")
    try:
        profile = static_profile.compiled(lowered)
    except Exception as error:
        return failed("compile", error)
    finally:
        jax.clear_caches()  # a search compiles hundreds of programs, each one once
    if not profile.cycles:
        return Failure("estimate", "the compiler told no cycles of it")
    return profile.cycles


def interpreted(
    operation: Operation[Any], problem: Problem, hardware: Hardware, backend: str, schedule: Schedule
) -> Failure | None:
    """Checks a candidate with Pallas' interpreter, on a small problem like `problem`; takes seconds.

    Returns the failure, or None if the candidate is correct. Also returns None if it cannot be checked: for a library
    program, a platform without such an interpreter, or a schedule that is legal for no small problem.
    """
    kernel = operation.kernel(backend)
    if kernel.library or hardware.platform not in interpreters.PLATFORMS:
        return None

    def small(like: Problem) -> bool:
        if like.flops > INTERPRETED_FLOPS or illegal(kernel, like, hardware, schedule) is not None:
            return False
        return (steps(kernel, like, schedule, hardware) or 1) <= INTERPRETED_STEPS

    like = problem if small(problem) else smaller(problem, small)
    if like is None:
        return None
    with interpreters.interpreting():
        wrong = Bench(operation, like, hardware).confirm(backend, schedule)
    return None if wrong is None else Failure("verify", f"interpreted, as {like}: {wrong}")
