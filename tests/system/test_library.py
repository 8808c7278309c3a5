"""The library's programs: what users write competes with the formula in float32, which answers unmeasured."""

import dataclasses
import functools
import time

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from operations import Double, DoubleLibrary, DoubleProblem

from scheduler.core.hardware import CPU
from scheduler.core.records import Entry, Failure, Measurement
from scheduler.dispatch import dispatch
from scheduler.measure import replay
from scheduler.measure.runner import InProcess
from scheduler.model.cost import CostModel
from scheduler.model.pruning import illegal, prune
from scheduler.prediction.predict import predict
from scheduler.prediction.transfer import recheck
from scheduler.search.runoff import Contender, race
from scheduler.search.sweep import sweep
from scheduler.search.tuner import tune
from scheduler.store.store import Store
from search_spaces import Library, Operation, Target
from search_spaces.configuration import formulas
from search_spaces.matmul import MATMUL, MatmulProblem
from search_spaces.rows.formulas import (
    RMS_NORM,
    SILU_AND_MUL,
    SOFTMAX,
    RmsNormProblem,
    SiluAndMulProblem,
    SoftmaxProblem,
)

pytestmark = pytest.mark.slow

PROBLEM = DoubleProblem(n=8)
XLA = frozenset({"xla"})
TARGET = Target("cpu", "cpu", "cpu", 1)


class TwoPrograms(DoubleLibrary):
    """Of which the first waits."""

    factor = 2.0

    def programs(self, problem):
        return "float32", "plain"

    def run(self, problem, schedule, target, /, *args, **params):
        if schedule.program == "plain":
            return args[0] * self.factor

        def pause(x):
            time.sleep(0.01)
            return np.asarray(x)

        return jax.pure_callback(pause, problem.result(), args[0] + args[0])


class WrongProgram(TwoPrograms):
    factor = 2.5


class Right(Double):
    def space(self, problem, target):
        return dataclasses.replace(super().space(problem, target), choices={"tile": (1, 2, 4, 8), "behave": ("ok",)})


def operation(library):
    return Operation("double", DoubleProblem, (Right(), library))


def searched(library, **how):
    store = Store(":memory:")
    return tune(operation(library), PROBLEM, store=store, **how), store


@pytest.mark.parametrize("budget", [2, 64])
def test_a_search_tries_all_programs_first_and_keeps_the_fastest_as_the_librarys(budget):
    record, store = searched(TwoPrograms(), budget=budget)
    first = store.trials(record.key)[:2]
    assert [(trial.backend, trial.schedule) for trial in first] == [("xla", {}), ("xla", {"program": "plain"})]
    assert record.best(XLA).schedule == {"program": "plain"}
    assert record.tried == min(budget, 6)
    assert isinstance(recheck(operation(TwoPrograms()), PROBLEM, CPU, record, backends=XLA), Entry)


def test_a_program_that_rounds_more_than_the_tolerance_allows_is_a_failed_trial():
    record, store = searched(WrongProgram(), budget=64)
    wrong = next(trial.outcome for trial in store.trials(record.key) if trial.schedule == {"program": "plain"})
    assert isinstance(wrong, Failure)
    assert wrong.stage == "verify"
    assert record.best(XLA).schedule == {}


def test_a_budget_of_one_is_spent_on_the_program_that_answers_unmeasured():
    record, store = searched(TwoPrograms(), budget=1)
    assert [trial.schedule for trial in store.trials(record.key)] == [{}]
    assert record.winner.schedule == {}


def test_what_was_not_measured_is_answered_by_the_first_program():
    for how in ({"backends": "xla"}, {"on_miss": "xla"}, {"on_miss": "model"}):
        options = dispatch.options(operation(TwoPrograms()), **how)
        decision = dispatch.decide(operation(TwoPrograms()), PROBLEM, "cpu", options)
        assert (decision.kernel.backend, decision.schedule) == ("xla", Library("float32")), how
    record, _ = searched(TwoPrograms(), budget=64)
    assert predict(operation(TwoPrograms()), DoubleProblem(n=16), CPU, records=[record]).schedule == {}


def test_a_record_of_before_there_were_programs_is_served_as_it_was():
    record, _ = searched(DoubleLibrary(), budget=64)
    assert record.best(XLA).schedule == {}
    assert recheck(operation(TwoPrograms()), PROBLEM, CPU, record, backends=XLA) == record.best(XLA)


def test_a_tie_of_programs_goes_to_the_one_that_answers_unmeasured():
    rivals = [Contender(label, library=True, onchip_bytes=0) for label in ('xla {"program":"plain"}', "xla {}")]
    measured = Measurement(1e-6, (1e-6,) * 10, "cupti", "cold")
    for order in (rivals, rivals[::-1]):
        assert race(order, lambda rival: measured).order[0] == "xla {}"


def test_a_sweep_measures_all_programs_twice_as_it_does_the_librarys_only_one(tmp_path):
    path = tmp_path / "double.jsonl.gz"
    sweep(operation(TwoPrograms()), PROBLEM, path, InProcess(), again=1)
    again = replay.read_again(path)
    assert [trial.schedule for trial in again[:2]] == [{}, {"program": "plain"}]
    assert [trial.backend for trial in again] == ["xla", "xla", "scripted"]


def test_of_several_programs_as_many_are_kept_as_are_asked_for():
    pruned = [prune(TwoPrograms(), PROBLEM, CPU, CostModel(CPU), keep=keep) for keep in (None, 1)]
    assert [[c.schedule for c in each.candidates()] for each in pruned] == [[{}, {"program": "plain"}], [{}]]
    assert all(each.size == sum(each.dropped.values()) + len(each.points) for each in pruned)


def program(call, problem):
    def run(*args):
        return call(*args)

    return jax.jit(run).lower(*problem.operands()).as_text()


def test_the_plain_program_of_rows_is_what_users_write():
    problems = {SOFTMAX: SoftmaxProblem(8, 64), SILU_AND_MUL: SiluAndMulProblem(8, 64)}

    def gated(x):
        gate, up = x[..., :64], x[..., 64:]
        return jax.nn.silu(gate) * up

    written = {SOFTMAX: lambda x: jax.nn.softmax(x, axis=-1), SILU_AND_MUL: gated}
    for which, problem in problems.items():
        assert which.library.programs(problem) == ("float32", "plain")
        plain = functools.partial(which.library.run, problem, Library("plain"), TARGET)
        assert program(plain, problem) == program(written[which], problem)
        in_float32 = dataclasses.replace(problem, dtype="float32")
        assert which.library.programs(in_float32) == ("float32",), "where it is the same program"
    assert RMS_NORM.library.programs(RmsNormProblem(8, 64)) == ("float32",)
    assert "program=plain is not among float32" in illegal(
        RMS_NORM.library, RmsNormProblem(8, 64), CPU, {"program": "plain"}
    )


@pytest.mark.parametrize("activation", ["", "relu", "gelu", "silu"])
def test_the_plain_program_of_a_fused_product_is_what_users_write(activation):
    problem = MatmulProblem(16, 32, 8, bias="bfloat16", activation=activation, residual="float32")
    a, b, bias, residual = args = problem.inputs(seed=0)

    def written():
        sums = jnp.matmul(a, b) + bias
        return ((getattr(jax.nn, activation)(sums) if activation else sums) + residual).astype(jnp.bfloat16)

    assert MATMUL.library.programs(problem) == ("float32", "plain")
    with jax.numpy_dtype_promotion("strict"), formulas():
        result = MATMUL.library.run(problem, Library("plain"), TARGET, *args)
    assert result.dtype == jnp.bfloat16
    np.testing.assert_array_equal(result.astype(jnp.float32), written().astype(jnp.float32))
    assert MATMUL.library.programs(MatmulProblem(16, 32, 8)) == ("float32",)
