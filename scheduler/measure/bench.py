"""Compile, verify and time candidates of one problem in this process."""

from __future__ import annotations

import collections
import contextlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp

from scheduler.core import interrupts
from scheduler.core.errors import CandidateFailed
from scheduler.core.hardware import Hardware
from scheduler.core.identity import Point, label_of, point_of
from scheduler.core.records import L2, Failure, Measurement, Outcome, Schedule, Stage
from scheduler.measure import buffers, timer
from scheduler.measure.blame import blamed, first_line
from scheduler.measure.checks import Checks, Compiled, Results, compiled_checks
from scheduler.measure.lowered import asked_onchip_bytes
from scheduler.measure.program_text import digest, lowered_digest
from scheduler.measure.rotation import condition, rotating_results, rotating_sets
from scheduler.measure.turns import When
from scheduler.measure.verification import Rows, compared_elements, mismatches
from scheduler.model.cost import CostModel
from scheduler.model.feasibility import illegal, onchip_bytes
from search_spaces import jax_compat, reference_programs
from search_spaces.kernel import Kernel
from search_spaces.operation import Operation
from search_spaces.problem import Problem, Tolerance, as_tuple

# What a bench is about to do: "wait" is for its turn on the device, "run" is on the device.
Step = Literal["prepare", "lower", "compile", "wait", "run"]

# A candidate this much slower than the fastest so far is not worth timing well.
SLOW = 1.5
# No time below this share of the lower bound is believed: the rest is for clocks above their rated boost.
BELIEVED = 0.9
# What is too fast to be true is measured again with so many times the repetitions.
DOUBTED = 3
# A finalist is called so many times with other inputs, and each of its answers is compared: one that is wrong in each
# fifth call is found, and one that is wrong in a fifth of them at random by these and later comparisons. Comparing
# large answers takes longer than all else.
RUNS, FEWEST_RUNS, MANY_ELEMENTS = 10, 5, 2**22
# It is traced so many times more: what a kernel's code keeps of earlier traces may show in the third.
RETRACED = 2
# Of the answers that were timed, the last ones that are compared.
COMPARED_TIMES = 4


class Draw(NamedTuple):
    """One draw of a problem's operands, and the right results: of those `rows` alone, where they are large.

    Attributes:
      tolerance: how far off a candidate may be; None is as far as for typical operands.
    """

    inputs: tuple[jax.Array, ...]
    expected: Results
    rows: Rows | None
    tolerance: tuple[Tolerance, ...] | None = None


class _Candidate(NamedTuple):
    """A candidate compiled.

    Attributes:
      run: a function of buffers for its results, and of the operands.
      tolerance: how far off it may be.
      lowered: a digest of what it was compiled from.
      program: a library's, which XLA may compile in several ways, as a digest of its text; "" for all others.
    """

    run: Compiled
    tolerance: Tolerance | tuple[Tolerance, ...]
    lowered: str
    program: str = ""


class Bench:
    """The inputs, the reference and the compiled candidates of one problem on one device.

    Args:
      hardware: the chip of JAX's default device here.
      l2: "cold" rotates through buffers larger than twice the last-level cache, "warm" reuses the same ones.
      exclusive: entered around everything that runs on the device, so that processes sharing it take turns; it is
        told when this turn should come.
      seed: of the inputs.
      announce: told each step before it begins, so that whoever watches knows what a process hangs in.
    """

    def __init__(
        self,
        operation: Operation[Any],
        problem: Problem,
        hardware: Hardware,
        *,
        l2: L2 = "cold",
        exclusive: Callable[[When], contextlib.AbstractContextManager[Any]] = contextlib.nullcontext,
        seed: int = 0,
        announce: Callable[[Step], None] = lambda step: None,
    ) -> None:
        self._operation, self._problem, self._hardware, self._seed = operation, problem, hardware, seed
        self._exclusive, self._announce, self._in_turn = exclusive, announce, False
        self._clock, self._l2 = condition(problem, hardware, l2)
        # What is compiled here is not compiled later, while other processes wait for their turns.
        timer.attach(self._clock)
        self._checks: dict[Problem, Checks] = {}
        self._special = False  # whether what alters operands is compiled
        self._draw: Draw
        self._sets: list[tuple[jax.Array, ...]] = []
        self._unfilled: Callable[[], None] | None = None  # what makes both
        # Operands in a cache may come faster than memory gives them; no time at all is never right.
        bounded = self._l2 == "cold" and not hardware.borrowed and problem.arithmetic in hardware.flops_per_s
        self._least_s = BELIEVED * CostModel(hardware).lower_bound(problem) if bounded else 0.0
        self._calls = 0
        self._results: collections.deque[Results] = collections.deque()
        self._candidates: dict[Point, _Candidate] = {}

    def measure(
        self,
        backend: str,
        schedule: Schedule,
        repetitions: int,
        *,
        incumbent_s: float | None = None,
        raising: bool = False,
    ) -> Outcome:
        """Times one candidate once it has been found right, or says at which stage it failed and why.

        Args:
          repetitions: fewer are taken of a candidate that is clearly slower than `incumbent_s`, seconds.
          raising: what is raised while the candidate is built is no `Failure` but raised.

        Raises:
          CandidateFailed: from what the candidate raised, where that was asked for.
        """
        kernel = self._operation.kernel(backend)
        # Of processes that come to a problem together the one that has the library, which is compiled in a turn on the
        # device, compiles what checks them all; the others build candidates meanwhile.
        if kernel.library:
            self._prepare()
        candidate = self._build(kernel, self._problem, schedule, raising=raising)
        if isinstance(candidate, Failure):
            return candidate
        self._prepare()
        with self._turn():  # one for all: others' turns may be XLA's compilations, of a second
            self._fill()
            if wrong := self._wrong(candidate, self._problem, self._draw):
                return Failure("verify", wrong)
            self._candidates[point_of(backend, schedule)] = candidate
            return self._time(candidate, repetitions, None if incumbent_s is None else SLOW * incumbent_s)

    def again(self, backend: str, schedule: Schedule, repetitions: int) -> Outcome:
        """Times a candidate that `measure` found right here, once more; one unknown here is measured from the start."""
        candidate = self._candidates.get(point_of(backend, schedule))
        if candidate is None:
            return self.measure(backend, schedule, repetitions)
        with self._turn("soon"):
            return self._time(candidate, repetitions)

    def confirm(self, backend: str, schedule: Schedule) -> Failure | None:
        """Whether a candidate is right for other inputs too, in each of several calls; None where it is.

        One that is no library kernel, which is a program of XLA's or the vendor's, is also asked to be the same program
        when it is traced again, or as right; to be right for each kind of special operands (`Problem.special`); and on
        the neighbour of the problem, where its schedule is legal there.
        """
        kernel, neighbour = self._operation.kernel(backend), self._problem.neighbour()
        candidate = self._candidates.get(point_of(backend, schedule)) or self._build(kernel, self._problem, schedule)
        if isinstance(candidate, Failure):
            return candidate
        if wrong := self._wrong_on(candidate, self._problem, self._seed + 1, _runs(self._problem)):
            return Failure("verify", f"with other inputs {wrong}")
        if kernel.library:
            return None
        for wrong in (self._wrong_when_traced_again(candidate, kernel, schedule), self._wrong_on_special(candidate)):
            if wrong:
                return Failure("verify", wrong)
        if neighbour is None or illegal(kernel, neighbour, self._hardware, schedule):
            return None
        candidate = self._build(kernel, neighbour, schedule)
        if isinstance(candidate, Failure):
            return Failure("verify", f"on {neighbour} {candidate}")
        if wrong := self._wrong_on(candidate, neighbour, self._seed):
            return Failure("verify", f"on {neighbour} {wrong}")
        return None

    def program(self, backend: str, schedule: Schedule) -> str:
        """What tells a library's compiled program from another of the same candidate; "" where it has not run here."""
        candidate = self._candidates.get(point_of(backend, schedule))
        return "" if candidate is None else candidate.program

    def intact(self) -> bool:
        """Whether operands and reference are what they were: a candidate may have written where it should not."""
        self._prepare()
        fresh = self._drawn(self._problem, self._seed)
        with self._turn():
            self._fill()
            return all(
                bool(jnp.array_equal(was, now, equal_nan=jnp.issubdtype(was.dtype, jnp.inexact)))
                for held in self._sets
                for was, now in zip((*fresh.inputs, *fresh.expected), (*held, *self._draw.expected), strict=True)
            )

    def _build(
        self, kernel: Kernel[Any, Any], problem: Problem, schedule: Schedule, *, raising: bool = False
    ) -> _Candidate | Failure:
        """The candidate, compiled for `problem`; what it raises meanwhile is its failure, or is raised."""
        lowered = self._lower(kernel, problem, schedule, raising=raising)
        if isinstance(lowered, Failure):
            return lowered
        return self._compile(kernel, problem, schedule, lowered, raising=raising)

    def _failed(
        self, kernel: Kernel[Any, Any], schedule: Schedule, stage: Stage, error: BaseException, raising: bool
    ) -> Failure:
        """What a candidate raised, as its failure.

        While JAX traces, lowers and compiles, no code runs but the kernel's and the compiler's: whatever is raised then
        is the candidate's failure, an end of the process or an interrupt of its own among it.
        """
        interrupts.reraise(error)
        failure = Failure(stage, blamed(error))
        if raising:
            raise CandidateFailed(f"{label_of(kernel.backend, schedule)}: {failure}") from error
        return failure

    def _lower(
        self, kernel: Kernel[Any, Any], problem: Problem, schedule: Schedule, *, raising: bool = False
    ) -> jax.stages.Lowered | Failure:
        """What JAX makes of the candidate, traced anew."""
        target, wanted, operands = self._hardware.target, problem.results(), problem.operands()
        point = kernel.space(problem, target).decode(schedule)
        self._announce("lower")
        run = jax_compat.writing_over(lambda *args: kernel.results(problem, point, target, *args))
        try:
            traced = run.trace(wanted, *operands)
        except BaseException as error:
            return self._failed(kernel, schedule, "lower", error, raising)
        if (found := _described(as_tuple(traced.out_info))) != _described(wanted):
            return Failure("verify", f"the result is {found} instead of {_described(wanted)}")
        try:
            lowered = traced.lower()
        except BaseException as error:
            return self._failed(kernel, schedule, "lower", error, raising)
        if not kernel.library and onchip_bytes(kernel, problem, self._hardware, schedule) == 0:  # no footprint tells
            asked, has = asked_onchip_bytes(lowered) or 0, self._hardware.onchip_bytes
            if asked > has:
                what = f"asks for {asked} bytes of on-chip memory; a block of {self._hardware.kind} has {has}"
                return Failure("lower", what)
        return lowered

    def _compile(
        self,
        kernel: Kernel[Any, Any],
        problem: Problem,
        schedule: Schedule,
        lowered: jax.stages.Lowered,
        *,
        raising: bool = False,
    ) -> _Candidate | Failure:
        point = kernel.space(problem, self._hardware.target).decode(schedule)
        try:
            tolerance = kernel.tolerance(problem, point)
        except BaseException as error:
            return self._failed(kernel, schedule, "lower", error, raising)
        # XLA's own choice of an algorithm runs on the device while it compiles: it would disturb others' timing, and it
        # has operands and results of its own.
        if kernel.library:
            self._results.clear()
        with self._turn("last") if kernel.library else contextlib.nullcontext():
            # Also within a turn: what XLA tries out takes seconds where operands are large, more than any run.
            self._announce("compile")
            try:
                compiled = lowered.compile()
            except BaseException as error:
                return self._failed(kernel, schedule, "compile", error, raising)
        return _Candidate(compiled, tolerance, lowered_digest(lowered), digest(compiled) if kernel.library else "")

    def _wrong_on(self, candidate: _Candidate, problem: Problem, seed: int, runs: int = 1) -> str | None:
        """What is wrong with a candidate's answers for operands that are drawn now, and not kept.

        Once what checks it is compiled, all in one turn: others' may be XLA's compilations, of a second.
        """
        with self._turn() if problem in self._checks else contextlib.nullcontext():
            return self._wrong(candidate, problem, self._drawn(problem, seed), runs)

    def _wrong_on_special(self, candidate: _Candidate) -> str | None:
        """What is wrong with a candidate's answers for special operands.

        All in one turn, once what draws and checks them is compiled: as of `_wrong_on`.
        """
        kinds = self._problem.special()
        if kinds and not self._special:
            if wrong := self._wrong_on_kind(candidate, kinds[0]):
                return wrong
            self._special, kinds = True, kinds[1:]
        if not kinds:
            return None
        with self._turn():
            each = (self._wrong_on_kind(candidate, kind) for kind in kinds)
            return next((wrong for wrong in each if wrong), None)

    def _wrong_on_kind(self, candidate: _Candidate, kind: str) -> str | None:
        problem = self._problem
        with self._preparing():
            inputs = problem.special_inputs(kind, self._seed + 1)
        with self._turn():
            self._announce("run")  # it has as long as the other kinds
            draw = self._draw_of(problem, inputs)._replace(tolerance=_special_tolerance(problem, kind, candidate))
        if wrong := self._wrong(candidate, problem, draw):
            return (
                f'with special operands ("{kind}") {wrong}; where answers to such need not be right, leave that out '
                "of `special`"
            )
        return None

    def _wrong_when_traced_again(
        self, candidate: _Candidate, kernel: Kernel[Any, Any], schedule: Schedule
    ) -> str | None:
        """What is wrong with what a kernel's code becomes when it is traced again, where that is another program."""
        for _ in range(RETRACED):
            lowered = self._lower(kernel, self._problem, schedule)
            if isinstance(lowered, Failure):
                return f"traced again {lowered}"
            if lowered_digest(lowered) == candidate.lowered:
                continue
            again = self._compile(kernel, self._problem, schedule, lowered)
            if isinstance(again, Failure):
                return f"traced again {again}"
            if wrong := self._wrong_on(again, self._problem, self._seed + 1):
                return f"traced again it is another program, and {wrong}"
        return None

    def _wrong(self, candidate: _Candidate, problem: Problem, draw: Draw, runs: int = 1) -> str | None:
        """What is wrong with a candidate's answers, written over NaN so that what it leaves unwritten is found.

        Those of every second call are written over numbers: where NaN is right, it must be there then, too.
        """
        self._results.clear()  # beside these, one more of gigabytes might be one too many
        actual: Results = ()
        with self._turn():
            for call in range(runs):
                actual = ()
                if call:
                    self._announce("run")  # it has as long as the one before
                poison = self._checks[problem].poison(call % 2 == 1)
                try:
                    actual = candidate.run(poison, *draw.inputs)
                    wrong = self._off(candidate, problem, draw, actual)
                except jax.errors.JaxRuntimeError as error:
                    return first_line(error)
                if wrong:
                    return wrong if call == 0 else f"in call {call + 1}, after {call} right ones, {wrong}"
        if problem == self._problem:
            self._results.append(actual)
        return None

    def _off(self, candidate: _Candidate, problem: Problem, draw: Draw, actual: Results) -> str | None:
        compare, tolerance = self._checks[problem].comparisons, draw.tolerance or candidate.tolerance
        return mismatches(problem, actual, draw.expected, tolerance, draw.rows, compare)

    def _time(self, candidate: _Candidate, repetitions: int, slow_s: float | None = None) -> Measurement | Failure:
        """Its times, unless one of the last answers that were timed is wrong."""

        def call() -> Results:
            self._calls += 1
            result = candidate.run(self._results.popleft(), *self._sets[self._calls % len(self._sets)])
            self._results.append(result)
            return result

        def timed(repetitions: int, slow_s: float | None = None) -> Measurement:
            return timer.measure(call, repetitions=repetitions, clock=self._clock, l2=self._l2, slow_s=slow_s)

        with self._turn():
            # Results rotate as operands do. A call that fails takes its buffer along.
            while len(self._results) < rotating_results(self._problem, self._hardware, len(self._sets)):
                self._results.append(self._checks[self._problem].poison())
            before = self._calls
            try:
                measured = timed(repetitions, slow_s)
                if measured.median_s <= self._least_s:
                    measured = timed(DOUBTED * repetitions)
                calls = self._calls - before
                last = list(self._results)[-min(calls, COMPARED_TIMES) :]
                each = (self._off(candidate, self._problem, self._draw, actual) for actual in last)
                wrong = next((found for found in each if found), None)
            except RuntimeError as error:
                return Failure("time", first_line(error))
        if wrong:
            return Failure("verify", f"after several calls {wrong}")
        if measured.median_s <= self._least_s:
            bound_s = self._least_s / BELIEVED
            return Failure(
                "implausible", f"takes {measured.median_s:.3g} s, and no kernel can take under {bound_s:.3g} s"
            )
        return measured

    @contextlib.contextmanager
    def _turn(self, when: When = "usual") -> Iterator[None]:
        """A turn on the device, or the one that is this bench's already."""
        if self._in_turn:
            yield
            return
        self._announce("wait")
        with self._exclusive(when):
            self._announce("run")
            self._in_turn = True
            try:
                yield
            finally:
                self._in_turn = False

    @contextlib.contextmanager
    def _preparing(self) -> Iterator[None]:
        """Within it programs are compiled beside others' timing, and run in turns; in a turn, as part of that."""

        def announce() -> None:
            if not self._in_turn:
                self._announce("prepare")

        @contextlib.contextmanager
        def turn() -> Iterator[None]:
            with self._turn():
                yield
            announce()

        announce()
        with reference_programs.in_turns(turn):
            yield

    def _drawn(self, problem: Problem, seed: int) -> Draw:
        inputs = self._operands(problem, seed)
        with self._turn():
            return self._draw_of(problem, inputs)

    def _operands(self, problem: Problem, seed: int) -> tuple[jax.Array, ...]:
        """Operands, drawn in a turn. Before it, what checks the problem is compiled, where this has not been."""
        with self._preparing():
            if problem in self._checks:
                return problem.inputs(seed)
            self._checks[problem], inputs = compiled_checks(problem, seed)
            return inputs

    def _draw_of(self, problem: Problem, inputs: tuple[jax.Array, ...]) -> Draw:
        checks = self._checks[problem]
        return Draw(inputs, jax.block_until_ready(checks.reference(*inputs)), checks.rows)

    def _prepare(self) -> None:
        """Operands are drawn, and all is compiled that `_fill` runs."""
        if self._sets or self._unfilled is not None:
            return
        inputs = self._operands(self._problem, self._seed)
        copies = buffers.copying(inputs) if self._l2 == "cold" else None

        def fill() -> None:
            self._draw = self._draw_of(self._problem, inputs)
            sets = [inputs]
            if copies is not None:
                sets += [copies() for _ in range(rotating_sets(self._problem, self._hardware) - 1)]
            self._sets = jax.block_until_ready(sets)

        self._unfilled = fill

    def _fill(self) -> None:
        """What operands come to, and for a cold cache as many copies as make a rotation miss it; within a turn."""
        if self._unfilled is not None:
            self._unfilled()
            self._unfilled = None


def _special_tolerance(problem: Problem, kind: str, candidate: _Candidate) -> tuple[Tolerance, ...]:
    """What the problem allows, and as many times as much as the kernel allows itself of typical operands."""
    usual, own = problem.for_each(problem.tolerance()), problem.for_each(candidate.tolerance)
    each = zip(problem.special_tolerance(kind), usual, own, strict=True)
    return tuple(special.wider(mine.times(one)) for special, one, mine in each)


def calls_to_confirm(problem: Problem) -> int:
    """How many times `Bench.confirm` calls a candidate that is right: also on the neighbour."""
    return _runs(problem) + len(problem.special()) + 1


def _runs(problem: Problem) -> int:
    return RUNS if compared_elements(problem) <= MANY_ELEMENTS else FEWEST_RUNS


def _described(results: Sequence[Any]) -> str:
    return " and ".join(
        f"{x.dtype}{list(x.shape)}" if hasattr(x, "dtype") else f"no array but {type(x).__name__}" for x in results
    )
