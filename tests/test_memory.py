"""What a bench takes of a device's memory: known before it is made, and divided among the workers that hold it."""

import dataclasses
import os
from concurrent.futures import ThreadPoolExecutor

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from operations import CROWDED, DOUBLE, CrowdedProblem, DoubleProblem

from scheduler.core.errors import NoCandidate, WorkerError
from scheduler.core.hardware import CPU, GIB, find
from scheduler.core.records import Failure, Measurement
from scheduler.measure import verification
from scheduler.measure.bench import Bench
from scheduler.measure.gpu import Gpu
from scheduler.measure.pool import Pool
from scheduler.measure.rotation import least_bytes, needed_bytes
from scheduler.measure.runner import InProcess, RunnerOptions, Task
from scheduler.measure.worker_process import CONTEXT_BYTES
from scheduler.search.tuner import tune
from search_spaces.matmul import MATMUL, MatmulProblem
from search_spaces.problem import Problem, nbytes
from search_spaces.rms_norm import RmsNormProblem
from search_spaces.softmax import SOFTMAX, SoftmaxProblem

H200 = find("NVIDIA H200")
QWEN = MatmulProblem(8192, 152064, 1024)

CUT = [
    MatmulProblem(24, 40, 16),
    MatmulProblem(24, 40, 16, dtype="float32", transpose_a=True, transpose_b=True),
    MatmulProblem(24, 8, 16, batch=3, bias="float32", activation="gelu", residual="bfloat16"),
    MatmulProblem(24, 8, 16, batch=3, transpose_a=True, residual="bfloat16"),
    MatmulProblem(24, 16, 32, dtype="int8", out_dtype="int32"),
    SoftmaxProblem(24, 33),
    RmsNormProblem(24, 33, "float32"),
]


@pytest.mark.parametrize("problem", CUT, ids=str)
def test_the_reference_of_some_rows_is_those_rows_of_the_reference(problem):
    rows = np.array([0, 3, 4, 17, 23], np.int32)
    below, take = problem.at_rows(rows)
    inputs = problem.inputs(0)
    part = take(inputs)
    assert [(x.shape, x.dtype) for x in part] == [(x.shape, x.dtype) for x in below.operands()]
    whole = problem.reference(*inputs)
    assert jnp.allclose(below.reference(*part), jnp.take(whole, rows, axis=-2), rtol=1e-6, atol=1e-6)


def test_rows_that_are_compared_are_one_of_each_run_the_first_and_the_last_among_them():
    rows = verification.compared_rows(QWEN)
    each = -(-QWEN.m // len(rows))
    assert len(rows) * QWEN.n <= verification.MOST_COMPARED
    assert (rows[0], rows[-1]) == (0, QWEN.m - 1)
    assert np.all(np.diff(rows) > 0)
    assert np.diff(rows).max() < 2 * each
    assert each < 16, "a tile of 16 rows and more is looked at"
    assert verification.compared_rows(MatmulProblem(8192, 8192, 1024)) is None
    assert verification.compared_rows(DoubleProblem(2**28)) is None, "an operation that does not say how it is cut"


@pytest.fixture
def sampled(monkeypatch):
    monkeypatch.setattr(verification, "MOST_COMPARED", 64 * 8)


@pytest.mark.usefixtures("sampled")
def test_of_a_large_result_a_wrong_tile_and_a_row_that_was_not_written_are_found():
    problem = MatmulProblem(256, 64, 16, dtype="float32")
    rows, inputs = verification.compared_rows(problem), problem.inputs(0)
    below, take = problem.at_rows(rows)
    expected, right = below.reference(*take(inputs)), problem.reference(*inputs)
    assert expected.shape == (8, 64)
    assert verification.mismatch(right, expected, problem.tolerance(), rows) is None
    tile = right.at[64:128, 16:32].mul(2)
    said = verification.mismatch(tile, expected, problem.tolerance(), rows)
    assert said.startswith(f"{16 * sum((rows >= 64) & (rows < 128))} of 512 elements are off")
    row = int(said.split("at (")[1].split(",")[0])
    assert row in rows
    assert 64 <= row < 128
    unseen = next(i for i in range(256) if i not in rows)
    said = verification.mismatch(right.at[unseen, 3].set(jnp.nan), expected, problem.tolerance(), rows)
    assert said == "1 of 256 rows hold elements that are NaN, as where nothing was written"


@pytest.mark.usefixtures("sampled")
def test_a_bench_of_a_large_result_keeps_a_small_reference_and_measures():
    problem = MatmulProblem(256, 64, 16, dtype="float32")
    bench = Bench(MATMUL, problem, CPU)
    assert isinstance(bench.measure("xla", {}, 2), Measurement)
    assert bench._draw.expected[0].shape == (8, 64)
    assert bench.confirm("xla", {}) is None


def test_operands_that_are_drawn_in_slabs_are_normal_and_never_the_same_twice():
    for problem in (MatmulProblem(8, 2**22 + 1, 7), MatmulProblem(2**21, 8, 9, dtype="int8", out_dtype="int32")):
        (large,) = (x for x in problem.inputs(0) if x.size > 2**24)
        numbers = np.asarray(large, np.float32)
        scale = 127 / 4 if problem.dtype == "int8" else 1.0
        assert abs(numbers.mean()) < 0.01 * scale
        assert abs(numbers.std() / scale - 1) < 0.02
        first = {row.tobytes() for row in np.asarray(large[: 2**10, :8])}
        assert len(first) == min(2**10, large.shape[0])


@pytest.mark.parametrize("problem", [MatmulProblem(1024, 2048, 512), SoftmaxProblem(2048, 1000)], ids=str)
def test_what_a_bench_holds_is_less_than_was_estimated_and_not_by_much(problem):
    operation = MATMUL if isinstance(problem, MatmulProblem) else SOFTMAX

    def alive():
        return sum(x.nbytes for x in jax.live_arrays())

    before = alive()
    bench = Bench(operation, problem, CPU)
    assert isinstance(bench.measure("xla", {}, 3), Measurement)
    held = alive() - before
    assert bench.confirm("xla", {}) is None
    needed = needed_bytes(problem, CPU)
    assert least_bytes(problem) < held < needed


def test_several_workers_of_an_h200_hold_a_product_whose_references_alone_were_once_too_much():
    """8192 x 152064 x 1024: a result of 2.5 GB, whose whole reference took 5 GB in each of 15 workers."""
    assert 2 * least_bytes(QWEN) < needed_bytes(QWEN, H200) < 140 * GIB / 10 - CONTEXT_BYTES


@pytest.mark.parametrize("problem", [QWEN, MatmulProblem(131072, 131072, 128), MatmulProblem(16384, 53248, 16384)])
def test_what_memory_holds_once_fits_at_least_one_worker(problem):
    assert least_bytes(problem) < needed_bytes(problem, H200) < 140 * GIB - CONTEXT_BYTES


def test_one_worker_holds_a_product_whose_results_each_need_the_next_power_of_two_where_xla_autotunes():
    """65536 x 65536 x 4096 in int8: results of 2^34 bytes, in regions of 2^35."""
    share = 140 * GIB // 2 - CONTEXT_BYTES
    exact = MatmulProblem(65536, 65536, 4096, dtype="int8", out_dtype="int32")
    assert nbytes(exact.result()) == 2**34
    assert needed_bytes(exact, H200) > share
    smaller = dataclasses.replace(exact, m=65024)
    assert 2 * needed_bytes(smaller, H200) < 1.2 * needed_bytes(exact, H200)


def noted(place, **fields):
    place.mkdir(exist_ok=True)
    return Task(CROWDED, CrowdedProblem(place=str(place), **fields), "scripted", {}, 2)


@pytest.fixture(scope="module")
def pool():
    with Pool(Gpu(index="", uuid="memory", driver="", free_bytes=2 * GIB), RunnerOptions(workers=2)) as pool:
        pool._division.settle()
        yield pool


def large(pool):
    """A problem that two workers of `pool` cannot hold at once, and one can."""
    problem = DoubleProblem(2**24)
    assert pool._shares.bytes(2) < needed_bytes(problem, CPU) < pool._shares.bytes(1)
    return Task(DOUBLE, problem, "scripted", {"tile": 1, "behave": "ok"}, 2)


def small(tile):
    return Task(DOUBLE, DoubleProblem(8), "scripted", {"tile": tile, "behave": "ok"}, 2)


@pytest.mark.one_jax
def test_as_many_workers_hold_a_problem_as_fit_and_the_next_problem_has_them_all_again(pool):
    for _ in range(2):
        with ThreadPoolExecutor(2) as threads:
            assert pool.capacity(DOUBLE, DoubleProblem(8)) == 2
            assert all(isinstance(m, Measurement) for m in threads.map(pool.measure, [small(1), small(2)]))
            pool._division.settle()
            assert sum(worker.pid is not None for worker in pool._workers) == 2
            task = large(pool)
            assert pool.capacity(task.operation, task.problem) == 1
            library = dataclasses.replace(task, backend="xla", schedule={})
            assert all(isinstance(m, Measurement) for m in threads.map(pool.measure, [task, library]))
            pool._division.settle()
            assert sum(worker.pid is not None for worker in pool._workers) == 1
            assert pool.confirm(task) is None
            assert isinstance(pool.measure(task, again=True), Measurement)


@pytest.mark.one_jax
def test_problems_of_two_sizes_at_once_wait_for_each_other(pool):
    tasks = [small(1), large(pool), small(2), small(4), large(pool)]
    with ThreadPoolExecutor(5) as threads:
        assert all(isinstance(outcome, Measurement) for outcome in threads.map(pool.measure, tasks))


@pytest.mark.one_jax
def test_a_problem_joins_those_held_where_as_many_workers_hold_it_and_a_share_has_the_memory():
    least, some, large = DoubleProblem(8), DoubleProblem(5 * 2**21), DoubleProblem(2**25)
    with Pool(Gpu(index="", uuid="joining", driver="", free_bytes=4 * GIB), RunnerOptions(workers=2)) as pool:
        pool._division.settle()
        share = pool._shares.bytes(2)
        assert needed_bytes(some, CPU) + needed_bytes(least, CPU) <= share < 2 * needed_bytes(some, CPU)
        assert pool.capacity(DOUBLE, large) == 1
        assert pool.joins(DOUBLE, large), "nothing is held"
        with pool.holding(DOUBLE, some):
            assert pool.joins(DOUBLE, least)
            assert pool.joins(DOUBLE, some), "it is held"
            assert not pool.joins(DOUBLE, DoubleProblem(5 * 2**21 + 8)), "a share has not the memory for both"
            assert not pool.joins(DOUBLE, large), "fewer workers hold it"
        with pool.holding(DOUBLE, large):
            assert not pool.joins(DOUBLE, least)
        with pytest.raises(NoCandidate):
            pool.joins(DOUBLE, DoubleProblem(2**32))


@pytest.mark.one_jax
def test_what_finds_no_memory_beside_others_is_tried_alone(pool, tmp_path):
    with ThreadPoolExecutor(2) as threads:
        library = dataclasses.replace(noted(tmp_path), backend="xla")
        assert isinstance(pool.measure(library), Measurement)
        assert all(isinstance(m, Measurement) for m in threads.map(pool.measure, [noted(tmp_path)] * 2))
    assert pool.capacity(CROWDED, noted(tmp_path).problem) == 1, "it needs more than was estimated"
    assert pool.capacity(DOUBLE, DoubleProblem(8)) == 2


@pytest.mark.one_jax
def test_what_finds_no_memory_even_alone_has_failed_and_the_others_go_on(pool, tmp_path):
    greedy = noted(tmp_path, greedy=True)
    for _ in range(2):
        outcome = pool.measure(greedy)
        assert isinstance(outcome, Failure)
        assert outcome.stage == "memory"
    assert pool.capacity(CROWDED, greedy.problem) == 2
    assert isinstance(pool.measure(dataclasses.replace(greedy, backend="xla")), Measurement)


def test_what_waits_for_memory_before_it_says_that_there_is_none_does_not_hang(pool, tmp_path, monkeypatch):
    """As XLA's allocator on a GPU: in a run, whose limit follows from what ran before."""
    monkeypatch.setattr("scheduler.measure.limits.RUN_LIMIT_S", 1.0)
    monkeypatch.setattr("scheduler.measure.limits.ALLOCATOR_RETRY_S", 2.0)
    waiting = noted(tmp_path, waits_s=2)
    assert isinstance(pool.measure(dataclasses.replace(waiting, backend="xla")), Measurement)
    with ThreadPoolExecutor(2) as threads:
        assert all(isinstance(m, Measurement) for m in threads.map(pool.measure, [waiting] * 2))
    assert pool.capacity(CROWDED, waiting.problem) == 1


def test_a_librarys_compilation_that_does_not_end_beside_others_is_tried_alone(tmp_path):
    """As XLA's autotuner, which waits for memory for each algorithm."""
    gpu = Gpu(index="", uuid="autotuned", driver="", free_bytes=2 * GIB)
    with Pool(gpu, RunnerOptions(workers=2, compile_timeout_s=10)) as pool:
        pool._division.settle()
        library = dataclasses.replace(noted(tmp_path, autotuned=True), backend="xla")
        for worker in pool._workers:
            (tmp_path / str(worker.pid)).touch()
        assert isinstance(pool.measure(library), Measurement)
        assert pool.capacity(CROWDED, library.problem) == 1, "it needs more than was estimated"


def test_what_no_memory_holds_is_said_before_anything_runs(pool):
    problem = MatmulProblem(2**20, 2**20, 8)
    for runner in (pool, InProcess()):
        with pytest.raises(NoCandidate, match=r"take 2048 GiB of memory, and the device has"):
            tune(MATMUL, problem, runner=runner)


@pytest.mark.one_jax
def test_a_worker_that_cannot_be_replaced_is_done_without_and_the_last_one_is_an_error(monkeypatch):
    with Pool(Gpu(index="", uuid="lost", driver="", free_bytes=2 * GIB), RunnerOptions(workers=2)) as pool:
        pool._division.settle()
        first, second = pool._workers
        monkeypatch.setattr("scheduler.measure.worker_process.RESTART_PAUSES_S", (0.0,))

        def refused(share_bytes):
            return WorkerError("the device is full")

        monkeypatch.setattr(first, "begin", refused)
        first._child.kill()
        outcomes = [pool.measure(small(tile)) for tile in (1, 2, 4)]
        assert all(isinstance(outcome, Measurement) for outcome in outcomes)
        assert pool._division.living == {second}
        with monkeypatch.context() as patch:
            patch.setattr(second, "begin", refused)
            second._child.kill()
            with pytest.raises(WorkerError, match="were lost, and the device takes no new ones"):
                pool.measure(small(1))
        assert isinstance(pool.measure(small(1)), Measurement), "the next one finds what can be started"


def test_the_memory_that_a_worker_may_take_is_its_share(monkeypatch):
    monkeypatch.setenv("XLA_PYTHON_CLIENT_MEM_FRACTION", "0.9")  # for the user's programs
    with Pool(Gpu("", "shares", "", 8 * GIB, total_bytes=16 * GIB), RunnerOptions(workers=2)) as pool:
        pool._division.settle()
        with open(f"/proc/{pool._workers[0].pid}/environ", "rb") as file:
            told = dict(line.split(b"=", 1) for line in file.read().split(b"\0") if b"=" in line)
        assert float(told[b"XLA_CLIENT_MEM_FRACTION"]) == pytest.approx((4 - 0.5) / 16, abs=1e-4)
        assert b"XLA_PYTHON_CLIENT_MEM_FRACTION" not in told
    assert os.environ["XLA_PYTHON_CLIENT_MEM_FRACTION"] == "0.9"


def test_an_operation_that_does_not_say_how_it_is_cut_is_compared_whole():
    assert Problem.at_rows(DoubleProblem(8), np.array([0], np.int32)) is None
