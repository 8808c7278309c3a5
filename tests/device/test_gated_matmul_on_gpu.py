"""The gated product's GPU kernel, compiled and run: every sampled legal schedule is right."""

import pytest
from samples import of_each_part, parts_without_any

from search_spaces.gated_matmul import GATED_MATMUL, GatedMatmulProblem
from search_spaces.matmul.hopper.schedule import PING_PONG

PROBLEMS = [
    GatedMatmulProblem(1024, 1024, 1024),
    GatedMatmulProblem(640, 384, 512, transpose_w=True, pair=True, bias="bfloat16", activation="gelu"),
    GatedMatmulProblem(640, 384, 512, pair=True, bias="float32", dtype="float16"),
    GatedMatmulProblem(640, 384, 512, transpose_w=True, activation="relu"),
    GatedMatmulProblem(16, 4096, 2048),
    GatedMatmulProblem(1, 2048, 4096, transpose_w=True, pair=True),
    GatedMatmulProblem(33, 1000, 4104, bias="bfloat16"),
    GatedMatmulProblem(777, 333, 555, bias="bfloat16"),
    GatedMatmulProblem(1000, 1000, 1000, pair=True),
    GatedMatmulProblem(1000, 1004, 1000, transpose_w=True),
    GatedMatmulProblem(64, 64, 16384, bias="float32"),
    GatedMatmulProblem(1384, 2600, 512, transpose_w=True),
    GatedMatmulProblem(5, 20, 33),
]
# Parts of the space: of each that a problem has, the model's first and some others run.
PARTS = {
    "plain": lambda s: (
        not ({"swap_ab", "split_k", "delay_release"} & set(s)) and s["consumers"] not in ("one", *PING_PONG)
    ),
    "swap_ab": lambda s: "swap_ab" in s,
    "split-K": lambda s: "split_k" in s,
    "cluster split-K": lambda s: s["cluster"] == "split_k",
    "multicast": lambda s: s["cluster"] in ("m", "n"),
    "one consumer": lambda s: s["consumers"] == "one",
    "ping-pong": lambda s: s["consumers"] in PING_PONG,
    "delay_release": lambda s: "delay_release" in s and s["consumers"] not in PING_PONG,
    "most accumulators": lambda s: s["tile_m"] * s["tile_n"] > 128 * 128,
}


@pytest.mark.parametrize("problem", PROBLEMS, ids=str)
def test_sampled_schedules_agree_with_the_reference(pool, all_right, problem):
    all_right(of_each_part(GATED_MATMUL, problem, pool.hardware, PARTS, first=1, others=2))


def test_every_part_of_the_space_has_schedules_among_the_problems(pool):
    assert not parts_without_any(GATED_MATMUL, PROBLEMS, pool.hardware, PARTS)
