"""Several results of the Hopper matmul on a CPU: which subtile is whose, in words, in bytes, interpreted."""

import hopper
import numpy as np
import pytest
from hopper_matmul import KERNEL, TARGET, footprint, interpreted, schedule
from test_hopper_matmul import sample

from scheduler.model.cost import CostModel
from scheduler.model.pruning import prune
from search_spaces import Columns
from search_spaces.matmul.problem import MatmulProblem

pytestmark = pytest.mark.slow_but_first

# Queries, keys and values of Llama-3-8B.
QKV = [MatmulProblem(m, 6144, 4096, split_sizes="4096+1024+1024") for m in (1, 16, 64, 256, 4096)]
OTHERS = [
    MatmulProblem(1000, 1120, 512, split_sizes="96+1024", bias="bfloat16", activation="gelu"),
    MatmulProblem(1001, 1097, 1000, transpose_b=True, split_sizes="512+512+73"),
    MatmulProblem(64, 4096, 8192, batch=2, split_sizes="64+4032", out_dtype="float32"),
    MatmulProblem(
        2048, 4096, 1024, dtype="float8_e4m3fn", out_dtype="bfloat16", transpose_b=True, split_sizes="2048+2048"
    ),
]


def test_results_that_start_anywhere_are_left_to_the_library_in_words():
    assert KERNEL.supports(MatmulProblem(64, 256, 64, split_sizes="96+64+96"), TARGET) is None
    said = KERNEL.supports(MatmulProblem(64, 256, 64, split_sizes="80+16+160"), TARGET)
    assert said == "writes results side by side that start at multiples of 32 columns, not of 16"


@pytest.mark.parametrize("problem", QKV, ids=str)
def test_of_results_at_multiples_of_the_widest_subtile_the_space_is_that_of_the_product(problem):
    (split, _), (joined, _) = (KERNEL.space(p, TARGET).legal() for p in (problem, problem.joined))
    assert len(split) == len(joined)


def test_a_subtile_belongs_to_one_result():
    for sizes, widest in (("4096+1024+1024", 128), ("64+6080", 64), ("96+6048", 32)):
        problem = MatmulProblem(16, 6144, 4096, split_sizes=sizes)
        points, _ = KERNEL.space(problem, TARGET).legal()
        stored = points.split_k == 1
        assert (problem.results_start % np.where(points.swap_ab, 64, points.epi_tile_n)[stored] == 0).all()
        assert points.epi_tile_n[stored & ~points.swap_ab].max() <= widest
        assert points.swap_ab[stored].any() == (widest >= 64)
    assert (KERNEL.space(MatmulProblem(16, 1024, 65536, split_sizes="96+928"), TARGET).legal()[0].split_k > 1).any()


@pytest.mark.parametrize("problem", QKV + OTHERS, ids=str)
def test_onchip_bytes_are_what_lowering_asks_for(problem):
    if reason := KERNEL.supports(problem, TARGET):
        pytest.fail(reason)
    schedules = sample(problem, 5, seed=str(problem))
    predictions = footprint(problem, Columns.of(schedules)).onchip_bytes
    for one, predicted in zip(schedules, predictions, strict=True):
        hopper.check_onchip_bytes(KERNEL, problem, one, predicted)


@pytest.mark.parametrize("problem", QKV, ids=str)
def test_the_models_first_choice_is_one_kernel_that_writes_every_result(problem):
    first = prune(KERNEL, problem, hopper.H200, CostModel(hopper.H200)).candidates()[0]
    one = next(
        KERNEL.space(problem, TARGET).schedules(Columns.of([KERNEL.space(problem, TARGET).decode(first.schedule)]))
    )
    text = hopper.lower(KERNEL, problem, one).as_text()
    assert text.count("stablehlo.custom_call") == 1
    assert "stablehlo.slice" not in text
    assert footprint(problem, Columns.of([one])).launches[0] == 1


def test_splits_of_k_are_reduced_into_each_result():
    problem = MatmulProblem(64, 1024, 4096, split_sizes="512+256+256")
    one = schedule(tile_m=64, consumers="cooperative_n", split_k=4)
    found, joined = (footprint(p, Columns.of([one])) for p in (problem, problem.joined))
    assert found.copied_bytes[0] == joined.copied_bytes[0]
    assert (found.launches[0], joined.launches[0]) == (4, 2)


SPLIT = {  # name: problem, schedule, cores
    "boundaries at the edges of tiles, ragged rows": (MatmulProblem(136, 512, 128, split_sizes="256+128+128"), {}, 4),
    "boundaries within tiles": (
        MatmulProblem(136, 320, 128, split_sizes="64+192+64"),
        {"tile_n": 256, "consumers": "cooperative_n"},
        4,
    ),
    "batch, bias, activation": (
        MatmulProblem(72, 320, 128, batch=2, split_sizes="128+192", bias="float32", activation="silu"),
        {"tile_m": 64, "consumers": "cooperative_n"},
        3,
    ),
    "ragged, stored by threads": (
        MatmulProblem(130, 197, 90, batch=2, split_sizes="96+64+37"),
        {"tile_n": 96, "epi_tile_n": 32},
        4,
    ),
    "a last result narrower than a swizzled row": (
        MatmulProblem(128, 200, 128, split_sizes="128+64+8"),
        {"cluster": "m", "tile_m": 64, "tile_n": 64, "consumers": "one"},
        2,
    ),
    "ping-pong": (
        MatmulProblem(128, 448, 128, split_sizes="64+320+64"),
        {"consumers": "ping_pong", "tile_m": 64, "delay_release": 1},
        2,
    ),
    "swap_ab": (
        MatmulProblem(16, 384, 320, split_sizes="192+128+64"),
        {"swap_ab": True, "tile_m": 16, "tile_n": 128, "tile_k": 64, "consumers": "cooperative_n"},
        4,
    ),
    "swap_ab, one row, one consumer, b transposed": (
        MatmulProblem(1, 320, 128, split_sizes="192+64+64", transpose_b=True),
        {"swap_ab": True, "tile_m": 8, "tile_n": 64, "consumers": "one", "delay_release": 1},
        4,
    ),
    "cluster split-K": (
        MatmulProblem(128, 512, 512, split_sizes="256+128+128"),
        {"cluster": "split_k", "stages": 4},
        12,
    ),
    "swap_ab, cluster split-K": (
        MatmulProblem(16, 256, 512, split_sizes="128+64+64"),
        {"swap_ab": True, "tile_m": 16, "consumers": "cooperative_n", "cluster": "split_k", "stages": 4},
        8,
    ),
    "split-K, with a bias": (
        MatmulProblem(24, 320, 640, split_sizes="96+64+160", bias="bfloat16", activation="gelu"),
        {"swap_ab": True, "tile_m": 24, "tile_n": 64, "consumers": "one", "split_k": 3},
        5,
    ),
}


@interpreted
@pytest.mark.parametrize("name", SPLIT)
def test_each_result_is_right_to_its_last_column(name):
    problem, fields, cores = SPLIT[name]
    actual, expected = hopper.interpret(KERNEL, problem, schedule(**fields), cores=cores)
    tolerance = problem.tolerance()
    assert [c.shape for c in actual] == [s.shape for s in problem.result()]
    for ours, right in zip(actual, expected, strict=True):
        np.testing.assert_allclose(ours, right, rtol=tolerance.relative, atol=tolerance.absolute)


@interpreted
def test_padded_results_are_cut_out_one_by_one(tiled_only):
    problem = MatmulProblem(130, 197, 90, batch=2, split_sizes="96+64+37")
    actual, expected = hopper.interpret(KERNEL, problem, schedule(tile_n=96, epi_tile_n=32), cores=4)
    tolerance = problem.tolerance()
    for ours, right in zip(actual, expected, strict=True):
        np.testing.assert_allclose(ours, right, rtol=tolerance.relative, atol=tolerance.absolute)


@interpreted
def test_no_warpgroup_touches_what_another_still_uses(capfd):
    problem = MatmulProblem(128, 256, 128, split_sizes="64+192")
    one = schedule(tile_m=64, consumers="one", tile_n=128)
    actual, expected = hopper.interpret(KERNEL, problem, one, cores=2, detect_races=True)
    tolerance = problem.tolerance()
    for ours, right in zip(actual, expected, strict=True):
        np.testing.assert_allclose(ours, right, rtol=tolerance.relative, atol=tolerance.absolute)
    assert "RACE" not in capfd.readouterr().out


def test_lowering_a_single_result_knows_nothing_of_several():
    joined, split = (
        hopper.lower(KERNEL, p, schedule()).as_text()
        for p in (MatmulProblem(256, 256, 256), MatmulProblem(256, 256, 256, split_sizes="128+128"))
    )
    assert "tensor<256x256xbf16>, tensor<256x256xbf16>) -> tensor<256x256xbf16>" in joined
    assert "-> (tensor<256x128xbf16>, tensor<256x128xbf16>)" in split
