"""A search that is cut short goes on where it stopped, and times nothing twice."""

import contextlib
import dataclasses
import json
import os
import signal
import sqlite3
import subprocess
import sys
import time
import warnings
from pathlib import Path

import pytest
from operations import DoubleLibrary, DoubleProblem
from paced import PACED, Paced
from postgres_server import server
from typer.testing import CliRunner

from scheduler.cli.app import app
from scheduler.core.errors import NoCandidate
from scheduler.core.hardware import CPU, find
from scheduler.core.records import Failure, Measurement, key_of
from scheduler.measure import buffers
from scheduler.measure.runner import InProcess
from scheduler.search.tuner import tune
from scheduler.store import database
from scheduler.store.store import Store
from search_spaces import Operation
from search_spaces.matmul import MatmulProblem

PROBLEM = DoubleProblem(n=8)
KEY = key_of(PACED, PROBLEM, CPU)
BUDGET = 12
COMMAND = ["tune", f"{Path(__file__).parents[1] / 'paced.py'}:PACED", "n=8", "--budget", str(BUDGET)]


class Counted(InProcess):
    """Measures at once and notes what; the process "dies" at the trial after the last one it may make."""

    def __init__(self, *, dies_after=10**9):
        super().__init__()
        self.measured, self.dies_after = [], dies_after

    def measure(self, task, *, again=False):
        if not again:
            if len(self.measured) == self.dies_after:
                raise KeyboardInterrupt
            self.measured.append((task.backend, *sorted(task.schedule.items())))
        time_s = 1e-3 * (1 + task.schedule.get("tile", 0) + 0.1 * task.schedule.get("copy", 0))
        return Measurement(time_s, (time_s,) * task.repetitions, "wall", "warm")


def cut_short(store, trials=5, operation=PACED):
    runner = Counted(dies_after=trials)
    with pytest.raises(KeyboardInterrupt):
        tune(operation, PROBLEM, budget=BUDGET, store=store, runner=runner, force=True)
    return runner


def choices(trials):
    return [(trial.backend, *sorted(trial.schedule.items())) for trial in trials]


@pytest.mark.slow
def test_a_killed_search_is_finished_by_the_same_command_which_times_nothing_twice(tmp_path):
    store = Store(tmp_path / "cache.db")
    process = subprocess.Popen(
        [sys.executable, "-m", "scheduler", *COMMAND],
        cwd=Path(__file__).parents[2],
        env=os.environ | {"PYTHONPATH": str(Path(__file__).parents[1])},
        stderr=subprocess.DEVNULL,
    )
    while len(store.trials(KEY)) < 4 and process.poll() is None:
        time.sleep(0.02)
    process.send_signal(signal.SIGKILL)
    assert process.wait() == -signal.SIGKILL
    before = store.trials(KEY)
    assert 4 <= len(before) < BUDGET
    assert store.get(KEY) is None

    ended = CliRunner().invoke(app, [*COMMAND, "--json"])
    assert ended.exit_code == 0, ended.output
    after = store.trials(KEY)
    assert after[: len(before)] == before
    assert [trial.number for trial in after] == list(range(BUDGET))
    assert len(set(choices(after))) == BUDGET
    said = json.loads(ended.stdout)
    assert (said["resumed"], said["record"]["tried"]) == (len(before), BUDGET)
    record = store.get(KEY)
    assert record.tried == BUDGET
    assert record.best(frozenset({"xla"})) is not None
    assert (record.winner.backend, *sorted(record.winner.schedule.items())) in choices(after)
    assert store.trials(KEY, unfinished=True) == []


def test_a_resumed_search_measures_what_is_left_of_its_budget_and_wins_with_what_was_told():
    whole, parts = Store(":memory:"), Store(":memory:")
    straight = tune(PACED, PROBLEM, budget=BUDGET, store=whole, runner=Counted())
    first = cut_short(parts)
    second = Counted()
    resumed = tune(PACED, PROBLEM, budget=BUDGET, store=parts, runner=second)
    assert len(first.measured) == 5
    assert len(second.measured) == BUDGET - 5
    assert not set(first.measured) & set(second.measured)
    assert resumed.tried == straight.tried == BUDGET
    assert choices(parts.trials(KEY)[:5]) == choices(whole.trials(KEY)[:5])


def test_a_search_may_be_cut_short_again_and_again():
    store = Store(":memory:")
    for _ in range(3):
        cut_short(store, trials=2)
    runner = Counted()
    assert tune(PACED, PROBLEM, budget=BUDGET, store=store, runner=runner).tried == BUDGET
    assert len(runner.measured) == BUDGET - 6


def test_progress_begins_where_the_search_stopped():
    store, seen = Store(":memory:"), []
    cut_short(store)
    tune(PACED, PROBLEM, budget=BUDGET, store=store, runner=Counted(), progress=seen.append)
    assert [step.done for step in seen] == list(range(5, BUDGET + 1))
    assert {step.resumed for step in seen} == {5}
    assert seen[0].best.outcome.median_s == min(trial.outcome.median_s for trial in store.trials(KEY)[:5])


def test_a_larger_budget_goes_on_and_a_smaller_one_only_races_the_finalists():
    for budget, made in ((20, 15), (3, 0)):
        store, runner = Store(":memory:"), Counted()
        cut_short(store)
        assert tune(PACED, PROBLEM, budget=budget, store=store, runner=runner).tried == 5 + made
        assert len(runner.measured) == made


def test_trials_of_a_finished_search_do_not_count_for_the_next():
    store = Store(":memory:")
    tune(PACED, PROBLEM, budget=BUDGET, store=store, runner=Counted())
    afresh = Counted()
    tune(PACED, PROBLEM, budget=BUDGET, store=store, runner=afresh, force=True)
    assert len(afresh.measured) == BUDGET
    cut_short(store)
    resumed = Counted()
    tune(PACED, PROBLEM, budget=BUDGET, store=store, runner=resumed, force=True)
    assert len(resumed.measured) == BUDGET - 5


def test_a_search_in_which_nothing_ran_is_over_and_the_next_one_tries_again():
    class Broken(Counted):
        def measure(self, task, *, again=False):
            super().measure(task, again=again)
            return Failure("compile", "no compiler today")

    store, mended = Store(":memory:"), Counted()
    with pytest.raises(NoCandidate, match="no compiler today"):
        tune(PACED, PROBLEM, budget=BUDGET, store=store, runner=Broken())
    assert tune(PACED, PROBLEM, budget=BUDGET, store=store, runner=mended).tried == len(mended.measured) == BUDGET


@pytest.mark.parametrize("name", ["jax", "jaxlib", "driver"])
def test_trials_of_other_versions_are_made_again(name):
    store, runner = Store(":memory:"), Counted()
    cut_short(store)
    runner.environment = dataclasses.replace(runner.environment, **{name: "0.0"})
    tune(PACED, PROBLEM, budget=BUDGET, store=store, runner=runner)
    assert len(runner.measured) == BUDGET


def test_trials_of_an_older_kernel_are_made_again():
    class Newer(Paced):
        version = 2

    store, runner = Store(":memory:"), Counted()
    cut_short(store)
    newer = Operation("paced", DoubleProblem, (Newer(), DoubleLibrary()))
    tune(newer, PROBLEM, budget=BUDGET, store=store, runner=runner)
    assert len(runner.measured) == BUDGET - 1  # the library's trial still counts


def test_trials_under_another_clock_or_with_operands_elsewhere_are_made_again():
    for clock, l2 in (("cupti", "warm"), ("wall", "cold")):
        store, runner = Store(":memory:"), Counted()
        cut_short(store)
        other = Store(":memory:")
        for trial in store.trials(KEY):
            outcome = dataclasses.replace(trial.outcome, clock=clock, l2=l2)
            other.save_trials(KEY, [dataclasses.replace(trial, outcome=outcome)], runner.environment)
        tune(PACED, PROBLEM, budget=BUDGET, store=other, runner=runner)
        assert len(runner.measured) == BUDGET


def test_the_condition_of_a_measurement_is_known_before_it_is_made():
    measured = InProcess()
    record = tune(PACED, PROBLEM, budget=1, runner=measured)
    assert (record.winner.measurement.clock, record.winner.measurement.l2) == buffers.timing_conditions(PROBLEM, CPU)
    assert buffers.timing_conditions(MatmulProblem(4096, 4096, 4096), find("NVIDIA H200")) == ("cupti", "cold")
    assert buffers.timing_conditions(MatmulProblem(8, 8, 8), find("NVIDIA H200")) == (
        "cupti",
        "warm",
    )  # too small to rotate


def test_what_was_cut_short_is_forgotten_on_request(tmp_path):
    with contextlib.closing(Store(tmp_path / "cache.db")) as store:
        cut_short(store)
        ended = CliRunner().invoke(app, ["forget", COMMAND[1], "n=8"])
        assert ended.exit_code == 0, ended.output
        assert store.trials(KEY) == []


# A store that fails for a moment


class Meanwhile(Counted):
    """Calls `begin` before the third trial and `end` before the last."""

    def __init__(self, begin, end=lambda: None):
        super().__init__()
        self.events = {2: begin, BUDGET - 1: end}

    def measure(self, task, *, again=False):
        if not again:
            self.events.pop(len(self.measured), lambda: None)()
        return super().measure(task, again=again)


def removed(path):
    for ending in ("", "-wal", "-shm"):
        path.with_name(path.name + ending).unlink(missing_ok=True)


def all_is_stored(url, runner):
    with contextlib.closing(Store(url)) as store:
        record = tune(PACED, PROBLEM, budget=BUDGET, store=store, runner=runner)
    with contextlib.closing(Store(url)) as store:
        assert [trial.number for trial in store.trials(KEY)] == list(range(BUDGET))
        assert store.get(KEY) == record
        assert store.trials(KEY, unfinished=True) == []
    assert record.tried == len(runner.measured) == BUDGET


@pytest.mark.parametrize("retry_s", [0.0, 60.0])
@pytest.mark.parametrize("fault", ["deleted", "locked", "read only"])
def test_trials_and_record_are_stored_though_the_file_fails_for_a_moment(fault, retry_s, tmp_path, monkeypatch):
    path = tmp_path / "cache.db"
    monkeypatch.setattr("scheduler.search.trials.RETRY_S", retry_s)
    monkeypatch.setattr(database, "BUSY_TIMEOUT_S", 0.05)
    if fault == "deleted":
        runner = Meanwhile(lambda: removed(path))
    elif fault == "locked":
        other = sqlite3.connect(path, isolation_level=None, check_same_thread=False)
        runner = Meanwhile(lambda: other.execute("BEGIN IMMEDIATE"), lambda: other.execute("ROLLBACK"))
    else:
        disk = {"query_only": 0}
        monkeypatch.setattr(
            database, "_set_synchronous", lambda each, _: each.execute(f"PRAGMA query_only={disk['query_only']}")
        )
        runner = Meanwhile(lambda: disk.update(query_only=1), lambda: disk.update(query_only=0))
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        all_is_stored(path, runner)
    warned = [str(one.message) for one in caught if one.category is RuntimeWarning]
    assert all("the search continues, and writes its trials later" in each for each in warned)
    if fault != "deleted":  # the next write usually makes a new file
        assert len(warned) == 1 or (warned and not retry_s)


@pytest.mark.slow
def test_trials_and_record_are_stored_though_the_server_restarts():
    with server() as running, pytest.warns(RuntimeWarning, match="the search continues, and writes its trials later"):
        all_is_stored(running.url, Meanwhile(running.stop, running.start))
