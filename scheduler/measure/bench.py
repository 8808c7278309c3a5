"""Verifies and times candidates of one problem on the device of this process."""

from __future__ import annotations

import collections
import contextlib
import functools
import itertools
import random
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from scheduler.core.fingerprints import BY_PROGRAM
from scheduler.core.hardware import Hardware
from scheduler.core.records import L2, Failure, Measurement, Outcome, Point, Schedule, point_of
from scheduler.measure import buffers, timer
from scheduler.measure.buffers import (
    PLAUSIBLE_SHARE_OF_BOUND,
    Checks,
    Results,
    compiled_checks,
    least_plausible_s,
    rotating_results,
    rotating_sets,
    timing_conditions,
)
from scheduler.measure.build import STRICT_ERRORS, Built, CandidateBuilder, first_line, raised_in_callback
from scheduler.measure.protocol import Caution, Finding, Step
from scheduler.measure.verification import (
    UNWRITTEN,
    Rows,
    compared_elements,
    has_stray_nan,
    identical,
    rounded_differently,
    special_tolerance,
    start_comparison,
    with_rounding_of_operands,
)
from scheduler.model.pruning import illegal
from search_spaces import checking
from search_spaces.kernel import Kernel
from search_spaces.operation import Operation
from search_spaces.problem import Problem, Tolerance
from search_spaces.space import cdiv

# A candidate this many times slower than the fastest one so far is timed with fewer repetitions.
SLOW = 1.5
# A time below the bound is measured again with this many times the repetitions.
REPEATS_BELOW_BOUND = 3
# A finalist is called this many times with other inputs, and each result is compared. This finds a candidate that is
# wrong in every fifth call. It finds a candidate that is wrong in a random fifth of its calls with high probability,
# together with the later comparisons. `FEWEST_RUNS` applies above `MANY_ELEMENTS`, because comparing large results
# takes longer than everything else.
RUNS, FEWEST_RUNS, MANY_ELEMENTS = 10, 5, 2**22
# How many of the last timed results are compared.
COMPARED_TIMES = 4


class Draw(NamedTuple):
    """One draw of a problem's operands, and the expected results.

    Attributes:
      expected: the reference results; if `rows` is set, those rows only.
      rows: the compared rows of large results; None compares all rows.
      tolerance: the allowed error; None uses the candidate's tolerance for typical operands.
    """

    inputs: tuple[jax.Array, ...]
    expected: Results
    rows: Rows | None
    tolerance: tuple[Tolerance, ...] | None = None


class Bench:
    """The inputs, the reference and the compiled candidates of one problem on one device.

    Args:
      hardware: the chip of JAX's default device in this process.
      l2: "cold" rotates through buffers larger than twice the last-level cache, "warm" reuses the same buffers.
      builder: compiles or loads candidates.
      exclusive: returns a context manager that holds the lock of the device; entered around all device work.
      seed: seed of the inputs.
      announce: called with each step before the step begins, so that a watching process knows in which step this one
        hangs.
    """

    def __init__(
        self,
        operation: Operation[Any],
        problem: Problem,
        hardware: Hardware,
        *,
        l2: L2 = "cold",
        builder: CandidateBuilder | None = None,
        exclusive: Callable[[], contextlib.AbstractContextManager[Any]] = contextlib.nullcontext,
        seed: int = 0,
        announce: Callable[[Step], None] = lambda step: None,
    ) -> None:
        self._operation, self._problem, self._hardware, self._seed = operation, problem, hardware, seed
        self._builder = builder or CandidateBuilder(hardware, announce)
        self._exclusive, self._announce, self._has_device = exclusive, announce, False
        self._clock, self._l2 = timing_conditions(problem, hardware, l2)
        # Start the clock and its compilation now, not later while this bench holds the device lock.
        timer.attach(self._clock)
        self._checks: dict[Problem, Checks] = {}
        self._special = False  # whether the programs that alter operands are compiled
        self._draws: list[Draw] = []  # one for each variant of the operands
        self._sets: list[tuple[tuple[jax.Array, ...], ...]] = []  # the variants of each set of operands
        self._unfilled: Callable[[], None] | None = None  # fills `_draws` and `_sets`
        self._copy: buffers.Copy | None = None  # of a set; None if one set is timed, from a warm cache
        self._random = random.Random(seed)
        self._min_plausible_s = least_plausible_s(problem, hardware, self._l2)
        self._calls = 0
        self._results: collections.deque[tuple[int, Results]] = collections.deque()  # each with its variant
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
        """Verifies one candidate, then times it; returns the failing stage and the reason if the candidate fails.

        Args:
          repetitions: the number of timed calls; fewer are made if the candidate is clearly slower than `incumbent_s`.
          incumbent_s: the fastest time so far, in seconds.
          raising: raise an exception that occurs while the candidate is built, instead of returning a `Failure`.

        Raises:
          CandidateFailed: the candidate raised an exception and `raising` is set; chained to that exception.
        """
        kernel = self._operation.kernel(backend)
        candidate = self._build(kernel, self._problem, schedule, raising=raising)
        if isinstance(candidate, Failure):
            return candidate
        self._prepare()
        with self._exclusive_device():
            self._fill()
            if wrong := self._wrong_on_each(candidate, self._problem, self._draws):
                return Failure("verify", wrong)
            self._candidates[point_of(backend, schedule)] = candidate
            return self._time(candidate, repetitions, None if incumbent_s is None else SLOW * incumbent_s)

    def again(self, backend: str, schedule: Schedule, repetitions: int) -> Outcome:
        """Times a candidate again that `measure` has verified; an unknown candidate is measured from the start.

        Operands and results are at other addresses each time: a time may depend on them.
        """
        candidate = self._candidates.get(point_of(backend, schedule))
        if candidate is None:
            return self.measure(backend, schedule, repetitions)
        with self._exclusive_device():
            self._move()
            return self._time(candidate, repetitions)

    def _move(self) -> None:
        """Copies the operands to other addresses, and drops the result buffers. Requires the device lock."""
        if self._copy is None or not buffers.moves(self._problem, len(self._sets)):
            return
        self._results.clear()
        with buffers.elsewhere(self._random):
            for number, (operands, *_) in enumerate(self._sets):
                moved = self._problem.variants(self._copy(operands))
                self._sets[number] = jax.block_until_ready(jax.tree.map(jnp.asarray, moved))

    def confirm(self, backend: str, schedule: Schedule) -> Finding:
        """Checks a candidate with other inputs in several calls; returns what is wrong, or None if it is correct.

        Library kernels (programs of XLA or the vendor) get no further checks. Any other candidate must also be correct
        for each kind of special operands (`Problem.special`), and for the neighbour of the problem if its schedule is
        legal there. Tracing it again must give the same program, or another program that is correct.
        """
        kernel, neighbour = self._operation.kernel(backend), self._problem.neighbour()
        candidate = self._candidates.get(point_of(backend, schedule)) or self._build(kernel, self._problem, schedule)
        if isinstance(candidate, Failure):
            return candidate
        if wrong := self._wrong_on(candidate, self._problem, self._seed + 1, _runs(self._problem)):
            return Failure("verify", f"with other inputs {wrong}")
        if kernel.library:
            return None
        wrong = self._wrong_when_traced_again(candidate, kernel, schedule)
        if wrong := wrong or self._wrong_in_strict_interpreter(kernel, schedule):
            return Failure("verify", wrong)
        found = self._wrong_on_special(candidate)
        if isinstance(found, Failure) or neighbour is None or illegal(kernel, neighbour, self._hardware, schedule):
            return found
        candidate = self._build(kernel, neighbour, schedule)
        if isinstance(candidate, Failure):
            return Failure("verify", f"on {neighbour} {candidate}")
        if wrong := self._wrong_on(candidate, neighbour, self._seed):
            return Failure("verify", f"on {neighbour} {wrong}")
        return found

    def intact(self) -> bool:
        """Returns whether operands and reference are unmodified: a candidate may have written out of bounds."""
        self._prepare()
        inputs = self._operands(self._problem, self._seed)
        with self._exclusive_device():
            self._fill()
            for variant, operands in enumerate(self._problem.variants(inputs)):
                fresh = self._draw_of(self._problem, operands)
                for held in self._sets:
                    was, now = (*fresh.inputs, *fresh.expected), (*held[variant], *self._draws[variant].expected)
                    if not all(map(identical, was, now)):
                        return False
        return True

    def _build(
        self, kernel: Kernel[Any, Any], problem: Problem, schedule: Schedule, *, raising: bool = False
    ) -> Built | Failure:
        """Compiles the candidate for `problem`.

        A library kernel is compiled under the device lock: XLA autotunes library algorithms on the device while it
        compiles, with its own operands and results. The buffers of earlier results are freed first.
        """
        if not kernel.library:
            return self._builder.build(kernel, problem, schedule, raising=raising)
        self._results.clear()
        with self._exclusive_device():
            return self._builder.build(kernel, problem, schedule, raising=raising)

    def _wrong_on(self, candidate: Built, problem: Problem, seed: int, runs: int = 1) -> str | None:
        """Describes the first error of a candidate on newly drawn operands, which are not kept; None if it is correct.

        The calls are divided among the operands as drawn and their variants, if there are several. The device lock is
        held throughout if the programs that check the problem are already compiled.
        """
        with self._exclusive_device() if problem in self._checks else contextlib.nullcontext():
            inputs = self._operands(problem, seed)
            variants = problem.variants(inputs)
            each = [inputs, *variants] if len(variants) > 1 else [inputs]
            draws = (self._draw_of(problem, one) for one in each)
            return self._wrong_on_each(candidate, problem, draws, cdiv(runs, len(each)))

    def _wrong_on_each(self, candidate: Built, problem: Problem, draws: Iterable[Draw], runs: int = 1) -> str | None:
        """Describes the first error of a candidate on several draws; None if it is correct."""
        for number, draw in enumerate(draws):
            if number:
                self._announce("run")  # restarts the timeout: each draw gets the full limit
            if wrong := self._wrong(candidate, problem, draw, runs):
                return wrong
            del draw  # frees its reference before the next one is computed
        return None

    def _wrong_on_special(self, candidate: Built) -> Finding:
        """Returns the first error of a candidate on special operands: a failure, or else one on disputed operands.

        The first kind compiles the programs that draw and check the operands. From then on, the device lock is held.
        """
        kinds, disputed = self._problem.special(), dict[str, str]()
        with contextlib.ExitStack() as stack:
            for kind in kinds:
                if self._special:
                    stack.enter_context(self._exclusive_device())
                wrong, refused = self._wrong_on_kind(candidate, kind)
                self._special = True
                if wrong and refused:
                    others = _option([other for other in kinds if other != kind])
                    return Failure("verify", f"{wrong}; where answers to such need not be right, write {others}")
                if wrong:
                    disputed[kind] = wrong
        if not disputed:
            return None
        others = _option([kind for kind in kinds if kind not in disputed])
        return Caution(
            f"{'; '.join(disputed.values())}; another order of operations may differ there, so it is used: "
            f"special=True refuses it, and {others} checks nothing else"
        )

    def _wrong_on_kind(self, candidate: Built, kind: str) -> tuple[str, bool]:
        """Describes the first error on special operands, "" if there is none; and whether it refuses the candidate."""
        problem = self._problem
        with self._preparing():
            inputs = problem.special_inputs(kind, self._seed + 1)
        with self._exclusive_device():
            self._announce("run")  # restarts the timeout: each kind gets the full limit
            draw, tolerance = self._draw_of(problem, inputs), special_tolerance(problem, kind, candidate.tolerance)
            if kind == "offset":  # narrower operands are rounded more coarsely than sums in float32
                moved = [rounded_differently(x, i) if x.dtype.itemsize >= 4 else x for i, x in enumerate(draw.inputs)]
                each = zip(tolerance, draw.expected, self._checks[problem].reference(*moved), strict=True)
                tolerance = tuple(itertools.starmap(with_rounding_of_operands, each))
            draw = draw._replace(tolerance=tolerance)
        if (wrong := self._wrong(candidate, problem, draw)) is None:
            return "", False
        described = f'with special operands ("{kind}") {wrong.replace(UNWRITTEN, "")}'
        if kind not in problem.disputed():
            return described, True
        # A correct kernel may make a NaN of an infinity: attention that masks by -inf, if the reference masks by -1e30.
        return described, kind not in ("inf", "-inf") and self._has_stray_nan(candidate, draw)

    def _has_stray_nan(self, candidate: Built, draw: Draw) -> bool:
        """Runs a candidate again; returns whether it writes a NaN in a row without one in the reference, or raises."""
        with self._exclusive_device():
            try:
                actual = candidate.run(self._checks[self._problem].poison(), *draw.inputs)
                return has_stray_nan(self._problem, actual, draw.expected, draw.rows)
            except jax.errors.JaxRuntimeError:
                return True

    def _wrong_when_traced_again(self, candidate: Built, kernel: Kernel[Any, Any], schedule: Schedule) -> str | None:
        """Describes the error of a retraced program that differs from the first; None if there is none."""
        for again in self._builder.traced_again(kernel, self._problem, schedule, candidate.traced):
            if isinstance(again, Failure):
                return f"traced again {again}"
            if wrong := self._wrong_on(again, self._problem, self._seed + 1):
                return f"traced again it is another program, and {wrong}"
        return None

    def _wrong_in_strict_interpreter(self, kernel: Kernel[Any, Any], schedule: Schedule) -> str | None:
        """Describes the error of a candidate in Pallas's strict interpreter; None if there is none.

        Only kernels without a manual version, on a CPU, are interpreted.
        """
        if kernel.version != BY_PROGRAM or not self._hardware.abilities.interpreted:
            return None
        draw = self._draw_of(self._problem, self._operands(self._problem, self._seed + 1))
        with self._builder.strictly_interpreted(kernel, self._problem, schedule) as strict:
            if strict is None:
                return None
            self._announce("prepare")  # not "run": the strict interpreter is slow
            try:
                actual = strict.run(self._checks[self._problem].poison(), *draw.inputs)
                wrong = self._start_comparison(strict, self._problem, draw, actual)()
            except jax.errors.JaxRuntimeError as error:
                wrong = raised_in_callback(error)
                if not any(sign in wrong for sign in STRICT_ERRORS):  # code that the interpreter does not support
                    return None
        return wrong and f"in Pallas's strict interpreter, {wrong}"

    def _wrong(self, candidate: Built, problem: Problem, draw: Draw, runs: int = 1) -> str | None:
        """Describes the first error of a candidate's results; None if all are correct.

        The result buffers are filled with NaN before the first call, so that unwritten elements are found. Before every
        second call they are filled with finite numbers, so that a NaN that the reference expects must really be
        written.
        """
        self._results.clear()  # free the old results first: another set of several gigabytes may not fit in memory
        actual: Results = ()
        with self._exclusive_device():
            for call in range(runs):
                actual = ()
                if call:
                    self._announce("run")  # restarts the timeout: each call gets the full limit
                poison = self._checks[problem].poison(call % 2 == 1)
                try:
                    actual = candidate.run(poison, *draw.inputs)
                    wrong = self._start_comparison(candidate, problem, draw, actual)()
                except jax.errors.JaxRuntimeError as error:
                    return first_line(error)
                if wrong:
                    return wrong if call == 0 else f"in call {call + 1}, after {call} right ones, {wrong}"
        if problem == self._problem:
            self._results.append((0, actual))
        return None

    def _start_comparison(
        self, candidate: Built, problem: Problem, draw: Draw, actual: Results
    ) -> Callable[[], str | None]:
        """Starts the comparison of results with their reference; returns a function that returns the first error."""
        compare, tolerance = self._checks[problem].comparisons, draw.tolerance or candidate.tolerance
        return start_comparison(problem, actual, draw.expected, tolerance, draw.rows, compare)

    def _time(self, candidate: Built, repetitions: int, slow_s: float | None = None) -> Measurement | Failure:
        """Times a candidate; fails if one of the last timed results is wrong."""

        def call(variant: int) -> Results:
            self._calls += 1
            operands = self._sets[self._calls % len(self._sets)][variant]
            result = candidate.run(self._results.popleft()[1], *operands)
            self._results.append((variant, result))
            return result

        calls_of = [functools.partial(call, variant) for variant in range(len(self._draws))]

        def timed(repetitions: int, slow_s: float | None = None) -> Measurement:
            return timer.measure(*calls_of, repetitions=repetitions, clock=self._clock, l2=self._l2, slow_s=slow_s)

        def started(variant: int, results: Results) -> Callable[[], str | None]:
            return self._start_comparison(candidate, self._problem, self._draws[variant], results)

        with self._exclusive_device():
            # Result buffers rotate like operands. A failed call consumes its donated buffer, so missing ones are added.
            while len(self._results) < rotating_results(self._problem, self._hardware, len(self._sets)):
                self._results.append((0, self._checks[self._problem].poison()))
            before = self._calls
            try:
                measured = timed(repetitions, slow_s)
                if measured.median_s <= self._min_plausible_s:
                    measured = timed(REPEATS_BELOW_BOUND * repetitions)
                calls = self._calls - before
                last = list(self._results)[-min(calls, COMPARED_TIMES) :]
                waiting = list(itertools.starmap(started, last))
                wrong = next((found for ended in waiting if (found := ended())), None)
                # These results are of the last variant, which is timed last.
                for again in calls_of[:-1]:
                    again()
                    wrong = wrong or started(*self._results[-1])()
            except RuntimeError as error:
                return Failure("time", first_line(error))
        if wrong:
            return Failure("verify", f"after several calls {wrong}")
        if measured.median_s <= self._min_plausible_s:
            bound_s = self._min_plausible_s / PLAUSIBLE_SHARE_OF_BOUND
            return Failure(
                "implausible", f"takes {measured.median_s:.3g} s, and no kernel can take under {bound_s:.3g} s"
            )
        return measured

    @contextlib.contextmanager
    def _exclusive_device(self) -> Iterator[None]:
        """Context manager that holds the device lock."""
        if self._has_device:
            yield
            return
        self._announce("wait")
        with self._exclusive():
            self._announce("run")
            self._has_device = True
            try:
                yield
            finally:
                self._has_device = False

    @contextlib.contextmanager
    def _preparing(self) -> Iterator[None]:
        """Context manager in which programs are compiled without the device lock and run with it."""

        def announce() -> None:
            if not self._has_device:
                self._announce("prepare")

        @contextlib.contextmanager
        def turn() -> Iterator[None]:
            with self._exclusive_device():
                yield
            announce()

        announce()
        with checking.compile_in_turn(turn):
            yield

    def _operands(self, problem: Problem, seed: int) -> tuple[jax.Array, ...]:
        """Draws operands, after compiling the programs that check the problem if that has not been done."""
        with self._preparing():
            if problem in self._checks:
                return problem.inputs(seed)
            self._checks[problem], inputs = compiled_checks(problem, seed)
            return inputs

    def _draw_of(self, problem: Problem, inputs: tuple[jax.Array, ...]) -> Draw:
        checks = self._checks[problem]
        with self._exclusive_device():
            inputs = tuple(map(jnp.asarray, inputs))
            return Draw(inputs, jax.block_until_ready(checks.reference(*inputs)), checks.rows)

    def _prepare(self) -> None:
        """Draws operands and compiles everything that `_fill` runs."""
        if self._sets or self._unfilled is not None:
            return
        inputs = self._operands(self._problem, self._seed)
        self._copy = buffers.copying(inputs) if self._l2 == "cold" else None

        def fill() -> None:
            self._draws = [self._draw_of(self._problem, each) for each in self._problem.variants(inputs)]
            sets = [inputs]
            if self._copy is not None:
                sets += [self._copy(inputs) for _ in range(rotating_sets(self._problem, self._hardware) - 1)]
            variants = [self._problem.variants(each) for each in sets]
            self._sets = jax.block_until_ready(jax.tree.map(jnp.asarray, variants))

        self._unfilled = fill

    def _fill(self) -> None:
        """Computes the expected results, and copies the operands for a cold cache. Requires the device lock."""
        if self._unfilled is not None:
            self._unfilled()
            self._unfilled = None


def _option(kinds: Sequence[str]) -> str:
    """Formats the option `special` of `autotune` that checks these kinds."""
    return f"special={tuple(kinds)}".replace("'", '"') if kinds else "special=False"


def calls_to_confirm(problem: Problem) -> int:
    """Returns how many times `Bench.confirm` calls a correct candidate, including the calls on the neighbour."""
    draws = problem.variant_count + (problem.variant_count > 1)
    return draws * cdiv(_runs(problem), draws) + len(problem.special()) + draws


def _runs(problem: Problem) -> int:
    return RUNS if compared_elements(problem) <= MANY_ELEMENTS else FEWEST_RUNS
