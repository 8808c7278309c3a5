"""The GPU kernels of the matrix product, compiled and run: every sampled legal schedule is right."""

import random
from concurrent.futures import ThreadPoolExecutor

import pytest

from scheduler.cost import CostModel
from scheduler.prune import prune
from scheduler.record import Measurement
from scheduler.tuner import tune
from scheduler.workers import Task
from search_spaces.matmul import MATMUL, MatmulProblem

PROBLEMS = [
    MatmulProblem(1024, 1024, 1024),
    MatmulProblem(1024, 1024, 1024, dtype="float16", out_dtype="float32"),
    MatmulProblem(640, 384, 512, transpose_a=True),
    MatmulProblem(640, 384, 512, transpose_b=True),
    MatmulProblem(640, 384, 512, transpose_a=True, transpose_b=True),
    MatmulProblem(16, 4096, 2048),
    MatmulProblem(1, 4096, 2048, transpose_b=True),
    MatmulProblem(1000, 1000, 1000),
    MatmulProblem(777, 333, 555, out_dtype="float32"),
    MatmulProblem(5, 7, 3),
    MatmulProblem(333, 777, 129, transpose_a=True, transpose_b=True),
    MatmulProblem(256, 192, 320, batch=5),
    MatmulProblem(4096, 64, 8192),
    MatmulProblem(512, 640, 384, dtype="float32", transpose_b=True),
    MatmulProblem(1384, 2600, 512, transpose_b=True),
]


@pytest.mark.parametrize("problem", PROBLEMS, ids=str)
def test_sampled_schedules_agree_with_the_reference(pool, problem):
    kernel = MATMUL.kernel("mosaic_gpu")
    if reason := kernel.supports(problem, pool.hardware.target):
        pytest.skip(reason)
    candidates = prune(kernel, problem, pool.hardware, CostModel(pool.hardware)).candidates()
    sample = candidates[:4] + random.Random(0).sample(candidates, min(26, len(candidates)))
    tasks = [Task(MATMUL, problem, c.backend, c.schedule, 3) for c in sample]
    with ThreadPoolExecutor(pool.slots) as threads:
        outcomes = list(threads.map(pool.measure, tasks))
    failed = [
        (task.schedule, outcome)
        for task, outcome in zip(tasks, outcomes, strict=True)
        if not isinstance(outcome, Measurement)
    ]
    assert not failed
    assert all(outcome.clock == "cupti" for outcome in outcomes)


def test_a_search_ends_with_a_schedule_near_the_librarys_time(pool):
    record = tune(MATMUL, MatmulProblem(4096, 4096, 4096), budget=64, runner=pool)
    library = record.best(frozenset({"xla"})).measurement.median_s
    pallas = record.best(frozenset({"mosaic_gpu"})).measurement.median_s
    assert pallas <= 1.03 * library
