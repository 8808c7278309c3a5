"""A search through real workers whose candidates misbehave: each is caught for what it is, and nobody else pays."""

import dataclasses
import re
from concurrent.futures import ThreadPoolExecutor

import jax
import pytest
from hypothesis import HealthCheck, Phase, example, given, settings
from hypothesis import strategies as st
from operations import FAULTS, FAULTY, RIGHT, FaultyProblem

from scheduler.core.errors import CandidateFailed
from scheduler.core.hardware import CPU, GIB
from scheduler.core.records import Failure, Measurement
from scheduler.measure.build import CandidateBuilder, save
from scheduler.measure.conversation import Timeouts
from scheduler.measure.gpu import Gpu
from scheduler.measure.pool import Pool
from scheduler.measure.runner import RunnerOptions, Task
from scheduler.search.tuner import tune
from scheduler.store.store import Store

pytestmark = pytest.mark.slow

# Each of these costs the start of a process or two.
CHEAP = ("wrong", "nan", "unpicklable", "defect", "zero", "forgetful", "vandal", "quitting", *RIGHT)


@pytest.fixture(scope="module")
def pool():
    gpu = Gpu(index="", uuid="faults", driver="", free_bytes=4 * GIB)
    with Pool(gpu, RunnerOptions(workers=2, compile_timeout_s=600, run_timeout_s=5)) as pool:
        yield pool


def task(script, number=0):
    return Task(FAULTY, FaultyProblem(8, script), "scripted", {"number": number}, 3)


scripts = st.tuples(
    st.lists(st.sampled_from(CHEAP), max_size=4), st.sampled_from(sorted(set(FAULTS) - {"stuck"})), st.randoms()
)


@settings(
    max_examples=4,
    deadline=None,
    phases=[Phase.explicit, Phase.generate],  # to shrink a search takes long and tells little
    suppress_health_check=list(HealthCheck),
)
@given(scripts.map(lambda drawn: drawn[2].sample([*drawn[0], drawn[1]], len(drawn[0]) + 1)))
@example(
    [
        *("sticky", "drift", "zero", "hang", "wrong", "ok", "abort", "nan", "slow", "exit", "noise", "memory"),
        *("unpicklable", "defect", "quitting", "interrupting", "greedy", "circular", "forgetful", "vandal"),
    ]
)
def test_every_trial_ends_once_no_innocent_is_blamed_and_the_fastest_right_one_wins(pool, behaviours):
    problem, store = FaultyProblem(8, " ".join(behaviours)), Store(":memory:")
    record = tune(FAULTY, problem, budget=64, store=store, runner=pool)
    trials = store.trials(record.key)
    assert sorted(trial.schedule.get("number", -1) for trial in trials) == list(range(-1, len(behaviours)))
    for trial in trials:
        behave = "ok" if trial.backend == "xla" else behaviours[trial.schedule["number"]]
        match trial.outcome:
            case Measurement(median_s=median_s):
                assert behave in RIGHT
                assert median_s > 0
            case Failure(stage, detail):
                assert (stage, detail) == (FAULTS.get(behave), detail)
                assert detail
    best = record.best(frozenset({"scripted"}))
    assert (best and best.schedule["number"]) == problem.fastest


def test_a_compiler_that_does_not_end_is_given_up():
    gpu = Gpu(index="", uuid="stuck", driver="", free_bytes=GIB)
    with Pool(gpu, RunnerOptions(workers=1, compile_timeout_s=600)) as pool:
        pool.measure(task("ok"))  # imports and prepares
        patient, pool._timeouts = pool._timeouts, Timeouts(RunnerOptions(compile_timeout_s=4), CPU)
        assert pool.measure(task("ok stuck", 1)) == Failure("timeout", "lower did not end within 4 s")
        pool._timeouts = patient
        assert isinstance(pool.measure(task("ok stuck", 0)), Measurement)


def test_who_waits_for_a_neighbour_that_hangs_is_not_blamed_for_waiting(pool):
    with ThreadPoolExecutor(2) as threads:
        hanging = threads.submit(pool.measure, task("hang ok", 0))
        waiting = threads.submit(pool.measure, task("hang ok", 1))
        assert hanging.result().stage == "timeout"
        assert isinstance(waiting.result(), Measurement)


def test_who_damages_what_others_read_is_wrong_and_they_are_not():
    # The first overwrites the operand that all candidates of a worker share.
    problem = FaultyProblem(8, "vandal ok ok")
    with Pool(Gpu(index="", uuid="vandal", driver="", free_bytes=GIB), RunnerOptions(workers=1)) as alone:
        outcomes = [alone.measure(Task(FAULTY, problem, "scripted", {"number": number}, 3)) for number in range(3)]
    assert outcomes[0].stage == "verify"
    assert outcomes[0].detail.startswith("after several calls 8 of 8 elements are off")
    assert all(isinstance(outcome, Measurement) for outcome in outcomes[1:]), outcomes


def test_a_defect_outside_of_the_kernels_code_costs_its_candidate_alone_and_is_traced_on_request(pool):
    match pool.measure(task("defect")):
        case Failure("lower", detail):
            assert re.fullmatch(r"KeyError: 'no such behaviour' \(tests/operations.py:\d+\)", detail)
        case other:
            pytest.fail(str(other))
    unknown = Task(FAULTY, FaultyProblem(8, "ok"), "scripted", {"nomber": 0}, 3)
    match pool.measure(unknown):
        case Failure("worker", detail):
            assert re.search(r"nomber.*, outside of any candidate \(\w+\.py:\d+\)$", detail)
        case other:
            pytest.fail(str(other))
    with pytest.raises(CandidateFailed, match="outside of any candidate") as caught:
        pool.measure(dataclasses.replace(unknown, raising=True))
    assert re.search(r"(?s)Traceback.*nomber", str(caught.value.__cause__))
    assert isinstance(pool.measure(task("ok")), Measurement)


@pytest.mark.parametrize("fault", ["quitting", "interrupting", "greedy", "circular", "defect", "forgetful", "vandal"])
def test_in_one_process_too_whatever_a_candidate_does_is_its_own_failure_and_the_search_goes_on(fault):
    record = tune(FAULTY, FaultyProblem(8, f"{fault} ok {fault} ok"), budget=8, store=(store := Store(":memory:")))
    failed = [trial for trial in store.trials(record.key) if isinstance(trial.outcome, Failure)]
    assert {trial.schedule["number"] for trial in failed} == {0, 2}
    for trial in failed:
        assert trial.outcome.stage == FAULTS[fault]
        if trial.outcome.stage == "lower":
            assert re.search(r"^(SystemExit|KeyboardInterrupt|MemoryError|ValueError|KeyError)\b", trial.outcome.detail)
            assert re.search(r" \(tests/operations.py:\d+\)$", trial.outcome.detail)
    assert record.best(frozenset({"scripted"})).schedule["number"] == 1


def test_a_program_that_calls_python_is_compiled_where_it_runs_not_for_an_absent_device(tmp_path):
    elsewhere = CandidateBuilder(CPU, device=jax.devices("cpu")[0])
    problem, schedule = FaultyProblem(8, "wrong forgetful"), [{"number": 0}, {"number": 1}]
    kernel = FAULTY.kernel("scripted")
    moved, left = (elsewhere.build(kernel, problem, each) for each in schedule)
    assert save(moved, tmp_path / "moved")
    assert left.run is None
    assert not save(left, tmp_path / "left")
    assert left.traced == CandidateBuilder(CPU).build(kernel, problem, schedule[1]).traced
