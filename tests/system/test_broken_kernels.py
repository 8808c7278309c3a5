"""Kernels of one's own that are broken: what is said of them, and once they are mended, by the real command."""

import contextlib
import dataclasses
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from operations import DoubleLibrary, DoubleProblem
from paced import Paced
from typer.testing import CliRunner

import scheduler
from scheduler.cli.app import app
from scheduler.core.errors import CacheMiss, CandidateFailed, NoCandidate
from scheduler.core.hardware import CPU
from scheduler.core.records import AllFailed, Failure, Measurement, key_of
from scheduler.measure.runner import InProcess
from scheduler.prediction.transfer import recheck
from scheduler.search import jobs
from scheduler.search.baseline import is_current
from scheduler.search.job_queue import DeviceExecutor
from scheduler.search.task import SearchOptions
from scheduler.search.tuner import tune
from scheduler.store.store import Store
from search_spaces import Operation, load

pytestmark = pytest.mark.slow

ROOT = Path(__file__).parents[2]
RIGHT = (ROOT / "examples" / "own_kernel.py").read_text()
BODY = "jax.nn.gelu(x_ref[...] + bias_ref[...])"
ROWS = "lambda i: (i, 0))\n"
# What is mistaken -> what stands there instead, the stage and the type of what is said of it.
MISTAKES = {
    "sign": (BODY, BODY.replace("+", "-"), "verify: 3200 of 3200 elements are off", None),
    "assertion": (ROWS, ROWS + "        assert False\n", "lower: ", "AssertionError"),
    "division": (BODY, f"{BODY} * (1 // 0)", "lower: ", "ZeroDivisionError"),
    "type": (BODY, 'x_ref[...] + "bias"', "lower: ", "TypeError"),
    "index": (BODY, f"{BODY} * (1.0, 2.0)[schedule.tile_m]", "lower: ", "IndexError"),
    "one tile": (ROWS, "lambda i: (i + 1, 0))\n", "verify: ", None),
    "index map": (ROWS, "lambda i: (0, i))\n", "verify: ", None),
}
PROBLEM = ["m=50", "n=64", "--budget", "6"]
FEW = "3 of 3 schedules of blocked failed: "
PROCESSES = pytest.mark.parametrize("processes", [[], ["--workers", "2"]], ids=["in process", "workers"])


@pytest.fixture
def own(tmp_path):
    """Writes the file of an operation with this mistake in it; of none with `None`."""

    def write(mistake):
        old, new, *_ = MISTAKES[mistake] if mistake else ("", "")
        assert old in RIGHT
        path = tmp_path / "own.py"
        path.write_text(RIGHT.replace(old, new, 1) if mistake else RIGHT)
        return path

    return write


def command(*arguments, cwd):
    ended = subprocess.run(
        [sys.executable, "-m", "scheduler", *map(str, arguments)],
        capture_output=True,
        text=True,
        cwd=cwd,
        env=os.environ | {"PYTHONPATH": str(ROOT), "COLUMNS": "300"},
    )
    return ended.returncode, ended.stdout, ended.stderr


@pytest.fixture
def here(tmp_path, monkeypatch):
    """Runs a command in this process, in the directory of the operation."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "300")

    def run(*arguments):
        ended = CliRunner().invoke(app, list(map(str, arguments)), prog_name="tile-scheduler")
        return ended.exit_code, ended.stdout, ended.stderr

    return run


@pytest.mark.parametrize("mistake", MISTAKES)
def test_a_kernel_that_never_runs_is_an_error_that_says_how_often_why_and_where(own, here, mistake):
    path = own(mistake)
    status, out, err = here("tune", f"{path}:BIAS_GELU", *PROBLEM)
    *_, said, kind = MISTAKES[mistake]
    assert status == 1
    assert "XLA is the only backend that ran" in out
    for text in (out, err):
        assert FEW + said in text
    if kind is not None:
        wrong = MISTAKES[mistake][1].strip().splitlines()[-1].strip()
        line = next(n for n, text in enumerate(path.read_text().splitlines(), 1) if wrong in text)
        assert f"{FEW}{said}{kind}" in err
        assert err.rstrip().endswith(f" (own.py:{line})")
    assert "Traceback" not in err


def test_once_mended_it_is_tuned_again_and_then_known(own):
    path = own("type")
    tune_it = ["tune", f"{path}:BIAS_GELU", *PROBLEM, "--json"]
    status, out, err = command(*tune_it, cwd=path.parent)
    assert status == 1
    assert "TypeError" in err
    (lost,) = json.loads(out)["record"]["failed"]
    assert (lost["backend"], lost["tried"], lost["alike"], lost["failure"]["stage"]) == ("blocked", 3, 3, "lower")
    states = []
    for mistake in ("sign", None, None):
        own(mistake)
        status, out, _ = command(*tune_it, cwd=path.parent)
        states.append((status, json.loads(out)["state"], [e["backend"] for e in json.loads(out)["record"]["entries"]]))
    assert states[0] == (1, "tuned", ["xla"])
    assert [(status, state) for status, state, _ in states[1:]] == [(0, "tuned"), (0, "known")]
    assert all({"xla", "blocked"} == set(backends) for _, _, backends in states[1:])


def test_schedules_that_failed_beside_others_are_told_of_and_again_where_it_is_known(own, here):
    path = own("one tile")
    for state in ("5 trials", "Already tuned"):
        status, out, _ = here("tune", f"{path}:BIAS_GELU", "m=64", "n=64", "--budget", "6")
        assert status == 0
        assert state in out
        assert "blocked: 3 of 4 schedules gave wrong results" in " ".join(out.split())


@PROCESSES
def test_the_first_error_comes_with_its_traceback_and_ends_the_search(own, processes):
    path = own("index")
    status, out, err = command("tune", f"{path}:BIAS_GELU", *PROBLEM, *processes, "--first-error", cwd=path.parent)
    assert (status, out) == (1, "")
    assert "Traceback (most recent call last)" in err
    assert f'File "{path}", line ' in err
    assert MISTAKES["index"][1] in err
    assert "IndexError: tuple index out of range" in err
    assert err.splitlines()[-1].startswith('tile-scheduler: blocked {"tile_m": ')
    own(None)
    assert command("tune", f"{path}:BIAS_GELU", *PROBLEM, *processes, "--first-error", cwd=path.parent)[0] == 0


def test_a_wrong_answer_is_a_first_error_too(own):
    operation = load(f"{own('sign')}:BIAS_GELU")
    with pytest.raises(CandidateFailed, match=r'^blocked \{"tile_m": \d+\}: verify: 3200 of 3200'):
        scheduler.tune(operation, {"m": 50, "n": 64}, budget=6, first_error=True)


def test_in_a_job_its_row_says_it_and_the_others_go_on(own, here, tmp_path):
    path = own("type")
    job = tmp_path / "job.toml"
    job.write_text(f"""
        budget = 3
        [[problem]]
        operation = "{path}:BIAS_GELU"
        m = 50
        n = 64
        [[problem]]
        operation = "matmul"
        m = 8
        n = 8
        k = 8
    """)
    status, out, err = here("tune-job", job, "--json", "--own", f"{path}:BIAS_GELU")
    broken, good = json.loads(out)["results"]
    assert status == 1
    assert (broken["state"], good["state"]) == ("tuned", "tuned")
    assert len(broken["record"]["failed"]) == 1
    assert good["record"]["failed"] == []
    assert "bias_gelu m=50 n=64: 2 of 2 schedules of blocked failed: lower: TypeError" in err
    status, out, _ = here("tune-job", job, "--own", f"{path}:BIAS_GELU")
    assert "2 of 2 schedules of blocked failed: lower: TypeError" in " ".join(out.split())
    states = {name: row for row in out.splitlines() for name in ("bias_gelu m=", "matmul m=") if name in row}
    assert ("tuned" in states["bias_gelu m="], "known" in states["matmul m="]) == (True, True)


def test_in_python_it_is_a_warning_and_calls_get_no_answer_of_that_backend(own):
    operation = load(f"{own('type')}:BIAS_GELU")
    for _ in range(2):  # what failed is tried again
        with pytest.warns(RuntimeWarning, match=r"3 of 3 schedules of blocked failed: lower: TypeError: .*own.py:\d+"):
            record = scheduler.tune(operation, {"m": 50, "n": 64}, budget=6)
    x, bias = operation.problem(50, 64).inputs(0)
    bias_gelu = scheduler.tuned(operation)
    assert bias_gelu(x, bias, on_miss="error").shape == (50, 64)  # XLA was measured
    with pytest.raises(CacheMiss, match=r"is invalid: 3 of 3 schedules of blocked failed: lower: TypeError"):
        bias_gelu(x, bias, backends="pallas", on_miss="error")
    assert [entry.backend for entry in record.entries] == ["xla"]


class Scripted(InProcess):
    """Every candidate but the library's fails as told; one that is told nothing takes a millisecond."""

    def __init__(self, *failures):
        super().__init__()
        self.failures, self.asked = list(failures), 0

    def measure(self, task, *, again=False):
        if task.backend != "xla" and not again:
            self.asked += 1
            if self.failures:
                return self.failures[min(self.asked, len(self.failures)) - 1]
        return Measurement(1e-3, (1e-3,) * task.repetitions, "wall", "warm")

    def confirm(self, task):
        return None


PACED = Operation("paced", DoubleProblem, (Paced(), DoubleLibrary()))
EIGHT = DoubleProblem(n=8)


def searched(*failures, store=None, **options):
    return tune(PACED, EIGHT, budget=5, store=store, runner=Scripted(*failures), **options)


def test_the_most_frequent_reason_is_told_whatever_numbers_are_in_it():
    wrong = [Failure("verify", f"{n} of 8 elements are off; the worst is {n / 7} instead of nan") for n in (3, 4, 5)]
    (lost,) = searched(Failure("compile", "no"), *wrong).failed
    assert lost == AllFailed("scripted", 4, wrong[0], 3)
    assert str(lost).startswith("4 of 4 schedules of scripted failed, 3 of them alike: verify: 3 of 8")


def test_two_lines_of_a_kernel_are_two_reasons():
    lines = [Failure("lower", f"ValueError: tile {n} (own.py:{line})") for n, line in ((1, 7), (2, 17), (4, 17))]
    (lost,) = searched(*lines).failed
    assert (lost.failure, lost.alike) == (lines[1], 3)  # the last one comes twice


def test_a_kernel_of_which_one_schedule_runs_is_not_broken():
    class Once(Scripted):
        def measure(self, task, *, again=False):
            measured = super().measure(task, again=again)
            return Failure("verify", "wrong") if self.asked > 1 and task.backend != "xla" and not again else measured

    assert tune(PACED, EIGHT, budget=5, runner=Once()).failed == ()


@pytest.mark.parametrize("stage", ["memory", "worker"])
def test_what_lacked_memory_or_a_process_is_no_fault_of_the_kernel_and_is_tried_again(stage):
    store, task = Store(":memory:"), jobs.Task(PACED, EIGHT, SearchOptions(budget=5))
    for _ in range(2):
        (result,) = jobs.run([task], [DeviceExecutor.of(Scripted(Failure(stage, "none left")))], store=store)
        assert (result.state, result.broken) == ("tuned", ())
        assert [lost.failure.stage for lost in result.record.failed] == [stage]
    (result,) = jobs.run(
        [task], [DeviceExecutor.of(Scripted(Failure(stage, "none left"), Failure("lower", "no")))], store=store
    )
    assert [lost.failure for lost in result.broken] == [Failure("lower", "no")]


def test_what_is_settled_depends_on_who_is_asked_for():
    store = Store(":memory:")
    record = searched(Failure("lower", "no"), store=store)
    assert is_current(jobs.Task(PACED, EIGHT), CPU, store) == "4 of 4 schedules of scripted failed: lower: no"
    assert is_current(jobs.Task(PACED, EIGHT, SearchOptions(backends=frozenset({"xla"}))), CPU, store) == record
    assert recheck(PACED, EIGHT, CPU, record, backends=frozenset({"scripted"})).startswith("4 of 4 schedules")

    class Dropped(Paced):
        def supports(self, problem, target):
            return "not any more"

    dropped = Operation("paced", DoubleProblem, (Dropped(), DoubleLibrary()))
    assert is_current(jobs.Task(dropped, EIGHT), CPU, store) == record
    task = jobs.Task(PACED, EIGHT, SearchOptions(budget=5, backends=frozenset({"xla"})))
    (result,) = jobs.run([task], [DeviceExecutor.of(Scripted())], store=store)
    assert (result.state, result.broken) == ("known", ())


def test_a_backend_asked_for_alone_that_never_ran_fails_with_its_reason():
    task = jobs.Task(PACED, EIGHT, SearchOptions(budget=5, backends=frozenset({"scripted"})))
    (result,) = jobs.run([task], [DeviceExecutor.of(Scripted(Failure("lower", "no")))], store=Store(":memory:"))
    assert result.state == "failed"
    assert "4 of 4 schedules of scripted failed: lower: no" in result.reason


def test_a_broken_library_is_told_like_any_other_backend():
    class Broken(DoubleLibrary):
        def run(self, problem, schedule, target, /, *args, **params):
            return args[0].no_such_attribute

    operation = Operation("paced", DoubleProblem, (Paced(), Broken()))
    (lost,) = tune(operation, EIGHT, budget=3).failed
    assert lost.backend == "xla"
    assert "no_such_attribute" in lost.failure.detail
    assert "test_broken_kernels.py:" in lost.failure.detail


def test_failures_of_a_search_that_was_cut_short_are_tried_again():
    class Dies(Scripted):
        def measure(self, task, *, again=False):
            if self.asked == 2:
                raise KeyboardInterrupt
            return super().measure(task, again=again)

    store, mended = Store(":memory:"), Scripted()
    with pytest.raises(KeyboardInterrupt):
        tune(PACED, EIGHT, budget=5, store=store, runner=Dies(Failure("lower", "no"), Failure("verify", "off")))
    assert len(store.trials(key_of(PACED, EIGHT, CPU), unfinished=True)) == 3
    record = tune(PACED, EIGHT, budget=5, store=store, runner=mended)
    assert (record.tried, mended.asked, record.failed) == (5, 4, ())
    shown = store.last_trials(record.key)
    assert len(shown) == 5
    assert all(isinstance(trial.outcome, Measurement) for trial in shown)


def test_tune_searches_once_unless_forced_and_show_lists_the_last_search(tmp_path):
    seen = []
    with contextlib.closing(Store(tmp_path / "cache.db")) as store:
        first = searched(store=store, progress=seen.append)
        steps = len(seen)
        assert searched(store=store, progress=seen.append) == first
        assert len(seen) == steps
        for seed in (1, 2):
            searched(store=store, force=True, seed=seed, progress=seen.append)
        assert len(seen) == 3 * steps
        assert len(store.trials(first.key)) == 15
        assert [trial.number for trial in store.last_trials(first.key)] == list(range(5))
        assert store.last_trials(first.key) == store.trials(first.key)[10:]
    shown = CliRunner().invoke(app, ["show", f"{ROOT / 'tests' / 'paced.py'}:PACED", "n=8", "--json"])
    (row,) = json.loads(shown.stdout)
    assert [trial["number"] for trial in row["trials"]] == list(range(5))


def test_the_public_tune_answers_what_is_known_and_searches_where_it_is_forced_or_was_measured_otherwise():
    seen = []
    first = scheduler.tune("matmul", {"m": 16, "n": 16, "k": 16}, budget=2)
    again = scheduler.tune("matmul", {"m": 16, "n": 16, "k": 16}, budget=2, progress=seen.append)
    assert again == first
    assert seen == []
    scheduler.tune("matmul", {"m": 16, "n": 16, "k": 16}, budget=2, progress=seen.append, force=True)
    assert [step.done for step in seen] == [0, 1, 2]


def test_where_nothing_ran_at_all_it_is_no_candidate_as_ever():
    class Never(Scripted):
        def measure(self, task, *, again=False):
            return Failure("lower", "no")

    with pytest.raises(NoCandidate, match="lower: no: 5"):
        tune(PACED, EIGHT, budget=5, runner=Never())


def test_a_record_from_before_this_was_kept_reads_and_counts_as_it_did():
    from values import record

    from scheduler.core import codec

    old = record()
    assert "failed" not in json.loads(codec.record_to_text(old))
    assert codec.record_from_text(codec.record_to_text(old)).failed == ()
    lost = AllFailed("scripted", 3, Failure("lower", "AssertionError (own.py:7)"), 3)
    new = dataclasses.replace(old, failed=(lost,))
    assert codec.record_from_text(codec.record_to_text(new)) == new
