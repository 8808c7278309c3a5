"""Estimates the time of a candidate with the compiler of an absent chip, or returns why it does not compile."""

from __future__ import annotations

import dataclasses
import importlib.util
import json
import math
import os
import re
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import jax
import numpy as np
from jax.experimental import topologies

from scheduler.contrib.tpu.chips import TOPOLOGIES
from scheduler.core.errors import CandidateFailed, SchedulerError
from scheduler.core.hardware import Hardware
from scheduler.core.records import Failure, Measurement, Outcome, Schedule, Stage, label_of
from scheduler.measure.bench import Bench
from scheduler.measure.build import describe_exception
from scheduler.measure.protocol import Step
from scheduler.model.cost import CostModel
from scheduler.model.pruning import illegal
from scheduler.search.candidates import smaller
from search_spaces import configuration
from search_spaces.fingerprint import all_equations, held_jaxprs, opened_jaxpr
from search_spaces.kernel import Kernel
from search_spaces.operation import Operation
from search_spaces.problem import Problem, nbytes
from search_spaces.sharding import Sharding
from search_spaces.space import Columns

# ------------------------------------------------------------------------------
# Finds loops of a kernel that the compiler's static estimate does not count in full.

# libtpu's estimate counts a nested loop in the first `COUNTED` iterations of the outer loop, and hardly in the later
# ones. A chain of 64 exponentials costs 715 cycles in each of the first two iterations, and 3.5 in each of the others
# (libtpu 0.0.48, v5e). The loop of the grid, and one loop within a step of it, are counted in full.
COUNTED = 2
_LOOPS = ("scan", "while")


def miscounted_loops(jaxpr: Any) -> bool:
    """Returns whether a Pallas kernel has nested loops with more than `COUNTED` outer iterations."""
    kernels = (eqn for eqn in all_equations(jaxpr) if eqn.primitive.name == "pallas_call")
    return any(_nested(inner) for eqn in kernels for inner in held_jaxprs(eqn))


def dynamic_grid(jaxpr: Any) -> bool:
    """Returns whether a Pallas kernel has a grid with an extent that is known only at run time.

    libtpu's estimate assumes the same number of steps for any such extent (libtpu 0.0.48, v5e).
    """
    kernels = (eqn for eqn in all_equations(jaxpr) if eqn.primitive.name == "pallas_call")
    return any(eqn.params["grid_mapping"].num_dynamic_grid_bounds > 0 for eqn in kernels)


def _nested(jaxpr: Any, within: bool = False) -> bool:
    for eqn in opened_jaxpr(jaxpr).eqns:
        loops = eqn.primitive.name in _LOOPS and eqn.params.get("length", COUNTED + 1) > 1
        if loops and within:
            return True
        # An outer loop of few iterations is counted in full. A loop with dynamic bounds counts as a long one.
        outer = within or (loops and eqn.params.get("length", COUNTED + 1) > COUNTED)
        if any(_nested(inner, outer) for inner in held_jaxprs(eqn)):
            return True
    return False


# ------------------------------------------------------------------------------
# Reports on-chip memory and estimated cycles of a program, from the chip's compiler on a host without the chip.
#
# The TPU compiler is a library, libtpu (the extra `tpu`). It compiles for a topology that JAX names. Besides the
# program, it writes the VMEM that each operation takes, and the number of cycles of its instruction schedule. libtpu
# reads its settings once when it is loaded, so a compiling process must be started with those of `profile_environment`.

# The variable with the path of the reports; `profile_environment` sets it.
REPORTS = "TILE_SCHEDULER_STATIC_REPORTS"

_CYCLES = re.compile(r"estimated_cycles: (\d+)")
_SIZES = {"": 1, "K": 2**10, "M": 2**20, "G": 2**30}
_SIZE = r"([\d.]+)([KMG]?)"
# libtpu rejects a program that exceeds VMEM in three places, with different messages.
_TOO_MUCH = tuple(
    re.compile(text)
    for text in (
        rf"Scoped allocation with size {_SIZE}",
        rf"Ran out of memory in memory space vmem\. Used {_SIZE}",
        rf"Allocation \(size={_SIZE}\) would exceed memory",
    )
)


@dataclasses.dataclass(frozen=True)
class Profile:
    """The compiler's report on one program.

    Attributes:
      onchip_bytes: the maximum on-chip memory of one operation, including spills.
      spill_bytes: the bytes of these that spilled registers take.
      cycles: the total of all operations, run one after another, in the compiler's static schedule; None if the
        compiler has no latency model of the chip (`Hardware.static_cycles`).
    """

    onchip_bytes: int
    spill_bytes: int
    cycles: int | None


class OutOfOnchipMemory(Exception):
    """The compiler rejected a program that needs too much on-chip memory.

    Attributes:
      requested: the bytes in the compiler's message: the total, or the bytes allocated before the compiler gave up.
    """

    def __init__(self, message: str, requested: int) -> None:
        super().__init__(message)
        self.requested = requested


def missing_compiler(hardware: Hardware) -> str | None:
    """Returns why this host cannot compile for `hardware`; None if it can."""
    if hardware.kind not in TOPOLOGIES:
        return f"no compiler for {hardware.kind} runs on a host without that chip"
    if importlib.util.find_spec("libtpu") is None:
        return f"the compiler for {hardware.kind} is not installed: pip install 'tile-scheduler[tpu]'"
    return None


def profile_environment(reports: Path, hardware: Hardware) -> dict[str, str]:
    """Returns the environment of a process that compiles for `hardware` and writes to its own folder `reports`.

    Cycles are requested only if the compiler models the latencies of the chip; otherwise it would abort the process.
    """
    flags: dict[str, object] = {
        "xla_jf_dump_to": reports,
        "xla_jf_dump_llo_text": "true",
        "xla_jf_dump_llo_pass_label_regex": "none_of_them",  # else it writes about three hundred files
    }
    if hardware.static_cycles:
        flags["xla_jf_dump_static_llo_profile_to"] = reports
    return {
        REPORTS: str(reports),
        "JAX_PLATFORMS": "cpu",
        # Do not query a metadata server; any host name works.
        "TPU_SKIP_MDS_QUERY": "1",
        "TPU_WORKER_HOSTNAMES": "localhost",
        "TPU_ACCELERATOR_TYPE": "v5litepod-4",
        "ALLOW_MULTIPLE_LIBTPU_LOAD": "1",
        "LIBTPU_INIT_ARGS": " ".join(f"--{name}={value}" for name, value in flags.items()),
    }


def static_profile(run: Callable[..., Any], operands: Iterable[jax.ShapeDtypeStruct], hardware: Hardware) -> Profile:
    """Compiles `run` for `hardware`, in a process started with `profile_environment`.

    Raises:
      OutOfOnchipMemory: the compiler rejected the program.
      SchedulerError: this process was not started with `profile_environment`, or has no such compiler.
      Exception: any exception of lowering or compiling.
    """
    return compiled_profile(traced_profile(run, operands, hardware).lower())


def traced_profile(
    run: Callable[..., Any], operands: Iterable[jax.ShapeDtypeStruct], hardware: Hardware
) -> jax.stages.Traced:
    """Traces `run` with operands on `hardware`, so that it is lowered for that chip.

    Raises:
      SchedulerError: this process has no compiler for the chip.
      Exception: any exception of tracing.
    """
    if (reason := missing_compiler(hardware)) is not None:
        raise SchedulerError(reason)
    name = TOPOLOGIES[hardware.kind]
    device = topologies.get_topology_desc(platform=hardware.platform, topology_name=name).devices[0]
    placed = jax.sharding.SingleDeviceSharding(device)
    return jax.jit(run).trace(*(jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=placed) for x in operands))


def compiled_profile(lowered: jax.stages.Lowered) -> Profile:
    """Compiles a program that was lowered for its chip, and returns the report; raises as `profile` does."""
    if REPORTS not in os.environ:
        raise SchedulerError(f"{REPORTS} is not set: start the compiling process with `profile_environment`")
    reports = Path(os.environ[REPORTS])
    for file in reports.iterdir():
        file.unlink()
    try:
        lowered.compile()
    except jax.errors.JaxRuntimeError as error:
        if (refused := _rejection(str(error))) is None:
            raise
        raise OutOfOnchipMemory(*refused) from error
    return _read(reports)


def _rejection(message: str) -> tuple[str, int] | None:
    """Returns the message of a rejection and its bytes; None if the error does not concern on-chip memory."""
    for pattern in _TOO_MUCH:
        if (hit := pattern.search(message)) is not None:
            text, _, _ = message[hit.start() :].partition("\n")
            return text[:300].strip(), round(float(hit[1]) * _SIZES[hit[2]])
    return None


def _read(reports: Path) -> Profile:
    """Reads the reports of one program. Its on-chip memory is 0 if no operation uses any."""
    onchip, spilled = 0, 0
    for file in reports.glob("*vmem_report.html"):
        text = file.read_text()
        start = text.index("const DATA =") + len("const DATA =")
        data, _ = json.JSONDecoder().raw_decode(text[start:].lstrip())
        for operation in data["hlo_breakdowns"].values():
            blocks = [block for block in operation["blocks"] if block["block_type"] == "SCOPED"]
            total = sum(block["block_size"] for block in blocks)
            if total > onchip:
                allocations = (each for block in blocks for each in block["allocations"])
                onchip, spilled = total, sum(each["size"] for each in allocations if each["tag"] == "SPILL")
    found = [file.read_text() for file in reports.glob("*_static_llo_profile.textproto")]
    cycles = sum(int(estimate) for text in found for estimate in _CYCLES.findall(text))
    return Profile(onchip, spilled, cycles if found else None)


# ------------------------------------------------------------------------------
# Derives smaller problems for the compiler's estimate, which executes every step of a grid.


@dataclasses.dataclass(frozen=True)
class Reduced:
    """Two smaller problems with the same tiles as a whole problem, from which its time is extrapolated linearly.

    Attributes:
      larger, smaller: the second has half the work of the first.
      times: the work of the whole problem divided by that of `larger`.
    """

    larger: Problem
    smaller: Problem
    times: int

    def whole(self, larger: float, smaller: float) -> float:
        """Extrapolates a value of the whole problem from the values of `larger` and `smaller`.

        The value is linear in the work: a fixed part per grid, and a part per tile.
        """
        return larger + (larger - smaller) * 2 * (self.times - 1)


def grid_steps(kernel: Kernel[Any, Any], problem: Problem, schedule: Schedule, hardware: Hardware) -> float | None:
    """Returns the steps of the grid of one launch; None if the schedule is illegal or there is no footprint."""
    if illegal(kernel, problem, hardware, schedule) is not None:
        return None
    one = Columns.of([kernel.space(problem, hardware.target).decode(schedule)])
    footprint = kernel.footprint(problem, one, hardware.target)
    if footprint is None:
        return None
    return math.prod(float(np.ravel(each)[0]) for each in (*footprint.grid, footprint.steps))


def reduced_problem(
    operation: Operation[Any], problem: Problem, size: Callable[[Problem], float | None], most: float
) -> Reduced | None:
    """Shrinks `problem` to at most `most` work, and to half of that; returns None if that is impossible.

    Axes that may be sharded over devices without a sum (`Operation.shard`) are independent. The longest such axis is
    halved, if a half has exactly half the size, so that tiles stay whole. At least two blocks stay along each axis,
    because a single block may be loaded only once for the whole grid.

    Args:
      size: returns the work of a problem, for example in steps; None if the candidate does not support the problem.
    """
    sharding, whole_size = operation.sharding(problem), size(problem)
    if sharding is None or whole_size is None:
        return None

    def halves(whole: Problem) -> Iterator[Problem]:
        have, extents = size(whole), sharding.extents(whole)
        for letter in sorted(sharding.divided, key=lambda letter: -extents.get(letter, 0)):
            half = _half(sharding, whole, letter)
            quarter = None if half is None else _half(sharding, half, letter)
            if have is not None and half is not None and quarter is not None:
                left, still = size(half), size(quarter)
                if left is not None and still is not None and have == 2 * left == 4 * still:
                    yield half

    larger, times = problem, 1
    while whole_size / times > most:
        half = next(halves(larger), None)
        if half is None:
            return None
        larger, times = half, 2 * times
    smaller = next(halves(larger), None)
    return None if smaller is None else Reduced(larger, smaller, times)


def _half(sharding: Sharding[Any], problem: Problem, letter: str) -> Problem | None:
    """Returns one of two equal parts of a problem along an axis; None if it cannot be divided."""
    try:
        extents = sharding.extents(problem)
        if extents[letter] % 2:
            return None
        half = sharding.local(problem, extents | {letter: extents[letter] // 2})
        return half if sharding.extents(half)[letter] == extents[letter] // 2 else None
    except (ValueError, KeyError):  # invalid problem, or no such axis
        return None


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
    started with `profile_environment`. Nothing runs, so the results are not verified.

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
            part = reduced_problem(operation, problem, lambda like: like.flops or None, problem.flops / share)
    elif (have := grid_steps(kernel, problem, schedule, hardware) or 0) > STEPS_AT_ONCE:
        part = reduced_problem(
            operation, problem, lambda like: grid_steps(kernel, like, schedule, hardware), STEPS_AT_ONCE
        )
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
    estimated_s = (cycles[0] if part is None else part.whole(*cycles)) / hardware.clock_hz
    seconds = max(estimated_s, _overlapped_bound_s(problem, hardware))
    return Measurement(seconds, (seconds,), hardware.abilities.clock, "cold")


def _overlapped_bound_s(problem: Problem, hardware: Hardware) -> float:
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
        detail = str(error) if isinstance(error, OutOfOnchipMemory) else describe_exception(error)
        failure = Failure(stage, detail)
        if raising:
            raise CandidateFailed(f"{label_of(backend, schedule)}: {failure}") from error
        return failure

    def run(*args: jax.Array) -> tuple[jax.Array, ...]:
        return kernel.results(problem, point, target, *args)

    announce("lower")
    try:
        traced = traced_profile(run, problem.operands(), hardware)
        if miscounted_loops(traced.jaxpr):
            return Failure("estimate", "it has a loop within a loop, which the compiler's estimate does not count")
        if dynamic_grid(traced.jaxpr):
            return Failure("estimate", "its number of steps is known only at run time")
        lowered = traced.lower()
    except Exception as error:  # only code of the kernel and of JAX runs here
        return failed("lower", error)
    announce("compile")
    try:
        profile = compiled_profile(lowered)
    except Exception as error:
        return failed("compile", error)
    finally:
        jax.clear_caches()  # a search compiles hundreds of programs, each one once
    if not profile.cycles:
        return Failure("estimate", "the compiler reports no cycles for it")
    return profile.cycles


def interpreted(
    operation: Operation[Any], problem: Problem, hardware: Hardware, backend: str, schedule: Schedule
) -> Failure | None:
    """Checks a candidate with Pallas' interpreter, on a small problem like `problem`; takes seconds.

    Returns the failure, or None if the candidate is correct. Also returns None if it cannot be checked: for a library
    program, or a schedule that is legal for no small problem.
    """
    kernel = operation.kernel(backend)
    if kernel.library:
        return None

    def small(like: Problem) -> bool:
        if like.flops > INTERPRETED_FLOPS or illegal(kernel, like, hardware, schedule) is not None:
            return False
        return (grid_steps(kernel, like, schedule, hardware) or 1) <= INTERPRETED_STEPS

    like = problem if small(problem) else smaller(problem, small)
    if like is None:
        return None
    with configuration.interpreting():
        wrong = Bench(operation, like, hardware).confirm(backend, schedule)
    return Failure("verify", f"interpreted, as {like}: {wrong}") if isinstance(wrong, Failure) else None
