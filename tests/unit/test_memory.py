"""What a bench takes of a device's memory: known before it is made, and enough for the problems that are held."""

import dataclasses
import os
from concurrent.futures import ThreadPoolExecutor

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from operations import DOUBLE, GREEDY, DoubleProblem, GreedyProblem
from processes import started

from scheduler.core.errors import DeviceLost, NoCandidate, WorkerError
from scheduler.core.hardware import CPU, GIB, find
from scheduler.core.records import Failure, Measurement
from scheduler.measure import verification
from scheduler.measure.bench import Bench
from scheduler.measure.buffers import least_buffer_bytes, needed_buffer_bytes
from scheduler.measure.gpu import Gpu
from scheduler.measure.pool import Pool
from scheduler.measure.runner import InProcess, RunnerOptions, Task
from scheduler.measure.worker_process import CONTEXT_BYTES
from scheduler.search.tuner import tune
from search_spaces.matmul import MATMUL, MatmulProblem
from search_spaces.problem import Problem, nbytes
from search_spaces.rows.formulas import SOFTMAX, RmsNormProblem, SoftmaxProblem

pytestmark = pytest.mark.slow

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
    assert bench._draws[0].expected[0].shape == (8, 64)
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
    needed = needed_buffer_bytes(problem, CPU)
    assert least_buffer_bytes(problem) < held < needed


@pytest.mark.parametrize("problem", [QWEN, MatmulProblem(131072, 131072, 128), MatmulProblem(16384, 53248, 16384)])
def test_what_memory_holds_once_fits_the_measuring_process(problem):
    assert least_buffer_bytes(problem) < needed_buffer_bytes(problem, H200) < 140 * GIB - CONTEXT_BYTES


def test_results_that_each_need_the_next_power_of_two_where_xla_autotunes_are_counted_so():
    """65536 x 65536 x 4096 in int8: results of 2^34 bytes, in regions of 2^35."""
    exact = MatmulProblem(65536, 65536, 4096, dtype="int8", out_dtype="int32")
    assert nbytes(exact.result()) == 2**34
    assert needed_buffer_bytes(exact, H200) > 2**36
    smaller = dataclasses.replace(exact, m=65024)
    assert 2 * needed_buffer_bytes(smaller, H200) < 1.2 * needed_buffer_bytes(exact, H200)


def greedy(**fields):
    return Task(GREEDY, GreedyProblem(**fields), "scripted", {}, 2)


@pytest.fixture(scope="module")
def pool():
    with Pool(Gpu(index="", uuid="memory", driver="", free_bytes=2 * GIB), RunnerOptions(workers=2)) as pool:
        yield started(pool)


def small(tile):
    return Task(DOUBLE, DoubleProblem(8), "scripted", {"tile": tile, "behave": "ok"}, 2)


def test_a_problem_joins_those_held_where_memory_holds_all_their_benches():
    least, some, large = DoubleProblem(8), DoubleProblem(5 * 2**22), DoubleProblem(2**25)
    with Pool(Gpu(index="", uuid="joining", driver="", free_bytes=3 * GIB), RunnerOptions(workers=1)) as pool:
        memory = pool._memory_bytes
        assert (
            needed_buffer_bytes(some, CPU) + needed_buffer_bytes(least, CPU)
            <= memory
            < 2 * needed_buffer_bytes(some, CPU)
        )
        assert pool._can_reserve((DOUBLE, large, "cold"), False), "nothing is held"
        with pool.reserve(DOUBLE, some):
            assert pool._can_reserve((DOUBLE, least, "cold"), False)
            assert not pool._can_reserve((DOUBLE, DoubleProblem(5 * 2**22 + 8), "cold"), False)
            assert not pool._can_reserve((DOUBLE, least, "cold"), True), "it is to be held by itself"
        with pool.reserve(DOUBLE, least, exclusive=True):
            assert not pool._can_reserve((DOUBLE, some, "cold"), False)
        with pytest.raises(NoCandidate), pool.reserve(DOUBLE, DoubleProblem(2**32)):
            pass


def test_problems_of_two_sizes_at_once_are_measured(pool):
    large = Task(DOUBLE, DoubleProblem(2**24), "scripted", {"tile": 1, "behave": "ok"}, 2)
    tasks = [small(1), large, small(2), small(4), large]
    with ThreadPoolExecutor(5) as threads:
        assert all(isinstance(outcome, Measurement) for outcome in threads.map(pool.measure, tasks))


def test_what_finds_no_memory_is_tried_again_in_a_fresh_process_and_then_has_failed(pool):
    before = pool._measuring.pid
    outcome = pool.measure(greedy())
    assert isinstance(outcome, Failure)
    assert outcome.stage == "memory"
    assert pool._measuring.pid != before
    assert isinstance(pool.measure(dataclasses.replace(greedy(), backend="xla")), Measurement)


def test_what_waits_for_memory_before_it_says_that_there_is_none_does_not_hang(pool, monkeypatch):
    """As XLA's allocator on a GPU: in a run, whose limit follows from what ran before."""
    monkeypatch.setattr("scheduler.measure.conversation.RUN_LIMIT_S", 1.0)
    monkeypatch.setattr("scheduler.measure.conversation.ALLOCATOR_RETRY_S", 60.0)
    waiting = greedy(waits_s=2)
    assert isinstance(pool.measure(dataclasses.replace(waiting, backend="xla")), Measurement)
    assert pool.measure(waiting).stage == "memory"


def test_what_no_memory_holds_is_said_before_anything_runs(pool):
    problem = MatmulProblem(2**20, 2**20, 8)
    for runner in (pool, InProcess()):
        with pytest.raises(NoCandidate, match=r"take 2048 GiB of memory, and the device has"):
            tune(MATMUL, problem, runner=runner)


def test_a_measuring_process_that_cannot_be_replaced_is_an_error_until_one_starts_again(monkeypatch):
    with Pool(Gpu(index="", uuid="lost", driver="", free_bytes=2 * GIB), RunnerOptions(workers=1)) as pool:
        monkeypatch.setattr("scheduler.measure.worker_process.RESTART_PAUSES_S", (0.0,))
        with monkeypatch.context() as patch:
            patch.setattr(pool._measuring, "begin", lambda: WorkerError("the device is full"))
            pool._detected_target()
            pool._measuring._child.kill()
            for _ in range(2):
                with pytest.raises(DeviceLost, match="no measuring process starts on the device: the device is full"):
                    pool.measure(small(1))
        assert isinstance(pool.measure(small(1)), Measurement), "the next one finds what can be started"


def test_the_memory_that_the_measuring_process_may_take_is_what_is_free(monkeypatch):
    monkeypatch.setenv("XLA_PYTHON_CLIENT_MEM_FRACTION", "0.9")  # for the user's programs
    with Pool(Gpu("", "shares", "", 8 * GIB, total_bytes=16 * GIB), RunnerOptions(workers=1)) as pool:
        pool._detected_target()
        with open(f"/proc/{pool._measuring.pid}/environ", "rb") as file:
            told = dict(line.split(b"=", 1) for line in file.read().split(b"\0") if b"=" in line)
        assert float(told[b"XLA_CLIENT_MEM_FRACTION"]) == pytest.approx((8 - 0.5) / 16, abs=1e-4)
        assert b"XLA_PYTHON_CLIENT_MEM_FRACTION" not in told
    assert os.environ["XLA_PYTHON_CLIENT_MEM_FRACTION"] == "0.9"


def test_an_operation_that_does_not_say_how_it_is_cut_is_compared_whole():
    assert Problem.at_rows(DoubleProblem(8), np.array([0], np.int32)) is None
