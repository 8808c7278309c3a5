"""What a bench believes: a kernel that leaves elements unwritten, is right by luck, or is too fast, loses its place."""

import contextlib
import dataclasses
import itertools
import time
import warnings
from typing import ClassVar

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental import pallas as pl
from operations import DoubleLibrary, DoubleProblem

from scheduler.core.hardware import CPU, describe
from scheduler.core.records import Failure, Measurement
from scheduler.measure.bench import RUNS, Bench
from scheduler.measure.build import RETRACED
from scheduler.search.tuner import tune
from scheduler.store.store import Store
from search_spaces import Columns, Footprint, Kernel, Operand, Operation, Phase, Space, Target
from search_spaces.jax_compat import writing_over
from search_spaces.matmul import MATMUL, MatmulProblem

pytestmark = pytest.mark.slow_but_first

LENGTH = 64


@dataclasses.dataclass(frozen=True)
class ShiftedProblem(DoubleProblem):
    """`DoubleProblem` with a neighbour of odd length."""

    def neighbour(self):
        return ShiftedProblem(self.n - 1) if self.n % 2 == 0 else None


@dataclasses.dataclass(frozen=True)
class Behaviour:
    behave: str


class Deceiver(Kernel):
    """Doubles an array, except as its schedule says."""

    backend = "deceiver"
    behaviours: ClassVar = ("right", "skips", "lucky", "even", "picky", "narrow", "slow", "tires")

    def space(self, problem, target):
        return Space(
            Behaviour,
            {"behave": self.behaviours},
            {"a picky schedule wants an even length": lambda s: (s.behave != "picky") | (problem.n % 2 == 0)},
        )

    def footprint(self, problem, schedules: Columns, target):
        one = np.ones(len(schedules))
        return Footprint(
            arithmetic="float32",
            grid=(one,),
            step=Phase(loads=(Operand(bytes=4.0 * problem.n * one, axes=(0,)),), flops=1.0 * problem.n * one),
            tile=Phase(bytes_written=4.0 * problem.n * one),
            onchip_bytes=8 * problem.n * np.ones(len(schedules), dtype=np.int64),
        )

    def run(self, problem, schedule, target, /, *args, **params):
        (x,) = args
        match schedule.behave:
            case "skips":
                return doubled_but_for_a_tile(x)
            case "lucky":  # a table of answers to the inputs it was tried on
                return 2 * problem.inputs(0)[0]
            case "even" | "picky":
                return 2 * x if problem.n % 2 == 0 else 3 * x
            case "narrow":
                return (2 * x).astype(jnp.bfloat16)
            case "slow":
                return jax.pure_callback(lambda y: (time.sleep(0.005), np.asarray(y))[1], problem.result(), 2 * x)
            case "tires":
                return jax.pure_callback(once(), problem.result(), 2 * x)
        return 2 * x


def once():
    """What answers one call, and fails those that follow."""
    calls = itertools.count()

    def answer(y):
        if next(calls):
            raise MemoryError("enough")
        return np.asarray(y)

    return answer


def doubled_but_for_a_tile(x):
    def body(x_ref, out_ref):
        @pl.when(pl.program_id(0) != 1)
        def _():
            out_ref[...] = 2 * x_ref[...]

    tile = pl.BlockSpec((16,), lambda i: (i,))
    return pl.pallas_call(body, grid=(x.shape[0] // 16,), in_specs=[tile], out_specs=tile, out_shape=x, interpret=True)(
        x
    )


DECEIVING = Operation("double", ShiftedProblem, (Deceiver(), DoubleLibrary()))


@pytest.fixture(scope="module")
def bench():
    return Bench(DECEIVING, ShiftedProblem(LENGTH), CPU)


def measure(bench, behave, repetitions=3, **how):
    return bench.measure("deceiver", {"behave": behave}, repetitions, **how)


def confirm(bench, behave):
    return bench.confirm("deceiver", {"behave": behave})


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "int32"])
def test_a_result_takes_the_place_of_the_buffer_it_is_given(dtype):
    x = jnp.arange(4096).astype(dtype)
    doubled = writing_over(lambda x: x + x).lower(x, x).compile()
    buffer = jnp.full(x.shape, 7, dtype)
    place = buffer.unsafe_buffer_pointer()
    result = doubled(buffer, x)
    assert result.unsafe_buffer_pointer() == place
    assert buffer.is_deleted()
    assert jnp.array_equal(result, x + x)


def test_a_tile_that_is_never_written_is_found(bench):
    outcome = measure(bench, "skips")
    assert isinstance(outcome, Failure)
    assert outcome.stage == "verify"
    assert outcome.detail.startswith("16 of 64 elements are off; the worst, at (16,), is nan (as where nothing was ")


def test_a_right_kernel_is_confirmed(bench):
    assert isinstance(measure(bench, "right"), Measurement)
    assert confirm(bench, "right") is None


def test_a_kernel_that_is_right_on_the_first_draw_only_is_found_by_the_second(bench):
    assert isinstance(measure(bench, "lucky"), Measurement)
    failure = confirm(bench, "lucky")
    assert failure.stage == "verify"
    assert failure.detail.startswith("with other inputs 64 of 64 elements are off")


def test_a_kernel_that_is_right_for_even_lengths_only_is_found_on_the_neighbour(bench):
    assert isinstance(measure(bench, "even"), Measurement)
    failure = confirm(bench, "even")
    assert failure.stage == "verify"
    assert failure.detail.startswith("on n=63 63 of 63 elements are off")


def test_a_schedule_that_is_not_legal_on_the_neighbour_is_not_asked_about_it(bench):
    assert confirm(bench, "picky") is None


def test_a_candidate_unknown_here_is_confirmed_from_the_start():
    assert confirm(Bench(DECEIVING, ShiftedProblem(LENGTH), CPU), "right") is None


def test_the_library_is_not_asked_about_the_neighbour():
    class EvenLibrary(DoubleLibrary):
        def run(self, problem, schedule, target, /, *args, **params):
            assert problem.n % 2 == 0
            return args[0] + args[0]

    bench = Bench(Operation("double", ShiftedProblem, (EvenLibrary(),)), ShiftedProblem(LENGTH), CPU)
    assert bench.confirm("xla", {}) is None


def test_a_library_is_compiled_while_the_bench_holds_the_lock_of_the_device():
    steps = []
    bench = Bench(DECEIVING, ShiftedProblem(LENGTH), CPU, announce=steps.append)
    assert isinstance(measure(bench, "right"), Measurement)
    steps.clear()
    assert isinstance(bench.measure("xla", {}, 3), Measurement)
    assert steps == ["wait", "run", "lower", "compile", "wait", "run"]


def test_a_candidate_that_is_confirmed_has_as_long_as_a_run_may_take_also_after_operands_were_drawn():
    steps = []
    bench = Bench(DECEIVING, ShiftedProblem(LENGTH), CPU, announce=steps.append)
    assert isinstance(measure(bench, "right"), Measurement)
    assert confirm(bench, "right") is None
    steps.clear()
    assert confirm(bench, "right") is None
    order = [step for step, _ in itertools.groupby(steps)]
    special, neighbour = ["wait", "run"], ["lower", "compile", "wait", "run"]
    assert order == ["wait", "run", "lower", *special, *neighbour], "of other inputs, traced again, and of these"
    assert steps.count("lower") == RETRACED + 1
    assert steps.count("run") == RUNS + 1 + len(ShiftedProblem(LENGTH).special()) + 1, "each call has as long as one"


def test_the_lock_is_taken_once_for_all_that_runs_of_a_request():
    entered = []

    @contextlib.contextmanager
    def exclusive():
        entered.append(1)
        yield

    def count(ask):
        entered.clear()
        assert not isinstance(ask(), Failure)
        return len(entered)

    bench = Bench(DECEIVING, ShiftedProblem(LENGTH), CPU, exclusive=exclusive)
    assert count(lambda: measure(bench, "right")) == 2, "operands are drawn; then it is verified and timed"
    assert count(lambda: measure(bench, "slow")) == 1
    # Programs that check special operands and the neighbour are compiled before the last context.
    assert count(lambda: confirm(bench, "right")) == 1 + 5 + 3
    assert count(lambda: confirm(bench, "slow")) == 1 + 1 + 1
    assert count(lambda: bench.again("deceiver", {"behave": "right"}, 3)) == 1
    assert count(lambda: bench.measure("xla", {}, 3)) == 2


def test_a_candidate_that_cannot_be_built_needs_no_operands():
    bench = Bench(DECEIVING, ShiftedProblem(LENGTH), CPU)
    assert measure(bench, "narrow").stage == "verify"
    assert "_draw" not in vars(bench)


def test_a_result_of_another_dtype_is_wrong_and_told_before_it_is_compiled(bench):
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # of a buffer that was donated for nothing
        assert measure(bench, "narrow") == Failure("verify", "the result is bfloat16[64] instead of float32[64]")


def test_a_kernel_that_stops_working_while_it_is_timed_costs_nobody_else_a_buffer(bench):
    outcome = measure(bench, "tires")
    assert outcome.stage == "time"
    assert outcome.detail == "MemoryError: enough"
    assert isinstance(measure(bench, "right"), Measurement)


def test_a_clearly_slow_candidate_is_left_after_three_repetitions(bench):
    assert len(measure(bench, "slow", 10, incumbent_s=1e-4).samples_s) == 3
    assert len(measure(bench, "slow", 10).samples_s) == 10
    assert len(measure(bench, "slow", 10, incumbent_s=60.0).samples_s) == 10


def test_a_candidate_that_is_timed_again_gets_all_its_repetitions(bench):
    measure(bench, "slow", 10, incumbent_s=1e-4)
    assert len(bench.again("deceiver", {"behave": "slow"}, 10).samples_s) == 10


def test_a_candidate_is_timed_again_with_operands_at_other_addresses():
    bench = Bench(DECEIVING, ShiftedProblem(LENGTH), COLD)
    assert isinstance(measure(bench, "right"), Measurement)

    def operands():
        return [x for each in bench._sets for variant in each for x in variant]

    before = operands()
    assert len(before) == 3
    assert isinstance(bench.again("deceiver", {"behave": "right"}, 3), Measurement)
    after = operands()
    assert not {x.unsafe_buffer_pointer() for x in before} & {x.unsafe_buffer_pointer() for x in after}
    np.testing.assert_array_equal(before, after)


# A chip whose operands do not fit its cache.
COLD = dataclasses.replace(
    CPU, l2_bytes=4 * LENGTH, abilities=dataclasses.replace(CPU.abilities, cold=True), flops_per_s={}
)
# A chip whose operands come from memory, and on which a doubled float takes a second.
SLUGGISH = dataclasses.replace(
    CPU, flops_per_s={"float32": 1.0}, l2_bytes=1024, abilities=dataclasses.replace(CPU.abilities, cold=True)
)


def test_a_time_below_the_lower_bound_is_never_believed():
    outcome = measure(Bench(DECEIVING, ShiftedProblem(LENGTH), SLUGGISH), "right")
    assert isinstance(outcome, Failure)
    assert outcome.stage == "implausible"
    assert "no kernel can take under 64 s" in outcome.detail


def test_only_operands_out_of_the_cache_make_a_time_implausible():
    measured = measure(Bench(DECEIVING, ShiftedProblem(LENGTH), SLUGGISH, l2="warm"), "right")
    assert isinstance(measured, Measurement)
    assert measured.l2 == "warm"


def test_a_chip_whose_figures_are_borrowed_bounds_nothing():
    assert describe(Target("cuda", "NVIDIA H300", "sm_90", 132)).extrapolated
    assert not describe(Target("cuda", "NVIDIA H200", "sm_90", 132)).extrapolated
    bench = Bench(DECEIVING, ShiftedProblem(LENGTH), dataclasses.replace(SLUGGISH, extrapolated=True))
    assert isinstance(measure(bench, "right"), Measurement)


def test_cold_operands_are_said_to_be_cold():
    quick = dataclasses.replace(SLUGGISH, flops_per_s={"float32": 1e15}, hbm_bytes_per_s=1e15)
    assert measure(Bench(DECEIVING, ShiftedProblem(LENGTH), quick), "right").l2 == "cold"


def test_a_finalist_that_is_not_confirmed_loses_its_place_and_its_trial_says_why():
    store = Store(":memory:")
    record = tune(DECEIVING, ShiftedProblem(LENGTH), budget=64, store=store)
    assert record.best(frozenset({"deceiver"})).schedule["behave"] in ("right", "picky")
    assert {entry.schedule.get("behave") for entry in record.entries} <= {"right", "picky", "slow", None}
    trials = store.trials(record.key)
    outcomes = {trial.schedule.get("behave", "library"): trial.outcome for trial in trials}
    assert len(trials) == len(outcomes) == record.tried == 9
    assert outcomes["lucky"].detail.startswith("with other inputs")
    assert outcomes["even"].detail.startswith("on n=63")
    assert {behave for behave, outcome in outcomes.items() if isinstance(outcome, Measurement)} == {
        "library", "right", "picky", "slow",
    }  # fmt: skip


@pytest.mark.parametrize(
    ("problem", "extents"),
    [
        (MatmulProblem(4096, 4096, 4096, transpose_b=True), (4095, 4093, 4091)),
        (MatmulProblem(4001, 16, 8, dtype="float32"), (3999, 13, 8)),
        (MatmulProblem(1, 9, 4104, batch=3, out_dtype="float32"), (1, 5, 4099)),
    ],
)
def test_a_products_neighbour_differs_in_its_extents_alone(problem, extents):
    m, n, k = extents
    assert problem.neighbour() == dataclasses.replace(problem, m=m, n=n, k=k)


def test_a_product_too_small_to_cut_has_no_neighbour():
    assert MatmulProblem(8, 4, 1).neighbour() is None


@pytest.mark.slow
def test_a_real_kernel_is_confirmed_on_a_ragged_neighbour():
    bench = Bench(MATMUL, MatmulProblem(64, 48, 32, dtype="float32"), CPU)
    assert bench.confirm("interpret", {"tile_m": 32, "tile_n": 16, "tile_k": 16, "minor": "n"}) is None
