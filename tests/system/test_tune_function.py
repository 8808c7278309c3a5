"""A plan for a whole function is decided by the whole function's time, and by what it computes."""

import dataclasses
import functools
import re
import subprocess
import sys
import textwrap
import time
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import operations
import pytest
from operations import DoubleProblem

import scheduler
from scheduler import Plan, tune_function, tuned, tuned_matmul
from scheduler.functions import ablation, answers
from scheduler.functions.answers import of_record
from scheduler.functions.equations import ProblemCount
from scheduler.store.store import Store, shipped
from search_spaces import Kernel, LibraryKernel, Operation, Space
from search_spaces.flash_attention import FLASH_ATTENTION
from search_spaces.matmul import MatmulProblem

pytestmark = pytest.mark.slow

X = jnp.arange(8, dtype=jnp.float32)


@pytest.fixture(autouse=True)
def _no_answers(_own_cache, monkeypatch):
    monkeypatch.setattr(time, "perf_counter", operations.own_time)
    monkeypatch.setattr(ablation, "SECONDS_OF_VARIANT", 0.4)
    scheduler.reload()


# Kernels that behave otherwise within a function: `Company.now` says how.


class Company:
    now = "ok"


def paused(x, seconds):
    def pause(y):
        operations.pause(seconds)
        return np.asarray(y)

    return jax.pure_callback(pause, jax.ShapeDtypeStruct(x.shape, x.dtype), x)


@dataclasses.dataclass(frozen=True)
class Only:
    pass


class Quick(Kernel):
    backend = "quick"

    def __init__(self, sociable):
        self.sociable = sociable

    def space(self, problem, target):
        return Space(Only, {}, {})

    def footprint(self, problem, schedules, target):
        return None

    def run(self, problem, schedule, target, /, *args, **params):
        match "ok" if self.sociable else Company.now:
            case "slow":
                return paused(args[0], 0.02) * 2
            case "wrong":
                return args[0] * 3
            case "broken":
                raise RuntimeError("no memory is left for it")
        return args[0] * 2


class Patient(LibraryKernel):
    def run(self, problem, schedule, target, /, *args, **params):
        return paused(args[0], 0.005) * 2


class Even(Quick):
    """Slower than its library alone, whatever else a host of CI does meanwhile, and no slower within a function."""

    def run(self, problem, schedule, target, /, *args, **params):
        return paused(args[0], 0.015) * 2


class Torn(LibraryKernel):
    """What a compiler fuses alone, and takes apart in bad company."""

    def run(self, problem, schedule, target, /, *args, **params):
        return paused(args[0], 0.005 if Company.now == "ok" else 0.05) * 2


TYING = Operation("tying", DoubleProblem, (Even(True), Torn()))
tying = tuned(TYING)
SOCIABLE = Operation("sociable", DoubleProblem, (Quick(True), Patient()))
SHY = Operation("shy", DoubleProblem, (Quick(False), Patient()))
sociable, shy = tuned(SOCIABLE), tuned(SHY)


def both(x):
    return sociable(x) + shy(x)


def backends(plan):
    return {answer.operation: answer.backend for answer in plan.answers}


@pytest.fixture
def store():
    """In which all is tuned that these functions ask, each kernel alone."""
    Company.now = "ok"
    made = Store(":memory:")
    for operation in (SOCIABLE, SHY):
        assert scheduler.tune(operation, DoubleProblem(8), store=made, budget=4).winner.backend == "quick"
    return made


def test_what_helps_the_function_is_in_its_plan_and_the_plan_answers(tmp_path):
    made = tune_function(both, X, minutes=0.2, budget=4)
    assert backends(made) == {"sociable": "quick", "shy": "quick"}
    figures = {figure.variant: figure.median_s for figure in made.figures}
    assert figures["plan"] == figures["all"] < figures["xla"]
    assert figures["xla"] > 0.01
    assert "x as fast as XLA alone" in made.verdict
    assert all("slower without it" in answer.reason for answer in made.answers)
    assert all(answer.alone_s < answer.library_s for answer in made.answers)
    made.save(tmp_path / "both.plan.json")
    assert Plan.load(tmp_path / "both.plan.json") == made
    with scheduler.plan(tmp_path / "both.plan.json", missing="error"):
        assert "callback" not in jax.jit(both).lower(X).as_text()
        np.testing.assert_allclose(both(X), 4 * X)


@pytest.mark.parametrize(
    ("company", "reason"),
    [
        ("slow", "alone it is faster, but the function is .* faster without it"),
        ("wrong", r"it cannot be used in the function: result float32\[8\] differs by 0.25 of its size"),
        ("broken", "it cannot be used in the function: RuntimeError: no memory is left for it"),
    ],
)
def test_what_does_not_help_in_the_function_stays_with_xla_and_the_plan_says_why(company, reason, store):
    Company.now = company
    made = tune_function(both, X, minutes=0, store=store)
    assert backends(made) == {"sociable": "quick", "shy": "xla"}
    (answer,) = (answer for answer in made.answers if answer.operation == "shy")
    assert re.search(reason, answer.reason), answer.reason
    assert "x as fast as XLA alone" in made.verdict


@pytest.mark.parametrize(
    ("company", "others", "backend", "reason"),
    [
        ("torn", True, "quick", "the function is .* slower without it"),
        ("torn", False, "quick", "the function is .* slower without it"),
        ("ok", True, "xla", "alone it is about as fast, and the function is not faster with it beyond doubt"),
        ("ok", False, "xla", "alone it is about as fast, and the function is not faster with it beyond doubt"),
    ],
)
def test_a_kernel_that_ties_alone_is_kept_where_the_function_is_faster_with_it(
    company, others, backend, reason, store, monkeypatch
):
    monkeypatch.setattr(answers, "NEAR", 10)  # times the library's time; what ties is said by these kernels' pauses
    record = scheduler.tune(TYING, DoubleProblem(8), store=store, budget=4)
    assert (record.winner.backend, len(record.entries)) == ("xla", 2)
    Company.now = company

    def fn(x):
        return tying(x) + sociable(x) if others else tying(x)

    made = tune_function(fn, X, minutes=0, store=store)
    assert backends(made) == {"tying": backend} | ({"sociable": "quick"} if others else {})
    (answer,) = (answer for answer in made.answers if answer.operation == "tying")
    assert re.search(reason, answer.reason), answer.reason
    assert answer.alone_s > answer.library_s


def test_a_kernel_that_is_not_near_alone_is_not_tried_within_a_function(store, monkeypatch):
    monkeypatch.setattr(answers, "NEAR", 0.01)
    scheduler.tune(TYING, DoubleProblem(8), store=store, budget=4)
    Company.now = "torn"
    made = tune_function(tying, X, minutes=0, store=store)
    assert (backends(made), made.answers[0].reason) == ({"tying": "xla"}, "xla is the fastest alone")


def test_where_the_function_is_not_faster_xla_answers_everything(store):
    Company.now = "slow"
    made = tune_function(shy, X, minutes=0, store=store)
    assert backends(made) == {"shy": "xla"}
    assert made.verdict.startswith("XLA answers everything: the function would be 0.")
    assert {figure.variant for figure in made.figures} == {"xla", "all"}
    with scheduler.plan(made, missing="error"):
        np.testing.assert_allclose(shy(X), 2 * X)


def test_what_is_not_tuned_in_time_is_xlas_with_the_reason():
    made = tune_function(both, X, minutes=0)
    assert backends(made) == {"sociable": "xla", "shy": "xla"}
    assert {answer.reason for answer in made.answers} == {"not tuned: the time for searches was over"}
    assert made.verdict.startswith("XLA answers everything")
    assert made.verdict.endswith("; 2 of 2 problems are not tuned")


def test_counts_of_a_scan_are_in_the_plan(store):
    def step(x):
        return jax.lax.scan(lambda x, _: (sociable(x) / 2, None), x, length=5)[0]

    made = tune_function(step, X, minutes=0, store=store)
    assert [answer.count for answer in made.answers] == [5]
    assert backends(made) == {"sociable": "quick"}


def test_an_interpreted_product_takes_part_and_xla_wins_on_a_cpu(monkeypatch):
    # 64 grid steps, which is slower beyond doubt on any host.
    monkeypatch.setattr("search_spaces.matmul.interpret.tile_extents", lambda extent: (16,))
    a, b = jnp.ones((64, 64)), jnp.ones((64, 64))

    @functools.partial(jax.jit, static_argnums=1, donate_argnums=0)
    def step(params, times):
        return params | {"w": tuned_matmul(params["w"], params["b"]) * times}

    made = tune_function(step, {"w": a, "b": b}, 3, minutes=1, budget=3, backends="interpret")
    (answer,) = made.answers
    assert (answer.backend, answer.problem) == ("xla", MatmulProblem(64, 64, 64, "float32").canonical())
    assert answer.alone_s > 0
    assert "faster without it" in answer.reason
    np.testing.assert_allclose(step({"w": a, "b": b}, 3)["w"], 192)  # nothing was donated before


def test_what_cannot_be_tuned_as_a_whole_is_refused_in_a_sentence():
    with pytest.raises(scheduler.SchedulerError, match="makes no tuned call, so there is nothing to plan"):
        tune_function(lambda x: x @ x, jnp.ones((8, 8)))
    with pytest.raises(scheduler.SchedulerError, match=r"call tuned_matmul in it, or use scheduler.optimize\("):
        tune_function(lambda x: x @ x, jnp.ones((8, 8)))
    with pytest.raises(scheduler.SchedulerError, match=r"tune its problems, scheduler.problems\(f, ...\).save"):
        tune_function(scheduler.optimize(lambda x: x @ x), jnp.ones((8, 8)))
    with pytest.raises(ValueError, match="needs arrays, found the shape"):
        tune_function(both, jax.ShapeDtypeStruct((8,), jnp.float32))
    with pytest.raises(scheduler.SchedulerError, match="under a trace"):
        jax.jit(lambda x: tune_function(both, x))(X)
    for minutes in (-1, True, "5", float("nan")):
        with pytest.raises((TypeError, ValueError), match="give a finite number, 0 or more"):
            tune_function(both, X, minutes=minutes)
    with pytest.raises(ValueError, match="has no backend 'cutlass'"):
        tune_function(both, X, backends="cutlass")
    with scheduler.target("NVIDIA H200"), pytest.raises(scheduler.SchedulerError, match="measures on this chip: leave"):
        tune_function(both, X)
    with pytest.raises(TypeError, match="pass scheduler"):
        tune_function(both, X, store="cache.db")


def test_a_job_of_several_processes_is_told_to_plan_in_one(monkeypatch):
    monkeypatch.setattr(jax, "process_count", lambda: 2)
    with pytest.raises(scheduler.SchedulerError, match="in a job of 2 processes, which could decide differently"):
        tune_function(both, X)


def test_answers_that_save_little_are_decided_together_and_variants_are_few():
    gains = {i: 1e-3 / 2**i for i in range(20)}
    found = ablation.groups(gains, ablation.MOST_GROUPS, 0.05e-3)
    assert found[:5] == [(0,), (1,), (2,), (3,), (4,)]
    assert found[5:] == [tuple(range(5, 20))]
    many = ablation.groups(dict.fromkeys(range(40), 1.0), 4)
    assert [len(group) for group in many] == [1, 1, 1, 37]
    assert sorted(i for group in many for i in group) == list(range(40))


PLANNING = """
    import sys, time, dataclasses, jax, jax.numpy as jnp
    sys.path[:0] = {places!r}
    from test_tune_function import X, both
    import scheduler
    if sys.argv[1] == "plan":
        scheduler.tune_function(both, X, minutes=0.2, budget=4).save(sys.argv[2])
    else:
        with scheduler.plan(sys.argv[2], missing="error") as plan:
            print(plan.digest, "callback" in jax.jit(both).lower(X).as_text(), both(X)[3])
"""


def test_a_plan_made_in_one_process_answers_the_same_in_two_others(tmp_path):
    code = textwrap.dedent(PLANNING).format(places=[str(Path(__file__).parent), str(Path(__file__).parents[1])])

    def process(what):
        ran = subprocess.run(
            [sys.executable, "-c", code, what, str(tmp_path / "both.plan.json")], capture_output=True, text=True
        )
        assert ran.returncode == 0, ran.stderr
        return ran.stdout

    process("plan")
    first, second = process("answer"), process("answer")
    assert first == second == f"{Plan.load(tmp_path / 'both.plan.json').digest} False 12.0\n"


@pytest.mark.parametrize(("backends", "library"), [(None, "cudnn"), (frozenset({"mosaic_gpu"}), "xla")])
def test_a_kernel_takes_the_place_of_the_fastest_library_that_may_answer(backends, library):
    record = next(
        record
        for record in shipped().records(operation=FLASH_ATTENTION.name)
        if record.winner.backend == "mosaic_gpu" and {"cudnn", "xla"} <= {entry.backend for entry in record.entries}
    )
    problem = FLASH_ATTENTION.problem.from_canonical(record.key.problem)
    known = of_record(ProblemCount(FLASH_ATTENTION, problem, 2, (), 0.0), record, backends)
    assert (known.best, known.library) == (record.winner, record.best(frozenset({library})))
    answer = known.planned(kernel=False, reason="")
    assert (answer.backend, answer.library) == (library, library)
    assert known.planned(kernel=True, reason="").library == library
