"""Learning: a miss is answered at once, and measured in the background, within a budget, without a word to the call."""

import contextlib
import dataclasses
import logging
import os
import subprocess
import sys
import threading
from pathlib import Path

import jax
import jax.numpy as jnp
import pytest
from rehearsal import Rehearsal

import scheduler
from scheduler import tuned_matmul
from scheduler.core.errors import WorkerError
from scheduler.core.hardware import GIB
from scheduler.core.records import Failure, Measurement, key_of
from scheduler.dispatch import dispatch, learning
from scheduler.dispatch.learning import Learner
from scheduler.measure import fork_server
from scheduler.measure.gpu import Gpu
from scheduler.search.baseline import is_current
from scheduler.store.lease import leased
from scheduler.store.store import Store, default_url
from search_spaces.matmul import MATMUL, MatmulProblem

pytestmark = pytest.mark.slow

ROOT = Path(__file__).parents[2]
A = jnp.ones((8, 8))
P8 = MatmulProblem(8, 8, 8, dtype="float32")


class Device(Rehearsal):
    """Times kernels of the interpreter as faster than XLA; `released` lets its measurements begin."""

    def __init__(self, hardware):
        super().__init__()
        self.hardware, self.released, self.backends, self.closed = hardware, threading.Event(), [], 0
        self.released.set()

    def measure(self, task, *, again=False):
        self.released.wait()
        self.backends += [] if again else [task.backend]
        measured = super().measure(task, again=again)
        time_s = measured.median_s * (1 if task.backend == "interpret" else 2)
        return Measurement(time_s, (time_s,) * task.repetitions, "wall", "warm")

    def close(self):
        self.closed += 1


class Driver(Gpu):
    """A GPU of which the driver reports these utilizations, and then the last one forever."""

    def utilization(self):
        looks.append(None)
        if len(looks) == 3 * learning.MOST_LOOKS:
            looked_often.set()
        return percents.pop(0) if len(percents) > 1 else percents[0]


percents: list = []
looks: list = []
looked_often = threading.Event()


@pytest.fixture
def device():
    scheduler.reload()
    return Device(dispatch.hardware_for("cpu", ""))


@pytest.fixture
def learner(monkeypatch, device):
    """The learner of this process, on that device."""
    started = []

    def start(options):
        started.append(options)
        return device

    learner = Learner(start, lambda: None)
    learner.started = started
    monkeypatch.setattr(learning, "_learner", learner)
    monkeypatch.setattr(learning, "LOOK_S", 0.0)
    monkeypatch.setattr(learning, "LATER_S", 0.0)
    yield learner
    device.released.set()
    learner.end()
    scheduler.reload()


def decided(problem=P8, **options):
    return dispatch.decide(MATMUL, problem, "cpu", dispatch.options(MATMUL, **options))


def stored(problem=P8):
    with contextlib.closing(Store(default_url())) as store:
        return store.get(key_of(MATMUL, problem, dispatch.hardware_for("cpu", "")))


def product(number, **options):
    return jax.jit(lambda x: tuned_matmul(x, x, **options) + number)(A)


def test_a_miss_is_answered_before_anything_is_measured_and_the_next_trace_uses_the_record(learner, device, caplog):
    device.released.clear()
    with caplog.at_level(logging.INFO, "scheduler"):
        assert product(0, on_miss="learn")[0, 0] == 8
        assert decided(on_miss="learn").kernel is MATMUL.library
        assert device.backends == []
        assert not scheduler.wait_for_learning(0)
        device.released.set()
        assert scheduler.wait_for_learning()
    assert "is learned: interpret" in caplog.text
    assert stored().winner.backend == "interpret"
    assert decided(on_miss="learn").kernel.backend == "interpret"
    assert product(1, on_miss="error")[0, 0] == 9
    scheduler.reload()  # as another process, which finds it in the store
    assert decided(on_miss="error").reason == "measured, from the user's cache"
    assert device.closed == 1


def test_the_choice_of_the_call_and_the_library_are_timed_once_whatever_repeats_the_call(learner, device, monkeypatch):
    monkeypatch.setenv(dispatch.ENVIRONMENT, "learn")
    chosen = decided(MatmulProblem(64, 64, 64, dtype="float32"), backends="interpret")
    for number in range(3):
        product(number)
        tuned_matmul(A, A, backends="pallas")
    learner.wait()
    assert device.backends.count("xla") == 2  # one program of each of both problems
    assert len(device.backends) <= 2 * (1 + learning.SCHEDULES)
    with contextlib.closing(Store(default_url())) as store:
        key = key_of(MATMUL, MatmulProblem(64, 64, 64, dtype="float32"), device.hardware)
        tried = [trial.schedule for trial in store.trials(key) if trial.backend == "interpret"]
    assert tried[0].items() <= dataclasses.asdict(chosen.schedule).items()


def test_a_record_that_was_learned_is_one_of_a_few_trials_and_a_search_replaces_it(learner, device):
    decided(on_miss="learn")
    learner.wait()
    learned = stored()
    assert (learned.brief, learned.budget) == (True, 1 + learning.SCHEDULES)
    with contextlib.closing(Store(default_url())) as store:
        assert "while learning" in is_current(MATMUL, P8, device.hardware, store)
    assert not scheduler.tune("matmul", P8, budget=3, runner=device).brief
    assert not stored().brief


def test_what_a_record_answers_is_not_measured(learner, device):
    scheduler.tune("matmul", P8, budget=2, runner=device)
    decided(on_miss="learn")
    call = learning.MissedCall(MATMUL, P8, device.hardware, ("xla", ()), dispatch.user_cache, lambda: None)
    learner.add(call)  # as if the record had come after the miss
    learner.wait()
    assert learner.started == []


@pytest.mark.parametrize(
    ("problem_s", "process_s", "message"), [(1e-9, 1e6, "its 1e-09 s"), (1e6, 1e-9, "1e-09 s of this")]
)
def test_a_spent_budget_ends_the_problem_and_what_waits(learner, device, caplog, problem_s, process_s, message):
    scheduler.learning_budget(problem_s=problem_s, process_s=process_s)
    device.released.clear()
    for m in (8, 16, 24):
        decided(MatmulProblem(m, 8, 8, dtype="float32"), on_miss="learn")
    device.released.set()
    learner.wait()
    assert message in caplog.text
    assert [stored(MatmulProblem(m, 8, 8, dtype="float32")) for m in (8, 16, 24)] == [None] * 3
    assert len(device.backends) == (3 if process_s == 1e6 else 1)
    with pytest.raises(ValueError, match="problem_s=0 is out of range"):
        scheduler.learning_budget(problem_s=0)


@pytest.mark.parametrize("error", [WorkerError("no memory is free"), RuntimeError("a defect")])
def test_a_failure_is_logged_the_call_is_unaffected_and_the_miss_stays_noted(learner, caplog, monkeypatch, error):
    monkeypatch.setenv("TILE_SCHEDULER_MISSES", "on")

    def start(options):
        raise error

    learner._start = start
    assert tuned_matmul(A, A, on_miss="learn")[0, 0] == 8
    learner.wait()
    assert f"matmul m=8 n=8 k=8 dtype=float32 on cpu is not learned: {error}" in caplog.text
    from scheduler.store import misses

    assert misses.flush_misses(600)
    with contextlib.closing(Store(default_url())) as store:
        assert [one.key for one in store.misses.all()] == [key_of(MATMUL, P8, dispatch.hardware_for("cpu", ""))]


def test_a_wrong_result_is_not_stored_as_a_schedule(learner, device):
    device.confirm = lambda task: Failure("verify", "off") if task.backend == "interpret" else None
    decided(on_miss="learn")
    learner.wait()
    assert [entry.backend for entry in stored().entries] == ["xla"]


def used(learner, *of, free_bytes=8 * GIB):
    percents[:], looks[:] = of, ()
    looked_often.clear()
    learner._find_gpu = lambda: Driver("0", "gpu", "", free_bytes)


def test_the_first_trial_waits_until_the_gpu_is_idle_for_some_time(learner):
    used(learner, 97, 0, 0, 60, 0, None, 3)
    decided(on_miss="learn")
    learner.wait()
    assert stored() is not None
    assert len(looks) > 7


def test_on_a_busy_gpu_nothing_starts_and_the_process_can_end(learner):
    used(learner, 100)
    decided(on_miss="learn")
    looked_often.wait()
    assert learner.started == []
    assert not learner.wait(0)
    learner.end()
    assert learner.wait(0)


def test_a_gpu_that_becomes_busy_is_left_and_its_trials_are_kept(learner, device):
    # Idle for the first trial, then busy for longer than the learner waits, then idle.
    used(learner, *[0] * (learning.IDLE_LOOKS + 2), *[100] * learning.MOST_LOOKS, 0)
    decided(on_miss="learn")
    learner.wait()
    assert stored() is not None
    assert device.closed == 2
    assert device.backends.count("xla") == 1


def test_a_problem_that_takes_more_than_half_of_the_free_memory_is_refused(learner, caplog):
    used(learner, 0, free_bytes=GIB // 4)
    decided(on_miss="learn")
    learner.wait()
    assert "learning may take 0.125 GiB" in caplog.text
    assert stored() is None


@pytest.mark.parametrize(("reported", "percent"), [("37", 37), ("[N/A]", None), ("No devices were found", None)])
def test_the_utilization_is_that_of_the_driver_where_it_has_one(tmp_path, monkeypatch, reported, percent):
    smi = tmp_path / "nvidia-smi"
    smi.write_text(f"#!/bin/sh\ncase $* in *--id=3*utilization.gpu*) echo '{reported}';; esac\n")
    smi.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=os.pathsep)
    assert Gpu("3", "uuid", "", GIB).utilization() == percent


def test_what_another_process_tunes_is_left_to_it(learner, device, caplog):
    caplog.set_level(logging.INFO, "scheduler")
    with contextlib.closing(Store(default_url())) as store, leased(store, key_of(MATMUL, P8, device.hardware)):
        decided(on_miss="learn")
        learner.wait()
    assert f"it is being tuned by process {os.getpid()}" in caplog.text
    assert device.backends == []


def test_processes_of_one_job_learn_nothing_as_they_must_choose_alike(learner, monkeypatch):
    monkeypatch.setattr(jax, "process_count", lambda: 2)
    monkeypatch.setattr(dispatch, "require_one_code", lambda: None)
    assert decided(on_miss="learn").kernel == decided(on_miss="model").kernel
    assert (learner.wait(0), learner._left_s) == (True, {})


def test_neither_an_absent_chip_nor_a_worker_learns(learner, monkeypatch):
    decided(on_miss="learn", target="cpu")
    monkeypatch.setattr(fork_server, "_is_worker", True)
    decided(on_miss="learn")
    assert learner._left_s == {}


SCRIPT = """
import os, sys, time, warnings, jax.numpy as jnp, scheduler
from scheduler.dispatch import learning
scheduler.learning_budget(problem_s=1e6, process_s=1e6)
a = jnp.ones((8, 8))
scheduler.tuned_matmul(a, a, on_miss="learn")
before = learning.learner()
warnings.filterwarnings("ignore", ".*fork")
if (child := os.fork()) == 0:
    os._exit(learning.learner() is before)
assert os.waitpid(child, 0)[1] == 0
if sys.argv[1] == "wait":
    assert scheduler.wait_for_learning()
elif sys.argv[1] == "started":
    while before._runner is None or before._runner._measuring.pid is None:
        time.sleep(0.05)
"""


@pytest.mark.parametrize("end", ["wait", "started", "at once"])
def test_worker_processes_measure_and_a_process_ends_with_them_in_silence(end):
    environment = os.environ | {"PYTHONPATH": str(ROOT), "JAX_PLATFORMS": "cpu"}
    # Its end of the pipe closes only once no process of it is left.
    ended = subprocess.run([sys.executable, "-c", SCRIPT, end], env=environment, capture_output=True, text=True)
    assert (ended.returncode, ended.stdout, ended.stderr) == (0, "", "")
    assert (stored() is not None) == (end == "wait")
