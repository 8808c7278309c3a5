"""Searches for a chip that is not here by its real compiler: what it refuses, what ends it, what is wrong."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from processes import gone
from static_profiles import compiled, needs_libtpu
from tpu_kernels import PRODUCT, ProductProblem

import scheduler
from scheduler.contrib.tpu.ahead_of_time import AheadOfTime
from scheduler.core.errors import WorkerError
from scheduler.core.hardware import find
from scheduler.core.records import Failure, Measurement, key_of
from scheduler.measure.runner import RunnerOptions, Task
from scheduler.search.tuner import tune
from scheduler.store.store import Store

pytestmark = [needs_libtpu, pytest.mark.slow]

V5E = find("v5e")
OWN = f"{Path(__file__).parent / 'tpu_kernels.py'}:PRODUCT"
ONE_TILE = {"tile_m": 128, "tile_n": 128}


def task(problem, **schedule):
    backend = "mosaic_tpu" if schedule else "xla"
    return Task(PRODUCT, problem, backend, schedule, 1)


@pytest.fixture(scope="module")
def runner():
    with_limit = RunnerOptions(workers=1, compile_timeout_s=600.0)
    runner = AheadOfTime(V5E, with_limit)
    yield runner
    runner.close()


def test_the_compiler_tells_a_time_or_why_there_is_none(runner):
    problem = ProductProblem(256, 256, 256, script="right.raises.aborts.greedy.wrong")
    for one in (task(problem), task(problem, tile_m=256, tile_n=128)):
        first, second = runner.measure(one), runner.measure(one)
        assert isinstance(first, Measurement)
        assert first == second  # the same whenever it is asked
        assert (first.clock, first.l2, first.samples_s) == ("static", "cold", (first.median_s,))
    failed = {
        behave: runner.measure(task(problem, **ONE_TILE, behave=behave)) for behave in ("raises", "aborts", "greedy")
    }
    assert failed["raises"].stage == "lower"
    assert "ValueError: no such way" in failed["raises"].detail
    assert failed["aborts"].stage == "worker"
    assert "SIGABRT" in failed["aborts"].detail
    assert failed["greedy"].stage == "compile"
    assert "exceeded scoped vmem limit" in failed["greedy"].detail
    assert isinstance(runner.measure(task(problem, **ONE_TILE)), Measurement)  # it lives on


def test_what_is_wrong_is_found_by_the_interpreter(runner):
    problem = ProductProblem(512, 256, 256, script="right.wrong")
    wrong = runner.confirm(task(problem, **ONE_TILE, behave="wrong"))
    assert isinstance(wrong, Failure)
    assert wrong.stage == "verify"
    assert wrong.detail.startswith("interpreted, as m=")
    assert runner.confirm(task(problem, **ONE_TILE)) is None
    assert runner.confirm(task(problem)) is None


def test_a_step_that_does_not_end_is_ended():
    runner = AheadOfTime(V5E, RunnerOptions(workers=1, compile_timeout_s=15.0))
    try:
        problem = ProductProblem(256, 256, 256, script="right.hangs")
        hung = runner.measure(task(problem, **ONE_TILE, behave="hangs"))
        assert (hung.stage, "lower did not end within 15 s" in hung.detail) == ("timeout", True)
    finally:
        runner.close()
    with pytest.raises(WorkerError, match="stopped"):
        runner.measure(task(problem))


def test_a_search_drops_what_the_compiler_refuses_and_what_is_wrong(runner, tmp_path):
    problem = ProductProblem(256, 128, 256, script="wrong.right.greedy.raises")
    store = Store(tmp_path / "cache.db")
    record = tune(PRODUCT, problem, store=store, runner=runner)
    assert record.estimated
    assert {entry.backend for entry in record.entries} == {"mosaic_tpu", "xla"}
    assert all(entry.schedule.get("behave", "right") == "right" for entry in record.entries)
    stages = {
        trial.schedule["behave"]: trial.outcome.stage
        for trial in store.last_trials(record.key)
        if isinstance(trial.outcome, Failure)
    }
    assert stages == {"wrong": "verify", "greedy": "compile", "raises": "lower"}
    assert record.environment.driver.startswith("libtpu ")


def test_a_grid_of_many_steps_takes_as_long_as_two_small_ones_tell(tmp_path):
    said = json.loads(compiled(__file__, V5E.kind, tmp_path, cycles=True).splitlines()[-1])
    assert said["steps"] == 512
    assert said["reduced_s"] == pytest.approx(said["whole_s"], rel=0.01)


def _command(*more):
    fields = str(ProductProblem(1024, 1024, 256)).split()
    return [sys.executable, "-m", "tile_scheduler", "tune", OWN, *fields, "--hardware", "v5e", "--workers", "1", *more]


def _workers(parent):
    found = subprocess.run(["pgrep", "-P", str(parent)], capture_output=True, text=True, check=False).stdout
    return [int(pid) for pid in found.split()]


def test_a_search_that_is_killed_leaves_no_process_and_goes_on_where_it_was(tmp_path):
    cache = tmp_path / "cache.db"
    own = os.environ | {"TILE_SCHEDULER_CACHE": str(cache), "JAX_PLATFORMS": "cpu"}
    key = key_of(PRODUCT, ProductProblem(1024, 1024, 256), V5E)
    killed = subprocess.Popen(_command(), env=own, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    store = Store(cache)
    while len(store.trials(key)) < 3:
        assert killed.poll() is None
        time.sleep(0.1)
    workers = _workers(killed.pid)
    killed.send_signal(signal.SIGKILL)
    killed.wait()
    assert workers
    assert all(gone(pid) for pid in workers)
    made = len(store.trials(key, unfinished=True))
    # Two of the same command at once: one searches, on from there, and the other takes its record.
    both = [
        subprocess.Popen(_command("--json"), env=own, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL)
        for _ in range(2)
    ]
    told = [json.loads(process.communicate()[0]) for process in both]
    assert sorted(result["state"] for result in told) == ["known", "tuned"]
    (tuned,) = [result for result in told if result["state"] == "tuned"]
    assert tuned["resumed"] >= made >= 3
    assert tuned["record"]["estimated"]
    assert told[0]["record"]["winner"] == told[1]["record"]["winner"]
    assert store.get(key).estimated


@pytest.mark.usefixtures("_own_cache")
def test_in_python_a_chip_is_named():
    problem = {"m": 128, "n": 128, "k": 128}
    options = RunnerOptions(workers=1)
    record = scheduler.tune(PRODUCT, problem, hardware="v5e", options=options)
    assert record.estimated
    assert record.key.hardware == V5E.id
    assert scheduler.predict(PRODUCT, problem, hardware="v5e").reason.startswith("estimated by the compiler")


def _compare(chip):
    """The time of a grid of 512 steps, whole and by its parts."""
    from scheduler.contrib.tpu import estimate
    from scheduler.contrib.tpu.ahead_of_time import elsewhere

    hardware = elsewhere(find(chip))
    # Not of the test's own module: this file runs as a program here.
    problem, schedule = ProductProblem(4096, 2048, 256), dict(ONE_TILE)
    part = estimate.estimate(PRODUCT, problem, hardware, "mosaic_tpu", schedule)
    estimate.STEPS_AT_ONCE = 512
    whole = estimate.estimate(PRODUCT, problem, hardware, "mosaic_tpu", schedule)
    steps = estimate.grid_steps(PRODUCT.kernel("mosaic_tpu"), problem, schedule, hardware)
    return {"steps": steps, "whole_s": whole.median_s, "reduced_s": part.median_s}


if __name__ == "__main__":
    print(json.dumps(_compare(sys.argv[1])))
