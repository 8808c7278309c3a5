"""Candidates in this process and in others: what is measured, what is refused, and what a lost process costs."""

import dataclasses
import os
import re
import shutil
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
from operations import DOUBLE, FAULTY, NOTED, UNNUMBERED, DoubleProblem, FaultyProblem, NotedProblem, _parent, _serves
from processes import gone, started

from scheduler import tuned_matmul
from scheduler.core import fingerprints, hardware
from scheduler.core.errors import UnknownChip, WorkerError
from scheduler.core.hardware import CPU, GIB, find
from scheduler.core.records import Failure, Measurement
from scheduler.measure.conversation import ALLOCATOR_RETRY_S, AUTOTUNED_LIMIT_S, Timeouts
from scheduler.measure.gpu import Gpu
from scheduler.measure.pool import Pool, start_runner
from scheduler.measure.protocol import Init
from scheduler.measure.runner import InProcess, RunnerOptions, Task
from scheduler.measure.subprocess_pipe import Children
from scheduler.measure.worker_process import OnDevice, WorkerProcess
from scheduler.search.reverify import reverify
from scheduler.search.tuner import tune
from scheduler.store.store import Store
from search_spaces.matmul import MATMUL, MatmulProblem

pytestmark = pytest.mark.slow

PROBLEM, ROOT = DoubleProblem(n=8), str(Path(__file__).parents[2])


def task(behave, tile=1, problem=PROBLEM):
    return Task(DOUBLE, problem, "scripted", {"tile": tile, "behave": behave}, 3)


def faulty(script, number=0):
    return Task(FAULTY, FaultyProblem(8, script), "scripted", {"number": number}, 3)


LIBRARY = Task(DOUBLE, PROBLEM, "xla", {}, 5)


@pytest.fixture(scope="module")
def pool():
    # No GPU answers to an empty index: these workers run on the CPU, through the same pipes.
    with Pool(Gpu(index="", uuid="test", driver="0", free_bytes=4 * GIB), RunnerOptions(workers=2)) as pool:
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
    for process in (pool._measuring, *started(pool)._compilers._processes):
        process._child.kill()
    assert isinstance(pool.measure(task("ok", tile=2)), Measurement)
    assert isinstance(pool.measure(task("ok", tile=4)), Measurement)


NOISY = """
import atexit, os, sys
print("hello from sitecustomize")
print('{"$type": "InitFailed", "reason": "none"}', flush=True)
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
        for pid in (pool._measuring.pid, *started(pool)._compilers.pids):
            os.kill(pid, signal.SIGKILL)
        assert isinstance(pool.measure(task("ok", tile=2)), Measurement)


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
        while not started:  # threads start them
            started.update(workers() - before)
        raise UnknownChip(f"{target.kind} is not in the table of chips")

    before, started = workers(), set()
    monkeypatch.setattr(hardware, "describe", unknown)
    with pytest.raises(UnknownChip, match="cpu is not in the table"):
        Pool(Gpu(index="", uuid="unknown", driver="", free_bytes=GIB), RunnerOptions(workers=1))
    assert started
    assert all(gone(pid) for pid in started)


def test_closing_a_pool_ends_what_is_under_way():
    with (
        Pool(Gpu(index="", uuid="closing", driver="", free_bytes=GIB), RunnerOptions(workers=1)) as pool,
        ThreadPoolExecutor(1) as one,
    ):
        hanging = one.submit(pool.measure, faulty("hang"))
        pool._detected_target()
        process = pool._measuring._child._process
        while not pool._busy:
            time.sleep(0.01)
        pool.close()
        with pytest.raises(WorkerError, match="were stopped"):
            hanging.result()
        assert process.returncode == -signal.SIGKILL


def test_a_pool_that_is_closed_while_its_processes_start_ends_them():
    with ThreadPoolExecutor(1) as one:
        pool = Pool(Gpu(index="", uuid="starting", driver="", free_bytes=GIB), RunnerOptions(workers=1))
        asked = one.submit(pool.measure, task("ok"))
        pool.close()
        with pytest.raises(WorkerError, match="were stopped"):
            asked.result()
        assert pool._measuring.pid is None
        assert not pool._compilers.pids


def test_limits_adapt_to_what_was_seen_unless_they_are_told():
    adapting, candidate = Timeouts(RunnerOptions(), CPU), task("ok")
    limit_s = adapting.for_task(dataclasses.replace(candidate, repetitions=5))
    assert (limit_s("compile"), limit_s("run"), limit_s("wait")) == (120, 60, None)
    for seconds in (1.0, 10.0, 300.0):
        adapting.record_compile("compile", seconds)
    adapting.record_run(LIBRARY, Measurement(0.2, (0.2,), "wall", "warm"))
    assert (limit_s("compile"), limit_s("lower"), limit_s("run")) == (40, 40, ALLOCATOR_RETRY_S + 20 * 0.2 * 5)
    adapting.record_run(LIBRARY, Measurement(1e-6, (1e-6,), "wall", "warm"))
    assert limit_s("run") == ALLOCATOR_RETRY_S + 10
    told = Timeouts(RunnerOptions(compile_timeout_s=3.0, run_timeout_s=4.0), CPU).for_task(LIBRARY)
    assert (told("prepare"), told("run"), told("wait")) == (3, 4, None)


def test_xla_may_try_its_algorithms_out_for_as_long_as_a_large_problem_takes():
    adapting = Timeouts(RunnerOptions(), find("NVIDIA H200"))
    for _ in range(20):
        adapting.record_compile("compile", 0.5)
    library = Task(MATMUL, MatmulProblem(98304, 98304, 8192), "xla", {}, 10)
    assert adapting.for_task(dataclasses.replace(library, backend="mosaic_gpu"))("compile") == 30
    assert adapting.for_task(library)("lower") == 30
    assert adapting.for_task(library)("compile") == 120 + AUTOTUNED_LIMIT_S, "and no longer"
    int8 = MatmulProblem(65536, 65536, 4096, dtype="int8", out_dtype="int32")
    assert 240 < adapting.for_task(dataclasses.replace(library, problem=int8))("compile") < 600
    assert adapting.for_task(dataclasses.replace(library, problem=MatmulProblem(16, 16, 16)))("compile") < 121


ORPHANS = """
import sys, threading, time
from scheduler.core.hardware import GIB
from scheduler.measure.gpu import Gpu
from scheduler.measure.pool import Pool, start_runner
from scheduler.measure.runner import RunnerOptions
pool = Pool(Gpu(index="", uuid="orphans", driver="", free_bytes=4 * GIB), RunnerOptions(workers=2))
pool._detected_target()
while len(pool._compilers.pids) < 2: time.sleep(0.01)
print(pool._measuring.pid, *pool._compilers.pids, flush=True)
{then}
"""


@pytest.mark.parametrize(("then", "status"), [("time.sleep(100)", -signal.SIGKILL), ("sys.exit(3)", 3)])
def test_no_worker_outlives_its_parent(then, status):
    command = [sys.executable, "-c", ORPHANS.format(then=then)]
    parent = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, cwd=Path(__file__).parents[2])
    workers = [int(word) for word in parent.stdout.readline().split()]
    assert len(workers) == 3
    if status < 0:
        parent.kill()
    parent.communicate()
    assert parent.returncode == status
    assert all(gone(pid) for pid in workers)


STILL_RUNNING = """
import atexit, os
@atexit.register
def look():
    time.sleep(1)
    for pid in pool._measuring.pid, *pool._compilers.pids:
        os.kill(pid, 0)
        state = open(f"/proc/{pid}/stat").read().rpartition(")")[2].split()[0]
        print(state in "ZX", flush=True)
"""


def test_workers_run_until_exit_handlers_stop_them_because_other_threads_may_still_use_them():
    # A handler that is registered after the pool's runs before it.
    command = [sys.executable, "-c", ORPHANS.format(then=STILL_RUNNING)]
    ended = subprocess.run(command, capture_output=True, text=True, cwd=Path(__file__).parents[2])
    assert (ended.stdout.split()[3:], ended.stderr) == (["False"] * 3, "")


def test_a_call_that_cannot_tune_because_the_gpu_is_full_says_so_once_and_gets_the_models_answer(tmp_path, monkeypatch):
    smi = tmp_path / "nvidia-smi"
    smi.write_text("#!/bin/sh\necho GPU-full, 580.95, 100, 81920\n")
    smi.chmod(0o755)
    (tmp_path / "jax_cuda13_plugin").mkdir()  # what tells that JAX could use a GPU
    (tmp_path / "jax_cuda13_plugin" / "__init__.py").touch()
    monkeypatch.setenv("PATH", str(tmp_path), prepend=os.pathsep)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    monkeypatch.syspath_prepend(tmp_path)
    a, platforms = jnp.ones((24, 24)), jax.config.jax_platforms
    jax.config.update("jax_platforms", "cuda,cpu")
    try:
        with pytest.warns(RuntimeWarning, match=r"is not tuned: the GPU has 0.1 GiB free.*the model selects") as warned:
            ours = jax.jit(lambda a: tuned_matmul(a, a, on_miss="tune", backends="interpret"))(a)
    finally:
        jax.config.update("jax_platforms", platforms)
    assert float(ours[0, 0]) == 24
    assert len(warned) == 1


def test_there_are_as_many_compile_processes_as_cores_that_the_process_may_use_but_one():
    count = "from scheduler.measure.pool import Gpu, Pool\nwith Pool(Gpu.none()) as pool: print(pool._compilers.count)"
    command = ["taskset", "-c", str(min(os.sched_getaffinity(0))), sys.executable, "-c", count]
    environment = os.environ | {"JAX_PLATFORMS": "cpu"}
    ran = subprocess.run(command, capture_output=True, text=True, check=True, env=environment)
    assert ran.stdout.strip() == "1"


def test_no_gpu_is_seen_where_none_is_visible(monkeypatch):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    assert Gpu.query() is None


@pytest.mark.parametrize(("count", "there"), [(0, "none is visible"), (1, "1 is visible"), (2, "2 are visible")])
def test_a_gpu_that_is_not_there_is_an_error_unless_it_is_the_first(count, there, monkeypatch):
    def query(device=0):
        return Gpu(str(device), "uuid", "", GIB) if device < count else None

    monkeypatch.setattr("scheduler.measure.gpu.cuda_wanted", lambda: True)
    monkeypatch.setattr(Gpu, "query", query)
    assert Gpu.wanted(0) == query(0)
    with pytest.raises(WorkerError, match=rf"GPU 9 is not visible \({there}\)"):
        start_runner(DOUBLE, RunnerOptions(device=9))


def test_where_jax_uses_no_gpu_only_the_first_device_is_the_cpu():
    assert isinstance(start_runner(DOUBLE), InProcess)
    with pytest.raises(WorkerError, match=r"GPU 1 is not visible \(none is visible\)"):
        start_runner(DOUBLE, RunnerOptions(device=1))


def test_a_candidate_is_traced_in_a_compile_process_and_a_library_where_it_is_measured(pool, tmp_path):
    pids = {}
    for backend in ("xla", "scripted"):
        (tmp_path / backend).mkdir()
        noted = Task(NOTED, NotedProblem(place=str(tmp_path / backend)), backend, {}, 2)
        assert isinstance(pool.measure(noted), Measurement)
        for _ in range(3):
            assert isinstance(pool.measure(noted, again=True), Measurement)
        pids[backend] = {int(path.name) for path in (tmp_path / backend).iterdir()}
    assert pids["xla"] == {pool._measuring.pid}
    assert len(pids["scripted"]) == 1
    assert pids["scripted"] <= pool._compilers.pids


def test_no_candidate_is_traced_in_the_process_that_searches_not_even_to_tell_whether_it_was_edited(pool, tmp_path):
    problem, store = NotedProblem(place=str(tmp_path)), Store(":memory:")
    record = tune(UNNUMBERED, problem, budget=2, store=store, runner=pool)
    assert tune(UNNUMBERED, problem, budget=2, store=store, runner=pool) == record
    (verified,) = reverify([record], operation=UNNUMBERED, runner=pool)
    traced_in = {int(path.name) for path in tmp_path.iterdir()}
    assert traced_in
    assert os.getpid() not in traced_in
    here = fingerprints.of_schedule(UNNUMBERED.kernel("scripted"), problem, {}, CPU.target)
    assert {e.fingerprint for e in (*record.entries, *verified.refreshed.entries)} == {here, ""}


def test_a_pool_that_loses_its_directory_compiles_where_it_measures_and_a_warning_says_what_to_do():
    with Pool(Gpu(index="", uuid="no directory", driver="", free_bytes=4 * GIB), RunnerOptions(workers=1)) as pool:
        assert isinstance(pool.measure(task("ok")), Measurement)
        shutil.rmtree(pool._compilers.directory)
        with pytest.warns(RuntimeWarning, match=r"compiles candidates one by one: .*No such file.*set TMPDIR"):
            confirmed = pool.confirm(task("ok"))
        assert confirmed is None
        assert isinstance(pool.measure(task("ok", tile=2)), Measurement)
        assert pool.confirm(task("ok", tile=2)) is None


LEAVING = """
import os, sys, time
def leave(channel):
    if not os.fork():
        {detach}
        open({path!r}, "w").write(f"{{os.getpid()}}\\n")
        time.sleep(1000)
    while not os.path.exists({path!r}) or not open({path!r}).read():
        time.sleep(0.01)
    os._exit(3)
{start}
"""


@pytest.mark.parametrize(
    ("forked", "detach", "start"),
    [
        (False, "pass", "leave(None)"),
        (True, "pass", "from scheduler.measure.fork_server import serve; serve(leave)"),
        (True, "os.setsid()", "from scheduler.measure.fork_server import serve; serve(leave)"),
    ],
)
def test_what_a_process_forked_ends_with_it_though_it_exits_by_itself(forked, detach, start, tmp_path):
    path, children = tmp_path / "pid", Children()
    program = LEAVING.format(path=str(path), detach=detach, start=start)
    child = children.start(["-c", program], os.environ | {"PYTHONPATH": ROOT}, forked=forked)
    with pytest.raises(EOFError, match="exit status 3"):
        child.ask(Init("", ""), "start", lambda _: None, lambda *_: None)
    child.close()
    assert gone(int(path.read_text()))
    children.shut_down()


def test_a_candidate_that_calls_python_is_compiled_where_it_is_measured(pool):
    calling, plain = task("slow", tile=8), task("ok", tile=8)
    with pool.reserve(DOUBLE, PROBLEM):
        for each in (calling, plain):
            assert isinstance(pool.measure(each), Measurement)
            assert pool.confirm(each) is None
        assert pool._known(calling).candidate == ""
        assert (pool._compilers.directory / pool._known(plain).candidate).exists()
    assert pool._known(plain) is None


def test_a_program_outlives_the_process_that_measured_it(pool):
    with pool.reserve(DOUBLE, PROBLEM):
        assert isinstance(pool.measure(task("ok", tile=4)), Measurement)
        before, pid = pool._known(task("ok", tile=4)), pool._measuring.pid
        os.kill(pid, signal.SIGKILL)
        assert isinstance(pool.measure(task("ok", tile=4), again=True), Measurement)
        assert pool.confirm(task("ok", tile=4)) is None
        assert pool._known(task("ok", tile=4)) == before
        assert pool._measuring.pid != pid


def test_a_program_that_cannot_be_loaded_is_compiled_where_it_is_measured_and_a_warning_says_why(pool):
    with pool.reserve(DOUBLE, PROBLEM):
        assert isinstance(pool.measure(task("ok", tile=1)), Measurement)
        (pool._compilers.directory / pool._known(task("ok", tile=1)).candidate).write_bytes(b"no program")
        os.kill(pool._measuring.pid, signal.SIGKILL)
        with pytest.warns(RuntimeWarning, match="the measuring process compiles candidates again"):
            assert isinstance(pool.measure(task("ok", tile=1), again=True), Measurement)


def test_the_programs_that_xla_tuned_on_a_gpu_are_kept_for_the_next_search_unless_the_user_keeps_them(monkeypatch):
    on_gpu, on_cpu = (OnDevice(Gpu(index, "uuid", "", GIB), "programs") for index in ("0", ""))
    monkeypatch.delenv("JAX_COMPILATION_CACHE_DIR", raising=False)
    assert on_gpu.environment()["JAX_COMPILATION_CACHE_DIR"].endswith("programs")
    assert "JAX_COMPILATION_CACHE_DIR" not in on_cpu.environment()
    monkeypatch.setenv("JAX_COMPILATION_CACHE_DIR", "/the/users")
    assert on_gpu.environment()["JAX_COMPILATION_CACHE_DIR"] == "/the/users"
    apart = OnDevice(Gpu("0", "uuid", "", GIB), "programs", keep_programs=False)
    assert apart.environment()["JAX_ENABLE_COMPILATION_CACHE"] == "0"
    assert "JAX_ENABLE_COMPILATION_CACHE" not in on_gpu.environment()


def test_without_a_compile_process_the_measuring_process_compiles_and_a_warning_says_why(monkeypatch):
    begin = WorkerProcess.begin

    def refused(process):
        if process._main.module == "scheduler.measure.compile_process":
            return WorkerError("no plugin compiles for this chip")
        return begin(process)

    monkeypatch.setattr(WorkerProcess, "begin", refused)
    with Pool(Gpu(index="", uuid="alone", driver="", free_bytes=4 * GIB), RunnerOptions(workers=2)) as pool:
        with pytest.warns(RuntimeWarning, match="compiles candidates one by one: no plugin") as warned:
            outcomes = [pool.measure(task("ok", tile)) for tile in (1, 2)]
        assert all(isinstance(outcome, Measurement) for outcome in outcomes)
        assert pool.confirm(task("ok")) is None
    assert len(warned) == 1


def test_a_pool_is_closed_while_compile_processes_start(monkeypatch):
    begin, started = WorkerProcess.begin, threading.Event()

    def later(process):
        if process._main.module == "scheduler.measure.compile_process":
            started.wait(60)
        return begin(process)

    monkeypatch.setattr(WorkerProcess, "begin", later)
    with Pool(Gpu(index="", uuid="closed", driver="", free_bytes=4 * GIB), RunnerOptions(workers=2)) as pool:
        processes = pool._compilers._processes
    started.set()
    while len(pool._compilers._refusals) < 2:
        time.sleep(0.05)
    assert all(process.pid is None or gone(process.pid) for process in processes)


def test_a_candidate_that_hangs_while_it_is_traced_keeps_the_device_free_for_others():
    gpu = Gpu(index="", uuid="free", driver="", free_bytes=4 * GIB)
    with Pool(gpu, RunnerOptions(workers=2, compile_timeout_s=600)) as pool, ThreadPoolExecutor(1) as one:
        hanging = one.submit(pool.measure, faulty("stuck ok"))
        assert isinstance(pool.measure(faulty("stuck ok", 1)), Measurement)
        assert not hanging.done()
        pool.close()
        with pytest.raises(WorkerError, match="were stopped"):
            hanging.result()
