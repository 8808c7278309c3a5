"""Offline jobs: read from TOML, run one by one, none able to stop the rest."""

import contextlib
import dataclasses
import sqlite3
from pathlib import Path

import pytest
from operations import DOUBLE, DoubleProblem

from scheduler.core.errors import WorkerError
from scheduler.core.records import Measurement
from scheduler.measure.runner import InProcess
from scheduler.search import baseline, jobs
from scheduler.search.job_queue import DeviceExecutor
from scheduler.search.jobs import Malformed, SearchOptions, Task, parse, parse_backends
from scheduler.store.store import Store
from search_spaces.matmul import MATMUL, MatmulProblem

EXAMPLE = Path(__file__).parents[2] / "examples" / "offline_job.toml"
ODD = {"tile_m": 16, "tile_n": 32, "tile_k": 16, "minor": "m"}
JOB = """
operation = "matmul"
budget = 3
[fields]
dtype = "float32"
[[problem]]
m = 16
n = 16
k = 16
[[problem]]
m = 8
n = 8
k = 8
dtype = "bfloat16"
budget = 5
seconds = 2.5
backends = "pallas"
"""


@pytest.fixture(scope="module")
def runner():
    runner = InProcess()
    yield runner
    runner.close()


def test_a_problem_has_what_the_job_shares_unless_it_says_otherwise():
    first, second = parse(JOB)
    assert first == Task(MATMUL, MatmulProblem(16, 16, 16, "float32"), SearchOptions(budget=3))
    pallas = frozenset(MATMUL.backends) - {"xla"}
    assert second == Task(
        MATMUL, MatmulProblem(8, 8, 8, "bfloat16"), SearchOptions(budget=5, seconds=2.5, backends=pallas)
    )


@pytest.mark.parametrize(
    ("table", "complaint"),
    [
        ("mm = 1", "did you mean 'm'"),
        ("m = 8\nn = 8\nk = 8\nbudgt = 3", "no field 'budgt'; did you mean 'budget'"),
        ("m = 1.5", "m must be an integer"),
        ("m = 1", "missing n, k"),
        ("m = 8\nn = 8\nk = 8\nbudget = 0", "budget=0 is out of range; give an integer from 1 to"),
        ("m = 8\nn = 8\nk = 8\nbudget = true", "budget=True is a bool; give an integer from 1 to"),
        ('m = 8\nn = 8\nk = 8\nbackends = "cuda"', "no backend 'cuda'"),
        ("m = 8\nn = 8\nk = 8\nbackends = 3", "backends must be comma-separated names"),
        ('operation = "softmux"', "no operation 'softmux'"),
    ],
)
def test_a_bad_problem_is_kept_with_its_reason_and_the_rest_are_read(table, complaint):
    good, bad = parse(f'operation = "matmul"\n[[problem]]\nm=4\nn=4\nk=4\n[[problem]]\n{table}\n')
    assert isinstance(good, Task)
    assert isinstance(bad, Malformed)
    assert complaint in bad.reason


@pytest.mark.parametrize(
    ("text", "complaint"),
    [
        ("budget =", "must be valid TOML: "),
        ('operatoin = "matmul"', "did you mean 'operation'"),
        ('operation = "matmul"', r"at least one table \[\[problem\]\]"),
        ('operation = "matmull"\n[[problem]]\nm=1\n[[problem]]\nm=2', "no operation 'matmull'"),
    ],
)
def test_what_is_wrong_with_the_whole_job_stops_it(text, complaint):
    with pytest.raises(ValueError, match=complaint):
        parse(text)


def test_backends_are_all_or_pallas_or_named():
    assert parse_backends(MATMUL, None) is None
    assert parse_backends(MATMUL, "xla, interpret") == {"xla", "interpret"}
    assert parse_backends(DOUBLE, "pallas") == {"scripted"}


def test_the_parts_of_a_job_are_the_job():
    tasks = list(range(10))
    parts = [jobs.part(tasks, f"{i}/4") for i in (1, 2, 3, 4)]
    assert sorted(task for part in parts for task in part) == tasks
    assert parts[1] == [1, 5, 9]
    assert jobs.part(tasks, "1/1") == tasks


@pytest.mark.parametrize("text", ["", "1", "0/4", "5/4", "1/0", "a/4", "1/4/2", "-1/4"])
def test_a_part_that_is_none_is_an_error(text):
    with pytest.raises(ValueError, match="part"):
        jobs.part([1, 2], text)


def test_one_bad_problem_does_not_stop_the_rest(runner):
    tasks = [
        Malformed("matmul m=x", "m='x' is no int"),
        Task(MATMUL, MatmulProblem(8, 8, 8, "float32"), SearchOptions(budget=2)),
    ]
    results = list(jobs.run(tasks, [DeviceExecutor.of(runner)], store=Store(":memory:")))
    assert [(result.state, result.reason) for result in results] == [("failed", "m='x' is no int"), ("tuned", "")]


def test_what_fails_while_it_is_tuned_is_a_result_with_its_reason():
    class Broken(InProcess):
        def measure(self, task, *, again=False):
            if task.problem.n == 1:
                raise WorkerError("the workers went away")
            return Measurement(1e-3, (1e-3,), "wall", "warm")

    tasks = [Task(DOUBLE, DoubleProblem(n), SearchOptions(budget=2)) for n in (1, 2)]
    first, second = jobs.run(tasks, [DeviceExecutor.of(Broken())], store=Store(":memory:"))
    assert (first.state, first.reason) == ("failed", "the workers went away")
    assert second.state == "tuned"


def test_what_is_tuned_is_skipped_unless_forced(runner):
    store, problem = Store(":memory:"), MatmulProblem(16, 16, 16, "float32")
    tasks = [Task(MATMUL, problem, SearchOptions(budget=2, force=force)) for force in (False, False, True)]
    states = [next(jobs.run([task], [DeviceExecutor.of(runner)], store=store)).state for task in tasks]
    assert states == ["tuned", "known", "tuned"]


def test_a_result_tells_before_after_and_the_library_from_one_run(runner):
    seen = []
    task = Task(MATMUL, MatmulProblem(32, 32, 32, "float32"), SearchOptions(budget=3))
    result = next(
        jobs.run(
            [task],
            [DeviceExecutor.of(runner)],
            store=Store(":memory:"),
            progress=lambda step: seen.append(step.search.done),
        )
    )
    assert seen == [0, 1, 2, 3]
    assert result.entry == result.record.winner
    assert result.library.backend == "xla"
    # On a CPU the answer on a miss is XLA's: before is its time in the same run-off.
    assert (result.before.backend, result.before.measured) == ("xla", True)
    assert result.before.seconds == result.library.measurement.median_s
    assert result.elapsed_s > 0


def test_before_is_what_the_shipped_cache_answered_where_the_users_own_has_nothing(runner, tmp_path, monkeypatch):
    task = Task(
        MATMUL, MatmulProblem(32, 32, 32, "float32"), SearchOptions(budget=3, backends=frozenset({"interpret"}))
    )
    with contextlib.closing(Store(tmp_path / "shipped.db")) as store:
        record = next(jobs.run([task], [DeviceExecutor.of(runner)], store=store)).record
        # A schedule that neither the search nor the model would have named first.
        odd = dataclasses.replace(record.best(task.options.backends), schedule=ODD)
        store.put(dataclasses.replace(record, entries=(odd,)))
    monkeypatch.setattr(baseline, "shipped", lambda: Store(tmp_path / "shipped.db"))
    result = next(jobs.run([task], [DeviceExecutor.of(runner)], store=Store(":memory:")))
    assert result.before.schedule == ODD
    assert result.before.measured


def test_the_entry_of_a_result_keeps_to_the_backends_asked_for(runner):
    task = Task(
        MATMUL, MatmulProblem(32, 32, 32, "float32"), SearchOptions(budget=3, backends=frozenset({"interpret"}))
    )
    result = next(jobs.run([task], [DeviceExecutor.of(runner)], store=Store(":memory:")))
    assert result.entry.backend == "interpret"
    assert result.library is not None


@pytest.mark.slow
def test_the_example_job_runs(runner):
    store = Store(":memory:")
    results = list(jobs.run(parse(EXAMPLE.read_text()), [DeviceExecutor.of(runner)], store=store))
    assert [(result.state, result.reason) for result in results] == [("tuned", "")] * 3
    assert [result.record.tried for result in results] == [6, 4, 6]
    assert {record.key for record in store.records()} == {result.record.key for result in results}


@pytest.mark.parametrize(("code", "complaint"), [("def (", "SyntaxError"), ("1 / 0", "ZeroDivisionError: division")])
def test_an_operation_that_cannot_be_loaded_is_one_bad_problem(code, complaint, tmp_path):
    (tmp_path / "own.py").write_text(code)
    bad, good = parse(
        f"""
        budget = 2
        [[problem]]
        operation = "{tmp_path}/own.py:OWN"
        [[problem]]
        operation = "matmul"
        m = 8
        n = 8
        k = 8
    """,
        own=[f"{tmp_path}/own.py:OWN"],
    )
    assert isinstance(bad, Malformed)
    assert complaint in bad.reason
    assert isinstance(good, Task)


def test_a_malformed_record_is_tuned_again(runner, tmp_path):
    store = Store(tmp_path / "cache.db")
    task = Task(MATMUL, MatmulProblem(8, 8, 8, "float32"), SearchOptions(budget=1))
    list(jobs.run([task], [DeviceExecutor.of(runner)], store=store))
    with contextlib.closing(sqlite3.connect(tmp_path / "cache.db")) as connection, connection:
        connection.execute("UPDATE schedules SET record = '{}'")
    (again,) = jobs.run([task], [DeviceExecutor.of(runner)], store=store)
    assert again.state == "tuned"
    assert "malformed" in again.reason
    (known,) = jobs.run([task], [DeviceExecutor.of(runner)], store=store)
    assert known.state == "known"
