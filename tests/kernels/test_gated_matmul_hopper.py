"""The gated product's Hopper kernel on a CPU: lowered for CUDA, its on-chip memory compared, small ones interpreted."""

import dataclasses
import random

import hopper
import jax
import numpy as np
import pytest
from hopper_matmul import interpreted, schedule

from search_spaces import Columns
from search_spaces.gated_matmul import GATED_MATMUL, GatedMatmulProblem
from search_spaces.jax_compat import HAS_UNTILED_SWIZZLE
from search_spaces.matmul.hopper.schedule import PING_PONG

pytestmark = pytest.mark.slow_but_first

KERNEL = GATED_MATMUL.kernel("mosaic_gpu")
TARGET = hopper.H200.target
PROBLEMS = [
    GatedMatmulProblem(4096, 14336, 4096),
    GatedMatmulProblem(4096, 14336, 4096, transpose_w=True, pair=True, bias="bfloat16"),
    GatedMatmulProblem(256, 14336, 4096, pair=True),
    GatedMatmulProblem(256, 2816, 2048, transpose_w=True, dtype="float16", activation="gelu"),
    GatedMatmulProblem(16, 14336, 4096),
    GatedMatmulProblem(16, 1408, 7168, transpose_w=True, pair=True),
    GatedMatmulProblem(1, 2048, 4096, bias="float32"),
    GatedMatmulProblem(64, 768, 4096, bias="bfloat16", pair=True),
    GatedMatmulProblem(1000, 1000, 1000),
    GatedMatmulProblem(333, 200, 4104, bias="bfloat16"),
    GatedMatmulProblem(77, 75, 900, pair=True),
    GatedMatmulProblem(5, 20, 33),
    GatedMatmulProblem(1001, 1003, 512, transpose_w=True, bias="float32", activation="relu"),
]


def sample(problem, count):
    """Points of the legal space; half of them plain, the others of the parts that few belong to."""
    points, _ = KERNEL.space(problem, TARGET).legal()
    rare = points.swap_ab | (points.split_k > 1) | (points.delay_release == 1)
    rare |= np.isin(points.consumers, ("one", *PING_PONG)) | (points.cluster == "split_k")
    draw, chosen = random.Random(str(problem)), []
    for rows in (np.flatnonzero(rare), np.flatnonzero(~rare)):
        chosen += draw.sample(rows.tolist(), min((count + 1) // 2, len(rows)))
    return list(KERNEL.space(problem, TARGET).schedules(points.take(sorted(chosen))))


def footprint(problem, *schedules):
    return KERNEL.footprint(problem, Columns.of(schedules), TARGET)


@pytest.mark.parametrize("problem", PROBLEMS, ids=str)
def test_onchip_bytes_are_what_lowering_asks_for_and_decide_whether_it_succeeds(problem):
    schedules = sample(problem, 6)
    for one, predicted in zip(schedules, footprint(problem, *schedules).onchip_bytes, strict=True):
        hopper.check_onchip_bytes(KERNEL, problem, one, predicted)


def test_the_sample_is_large_and_holds_schedules_of_every_part():
    schedules = [one for problem in PROBLEMS for one in sample(problem, 6)]
    assert len(schedules) >= 60
    assert {one.consumers for one in schedules} == {"one", "cooperative_m", "cooperative_n", *PING_PONG}
    assert {one.cluster for one in schedules} == {"none", "m", "n", "split_k"}
    assert {one.swap_ab for one in schedules} == {False, True}
    assert max(one.split_k for one in schedules) > 1
    assert {one.delay_release for one in schedules} == {0, 1}


@pytest.mark.parametrize("pair", [False, True])
@pytest.mark.parametrize("transpose_w", [False, True])
def test_weights_are_read_as_they_lie_in_memory(pair, transpose_w):
    problem = GatedMatmulProblem(512, 512, 512, transpose_w=transpose_w, pair=pair, bias="bfloat16")
    text = hopper.lower(KERNEL, problem, schedule()).as_text()
    assert "mosaic_gpu" in text
    for copying in ("concatenate", "transpose", "slice", "pad"):
        assert f"stablehlo.{copying}" not in text
    found = footprint(problem, schedule())
    assert (found.copied_bytes[0], found.launches[0]) == (0, 1)


def test_joined_weights_are_copied_only_where_tma_cannot_start_at_the_second_half():
    joined, pair = GatedMatmulProblem(512, 1004, 512), GatedMatmulProblem(512, 1004, 512, pair=True)
    copied = footprint(joined, schedule()).copied_bytes[0]
    assert copied >= 2 * 2 * 512 * 1004 * 2, "both halves, read and written"
    assert footprint(dataclasses.replace(joined, n=1008), schedule()).copied_bytes[0] == (
        0 if HAS_UNTILED_SWIZZLE else footprint(dataclasses.replace(pair, n=1008), schedule()).copied_bytes[0]
    )
    turned = GatedMatmulProblem(512, 1004, 512, transpose_w=True)
    assert (footprint(turned, schedule()).copied_bytes[0] == 0) == HAS_UNTILED_SWIZZLE


def test_it_demands_twice_the_weights_and_flops_of_its_gate_and_writes_as_much():
    problem = GatedMatmulProblem(4096, 14336, 4096)
    found, one = footprint(problem, schedule()), _of_gate(problem, schedule())
    x, gate, up = found.step.loads
    assert (x.name, gate.name, up.name) == ("x", "gate", "up")
    assert (x.bytes, gate.bytes, up.bytes) == (one.step.loads[0].bytes, *[one.step.loads[1].bytes] * 2)
    assert found.step.flops == 2 * one.step.flops
    assert found.tile.bytes_written == one.tile.bytes_written
    assert found.registers == one.registers + 64 * 128 // 128


def _of_gate(problem, one):
    from hopper_matmul import KERNEL as MATMUL_KERNEL

    return MATMUL_KERNEL.footprint(problem.gate, Columns.of([one]), TARGET)


def test_schedules_of_the_space_have_registers_for_both_factors():
    problem = GatedMatmulProblem(4096, 14336, 4096)
    points, _ = KERNEL.space(problem, TARGET).legal()
    found = KERNEL.footprint(problem, points, TARGET)
    fits = (found.registers <= hopper.H200.registers_per_thread) & (found.onchip_bytes <= hopper.H200.onchip_bytes)
    assert {128 * 128, 256 * 64} <= set((points.tile_m * points.tile_n)[fits].tolist())
    assert max((points.tile_m * points.tile_n)[fits]) <= 256 * 96


PRODUCTS = {  # name: problem, schedule, cores
    "many tiles": (GatedMatmulProblem(200, 136, 192), {"tile_n": 64}, 2),
    "a pair, bias": (GatedMatmulProblem(136, 192, 200, pair=True, bias="bfloat16"), {"tile_n": 64}, 3),
    "joined, transposed, wide bias": (
        GatedMatmulProblem(136, 192, 200, transpose_w=True, bias="float32", activation="gelu"),
        {"consumers": "cooperative_n"},
        2,
    ),
    "a pair, transposed, float16": (
        GatedMatmulProblem(136, 72, 104, transpose_w=True, pair=True, dtype="float16", activation="relu"),
        {"tile_n": 64},
        2,
    ),
    "halves that start nowhere": (GatedMatmulProblem(77, 75, 130, bias="bfloat16"), {"tile_n": 64}, 3),
    "halves of a few columns": (GatedMatmulProblem(3, 20, 33), {"tile_m": 64, "tile_n": 64, "consumers": "one"}, 2),
    "halves that start between swizzled rows": (GatedMatmulProblem(64, 40, 64), {"tile_m": 64, "consumers": "one"}, 2),
    "transposed halves of 20 rows": (
        GatedMatmulProblem(40, 20, 72, transpose_w=True),
        {"tile_m": 64, "tile_n": 64, "consumers": "one"},
        2,
    ),
    "swap_ab, bias": (
        GatedMatmulProblem(16, 200, 320, bias="bfloat16"),
        {"swap_ab": True, "tile_m": 16, "tile_k": 128, "consumers": "cooperative_n", "stages": 2},
        2,
    ),
    "swap_ab, one consumer, a pair": (
        GatedMatmulProblem(5, 136, 192, pair=True, transpose_w=True),
        {"swap_ab": True, "tile_m": 8, "tile_n": 64, "consumers": "one"},
        2,
    ),
    "ping-pong": (
        GatedMatmulProblem(136, 192, 192),
        {"consumers": "ping_pong", "tile_m": 64, "tile_n": 64, "stages": 3},
        1,
    ),
    "ordered ping-pong, swap_ab, bias": (
        GatedMatmulProblem(320, 192, 192, bias="bfloat16"),
        {"consumers": "ordered_ping_pong", "swap_ab": True, "tile_m": 160, "tile_n": 64, "stages": 3}
        | {"delay_release": 1},
        1,
    ),
    "halves that start nowhere, ordered ping-pong": (
        GatedMatmulProblem(197, 141, 330, bias="bfloat16"),
        {"consumers": "ordered_ping_pong", "tile_m": 64, "tile_n": 64, "stages": 3, "delay_release": 1},
        1,
    ),
    "cluster along m": (GatedMatmulProblem(256, 128, 128), {"cluster": "m", "tile_n": 64}, 4),
    "cluster along n": (GatedMatmulProblem(200, 256, 128), {"cluster": "n", "tile_n": 64}, 4),
    "split-K, bias": (
        GatedMatmulProblem(61, 40, 600, bias="bfloat16"),
        {"tile_m": 64, "tile_n": 64, "consumers": "one", "split_k": 3},
        4,
    ),
    "cluster split-K": (
        GatedMatmulProblem(60, 72, 450, bias="float32"),
        {"cluster": "split_k", "tile_m": 64, "consumers": "one", "epi_tile_n": 32},
        4,
    ),
    "cluster split-K, swap_ab": (
        GatedMatmulProblem(16, 136, 600, pair=True),
        {"cluster": "split_k", "swap_ab": True, "tile_m": 16, "consumers": "one"},
        6,
    ),
}


@interpreted
@pytest.mark.parametrize("name", PRODUCTS)
def test_small_products_are_right_in_the_interpreter(name):
    problem, fields, cores = PRODUCTS[name]
    actual, expected = hopper.interpret(KERNEL, problem, schedule(**fields), cores=cores)
    tolerance = problem.tolerance()
    assert actual.shape == expected.shape
    np.testing.assert_allclose(actual, expected, atol=tolerance.absolute, rtol=tolerance.relative)


@pytest.mark.parametrize("option", [{"jax_enable_x64": True}, {"jax_numpy_dtype_promotion": "strict"}], ids=str)
def test_a_user_s_defaults_for_types_do_not_reach_into_the_kernel(option):
    ((name, value),) = option.items()
    before = getattr(jax.config, name)
    jax.config.update(name, value)
    try:
        for fields in ({}, {"split_k": 2}):
            hopper.lower(KERNEL, GatedMatmulProblem(200, 1000, 1000, bias="float32"), schedule(**fields))
    finally:
        jax.config.update(name, before)


def test_tiles_of_transposed_weights_quantize_into_whole_waves():
    problem = GatedMatmulProblem(256, 14336, 4096, transpose_w=True)
    points, _ = KERNEL.space(problem, TARGET).legal()
    tiles = np.ceil(256 / points.tile_m) * np.ceil(14336 / points.tile_n)
    busy = tiles / (np.ceil(tiles / TARGET.cores) * TARGET.cores)
    assert max(busy[points.tile_m * points.tile_n >= 128 * 96]) > 0.96
