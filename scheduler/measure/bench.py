"""Verify and time candidates of one problem on the device of this process."""

from __future__ import annotations

import collections
import contextlib
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from scheduler.core.hardware import Hardware
from scheduler.core.identity import Point, point_of
from scheduler.core.records import L2, Failure, Measurement, Outcome, Schedule
from scheduler.measure import buffers, timer
from scheduler.measure.blame import first_line
from scheduler.measure.build import Builder, Built, Step
from scheduler.measure.checks import Checks, Results, compiled_checks
from scheduler.measure.rotation import condition, rotating_results, rotating_sets
from scheduler.measure.verification import Rows, compared_elements, mismatches
from scheduler.model.cost import CostModel
from scheduler.model.feasibility import illegal
from search_spaces import reference_programs
from search_spaces.kernel import Kernel
from search_spaces.operation import Operation
from search_spaces.problem import Problem, Tolerance

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


class Bench:
    """The inputs, the reference and the compiled candidates of one problem on one device.

    Args:
      hardware: the chip of JAX's default device here.
      l2: "cold" rotates through buffers larger than twice the last-level cache, "warm" reuses the same ones.
      builder: compiles candidates, or loads them.
      exclusive: entered around everything that runs on the device: a lock of the device.
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
        builder: Builder | None = None,
        exclusive: Callable[[], contextlib.AbstractContextManager[Any]] = contextlib.nullcontext,
        seed: int = 0,
        announce: Callable[[Step], None] = lambda step: None,
    ) -> None:
        self._operation, self._problem, self._hardware, self._seed = operation, problem, hardware, seed
        self._builder = builder or Builder(hardware, announce)
        self._exclusive, self._announce, self._in_turn = exclusive, announce, False
        self._clock, self._l2 = condition(problem, hardware, l2)
        # What is compiled here is not compiled later, while this bench holds the lock of the device.
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
        self._candidates: dict[Point, Built] = {}

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
        candidate = self._build(kernel, self._problem, schedule, raising=raising)
        if isinstance(candidate, Failure):
            return candidate
        self._prepare()
        with self._turn():
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
        with self._turn():
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
    ) -> Built | Failure:
        """The candidate, compiled for `problem`.

        XLA tries algorithms of a library out on the device while it compiles, with operands and results of its own.
        """
        if not kernel.library:
            return self._builder.build(kernel, problem, schedule, raising=raising)
        self._results.clear()
        with self._turn():
            return self._builder.build(kernel, problem, schedule, raising=raising)

    def _wrong_on(self, candidate: Built, problem: Problem, seed: int, runs: int = 1) -> str | None:
        """What is wrong with a candidate's answers for operands that are drawn now, and not kept.

        Once the programs that check it are compiled, all of it holds the lock of the device.
        """
        with self._turn() if problem in self._checks else contextlib.nullcontext():
            return self._wrong(candidate, problem, self._drawn(problem, seed), runs)

    def _wrong_on_special(self, candidate: Built) -> str | None:
        """What is wrong with a candidate's answers for special operands.

        Once the programs that draw and check them are compiled, all of it holds the lock of the device.
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

    def _wrong_on_kind(self, candidate: Built, kind: str) -> str | None:
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

    def _wrong_when_traced_again(self, candidate: Built, kernel: Kernel[Any, Any], schedule: Schedule) -> str | None:
        """What is wrong with what a kernel's code becomes when it is traced again, where that is another program."""
        for again in self._builder.traced_again(kernel, self._problem, schedule, candidate.traced):
            if isinstance(again, Failure):
                return f"traced again {again}"
            if wrong := self._wrong_on(again, self._problem, self._seed + 1):
                return f"traced again it is another program, and {wrong}"
        return None

    def _wrong(self, candidate: Built, problem: Problem, draw: Draw, runs: int = 1) -> str | None:
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

    def _off(self, candidate: Built, problem: Problem, draw: Draw, actual: Results) -> str | None:
        compare, tolerance = self._checks[problem].comparisons, draw.tolerance or candidate.tolerance
        return mismatches(problem, actual, draw.expected, tolerance, draw.rows, compare)

    def _time(self, candidate: Built, repetitions: int, slow_s: float | None = None) -> Measurement | Failure:
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
    def _turn(self) -> Iterator[None]:
        """Within this context, the bench holds the lock of the device."""
        if self._in_turn:
            yield
            return
        self._announce("wait")
        with self._exclusive():
            self._announce("run")
            self._in_turn = True
            try:
                yield
            finally:
                self._in_turn = False

    @contextlib.contextmanager
    def _preparing(self) -> Iterator[None]:
        """Within this context, programs are compiled without the lock of the device, and run with it."""

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
        """Draws operands. Before that, the programs that check the problem are compiled, where they have not been."""
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
        """What operands come to, and for a cold cache as many copies as make a rotation miss it; with the lock."""
        if self._unfilled is not None:
            self._unfilled()
            self._unfilled = None


def _special_tolerance(problem: Problem, kind: str, candidate: Built) -> tuple[Tolerance, ...]:
    """What the problem allows, and as many times as much as the kernel allows itself of typical operands."""
    usual, own = problem.for_each(problem.tolerance()), problem.for_each(candidate.tolerance)
    each = zip(problem.special_tolerance(kind), usual, own, strict=True)
    return tuple(special.wider(mine.times(one)) for special, one, mine in each)


def calls_to_confirm(problem: Problem) -> int:
    """How many times `Bench.confirm` calls a candidate that is right: also on the neighbour."""
    return _runs(problem) + len(problem.special()) + 1


def _runs(problem: Problem) -> int:
    return RUNS if compared_elements(problem) <= MANY_ELEMENTS else FEWEST_RUNS
