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
from scheduler.search.interpreter_time import search_seconds, smaller
from scheduler.search.tuner import tune
from scheduler.store.store import Store
from search_spaces import Operation
from search_spaces.matmul import MATMUL, MatmulProblem

ROOT = Path(__file__).parents[1]
PACED = Operation("paced", DoubleProblem, (Paced(), DoubleLibrary()))
COUNTS = {"backends": frozenset({"interpret"}), "calls": 6, "finalists": 4, "calls_of_finalist": 34}
# Each call of any schedule of this takes seconds, each trial six of them or more.
LARGE = ["m=3072", "n=3072", "k=3072", "dtype=float32"]


def paced(monkeypatch, seconds, slots=1):
    """A pace of trials that took so long, by a clock that nothing else moves."""
    now, pace = 0.0, Pace(slots)

    def clock():
        return now

    monkeypatch.setattr(tuner.time, "perf_counter", clock)
    for took in seconds:

        def trial(took=took):
            nonlocal now
            now += took

        pace.timed(trial)
    return pace


def test_the_time_left_is_told_from_enough_trials_and_a_slow_first_one_does_not_count(monkeypatch):
    assert paced(monkeypatch, [120.0]).left_s(63) is None
    assert paced(monkeypatch, [120.0, 1.0]).left_s(62) is None
    assert paced(monkeypatch, [120.0, 1.0, 2.0]).left_s(61) == 2.0 * 61
    assert paced(monkeypatch, [120.0, 1.0, 1.0, 60.0, 1.0]).left_s(10) == 10.0
    assert paced(monkeypatch, [120.0]).left_s(0) == 0.0


def test_trials_beside_each_other_share_the_time_and_the_first_to_end_are_not_asked(monkeypatch):
    assert paced(monkeypatch, [4.0] * 7, slots=8).left_s(56) is None
    assert paced(monkeypatch, [4.0] * 8, slots=8).left_s(56) == 4.0 * 7
    assert paced(monkeypatch, [4.0] * 8, slots=8).left_s(1) == 4.0


class Slow(InProcess):
    """Its first trial takes long."""

    def __init__(self, first_s, dies_after=10**9):
        super().__init__()
        self.first_s, self.asked, self.dies_after = first_s, 0, dies_after

    def measure(self, task, *, again=False):
        if not again:
            if self.asked == self.dies_after:
                raise KeyboardInterrupt
            self.asked += 1
            time.sleep(self.first_s if self.asked == 1 else 0.01)
        return Measurement(1e-3, (1e-3,) * task.repetitions, "wall", "warm")

    def confirm(self, task):
        return None


def test_a_search_says_what_it_does_before_the_first_trial_and_promises_nothing():
    seen = []
    tune(PACED, DoubleProblem(8), budget=12, runner=Slow(0.5), progress=seen.append)
    assert (seen[0].done, seen[0].budget, seen[0].last) == (0, 12, None)
    assert [step.done for step in seen if step.eta_s is None] == list(range(FEWEST_TO_TELL))
    assert all(step.eta_s < 0.2 * (12 - step.done) for step in seen if step.eta_s)
    assert seen[-1].eta_s == 0


def test_trials_of_an_earlier_run_say_nothing_of_the_time_left():
    store, seen = Store(":memory:"), []
    with pytest.raises(KeyboardInterrupt):
        tune(PACED, DoubleProblem(8), budget=12, store=store, runner=Slow(0.01, dies_after=5))
    tune(PACED, DoubleProblem(8), budget=12, store=store, runner=Slow(0.01), progress=seen.append)
    assert [step.done for step in seen if step.eta_s is None] == [5, 6, 7]


def test_a_search_that_would_interpret_for_hours_is_refused_with_one_that_would_not():
    started = time.monotonic()
    with pytest.raises(
        TakesHours, match=r"takes \d+ hours or more.*interpreted.*smaller one \(m=.*\), or.*seconds="
    ) as e:
        scheduler.tune("matmul", {"m": 4096, "n": 4096, "k": 4096})
    assert time.monotonic() - started < 20
    fields = dict(field.split("=") for field in re.search(r"one \(([^)]*)\)", str(e.value))[1].split())
    smaller = MATMUL.problem.parse(fields)
    assert search_seconds(MATMUL, smaller, CPU, budget=63, **COUNTS) <= tuner.LONGEST_INTERPRETED_S
    assert smaller.m >= 512


def test_a_call_that_would_interpret_for_hours_is_warned_of_and_the_model_answers():
    shape = jax.ShapeDtypeStruct((4096, 4096), jnp.float32)
    with pytest.warns(RuntimeWarning, match=r"is not tuned: .* or more to tune on a CPU.*the model answers instead"):
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
    record = scheduler.tune("matmul", {"m": 2048, "n": 2048, "k": 2048, "dtype": "float32"}, seconds=0.001, budget=64)
    assert [entry.backend for entry in record.entries] == ["xla"]


def started(*command):
    process = subprocess.Popen(
        [sys.executable, *map(str, command)],
        stderr=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        cwd=ROOT,
        env=os.environ | {"PYTHONPATH": str(ROOT)},
    )
    lines = []
    while "1/" not in (line := process.stderr.readline()):
        assert line, f"it ended: {lines}"
        lines.append(line)
    time.sleep(2)  # well into a candidate that nobody can stop
    return process, lines


def interrupted(process):
    """Its status, what it said on standard error, and after how many seconds it was gone."""
    sent = time.monotonic()
    process.send_signal(signal.SIGINT)
    _, err = process.communicate(timeout=60)
    return process.returncode, err, time.monotonic() - sent


@pytest.mark.parametrize("processes", [[], ["--workers", 2]], ids=["in process", "workers"])
def test_ctrl_c_ends_a_search_at_once_whatever_is_interpreted_and_keeps_what_was_measured(tmp_path, processes):
    process, before = started("-m", "scheduler", "tune", "matmul", *LARGE, "--seconds", 600, *processes)
    assert "0/64 trials, building and checking the first" in before[0]
    assert "left" not in before[0]
    status, err, took_s = interrupted(process)
    assert status == 130
    assert took_s < 4
    assert "interrupted; what was measured so far is kept" in err
    assert "Traceback" not in err
    store = Store(tmp_path / "cache.db")
    (key,) = store.keys()
    assert store.trials(key, unfinished=True)
    assert store.lease(key, "host/1/next", 1) == "host/1/next"  # it was given back


def test_ctrl_c_ends_a_script_at_once_as_it_ends_any_other(tmp_path):
    script = tmp_path / "script.py"
    problem = dict(field.split("=") for field in LARGE)
    script.write_text(
        "import sys, scheduler\n"
        "say = lambda step: print(f'{step.done}/', file=sys.stderr, flush=True)\n"
        f"scheduler.tune('matmul', {problem}, seconds=600, progress=say)\n"
    )
    status, err, took_s = interrupted(started(script)[0])
    assert status == -signal.SIGINT
    assert took_s < 4
    assert err.rstrip().endswith("KeyboardInterrupt")
