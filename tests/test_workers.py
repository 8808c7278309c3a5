"""Candidates in this process and in others: what is measured, what is refused, and what a lost process costs."""

import dataclasses
import os
import re
import signal
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import jax
import jax.numpy as jnp
import pytest
from operations import DOUBLE, FAULTY, NOTED, DoubleProblem, FaultyProblem, NotedProblem, _parent, _serves
from processes import gone

from scheduler import tuned_matmul
from scheduler.core import hardware
from scheduler.core.errors import UnknownChip, WorkerError
from scheduler.core.hardware import CPU, GIB, find
from scheduler.core.records import Failure, Measurement
from scheduler.measure.gpu import Gpu
from scheduler.measure.limits import ALLOCATOR_RETRY_S, AUTOTUNED_LIMIT_S, Limits
from scheduler.measure.pool import BEYOND_REACH, Pool, start_runner
from scheduler.measure.runner import InProcess, RunnerOptions, Task
from scheduler.measure.worker_process import WorkerProcess, WorkerResult
from search_spaces import jax_compat
from search_spaces.matmul import MATMUL, MatmulProblem

PROBLEM = DoubleProblem(n=8)


def task(behave, tile=1, problem=PROBLEM):
    return Task(DOUBLE, problem, "scripted", {"tile": tile, "behave": behave}, 3)


def faulty(script, number=0):
    return Task(FAULTY, FaultyProblem(8, script), "scripted", {"number": number}, 3)


LIBRARY = Task(DOUBLE, PROBLEM, "xla", {}, 5)


@pytest.fixture(scope="module")
def pool():
    # No GPU answers to an empty index: these workers run on the CPU, through the same pipes.
    with Pool(Gpu(index="", uuid="test", driver="0", free_bytes=4 * GIB), RunnerOptions(workers=2)) as pool:
        pool._division.settle()
        yield pool


@pytest.fixture(scope="module", params=["in process", "pool"])
def runner(request):
    if request.param == "in process":
        return InProcess()
    return request.getfixturevalue("pool")


def test_a_right_candidate_gets_as_many_samples_as_asked(runner):
    measured = runner.measure(LIBRARY)
    assert isinstance(measured, Measurement)
    assert len(measured.samples_s) == 5
    assert measured.clock == "wall"
    assert 0 < min(measured.samples_s) <= measured.median_s <= max(measured.samples_s)


def test_a_wrong_answer_is_never_timed(runner):
    outcome = runner.measure(task("wrong"))
    assert isinstance(outcome, Failure)
    assert outcome.stage == "verify"
    assert outcome.detail.startswith("8 of 8 elements are off")


def test_what_does_not_build_fails_with_the_compilers_words(runner):
    failure = runner.measure(task("unbuilt", tile=4))
    assert failure.stage == "lower"
    assert re.fullmatch(r"ValueError: tile 4 cannot be built \(tests/operations.py:\d+\)", failure.detail)


def test_a_slow_candidate_measures_slow(runner):
    assert runner.measure(task("slow")).median_s > 0.01


def test_a_candidate_is_timed_again_where_it_was_compiled(runner):
    first = runner.measure(task("ok", tile=2))
    second = runner.measure(task("ok", tile=2), again=True)
    assert isinstance(second, Measurement)
    assert second != first


def test_the_hardware_of_a_runner_is_the_one_its_candidates_run_on(runner):
    assert runner.hardware == CPU


def test_a_process_that_dies_costs_its_candidate_alone(pool):
    with ThreadPoolExecutor(2) as threads:
        outcomes = list(threads.map(pool.measure, [task("ok"), task("exit"), task("ok", tile=4), task("ok", tile=8)]))
    assert outcomes[1] == Failure("worker", "the process ended in lower: exit status 7, nothing said")
    assert all(isinstance(outcome, Measurement) for outcome in (outcomes[0], *outcomes[2:]))


def test_a_worker_that_is_killed_from_outside_costs_nothing(pool):
    for worker in pool._workers:
        worker._child.kill()
    assert isinstance(pool.measure(task("ok", tile=2)), Measurement)
    assert isinstance(pool.measure(task("ok", tile=4)), Measurement)


NOISY = """
import atexit, os, sys
print("hello from sitecustomize")
print('{"$type": "Unable", "reason": "none"}', flush=True)
os.write(1, b"straight to the descriptor\\n" * 5000)
os.system("echo a child process")
sys.stdin.read()
atexit.register(print, "and goodbye")
"""


def test_what_a_worker_prints_as_it_starts_is_no_message_and_neither_after_it_was_replaced(tmp_path, monkeypatch):
    (tmp_path / "sitecustomize.py").write_text(NOISY)
    monkeypatch.syspath_prepend(tmp_path)
    gpu = Gpu(index="", uuid="noisy", driver="0", free_bytes=4 * GIB)
    with Pool(gpu, RunnerOptions(workers=1)) as pool:
        assert isinstance(pool.measure(task("ok")), Measurement)
        os.kill(pool._workers[0].pid, signal.SIGKILL)
        assert isinstance(pool.measure(task("ok", tile=2)), Measurement)


def test_a_library_goes_on_where_another_process_has_no_memory_for_it(pool, monkeypatch):
    library = Task(DOUBLE, DoubleProblem(n=24), "xla", {}, 5)
    assert isinstance(pool.measure(library), Measurement)
    asked = []
    (holder,) = pool._compiled.holders(library)
    for worker in pool._workers:
        if worker is not holder:
            full = WorkerResult(Failure("memory", "RESOURCE_EXHAUSTED"))
            monkeypatch.setattr(worker, "request", lambda *words, full=full: asked.append(words) or full)
    assert all(isinstance(pool.measure(library, again=True), Measurement) for _ in range(3))
    assert len(asked) == 1


def test_workers_of_a_pool_change_the_problem_between_tasks(pool):
    for n in (16, 8, 16):
        assert isinstance(pool.measure(task("ok", problem=DoubleProblem(n=n))), Measurement)


def test_a_gpu_without_free_memory_is_refused_with_what_to_do():
    with pytest.raises(WorkerError, match="XLA_PYTHON_CLIENT_PREALLOCATE"):
        Pool(Gpu(index="0", uuid="full", driver="0", free_bytes=GIB // 4))


def test_workers_that_cannot_start_end_in_one_sentence_with_their_own_words():
    with pytest.raises(WorkerError) as caught:
        Pool(Gpu(index="no such GPU", uuid="test", driver="0", free_bytes=4 * GIB), RunnerOptions(workers=2))
    assert str(caught.value).startswith("a worker process found no device: ")
    assert "cuda" in str(caught.value)
    assert "\n" not in str(caught.value)


def test_no_worker_is_left_of_a_pool_on_an_unknown_chip(monkeypatch):
    def workers():
        processes = (Path("/proc") / name for name in os.listdir("/proc") if name.isdecimal())
        return {int(path.name) for path in processes if _parent(path) == os.getpid() and _serves(path)}

    def unknown(target):
        started.update(workers() - before)
        raise UnknownChip(f"{target.kind} is not in the table of chips")

    before, started = workers(), set()
    monkeypatch.setattr(hardware, "describe", unknown)
    with pytest.raises(UnknownChip, match="cpu is not in the table"):
        Pool(Gpu(index="", uuid="unknown", driver="", free_bytes=GIB), RunnerOptions(workers=1))
    assert started
    assert all(gone(pid) for pid in started)


def test_a_pool_begins_with_its_first_worker_and_others_join(monkeypatch):
    begin, held, order = WorkerProcess.begin, threading.Event(), []

    def later(worker, share_bytes):
        order.append(worker)
        if worker is not order[0]:
            assert held.wait(60)
        return begin(worker, share_bytes)

    monkeypatch.setattr(WorkerProcess, "begin", later)
    try:
        with Pool(Gpu(index="", uuid="joined", driver="", free_bytes=4 * GIB), RunnerOptions(workers=2)) as pool:
            assert pool._division.living == {order[0]}
            assert isinstance(pool.measure(task("ok")), Measurement)
            held.set()
            pool._division.settle()
            assert pool._division.living == {*pool._workers}
            order[0]._child.kill()
            assert isinstance(pool.measure(task("ok", tile=2)), Measurement)
    finally:
        held.set()


def test_a_pool_is_closed_while_workers_start(monkeypatch):
    begin, began = WorkerProcess.begin, []

    def later(worker, share_bytes):
        began.append(worker)
        if len(began) > 1:
            time.sleep(1)
        return begin(worker, share_bytes)

    monkeypatch.setattr(WorkerProcess, "begin", later)
    with Pool(Gpu(index="", uuid="closed", driver="", free_bytes=4 * GIB), RunnerOptions(workers=2)) as pool:
        pass
    pool._division.settle()
    assert all(worker.pid is None or gone(worker.pid) for worker in pool._workers)
    assert len(pool._division.living) == 1


def test_closing_a_pool_ends_what_is_under_way():
    with (
        Pool(Gpu(index="", uuid="closing", driver="", free_bytes=GIB), RunnerOptions(workers=1)) as pool,
        ThreadPoolExecutor(1) as one,
    ):
        hanging = one.submit(pool.measure, faulty("hang"))
        time.sleep(1)
        process = pool._workers[0]._child._process
        pool.close()
        with pytest.raises(WorkerError, match="were stopped"):
            hanging.result()
        assert process.returncode == -signal.SIGKILL


def test_limits_adapt_to_what_was_seen_unless_they_are_told():
    adapting, candidate = Limits(RunnerOptions(), CPU), task("ok")
    limit_s = adapting.of(dataclasses.replace(candidate, repetitions=5))
    assert (limit_s("compile"), limit_s("run"), limit_s("wait")) == (120, 60, None)
    for seconds in (1.0, 10.0, 300.0):
        adapting.ended("compile", seconds)
    adapting.saw(LIBRARY, Measurement(0.2, (0.2,), "wall", "warm"))
    assert (limit_s("compile"), limit_s("lower"), limit_s("run")) == (40, 40, ALLOCATOR_RETRY_S + 20 * 0.2 * 5)
    adapting.saw(LIBRARY, Measurement(1e-6, (1e-6,), "wall", "warm"))
    assert limit_s("run") == ALLOCATOR_RETRY_S + 10
    told = Limits(RunnerOptions(compile_timeout_s=3.0, run_timeout_s=4.0), CPU).of(LIBRARY)
    assert (told("prepare"), told("run"), told("wait")) == (3, 4, None)


def test_xla_may_try_its_algorithms_out_for_as_long_as_a_large_problem_takes():
    adapting = Limits(RunnerOptions(), find("NVIDIA H200"))
    for _ in range(20):
        adapting.ended("compile", 0.5)
    library = Task(MATMUL, MatmulProblem(98304, 98304, 8192), "xla", {}, 10)
    assert adapting.of(dataclasses.replace(library, backend="mosaic_gpu"))("compile") == 30
    assert adapting.of(library)("lower") == 30
    assert adapting.of(library)("compile") == 120 + AUTOTUNED_LIMIT_S, "and no longer"
    int8 = MatmulProblem(65536, 65536, 4096, dtype="int8", out_dtype="int32")
    assert 240 < adapting.of(dataclasses.replace(library, problem=int8))("compile") < 600
    assert adapting.of(dataclasses.replace(library, problem=MatmulProblem(16, 16, 16)))("compile") < 121


ORPHANS = """
import sys, threading, time
from scheduler.core.hardware import GIB
from scheduler.measure.gpu import Gpu
from scheduler.measure.pool import BEYOND_REACH, Pool, start_runner
from scheduler.measure.runner import RunnerOptions
pool = Pool(Gpu(index="", uuid="orphans", driver="", free_bytes=4 * GIB), RunnerOptions(workers=2))
pool._division.settle()
print(*(worker._child._process.pid for worker in pool._workers), flush=True)
{then}
"""


@pytest.mark.parametrize(("then", "status"), [("time.sleep(100)", -signal.SIGKILL), ("sys.exit(3)", 3)])
def test_no_worker_outlives_its_parent(then, status):
    command = [sys.executable, "-c", ORPHANS.format(then=then)]
    parent = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, cwd=Path(__file__).parents[1])
    workers = [int(word) for word in parent.stdout.readline().split()]
    assert len(workers) == 2
    if status < 0:
        parent.kill()
    parent.communicate()
    assert parent.returncode == status
    assert all(gone(pid) for pid in workers)


def test_a_call_that_cannot_tune_because_the_gpu_is_full_says_so_once_and_gets_the_models_answer(tmp_path, monkeypatch):
    smi = tmp_path / "nvidia-smi"
    smi.write_text("#!/bin/sh\necho GPU-full, 580.95, 100, 81920, 00000000:17:00.0\n")
    smi.chmod(0o755)
    (tmp_path / "jax_cuda13_plugin").mkdir()  # what tells that JAX could use a GPU
    (tmp_path / "jax_cuda13_plugin" / "__init__.py").touch()
    monkeypatch.setenv("PATH", str(tmp_path), prepend=os.pathsep)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    monkeypatch.syspath_prepend(tmp_path)
    a, platforms = jnp.ones((24, 24)), jax.config.jax_platforms
    jax.config.update("jax_platforms", "cuda,cpu")
    try:
        with pytest.warns(RuntimeWarning, match=r"is not tuned: the GPU has 0.1 GiB free.*the model answers") as warned:
            ours = jax.jit(lambda a: tuned_matmul(a, a, on_miss="tune", backends="interpret"))(a)
    finally:
        jax.config.update("jax_platforms", platforms)
    assert float(ours[0, 0]) == 24
    assert len(warned) == 1


def test_there_are_as_many_workers_as_cores_that_the_process_may_use_but_one():
    count = "from scheduler.measure.pool import Gpu, Pool\nwith Pool(Gpu.none()) as pool: print(pool.slots)"
    command = ["taskset", "-c", str(min(os.sched_getaffinity(0))), sys.executable, "-c", count]
    environment = os.environ | {"JAX_PLATFORMS": "cpu"}
    ran = subprocess.run(command, capture_output=True, text=True, check=True, env=environment)
    assert ran.stdout.strip() == "1"


def test_no_gpu_is_seen_where_none_is_visible(monkeypatch):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    assert Gpu.query() is None


@pytest.mark.parametrize(("count", "there"), [(0, "there is none"), (1, "there is 1"), (2, "there are 2")])
def test_a_gpu_that_is_not_there_is_an_error_unless_it_is_the_first(count, there, monkeypatch):
    def query(device=0):
        return Gpu(str(device), "uuid", "", GIB) if device < count else None

    monkeypatch.setattr(jax_compat, "cuda_wanted", lambda: True)
    monkeypatch.setattr(Gpu, "query", query)
    assert Gpu.wanted(0) == query(0)
    with pytest.raises(WorkerError, match=rf"no GPU 9 is visible \({there}\)"):
        start_runner(DOUBLE, RunnerOptions(device=9))


def test_where_jax_uses_no_gpu_only_the_first_device_is_the_cpu():
    assert isinstance(start_runner(DOUBLE), InProcess)
    with pytest.raises(WorkerError, match=r"no GPU 1 is visible \(there is none\)"):
        start_runner(DOUBLE, RunnerOptions(device=1))


def test_a_librarys_time_is_that_of_several_compilations_and_a_kernels_that_of_one(pool, tmp_path):
    for backend, processes in (("xla", 2), ("scripted", 1)):
        place = tmp_path / backend
        place.mkdir()
        noted = Task(NOTED, NotedProblem(place=str(place)), backend, {}, 2)
        assert isinstance(pool.measure(noted), Measurement)
        for _ in range(4):
            assert isinstance(pool.measure(noted, again=True), Measurement)
        assert len(list(place.iterdir())) == processes


def test_a_library_that_is_out_of_reach_is_compiled_once(pool, tmp_path):
    noted = Task(NOTED, NotedProblem(place=str(tmp_path)), "xla", {}, 2)
    measured = pool.measure(noted)
    assert isinstance(measured, Measurement)
    ahead = dataclasses.replace(noted, incumbent_s=measured.median_s / (BEYOND_REACH * 1.01))
    for _ in range(4):
        assert isinstance(pool.measure(ahead, again=True), Measurement)
    assert len(list(tmp_path.iterdir())) == 1
