"""Products whose columns come in several arrays, compiled and run: each result is right, and none is copied."""

import pytest
from samples import of_each_part
from test_matmul_on_gpu import PARTS

from scheduler.search.tuner import tune
from search_spaces.matmul import MATMUL, MatmulProblem

PROBLEMS = [
    MatmulProblem(1, 6144, 4096, split_sizes="4096+1024+1024"),
    MatmulProblem(16, 6144, 4096, transpose_b=True, split_sizes="4096+1024+1024"),
    MatmulProblem(256, 6144, 4096, split_sizes="4096+1024+1024", bias="bfloat16"),
    MatmulProblem(1000, 1120, 512, split_sizes="96+1024", bias="bfloat16", activation="gelu"),
    MatmulProblem(777, 1097, 1000, batch=2, split_sizes="512+512+73", out_dtype="float32"),
    MatmulProblem(64, 512, 16384, split_sizes="256+192+64"),
]


@pytest.mark.parametrize("problem", PROBLEMS, ids=str)
def test_sampled_schedules_are_right_in_every_result(pool, all_right, problem):
    all_right(of_each_part(MATMUL, problem, pool.hardware, PARTS, first=2, others=3))


def test_queries_keys_and_values_take_less_than_a_product_and_three_slices(pool):
    record = tune(MATMUL, MatmulProblem(4096, 6144, 4096, split_sizes="4096+1024+1024"), budget=24, runner=pool)
    library = record.best(frozenset({"xla"})).measurement.median_s
    pallas = record.best(frozenset({"mosaic_gpu"})).measurement.median_s
    assert pallas <= 0.95 * library
