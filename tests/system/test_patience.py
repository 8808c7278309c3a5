"""What a person waits for: the first line, the time left, hours of interpreting, and the end after Ctrl-C."""

import dataclasses
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import jax
import jax.numpy as jnp
import pytest
from operations import DoubleLibrary, DoubleProblem
from paced import Paced

import scheduler
from scheduler.core.errors import TakesHours
from scheduler.core.hardware import CPU
from scheduler.core.progress import FEWEST_TO_TELL, Pace
from scheduler.core.records import Measurement
from scheduler.measure.runner import InProcess
from scheduler.search import tuner
from scheduler.search.candidates import search_seconds, smaller
from scheduler.search.tuner import tune
from scheduler.store.store import Store
from search_spaces import Operation
from search_spaces.matmul import MATMUL, MatmulProblem

pytestmark = pytest.mark.slow

ROOT = Path(__file__).parents[2]
PACED = Operation("paced", DoubleProblem, (Paced(), DoubleLibrary()))
COUNTS = {"backends": frozenset({"interpret"}), "calls": 6, "finalists": 4, "calls_of_finalist": 34}


class Clock:
    """Seconds that pass only as they are told to."""

    now = 0.0

    def take(self, seconds):
        self.now += seconds


@pytest.fixture
def clock(monkeypatch):
    clock = Clock()
    monkeypatch.setattr(tuner.time, "perf_counter", lambda: clock.now)
    return clock


def paced(clock, seconds, slots=1):
    """A pace of trials that took so long."""
    pace = Pace(slots)
    for took in seconds:
        pace.timed(lambda took=took: clock.take(took))
    return pace


def test_the_time_left_is_told_from_enough_trials_and_a_slow_first_one_does_not_count(clock):
    assert paced(clock, [120.0]).left_s(63) is None
    assert paced(clock, [120.0, 1.0]).left_s(62) is None
    assert paced(clock, [120.0, 1.0, 2.0]).left_s(61) == 2.0 * 61
    assert paced(clock, [120.0, 1.0, 1.0, 60.0, 1.0]).left_s(10) == 10.0
    assert paced(clock, [120.0]).left_s(0) == 0.0


def test_trials_beside_each_other_share_the_time_and_the_first_to_end_are_not_asked(clock):
    assert paced(clock, [4.0] * 7, slots=8).left_s(56) is None
    assert paced(clock, [4.0] * 8, slots=8).left_s(56) == 4.0 * 7
    assert paced(clock, [4.0] * 8, slots=8).left_s(1) == 4.0


class Slow(InProcess):
    """Its first trial takes long."""

    def __init__(self, clock, dies_after=10**9):
        super().__init__()
        self.clock, self.asked, self.dies_after = clock, 0, dies_after

    def measure(self, task, *, again=False):
        if not again:
            if self.asked == self.dies_after:
                raise KeyboardInterrupt
            self.asked += 1
            self.clock.take(60 if self.asked == 1 else 2)
        return Measurement(1e-3, (1e-3,) * task.repetitions, "wall", "warm")

    def confirm(self, task):
        return None


def test_a_search_says_what_it_does_before_the_first_trial_and_promises_nothing(clock):
    seen = []
    tune(PACED, DoubleProblem(8), budget=12, runner=Slow(clock), progress=seen.append)
    assert (seen[0].done, seen[0].budget, seen[0].last) == (0, 12, None)
    assert [step.done for step in seen if step.eta_s is None] == list(range(FEWEST_TO_TELL))
    assert all(step.eta_s == 2 * (12 - step.done) for step in seen if step.eta_s is not None)


def test_trials_of_an_earlier_run_say_nothing_of_the_time_left(clock):
    store, seen = Store(":memory:"), []
    with pytest.raises(KeyboardInterrupt):
        tune(PACED, DoubleProblem(8), budget=12, store=store, runner=Slow(clock, dies_after=5))
    tune(PACED, DoubleProblem(8), budget=12, store=store, runner=Slow(clock), progress=seen.append)
    assert [step.done for step in seen if step.eta_s is None] == [5, 6, 7]


def test_a_search_that_would_interpret_for_hours_is_refused_with_one_that_would_not():
    with pytest.raises(
        TakesHours, match=r"takes \d+ hours or more.*interpreted.*smaller one \(m=.*\), or.*seconds="
    ) as e:
        scheduler.tune("matmul", {"m": 4096, "n": 4096, "k": 4096})
    fields = dict(field.split("=") for field in re.search(r"one \(([^)]*)\)", str(e.value))[1].split())
    smaller = MATMUL.problem.parse(fields)
    assert search_seconds(MATMUL, smaller, CPU, budget=63, **COUNTS) <= tuner.LONGEST_INTERPRETED_S
    assert smaller.m >= 512


def test_a_call_that_would_interpret_for_hours_is_warned_of_and_the_model_answers():
    shape = jax.ShapeDtypeStruct((4096, 4096), jnp.float32)
    with pytest.warns(RuntimeWarning, match=r"is not tuned: .* or more to tune on a CPU.*the model selects instead"):
        jax.jit(lambda a: scheduler.tuned_matmul(a, a, on_miss="tune")).lower(shape)


def test_what_is_refused_is_what_takes_long_however_it_does():
    def takes_s(*extents, budget=63):
        return search_seconds(MATMUL, MatmulProblem(*extents, dtype="float32"), CPU, budget=budget, **COUNTS)

    assert takes_s(64, 64, 64) < 5
    assert takes_s(1024, 1024, 1024) < 600 < takes_s(4096, 4096, 4096)
    assert takes_s(4096, 4096, 4096, budget=2) < takes_s(4096, 4096, 4096) / 5
    library_alone = COUNTS | {"backends": frozenset({"xla"})}
    assert search_seconds(MATMUL, MatmulProblem(8192, 8192, 8192), CPU, budget=63, **library_alone) == 0


def test_an_estimate_is_of_the_order_of_what_is_measured():
    problem = MatmulProblem(512, 512, 512, dtype="float32")
    started = time.perf_counter()
    tune(MATMUL, problem, budget=9)
    took_s = time.perf_counter() - started
    assert search_seconds(MATMUL, problem, CPU, budget=8, **COUNTS) < 2 * took_s


def test_a_problem_is_halved_until_it_fits_or_is_none():
    problem = MatmulProblem(4096, 16, 1000)
    assert smaller(problem, lambda p: p.m * p.k <= 250 * 300) == dataclasses.replace(problem, m=256, k=250)
    assert smaller(problem, lambda p: False) is None


def test_a_bound_in_seconds_is_enough_to_go_on_and_the_library_is_measured():
    record = scheduler.tune("matmul", {"m": 4096, "n": 16, "k": 4096, "dtype": "float32"}, seconds=0.001, budget=64)
    assert [entry.backend for entry in record.entries] == ["xla"]


def interrupted(place, *command):
    """Interrupts a command well into a candidate that never ends: its status, and what it said on standard error."""
    process = subprocess.Popen(
        [sys.executable, *map(str, command)],
        stderr=subprocess.PIPE,
        text=True,
        cwd=ROOT,
        env=os.environ | {"PYTHONPATH": os.pathsep.join([str(ROOT), str(ROOT / "tests")]), "BEGUN": str(place)},
    )
    try:
        while not place.exists():
            assert process.poll() is None, process.communicate()
            time.sleep(0.05)
        process.send_signal(signal.SIGINT)
        _, err = process.communicate()
    finally:
        process.kill()
    return process.returncode, err


@pytest.mark.parametrize("processes", [[], ["--workers", 1, "--run-timeout", 1e6]], ids=["in process", "workers"])
def test_ctrl_c_ends_a_search_though_a_candidate_never_ends_and_keeps_what_was_measured(tmp_path, processes):
    command = ["-m", "scheduler", "tune", "tests/paced.py:ENDLESS", "n=8", "--seconds", 1e6, *processes]
    status, err = interrupted(tmp_path / "begun", *command)
    starting, first, *_ = err.splitlines()
    assert starting.endswith("n=8: starting")
    assert first.endswith("n=8: 0/21 trials, compiling the first candidate")
    assert status == 130
    assert "interrupted; finished measurements are kept" in err
    assert "Traceback" not in err
    store = Store(tmp_path / "cache.db")
    (key,) = store.keys()
    assert [trial.backend for trial in store.trials(key, unfinished=True)] == ["xla"]
    assert store.lease(key, "host/1/next", 1).owner == "host/1/next"  # it was given back


def test_ctrl_c_ends_a_script_though_a_candidate_never_ends_as_it_ends_any_other(tmp_path):
    script = tmp_path / "script.py"
    script.write_text("import scheduler\nfrom paced import ENDLESS\nscheduler.tune(ENDLESS, {'n': 8}, seconds=1e6)\n")
    status, err = interrupted(tmp_path / "begun", script)
    assert status == -signal.SIGINT
    assert err.rstrip().endswith("KeyboardInterrupt")
