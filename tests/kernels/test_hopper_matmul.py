"""The Hopper matmul on a CPU: lowered for CUDA, its on-chip memory compared, small products interpreted."""

import dataclasses
import random

import hopper
import jax
import numpy as np
import pytest
from hopper_matmul import FUSED, KERNEL, LARGE, SMALL, TARGET, footprint, interpreted, schedule

from search_spaces import Columns, Target
from search_spaces.matmul.problem import MatmulProblem

pytestmark = pytest.mark.slow_but_first


def sample(problem, count, seed):
    """Points of the legal space: those whose memory the chip has, and those that want more; half of them plain."""
    points, _ = KERNEL.space(problem, TARGET).legal()
    plain = ~points.swap_ab & (points.split_k == 1) & (points.delay_release == 0)
    plain &= (points.consumers == "cooperative_m") | (points.consumers == "cooperative_n")
    draw, chosen = random.Random(seed), []
    for rows in (np.flatnonzero(~plain), np.flatnonzero(plain)):
        chosen += draw.sample(rows.tolist(), min((count + 1) // 2, len(rows)))
    return list(KERNEL.space(problem, TARGET).schedules(points.take(sorted(chosen))))


@pytest.mark.parametrize("problem", LARGE + SMALL + FUSED, ids=str)
def test_onchip_bytes_are_what_lowering_asks_for_and_decide_whether_it_succeeds(problem):
    schedules = sample(problem, 5, seed=str(problem))
    predictions = footprint(problem, Columns.of(schedules)).onchip_bytes
    for one, predicted in zip(schedules, predictions, strict=True):
        hopper.check_onchip_bytes(KERNEL, problem, one, predicted)


def test_the_sample_holds_schedules_of_both_sides_of_the_limit():
    schedules = [(p, one) for p in LARGE + SMALL for one in sample(p, 5, seed=str(p))]
    fits = [footprint(p, Columns.of([one])).onchip_bytes[0] <= hopper.H200.onchip_bytes for p, one in schedules]
    assert len(fits) >= 80
    assert 10 <= sum(fits) <= len(fits) - 10


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
@pytest.mark.parametrize("transpose_a", [False, True])
@pytest.mark.parametrize("transpose_b", [False, True])
@pytest.mark.parametrize("consumers", ["cooperative_m", "cooperative_n"])
def test_both_operands_are_read_as_they_lie_in_memory(dtype, transpose_a, transpose_b, consumers):
    problem = MatmulProblem(512, 512, 512, dtype=dtype, transpose_a=transpose_a, transpose_b=transpose_b)
    text = hopper.lower(KERNEL, problem, schedule(consumers=consumers)).as_text()
    assert "mosaic_gpu" in text
    assert "stablehlo.transpose" not in text
    assert footprint(problem, Columns.of([schedule(consumers=consumers)])).launches[0] == 1


@pytest.mark.parametrize("option", [{"jax_enable_x64": True}, {"jax_numpy_dtype_promotion": "strict"}], ids=str)
def test_a_user_s_defaults_for_types_do_not_reach_into_the_kernel(option):
    ((name, value),) = option.items()
    before = getattr(jax.config, name)
    jax.config.update(name, value)
    try:
        hopper.lower(KERNEL, MatmulProblem(1000, 1024, 1000, batch=3), schedule(cluster="m", grid_minor_dim="m"))
    finally:
        jax.config.update(name, before)


PRODUCTS = {  # name: problem, schedule, cores
    "one tile per block": (MatmulProblem(256, 256, 256), {}, 4),
    "many tiles of one step": (
        MatmulProblem(384, 256, 64),
        {"tile_m": 64, "tile_n": 128, "consumers": "cooperative_n"},
        5,
    ),
    "more stages than steps of a tile": (
        MatmulProblem(512, 384, 64),
        {"tile_n": 64, "grid_minor_dim": "m", "stages": 8},
        3,
    ),
    "cluster along m": (MatmulProblem(256, 384, 320), {"stages": 4, "cluster": "m"}, 5),
    "cluster along n": (MatmulProblem(300, 384, 320), {"cluster": "n", "grid_minor_dim": "m", "grid_tile_width": 2}, 2),
    "a transposed": (MatmulProblem(136, 200, 104, transpose_a=True), {"consumers": "cooperative_n"}, 2),
    "b transposed": (MatmulProblem(136, 200, 104, transpose_b=True), {"consumers": "cooperative_n"}, 2),
    "both transposed": (MatmulProblem(136, 200, 104, transpose_a=True, transpose_b=True), {}, 2),
    "batch, padded": (MatmulProblem(130, 70, 90, batch=3), {"tile_n": 64}, 4),
    "rows of half and a quarter of the widest swizzle": (MatmulProblem(128, 144, 96, transpose_a=True), {}, 4),
    "scalars": (
        MatmulProblem(1, 1, 1),
        {"tile_m": 64, "tile_n": 64, "consumers": "cooperative_n", "epi_tile_n": 32},
        4,
    ),
    "fewer rows than a swizzle": (MatmulProblem(3, 40, 33), {"tile_m": 64, "consumers": "cooperative_n"}, 4),
    "no powers of two": (
        MatmulProblem(192, 320, 128, out_dtype="float32"),
        {"tile_m": 192, "tile_n": 160, "consumers": "cooperative_n", "epi_tile_n": 16},
        4,
    ),
    "float32": (MatmulProblem(128, 128, 96, dtype="float32", transpose_b=True), {"tile_k": 32, "epi_tile_n": 32}, 4),
    "swap_ab": (
        MatmulProblem(16, 256, 320),
        {"swap_ab": True, "tile_m": 16, "tile_n": 256, "tile_k": 256, "consumers": "cooperative_n", "stages": 2},
        4,
    ),
    "swap_ab, one row, one consumer": (
        MatmulProblem(1, 200, 130, out_dtype="float32", transpose_b=True),
        {"swap_ab": True, "tile_m": 8, "tile_n": 64, "consumers": "one"},
        4,
    ),
    "swap_ab, a transposed, batch": (
        MatmulProblem(40, 144, 96, batch=2, transpose_a=True),
        {"swap_ab": True, "tile_m": 64, "consumers": "cooperative_n"},
        3,
    ),
    "swap_ab, float32, rows of 16 bytes": (
        MatmulProblem(12, 108, 96, dtype="float32", transpose_b=True),
        {"swap_ab": True, "tile_m": 16, "tile_k": 32, "consumers": "cooperative_n"},
        2,
    ),
    "swap_ab, split-K": (
        MatmulProblem(24, 136, 640),
        {"swap_ab": True, "tile_m": 24, "tile_n": 64, "consumers": "one", "split_k": 3},
        5,
    ),
    "split-K, none as long as the others": (MatmulProblem(61, 37, 600, transpose_b=True), {"split_k": 4}, 5),
    "split-K, batch, cluster": (
        MatmulProblem(256, 72, 512, batch=2),
        {"tile_n": 64, "split_k": 2, "cluster": "m"},
        4,
    ),
    "8-bit floats": (
        MatmulProblem(72, 48, 300, dtype="float8_e5m2", out_dtype="bfloat16", transpose_b=True),
        {"tile_n": 64, "tile_k": 128},
        2,
    ),
    "8-bit integers, swap_ab, split-K": (
        MatmulProblem(20, 72, 600, dtype="int8", out_dtype="int32", transpose_b=True),
        {"swap_ab": True, "tile_m": 24, "tile_n": 64, "tile_k": 128, "consumers": "one", "split_k": 2},
        4,
    ),
    "one consumer, rows of 208 bytes": (MatmulProblem(64, 104, 96), {"tile_m": 64, "consumers": "one"}, 2),
    "bias, residual, padded": (
        MatmulProblem(60, 72, 64, bias="bfloat16", activation="gelu", residual="bfloat16"),
        {"tile_m": 64, "tile_n": 64, "consumers": "cooperative_n", "epi_tile_n": 16},
        1,
    ),
    "bias of odd rows, wide residual, batch": (
        MatmulProblem(8, 37, 64, batch=2, bias="bfloat16", activation="silu", residual="float32"),
        {"tile_m": 64, "tile_n": 64, "consumers": "one"},
        1,
    ),
    "swap_ab, bias, residual in columns of 16 bytes": (
        MatmulProblem(12, 136, 64, bias="float32", activation="gelu", residual="float16"),
        {"swap_ab": True, "tile_m": 16, "consumers": "cooperative_n"},
        1,
    ),
    "split-K, bias, residual": (
        MatmulProblem(61, 37, 200, bias="float32", activation="relu", residual="bfloat16"),
        {"tile_m": 64, "tile_n": 64, "consumers": "one", "split_k": 2},
        4,
    ),
    "cluster split-K, ragged, the last part shorter": (
        MatmulProblem(120, 100, 450, batch=2),
        {"cluster": "split_k", "consumers": "one", "stages": 2, "epi_tile_n": 32},
        8,
    ),
    "cluster split-K, bias, residual": (
        MatmulProblem(60, 72, 300, bias="bfloat16", activation="silu", residual="float32"),
        {"cluster": "split_k", "tile_m": 64, "consumers": "one"},
        4,
    ),
    "cluster split-K, swap_ab, bias": (
        MatmulProblem(16, 136, 600, bias="float32", activation="gelu"),
        {"cluster": "split_k", "swap_ab": True, "tile_m": 16, "consumers": "one"},
        4,
    ),
    "cluster split-K, swap_ab, many rows that TMA cannot address": (
        MatmulProblem(95, 125, 330),
        {"cluster": "split_k", "swap_ab": True, "tile_m": 96, "consumers": "one", "stages": 2},
        2,
    ),
    "cluster split-K, integers": (
        MatmulProblem(64, 64, 600, dtype="int8", out_dtype="int32", transpose_b=True),
        {"cluster": "split_k", "tile_m": 64, "tile_n": 64, "tile_k": 128, "epi_tile_n": 32, "consumers": "one"},
        2,
    ),
    "swap_ab, many rows": (
        MatmulProblem(200, 384, 192, out_dtype="float32"),
        {"swap_ab": True, "tile_m": 112, "tile_n": 192, "stages": 2},
        4,
    ),
    "delay_release, fewer steps than stages": (MatmulProblem(128, 192, 96), {"delay_release": 1}, 2),
    "ping-pong, an odd number of them": (
        MatmulProblem(136, 320, 192),
        {"consumers": "ping_pong", "tile_m": 64, "tile_n": 128, "stages": 2, "delay_release": 1},
        1,
    ),
    "ping-pong, rows of the result that TMA cannot address": (
        MatmulProblem(130, 324, 192),
        {"consumers": "ping_pong", "tile_m": 64, "tile_n": 128, "stages": 2},
        1,
    ),
    "ordered ping-pong, an odd number of tiles": (
        MatmulProblem(136, 320, 192),
        {"consumers": "ordered_ping_pong", "tile_m": 64, "tile_n": 128, "stages": 2, "delay_release": 1},
        1,
    ),
    "ordered ping-pong, swap_ab, cluster, bias and residual": (
        MatmulProblem(320, 512, 192, bias="bfloat16", residual="bfloat16"),
        {"consumers": "ordered_ping_pong", "tile_m": 160, "tile_n": 128, "swap_ab": True, "cluster": "m"}
        | {"delay_release": 1},
        2,
    ),
    "rows that TMA cannot address, delay_release": (
        MatmulProblem(133, 197, 331, bias="bfloat16"),
        {"delay_release": 1, "stages": 3},
        2,
    ),
    "rows that TMA cannot address, delay_release, one step": (MatmulProblem(70, 83, 43), {"delay_release": 1}, 1),
    "integers in rows that TMA cannot address, delay_release": (
        MatmulProblem(67, 73, 620, dtype="int8", out_dtype="int32", transpose_b=True),
        {"delay_release": 1, "tile_m": 64, "tile_n": 64, "tile_k": 128, "epi_tile_n": 32, "consumers": "one"},
        2,
    ),
    "rows that TMA cannot address, ordered ping-pong, bias and residual": (
        MatmulProblem(133, 325, 330, bias="bfloat16", residual="bfloat16"),
        {"consumers": "ordered_ping_pong", "tile_m": 64, "tile_n": 128, "stages": 3, "delay_release": 1},
        1,
    ),
    "rows that TMA cannot address, ordered ping-pong, swap_ab, transposed": (
        MatmulProblem(329, 260, 190, transpose_a=True, transpose_b=True),
        {"consumers": "ordered_ping_pong", "tile_m": 160, "tile_n": 128, "swap_ab": True, "delay_release": 1},
        2,
    ),
    "activation, residual in rows of 208 bytes": (
        MatmulProblem(64, 104, 64, activation="silu", residual="bfloat16"),
        {"tile_m": 64, "consumers": "one"},
        2,
    ),
    "rows of the result that TMA cannot address, batch": (MatmulProblem(77, 75, 72, batch=2), {"tile_n": 64}, 3),
    "swap_ab, rows of the result that TMA cannot address, residual": (
        MatmulProblem(9, 139, 72, bias="bfloat16", residual="bfloat16"),
        {"swap_ab": True, "tile_m": 16, "consumers": "cooperative_n"},
        2,
    ),
    "last wave in two parts, ragged, batch": (MatmulProblem(300, 384, 320, batch=2), {"tail_split_k": 2}, 8),
    "last wave in three parts, ordered ping-pong, bias and residual": (
        MatmulProblem(136, 640, 384, bias="bfloat16", activation="silu", residual="float32"),
        {"consumers": "ordered_ping_pong", "tile_m": 64, "tile_n": 128, "delay_release": 1, "tail_split_k": 3},
        7,
    ),
    "last wave in two parts, swap_ab, cluster, delay_release": (
        MatmulProblem(320, 512, 320, out_dtype="float32"),
        {"consumers": "ordered_ping_pong", "tile_m": 160, "tile_n": 128, "swap_ab": True, "cluster": "m"}
        | {"delay_release": 1, "tail_split_k": 2},
        6,
    ),
    "last wave in two parts, cluster along n, cooperating consumers": (
        MatmulProblem(384, 512, 256, transpose_a=True),
        {"cluster": "n", "grid_minor_dim": "m", "tail_split_k": 2},
        8,
    ),
    "last wave in four parts, rows that TMA cannot address": (
        MatmulProblem(133, 325, 500, bias="bfloat16"),
        {"tile_m": 64, "tile_n": 128, "consumers": "cooperative_n", "tail_split_k": 4},
        8,
    ),
    "last wave in two parts, integers": (
        MatmulProblem(192, 64, 600, dtype="int8", out_dtype="int32", transpose_b=True),
        {"tile_m": 64, "tile_n": 64, "tile_k": 128, "epi_tile_n": 32, "consumers": "one", "tail_split_k": 2},
        2,
    ),
    "columns of b shared in narrow groups": (
        MatmulProblem(130, 200, 72),
        {"tile_n": 96, "consumers": "cooperative_n", "epi_tile_n": 16},
        3,
    ),
}
TILED = (
    "batch, padded",
    "both transposed",
    "swap_ab, one row, one consumer",
    "one consumer, rows of 208 bytes",
    "bias, residual, padded",
    "bias of odd rows, wide residual, batch",
)


@interpreted
@pytest.mark.parametrize("name", PRODUCTS)
def test_products_are_right_to_the_last_ragged_edge(name):
    problem, fields, cores = PRODUCTS[name]
    actual, expected = hopper.interpret(KERNEL, problem, schedule(**fields), cores=cores)
    assert actual.shape == problem.result().shape
    tolerance = problem.tolerance()
    np.testing.assert_allclose(actual, expected, rtol=tolerance.relative, atol=tolerance.absolute)


@interpreted
@pytest.mark.parametrize("name", TILED)
def test_padded_copies_give_the_same_products(name, tiled_only):
    test_products_are_right_to_the_last_ragged_edge(name)


RACES = {
    "ragged, stages used again, cluster": (
        MatmulProblem(133, 264, 200),
        {"cluster": "m", "tile_m": 64, "consumers": "cooperative_n", "stages": 2},
        2,
    ),
    "stages used again, a CTA without a second tile": (MatmulProblem(256, 256, 320), {"stages": 2}, 3),
    "pipeline filled across tiles": (
        MatmulProblem(256, 256, 64),
        {"tile_m": 64, "consumers": "cooperative_n", "stages": 4},
        2,
    ),
    "cluster along m": (MatmulProblem(256, 256, 192), {"cluster": "m", "stages": 2}, 2),
    "cluster along n": (MatmulProblem(128, 512, 192), {"cluster": "n", "stages": 2, "epi_tile_n": 32}, 2),
    "cluster split-K": (MatmulProblem(128, 256, 512), {"cluster": "split_k", "consumers": "one", "stages": 2}, 4),
    "swap_ab, split-K": (
        MatmulProblem(16, 256, 512),
        {"swap_ab": True, "tile_m": 16, "consumers": "cooperative_n", "split_k": 2, "stages": 2},
        3,
    ),
    "delay_release, as many stages as it keeps": (MatmulProblem(256, 256, 320), {"stages": 2, "delay_release": 1}, 2),
    "delay_release, cluster": (MatmulProblem(256, 256, 192), {"cluster": "m", "stages": 3, "delay_release": 1}, 2),
    "ping-pong, more steps than stages, a CTA with one": (
        MatmulProblem(192, 192, 320),
        {"consumers": "ping_pong", "tile_m": 64, "tile_n": 64, "stages": 3, "delay_release": 1},
        4,
    ),
    "ping-pong, fewer steps than stages, cluster": (
        MatmulProblem(256, 384, 128),
        {"consumers": "ping_pong", "tile_m": 64, "stages": 5, "delay_release": 1, "cluster": "n"},
        2,
    ),
    "rows that TMA cannot address, ordered ping-pong, stages used again": (
        MatmulProblem(190, 189, 320),
        {"consumers": "ordered_ping_pong", "tile_m": 64, "tile_n": 64, "stages": 3, "delay_release": 1},
        4,
    ),
    "ping-pong, bias and residual": (
        MatmulProblem(128, 128, 128, bias="bfloat16", activation="relu", residual="bfloat16"),
        {"consumers": "ping_pong", "tile_m": 64, "tile_n": 64, "epi_tile_n": 32, "delay_release": 1},
        1,
    ),
    "stages of bias and residual used again within a tile and by the next, cluster": (
        MatmulProblem(128, 128, 64, bias="bfloat16", residual="bfloat16"),
        {"tile_m": 64, "tile_n": 64, "consumers": "one", "epi_tile_n": 16, "cluster": "m"},
        2,
    ),
}


@interpreted
@pytest.mark.parametrize("name", RACES)
def test_no_warpgroup_touches_what_another_still_uses(name, capfd):
    problem, fields, cores = RACES[name]
    actual, expected = hopper.interpret(KERNEL, problem, schedule(**fields), cores=cores, detect_races=True)
    tolerance = problem.tolerance()
    np.testing.assert_allclose(actual, expected, rtol=tolerance.relative, atol=tolerance.absolute)
    assert "RACE" not in capfd.readouterr().out


@interpreted
def test_splits_of_k_are_reduced_in_the_same_order_each_time():
    problem = MatmulProblem(64, 64, 256)
    one = schedule(tile_m=64, tile_n=64, consumers="cooperative_n", epi_tile_n=32, split_k=4)
    times = [hopper.interpret(KERNEL, problem, one, cores=cores)[0] for cores in (1, 4)]
    np.testing.assert_array_equal(*times)


def test_what_it_cannot_do_it_refuses_in_words():
    product = MatmulProblem(128, 128, 128)
    assert KERNEL.supports(product, TARGET) is None
    assert "sm_80" in KERNEL.supports(product, Target("cuda", "NVIDIA A100-SXM4-80GB", "sm_80", 108))
    assert "sm_90" in KERNEL.supports(product, Target("cpu", "cpu", "cpu", 1))
    exact = dataclasses.replace(product, dtype="float32", precision="highest", transpose_b=True)
    assert "highest" in KERNEL.supports(exact, TARGET)
    assert KERNEL.supports(dataclasses.replace(exact, precision="default", transpose_b=False), TARGET) is None
    assert KERNEL.supports(dataclasses.replace(exact, precision="default"), TARGET) is None


def test_blocks_that_share_tiles_have_one_each():
    problem, two_cores = MatmulProblem(128, 256, 512), dataclasses.replace(TARGET, cores=2)
    with pytest.raises(ValueError, match="too many"):
        jax.eval_shape(
            lambda *args: KERNEL.run(problem, schedule(cluster="split_k"), two_cores, *args), *problem.operands()
        )


def test_stages_too_small_for_a_cluster_reduction_are_refused_before_anything_is_overwritten():
    with pytest.raises(ValueError, match="more stages"):
        hopper.lower(
            KERNEL,
            MatmulProblem(256, 128, 2048),
            schedule(cluster="split_k", tile_m=256, tile_n=128, tile_k=32, stages=2),
        )


@pytest.mark.parametrize(
    ("problem", "fields", "guarded"),
    [
        (MatmulProblem(5, 7, 3), {"consumers": "cooperative_n", "epi_tile_n": 32}, True),
        (MatmulProblem(5, 71, 3), {"consumers": "cooperative_n", "epi_tile_n": 32}, False),
        (MatmulProblem(5, 7, 3), {"consumers": "one", "epi_tile_n": 64}, False),
        (MatmulProblem(64, 40, 64, split_sizes="32+8"), {"consumers": "one", "epi_tile_n": 16}, True),
    ],
    ids=str,
)
def test_a_store_that_would_land_at_the_start_of_a_narrow_result_is_left_out(problem, fields, guarded):
    one = schedule(tile_m=64, tile_n=64, stages=2, **fields)
    traced = str(jax.make_jaxpr(lambda *args: KERNEL.run(problem, one, TARGET, *args))(*problem.operands()))
    assert ("commit_group" in traced) is guarded  # in place of the store, so that stages are still counted


@pytest.mark.parametrize(
    ("problem", "parts", "why"),
    [
        (MatmulProblem(132 * 128, 256, 4096), 2, "there is none"),
        (MatmulProblem(132 * 128, 128, 4096), 2, "there is no other"),
        (MatmulProblem(100 * 128, 256, 4096), 2, "136 parts for 132 SMs"),
        (MatmulProblem(70 * 128, 256, 6 * 64), 4, "of 6 steps, the first three parts take all"),
        (MatmulProblem(70 * 128, 256, 7 * 64), 3, "of 7 steps, the first two leave none to delay_release"),
    ],
    ids=lambda value: value if isinstance(value, str) else None,
)
def test_a_last_wave_that_cannot_be_split_is_an_error(problem, parts, why):
    with pytest.raises(ValueError, match="splits the last wave"):
        hopper.lower(KERNEL, problem, schedule(tail_split_k=parts, delay_release=int(problem.k == 7 * 64)))
