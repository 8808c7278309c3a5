"""The scaled product's GPU kernel, compiled and run: every sampled legal schedule is right."""

import pytest
from samples import of_each_part, parts_without_any

from search_spaces.matmul.hopper.schedule import PING_PONG
from search_spaces.scaled_matmul import SCALED_MATMUL, ScaledMatmulProblem

PROBLEMS = [
    ScaledMatmulProblem(1024, 1024, 1024, transpose_b=True),
    ScaledMatmulProblem(4096, 7168, 2048, transpose_b=True),
    ScaledMatmulProblem(640, 384, 512, transpose_b=True, a_scales="rows"),
    ScaledMatmulProblem(640, 384, 512, transpose_b=True, b_scales="rows", dtype="float8_e5m2"),
    ScaledMatmulProblem(640, 384, 512, transpose_b=True, a_scales="rows", b_scales="rows", out_dtype="float32"),
    ScaledMatmulProblem(2048, 3072, 1024, transpose_b=True, a_scales="rows", b_scales="rows"),
    ScaledMatmulProblem(16, 4096, 7168, transpose_b=True),
    ScaledMatmulProblem(777, 333, 560, transpose_b=True),
    ScaledMatmulProblem(1001, 1003, 1000, transpose_b=True, out_dtype="float16"),
    ScaledMatmulProblem(5, 20, 33, transpose_b=True),
    ScaledMatmulProblem(128, 256, 65536, transpose_b=True, out_dtype="float32"),
]
# Parts of the space: of each that a problem has, the model's first and some others run.
PARTS = {
    "cooperative": lambda s: s["consumers"] in ("cooperative_m", "cooperative_n"),
    "one consumer": lambda s: s["consumers"] == "one",
    "ping-pong": lambda s: s["consumers"] in PING_PONG,
    "multicast": lambda s: s["cluster"] in ("m", "n"),
    "most accumulators": lambda s: s["tile_m"] * s["tile_n"] >= 128 * 128,
}


@pytest.mark.parametrize("problem", PROBLEMS, ids=str)
def test_sampled_schedules_agree_with_the_reference(pool, all_right, problem):
    all_right(of_each_part(SCALED_MATMUL, problem, pool.hardware, PARTS, first=1, others=2))


def test_every_part_of_the_space_has_schedules_among_the_problems(pool):
    assert not parts_without_any(SCALED_MATMUL, PROBLEMS, pool.hardware, PARTS)
