"""The benchmark of predictions for TPUs: what it draws, what it makes of answers, and the process that it asks."""

import importlib.util
import json
import os
import signal
import sys
from pathlib import Path

import pytest
from static_profiles import needs_libtpu

from scheduler.contrib.tpu import estimate
from scheduler.core.hardware import find
from search_spaces import load
from search_spaces.matmul import MATMUL, MatmulProblem

sys.path.append(str(Path(__file__).parents[2] / "benchmarks"))
import tpu_fit
from harness import Kept
from tpu_compiler import ENDED, Asked, Compiler
from tpu_problems import PROBLEMS

pytestmark = pytest.mark.slow

V5E = find("v5e")
KERNEL = MATMUL.kernel("mosaic_tpu")


@pytest.fixture(scope="module")
def cases():
    return list(tpu_fit.cases_of(MATMUL, V5E))


def test_every_kernel_for_tpus_has_problems_that_it_can_do():
    for name, problems in PROBLEMS.items():
        operation = load(name)
        if tpu_fit.BACKEND in operation.backends:
            able = [case.problem for case in tpu_fit.cases_of(operation, V5E)]
            assert len(able) >= 3, f"{name}: {able}"
            assert len(set(able)) == len(able) <= len(problems)


def test_a_longer_draw_begins_with_a_shorter_one_and_no_schedule_is_drawn_twice(cases):
    short, long = tpu_fit.draw(cases, 24), tpu_fit.draw(cases, 60)
    assert [(id(case), index) for case, index in long[:24]] == [(id(case), index) for case, index in short]
    assert len({(id(case), index) for case, index in long}) == len(long) == 60
    assert {case.problem for case, _ in short} == {case.problem for case in cases}, "all problems, in turn"


def test_what_is_drawn_has_what_the_model_ranks_first_and_what_asks_for_a_little_too_much(cases):
    drawn = tpu_fit.draw(cases, 10**6)
    for case in cases:
        indices = [index for one, index in drawn if one is case]
        legal = [index for index in indices if case.demand[index] <= case.limit[index]]
        best = min(legal, key=lambda index: case.predicted_s[index])
        assert best in indices[: 3 * tpu_fit.FIRST]
        assert len(legal) == (case.demand <= case.limit).sum(), "all that are legal, in the end"
        assert all(case.demand[index] <= tpu_fit.ABOVE * case.limit[index] for index in indices)
    assert any(case.demand[index] > case.limit[index] for case, index in drawn)


def _row(predicted, demand, limit, seconds=1.0, **said):
    return {
        "operation": "matmul",
        "problem": "p",
        "predicted_bytes": predicted,
        "demand_bytes": demand,
        "limit_bytes": limit,
        "predicted_s": seconds,
        **said,
    }


def test_figures_count_what_the_model_and_the_compiler_disagree_about():
    rows = [
        _row(10, 10, 16, onchip_bytes=12, spill_bytes=2, cycles=5),
        _row(10, 10, 16, onchip_bytes=15, spill_bytes=0, cycles=5),  # five bytes that nobody predicted
        _row(10, 10, 16, refused_bytes=20),  # a false accept
        _row(20, 20, 16, onchip_bytes=20, spill_bytes=0, cycles=5),  # a false reject
        _row(20, 20, 16, refused_bytes=20),
        _row(10, 10, 16, failed="the compiler ended its process"),
    ]
    found = tpu_fit.figures(rows)
    assert (found["schedules"], found["false_accepts"], found["false_rejects"], found["failed"]) == (6, 1, 1, 1)
    assert (found["bytes_equal"], found["bytes_compared"], found["largest_error_bytes"]) == (2, 3, 5)
    assert found["tau_median"] is None, "too few to rank"


@pytest.mark.parametrize(("order", "tau", "first"), [(range(10), 1.0, 1.0), (range(9, -1, -1), -1.0, 100 / 190)])
def test_ranks_are_those_of_kendall_and_the_first_choice_is_compared_with_the_best_estimate(order, tau, first):
    rows = [
        _row(10, 10, 16, seconds=float(place), onchip_bytes=10, spill_bytes=0, cycles=100 + 10 * cycles)
        for place, cycles in enumerate(order)
    ]
    found = tpu_fit.figures(rows)
    assert found["tau_median"] == pytest.approx(tau)
    assert found["first_choice_median"] == pytest.approx(first)
    assert found["problems_ranked"] == 1


def test_what_is_kept_is_judged_by_todays_predictions_and_is_not_compiled_again(cases, tmp_path, monkeypatch):
    kept = Kept(tmp_path / "compiled.jsonl")
    drawn = tpu_fit.draw(cases, 12)
    asked = []

    class Answering:
        def __init__(self, hardware):
            assert hardware is V5E

        def ask(self, question):
            asked.append(json.dumps(question, sort_keys=True))
            return {"onchip_bytes": 7, "spill_bytes": 0, "cycles": 1}

        def close(self):
            pass

    monkeypatch.setattr(tpu_fit, "Compiler", Answering)
    monkeypatch.setattr(tpu_fit, "libtpu", lambda: "0")
    tpu_fit.compile_all(drawn, kept, workers=2, deadline=float("inf"))
    assert len(asked) == len(set(asked)) == 12
    again = Kept(tmp_path / "compiled.jsonl")
    tpu_fit.compile_all(tpu_fit.draw(cases, 16), again, workers=2, deadline=float("inf"))
    assert len(set(asked)) == 16
    rows = tpu_fit.judged(drawn, Kept(tmp_path / "compiled.jsonl"))
    assert [row["predicted_bytes"] for row in rows] == [int(case.onchip_bytes[index]) for case, index in drawn]
    assert {row["onchip_bytes"] for row in rows} == {7}


def test_nothing_is_compiled_once_the_time_is_up(cases, tmp_path, monkeypatch):
    monkeypatch.setattr(tpu_fit, "libtpu", lambda: "0")
    kept = Kept(tmp_path / "compiled.jsonl")
    tpu_fit.compile_all(tpu_fit.draw(cases, 4), kept, workers=2, deadline=0.0)
    assert not (tmp_path / "compiled.jsonl").exists()


QUESTION = {
    "operation": "matmul",
    "backend": "mosaic_tpu",
    "problem": MatmulProblem(256, 256, 256).canonical(),
    "schedule": {"tile_m": 256, "tile_n": 256, "tile_k": 256, "grid_minor_dim": "n", "vmem_limit_mib": 0},
}


@pytest.fixture
def compiler():
    made = Asked(V5E)
    yield made
    made.close()


@pytest.mark.skipif(importlib.util.find_spec("libtpu") is not None, reason="the compiler is there")
def test_without_the_compiler_the_answer_says_so(compiler):
    assert "the compiler for TPU v5 lite is not installed" in compiler.ask(QUESTION)["failed"]


def test_a_question_that_no_schedule_answers_costs_its_own_row_alone(compiler):
    wrong = QUESTION | {"schedule": QUESTION["schedule"] | {"tile_m": "many"}}
    said = compiler.ask(wrong)
    assert "tile_m" in said["failed"]
    assert compiler.ask(wrong) == said, "the process answers on"


def test_a_process_that_ends_costs_one_row(compiler):
    compiler.ask(QUESTION)
    os.kill(compiler.pid, signal.SIGKILL)
    assert compiler.ask(QUESTION) == ENDED
    assert compiler.ask(QUESTION) != ENDED


def test_a_program_that_takes_too_long_costs_one_row(compiler, monkeypatch):
    monkeypatch.setattr("tpu_compiler.LIMIT_S", 0.0)
    assert compiler.ask(QUESTION) == {"failed": "compiling it took more than 0 s"}


@needs_libtpu
def test_what_the_estimator_cannot_follow_is_compiled_without_it():
    """A grid of one step has no copies that a step before started, and libtpu ends the process that asks."""
    softmax = load("softmax")
    problem = softmax.problem(rows=256, columns=512)
    fields = {"residency": "window", "rows": 256, "columns": 512, "step_rows": 8, "lanes": 128, "fragments": 2}
    question = {
        "operation": "softmax",
        "backend": "mosaic_tpu",
        "problem": problem.canonical(),
        "schedule": fields | {"vmem_limit_mib": 0},
    }
    alone, made = Asked(V5E), Compiler(V5E)
    try:
        estimated, said = alone.ask(question), made.ask(question)
    finally:
        alone.close()
        made.close()
    # libtpu 0.0.48 ends the process here, and 0.0.50 follows it: then both say the same.
    assert said == (estimated if estimated != ENDED else said | {"cycles": None})
    assert said["onchip_bytes"] == 2 * 256 * 512 * 2


@needs_libtpu
@pytest.mark.parametrize("chip", ["TPU v4", "v6e"])
def test_memory_is_predicted_to_the_byte(chip):
    hardware = find(chip)
    made = Compiler(hardware)
    try:
        rows = [
            (case, index, made.ask(tpu_fit.conditions(case, index)))
            for case, index in tpu_fit.draw(list(tpu_fit.cases_of(MATMUL, hardware)), 4)
        ]
    finally:
        made.close()
    assert all("failed" not in said for _, _, said in rows)
    fits = [(case, index, said) for case, index, said in rows if "onchip_bytes" in said]
    assert fits
    for case, index, said in fits:
        assert said["onchip_bytes"] - said["spill_bytes"] == case.onchip_bytes[index], case.schedule(index)
        assert (said["cycles"] is not None) == hardware.static_cycles
        assert estimate.missing_compiler(hardware) is None
