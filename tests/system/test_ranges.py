"""A range of an extent is tuned at a few points, and what lies between them uses the schedule of the nearest point."""

import contextlib
import dataclasses
import math
from pathlib import Path

import jax.numpy as jnp
import pytest
from operations import DoubleLibrary, DoubleProblem
from stepped import STEPPED, Stepped, Told, seconds
from typer.testing import CliRunner

import scheduler
from scheduler import tuned
from scheduler.cli.app import app
from scheduler.core.errors import CacheMiss
from scheduler.core.hardware import CPU
from scheduler.core.records import key_of
from scheduler.dispatch import dispatch
from scheduler.prediction.predict import SERVED, predict
from scheduler.search import jobs
from scheduler.search.job_queue import DeviceExecutor
from scheduler.search.task import Malformed, SearchOptions, Task, points, problems_of
from scheduler.store.store import Store, default_url
from search_spaces import Operation
from search_spaces.matmul import MATMUL

OWN = f"{Path(__file__).parents[1] / 'stepped.py'}:STEPPED"


def run(store, runner=None, ends="1..1024", operation=STEPPED):
    tasks = [Task(operation, problem, SearchOptions(budget=8)) for problem in problems_of(operation, {"n": ends})]
    return list(jobs.run(tasks, [DeviceExecutor.of(runner or Told())], store=store))


@pytest.fixture(scope="module")
def records():
    """The records at the points of a range from 1 to 1024."""
    with contextlib.closing(Store(":memory:")) as store:
        assert {result.state for result in run(store)} == {"tuned"}
        return list(store.records())


def answer(n, records, operation=STEPPED):
    return predict(operation, DoubleProblem(n), CPU, records=records)


# What is written


@pytest.mark.parametrize("written", ["m = [1, 5]", 'm = "1..5"'])
def test_a_job_says_a_range_as_two_integers_or_as_a_command_does(written):
    tasks = jobs.parse(f'operation = "matmul"\nbudget = 7\n[[problem]]\n{written}\nn = 8\nk = 8\n')
    assert [(task.problem.m, task.problem.n, task.options.budget) for task in tasks] == [
        (m, 8, 7) for m in (1, 2, 4, 5)
    ]
    assert [task.problem for task in tasks] == problems_of(MATMUL, {"m": "1..5", "n": "8", "k": "8"})


@pytest.mark.parametrize(
    ("table", "complaint"),
    [
        ("m = [1, 2, 3]\nn = 8\nk = 8", "write one [[problem]] per value"),
        ("m = [1]\nn = 8\nk = 8", "must be a value or a range of two integers"),
        ("m = [1, 2.5]\nn = 8\nk = 8", "must be a value or a range of two integers"),
        ('m = [1, "8"]\nn = 8\nk = 8', "must be a value or a range of two integers"),
        ("m = [true, 8]\nn = 8\nk = 8", "must be a value or a range of two integers"),
        ("m = [8, 1]\nn = 8\nk = 8", "write m=1..8"),
        ("m = [8, 8]\nn = 8\nk = 8", "write m=8"),
        ("m = [0, 8]\nn = 8\nk = 8", "an extent must be at least 1"),
        ("m = [-4, 8]\nn = 8\nk = 8", "an extent must be at least 1"),
        ("m = [1, 8]\nn = [1, 8]\nk = 8", "only one field may be a range, found m and n"),
        ("m = 8\nn = 8\nk = 8\ntranspose_a = [0, 1]", "transpose_a=0..1: only an extent may be a range"),
        ("m = 8\nn = 8\nk = 8\ndtype = [1, 2]", "dtype=1..2: only an extent may be a range"),
        ("m = [1, 8]\nn = 8", "missing k"),
        ("mm = [1, 8]\nn = 8\nk = 8", "did you mean 'm'"),
        ("m = [1, 8]\nn = 8\nk = 8\nbudget = [1, 2]", "budget=[1, 2] is a list; give an integer from 1 to"),
    ],
)
def test_what_is_no_range_is_refused_with_what_is_wanted(table, complaint):
    (bad,) = jobs.parse(f'operation = "matmul"\n[[problem]]\n{table}\n')
    assert isinstance(bad, Malformed)
    assert complaint in bad.reason


def test_a_range_of_what_shapes_no_array_is_refused():
    (bad,) = jobs.parse(
        'operation = "flash_attention"\n[[problem]]\nbatch = 1\nq_len = 64\nkv_len = 64\nheads = 1\nkv_heads = 1\n'
        "head_dim = 64\ncausal = true\nwindow_left = [8, 32]\n"
    )
    assert isinstance(bad, Malformed)
    assert "no array's shape depends on window_left" in bad.reason


@pytest.mark.parametrize(
    ("ends", "values"),
    [
        ((1, 8), [1, 2, 4, 8]),
        ((3, 9), [3, 4, 8, 9]),
        ((5, 7), [5, 7]),
        ((1000, 1100), [1000, 1024, 1100]),
        ((64, 65), [64, 65]),
    ],
)
def test_the_points_are_both_ends_and_the_powers_of_two_between_them(ends, values):
    assert points(*ends) == values


def test_every_value_between_two_points_is_near_enough_to_one_of_them():
    for ends in ((1, 300), (7, 1000), (33, 35)):
        for value in range(ends[0], ends[1] + 1):
            assert min(abs(math.log2(value / point)) for point in points(*ends)) <= SERVED


# What is searched


class Even(DoubleProblem):
    def __post_init__(self):
        if self.n % 2 and self.n > 1:
            raise ValueError(f"n={self.n} is odd")
        super().__post_init__()


def test_values_that_are_no_problems_are_passed_over():
    operation = Operation("even", Even, (Stepped(), DoubleLibrary()))
    assert [problem.n for problem in problems_of(operation, {"n": "1..10"})] == [1, 2, 4, 8, 10]
    with pytest.raises(ValueError, match="n=11 is odd"):
        problems_of(operation, {"n": "1..11"})


def test_points_that_do_not_fit_fail_alone_and_what_is_tuned_is_known():
    store = Store(":memory:")
    states = {result.task.problem.n: result.state for result in run(store, Told(largest=600))}
    assert {n for n, state in states.items() if state == "failed"} == {1024}
    again, runner = run(store, Told()), Told()
    assert [result.task.problem.n for result in again if result.state == "tuned"] == [1024]
    assert {result.state for result in run(store, runner)} == {"known"}
    assert runner.measured == []


# What is used


def test_between_two_points_the_winner_of_the_nearest_is_used_and_is_never_behind_the_library(records):
    by_value = {record.key: record for record in records}
    for n in set(range(1, 1025, 7)) - set(points(1, 1024)):
        near = min(points(1, 1024), key=lambda point: abs(math.log2(n / point)))
        winner = by_value[key_of(STEPPED, DoubleProblem(near), CPU)].winner
        found = answer(n, records)
        assert (found.backend, found.schedule, found.neighbour) == (winner.backend, winner.schedule, f"n={near}"), n
        assert seconds(n, found.backend, found.schedule.get("tile", 0)) <= 1.01 * seconds(n, "xla"), n


def test_beyond_half_a_doubling_from_the_ends_the_model_decides(records):
    assert answer(1400, records).neighbour == "n=1024"
    assert answer(1500, records).reason == "scripted: not verified on cpu"


class Multiples(Stepped):
    def supports(self, problem, target):
        return None if problem.n % 8 == 0 else "it takes multiples of eight"


class Newer(Stepped):
    version = 2


def test_a_winner_that_is_not_legal_here_or_of_an_older_kernel_is_not_used(records):
    operation, store = Operation("multiples", DoubleProblem, (Multiples(), DoubleLibrary())), Store(":memory:")
    run(store, ends="64..128", operation=operation)
    kept = list(store.records())
    assert [answer(n, kept, operation).backend for n in (72, 73, 80)] == ["scripted", "xla", "scripted"]
    newer = Operation("stepped", DoubleProblem, (Newer(), DoubleLibrary()))
    assert answer(100, records).backend == "scripted"
    assert answer(100, records, newer).backend == "xla"


def test_a_call_between_two_points_is_a_miss_that_the_model_answers(records):
    with contextlib.closing(Store(default_url())) as mine:
        mine.put_all(records)
    scheduler.reload()

    def decide(**options):
        return dispatch.decide(STEPPED, DoubleProblem(77), "cpu", dispatch.options(STEPPED, **options))

    decision = decide()
    assert (decision.kernel.backend, decision.schedule.tile) == ("scripted", 8)
    assert decision.missed == key_of(STEPPED, DoubleProblem(77), CPU)
    assert decision.reason.startswith("measured at n=64, 0.3 doublings away; ")
    assert decide(on_miss="xla").kernel.library
    with pytest.raises(CacheMiss, match="no schedule for stepped n=77"):
        decide(on_miss="error")
    assert tuned(STEPPED)(jnp.ones(77)).tolist() == [2.0] * 77
    found = scheduler.predict(STEPPED, {"n": 77})
    assert (found.source, found.schedule) == ("model", {"tile": 8})


def test_an_estimate_serves_only_where_nothing_was_measured(records):
    def as_estimated(record):
        static = [dataclasses.replace(e, measurement=dataclasses.replace(e.measurement, clock="static"))
                  for e in record.entries]  # fmt: skip
        return dataclasses.replace(record, entries=tuple(static))

    near, far = (next(r for r in records if r.key == key_of(STEPPED, DoubleProblem(n), CPU)) for n in (64, 128))
    assert answer(90, [near, far]).neighbour == "n=64"
    assert answer(90, [as_estimated(near), far]).neighbour == "n=128"
    alone = answer(90, [as_estimated(near)])
    assert (alone.neighbour, alone.estimated) == ("n=64", True)


# The command line


def command(*words, code=0):
    done = CliRunner().invoke(app, list(map(str, words)))
    assert done.exit_code == code, done.output + done.stderr
    return done.stdout, done.stderr


def test_from_the_command_line_the_points_are_tuned_and_a_value_between_is_explained(monkeypatch):
    monkeypatch.setenv("COLUMNS", "200")
    monkeypatch.setattr("scheduler.search.job_queue.start_runner", lambda *_: Told())
    out, _ = command("tune", OWN, "n=20..34", "--budget", 3)
    assert [line.split()[:2] for line in out.splitlines() if line.startswith("stepped")] == [
        ["stepped", "n=20"], ["stepped", "n=32"], ["stepped", "n=34"],
    ]  # fmt: skip
    out, _ = command("explain", OWN, "n=27")
    assert "Without a measurement, a call gets" in out
    assert "measured at n=32" in out


@pytest.mark.parametrize(
    ("words", "complaint"),
    [
        (("tune", "matmul", "m=8..1", "n=8", "k=8"), "write m=1..8"),
        (("tune", "matmul", "m=1..8", "n=1..8", "k=8"), "only one field may be a range"),
        (("show", "matmul", "m=1..8", "n=8", "k=8"), "only tune takes a range"),
        (("explain", "matmul", "m=1..8", "n=8", "k=8"), "only tune takes a range"),
    ],
)
def test_a_range_that_a_command_cannot_take_is_a_usage_error(words, complaint):
    _, said = command(*words, code=2)
    assert complaint in " ".join(said.replace("│", " ").split())
