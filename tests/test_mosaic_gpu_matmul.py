"""The Hopper matmul on a CPU: lowered for CUDA, its on-chip memory compared, small products interpreted."""

import dataclasses
import random
from pathlib import Path

import hopper
import jax
import numpy as np
import pytest
from counting import bytecodes

from scheduler.measure import replay
from search_spaces import Columns, Target
from search_spaces.jax_compat import HAS_GPU_INTERPRETER, HAS_UNTILED_SWIZZLE
from search_spaces.matmul.mosaic_gpu import HopperSchedule, MosaicGpuMatmul, geometry
from search_spaces.matmul.mosaic_gpu.product import walk
from search_spaces.matmul.problem import MatmulProblem

KERNEL = MosaicGpuMatmul()
TARGET = hopper.H200.target
BASE = HopperSchedule(
    tile_m=128,
    tile_n=128,
    tile_k=64,
    stages=3,
    split="m",
    cluster="none",
    raster="n",
    raster_width=4,
    epilogue_n=64,
)
OLD_FIELDS = ("tile_m", "tile_n", "tile_k", "stages", "split", "cluster", "raster", "raster_width", "epilogue_n")
SWEEPS = Path(__file__).parent.parent / "sweeps" / "nvidia-h200"
LARGE = [
    MatmulProblem(4096, 4096, 4096),
    MatmulProblem(8192, 8192, 8192, transpose_b=True),
    MatmulProblem(2048, 5120, 5120),
    MatmulProblem(2048, 14336, 4096, dtype="float16", out_dtype="float32"),
    MatmulProblem(4001, 4040, 4104, transpose_a=True),
    MatmulProblem(4096, 4096, 4096, dtype="float32", transpose_b=True),
    MatmulProblem(2048, 2048, 128, batch=16),
]
SMALL = [
    MatmulProblem(1, 1, 1),
    MatmulProblem(5, 16, 24, transpose_b=True),
    MatmulProblem(16, 8192, 8192),
    MatmulProblem(100, 72, 40, batch=3, transpose_a=True),
    MatmulProblem(128, 8192, 8192, transpose_b=True),
    MatmulProblem(512, 512, 65536, out_dtype="float32"),
    MatmulProblem(1024, 1024, 2048, transpose_a=True, transpose_b=True),
    MatmulProblem(30000, 64, 64),
    MatmulProblem(16, 4096, 14336, transpose_b=True),
    MatmulProblem(33, 4096, 4096, transpose_a=True, out_dtype="float32"),
    MatmulProblem(5, 1000, 2000, dtype="float32", transpose_b=True, out_dtype="bfloat16"),
    MatmulProblem(1000, 1000, 1000, transpose_b=True),
    MatmulProblem(200, 1000, 3000, batch=2),
    MatmulProblem(40, 4096, 4096, dtype="int8", out_dtype="int32", transpose_b=True),
    MatmulProblem(1024, 1024, 4096, dtype="float8_e4m3fn", out_dtype="bfloat16", transpose_b=True),
    MatmulProblem(1024, 5027, 768, transpose_b=True),
]
FUSED = [
    MatmulProblem(4096, 4096, 4096, bias="bfloat16", activation="gelu", residual="bfloat16"),
    MatmulProblem(4001, 1000, 512, batch=2, bias="float32", activation="silu", residual="float32"),
    MatmulProblem(1000, 1000, 2048, out_dtype="float32", residual="bfloat16"),
    MatmulProblem(33, 1000, 4096, batch=2, bias="float16", residual="float16"),
    MatmulProblem(
        200, 333, 2000, dtype="float32", transpose_b=True, bias="float32", activation="relu", out_dtype="bfloat16"
    ),
]


def schedule(**fields):
    return dataclasses.replace(BASE, **fields)


def footprint(problem, schedules):
    return KERNEL.footprint(problem, schedules, TARGET)


def sample(problem, count, seed):
    """Points of the legal space: those whose memory the chip has, and those that want more; half of them plain."""
    points, _ = KERNEL.space(problem, TARGET).legal()
    plain = ~points.swap & (points.split_k == 1) & (points.in_flight == 0)
    plain &= (points.split == "m") | (points.split == "n")
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
@pytest.mark.parametrize("split", ["m", "n"])
def test_both_operands_are_read_as_they_lie_in_memory(dtype, transpose_a, transpose_b, split):
    problem = MatmulProblem(512, 512, 512, dtype=dtype, transpose_a=transpose_a, transpose_b=transpose_b)
    text = hopper.lower(KERNEL, problem, schedule(split=split)).as_text()
    assert "mosaic_gpu" in text
    assert "stablehlo.transpose" not in text
    assert footprint(problem, Columns.of([schedule(split=split)])).launches[0] == 1


@pytest.mark.parametrize("option", [{"jax_enable_x64": True}, {"jax_numpy_dtype_promotion": "strict"}], ids=str)
def test_a_user_s_defaults_for_types_do_not_reach_into_the_kernel(option):
    ((name, value),) = option.items()
    before = getattr(jax.config, name)
    jax.config.update(name, value)
    try:
        hopper.lower(KERNEL, MatmulProblem(1000, 1024, 1000, batch=3), schedule(cluster="m", raster="m"))
    finally:
        jax.config.update(name, before)


interpreted = pytest.mark.skipif(not HAS_GPU_INTERPRETER, reason="JAX interprets GPU kernels from 0.11 on")
untiled = pytest.mark.skipif(not HAS_UNTILED_SWIZZLE, reason="JAX swizzles without tiles from 0.11 on")


@pytest.fixture
def tiled_only(monkeypatch):
    """What is lowered lies in tiles on chip, as all JAX does before 0.11."""
    monkeypatch.setattr(geometry, "HAS_UNTILED_SWIZZLE", False)


PRODUCTS = {  # name: problem, schedule, cores
    "one tile per block": (MatmulProblem(256, 256, 256), {}, 4),
    "many tiles of one step": (MatmulProblem(384, 256, 64), {"tile_m": 64, "tile_n": 128, "split": "n"}, 5),
    "more stages than steps of a tile": (MatmulProblem(512, 384, 64), {"tile_n": 64, "raster": "m", "stages": 8}, 3),
    "cluster along m": (MatmulProblem(256, 384, 320), {"stages": 4, "cluster": "m"}, 5),
    "cluster along n": (MatmulProblem(300, 384, 320), {"cluster": "n", "raster": "m", "raster_width": 2}, 2),
    "a transposed": (MatmulProblem(136, 200, 104, transpose_a=True), {"split": "n"}, 2),
    "b transposed": (MatmulProblem(136, 200, 104, transpose_b=True), {"split": "n"}, 2),
    "both transposed": (MatmulProblem(136, 200, 104, transpose_a=True, transpose_b=True), {}, 2),
    "batch, padded": (MatmulProblem(130, 70, 90, batch=3), {"tile_n": 64}, 4),
    "rows of half and a quarter of the widest swizzle": (MatmulProblem(128, 144, 96, transpose_a=True), {}, 4),
    "scalars": (MatmulProblem(1, 1, 1), {"tile_m": 64, "tile_n": 64, "split": "n", "epilogue_n": 32}, 4),
    "fewer rows than a swizzle": (MatmulProblem(3, 40, 33), {"tile_m": 64, "split": "n"}, 4),
    "no powers of two": (
        MatmulProblem(192, 320, 128, out_dtype="float32"),
        {"tile_m": 192, "tile_n": 160, "split": "n", "epilogue_n": 16},
        4,
    ),
    "float32": (MatmulProblem(128, 128, 96, dtype="float32", transpose_b=True), {"tile_k": 32, "epilogue_n": 32}, 4),
    "swapped": (
        MatmulProblem(16, 256, 320),
        {"swap": True, "tile_m": 16, "tile_n": 256, "tile_k": 256, "split": "n", "stages": 2},
        4,
    ),
    "swapped, one row, one warpgroup": (
        MatmulProblem(1, 200, 130, out_dtype="float32", transpose_b=True),
        {"swap": True, "tile_m": 8, "tile_n": 64, "split": "none"},
        4,
    ),
    "swapped, a transposed, batch": (
        MatmulProblem(40, 144, 96, batch=2, transpose_a=True),
        {"swap": True, "tile_m": 64, "split": "n"},
        3,
    ),
    "swapped, float32, rows of 16 bytes": (
        MatmulProblem(12, 108, 96, dtype="float32", transpose_b=True),
        {"swap": True, "tile_m": 16, "tile_k": 32, "split": "n"},
        2,
    ),
    "swapped, parts of k": (
        MatmulProblem(24, 136, 640),
        {"swap": True, "tile_m": 24, "tile_n": 64, "split": "none", "split_k": 3},
        5,
    ),
    "parts of k, none as long as the others": (MatmulProblem(61, 37, 600, transpose_b=True), {"split_k": 4}, 5),
    "parts of k, batch, cluster": (
        MatmulProblem(256, 72, 512, batch=2),
        {"tile_n": 64, "split_k": 2, "cluster": "m"},
        4,
    ),
    "8-bit floats": (
        MatmulProblem(72, 48, 300, dtype="float8_e5m2", out_dtype="bfloat16", transpose_b=True),
        {"tile_n": 64, "tile_k": 128},
        2,
    ),
    "8-bit whole numbers, swapped, parts of k": (
        MatmulProblem(20, 72, 600, dtype="int8", out_dtype="int32", transpose_b=True),
        {"swap": True, "tile_m": 24, "tile_n": 64, "tile_k": 128, "split": "none", "split_k": 2},
        4,
    ),
    "one computing warpgroup, rows of 208 bytes": (MatmulProblem(64, 104, 96), {"tile_m": 64, "split": "none"}, 2),
    "bias, residual, padded": (
        MatmulProblem(60, 72, 64, bias="bfloat16", activation="gelu", residual="bfloat16"),
        {"tile_m": 64, "tile_n": 64, "split": "n", "epilogue_n": 16},
        1,
    ),
    "bias of odd rows, wide residual, batch": (
        MatmulProblem(8, 37, 64, batch=2, bias="bfloat16", activation="silu", residual="float32"),
        {"tile_m": 64, "tile_n": 64, "split": "none"},
        1,
    ),
    "swapped, bias, residual in columns of 16 bytes": (
        MatmulProblem(12, 136, 64, bias="float32", activation="gelu", residual="float16"),
        {"swap": True, "tile_m": 16, "split": "n"},
        1,
    ),
    "parts of k, bias, residual": (
        MatmulProblem(61, 37, 200, bias="float32", activation="relu", residual="bfloat16"),
        {"tile_m": 64, "tile_n": 64, "split": "none", "split_k": 2},
        4,
    ),
    "a tile shared along k, ragged, the last part shorter": (
        MatmulProblem(120, 100, 450, batch=2),
        {"cluster": "k", "split": "none", "stages": 2, "epilogue_n": 32},
        8,
    ),
    "a tile shared along k, bias, residual": (
        MatmulProblem(60, 72, 300, bias="bfloat16", activation="silu", residual="float32"),
        {"cluster": "k", "tile_m": 64, "split": "none"},
        4,
    ),
    "a tile shared along k, swapped, bias": (
        MatmulProblem(16, 136, 600, bias="float32", activation="gelu"),
        {"cluster": "k", "swap": True, "tile_m": 16, "split": "none"},
        4,
    ),
    "a tile shared along k, swapped, many rows that no copy reaches": (
        MatmulProblem(95, 125, 330),
        {"cluster": "k", "swap": True, "tile_m": 96, "split": "none", "stages": 2},
        2,
    ),
    "a tile shared along k, whole numbers": (
        MatmulProblem(64, 64, 600, dtype="int8", out_dtype="int32", transpose_b=True),
        {"cluster": "k", "tile_m": 64, "tile_n": 64, "tile_k": 128, "epilogue_n": 32, "split": "none"},
        2,
    ),
    "swapped, many rows": (
        MatmulProblem(200, 384, 192, out_dtype="float32"),
        {"swap": True, "tile_m": 112, "tile_n": 192, "stages": 2},
        4,
    ),
    "steps in flight, fewer steps than stages": (MatmulProblem(128, 192, 96), {"in_flight": 1}, 2),
    "tiles in turns, an odd number of them": (
        MatmulProblem(136, 320, 192),
        {"split": "tiles", "tile_m": 64, "tile_n": 128, "stages": 2, "in_flight": 1},
        1,
    ),
    "tiles in turns, rows of the result that no copy reaches": (
        MatmulProblem(130, 324, 192),
        {"split": "tiles", "tile_m": 64, "tile_n": 128, "stages": 2},
        1,
    ),
    "activation, residual in rows of 208 bytes": (
        MatmulProblem(64, 104, 64, activation="silu", residual="bfloat16"),
        {"tile_m": 64, "split": "none"},
        2,
    ),
    "rows of the result that no copy reaches, batch": (MatmulProblem(77, 75, 72, batch=2), {"tile_n": 64}, 3),
    "swapped, rows of the result that no copy reaches, residual": (
        MatmulProblem(9, 139, 72, bias="bfloat16", residual="bfloat16"),
        {"swap": True, "tile_m": 16, "split": "n"},
        2,
    ),
    "columns of b shared in narrow groups": (
        MatmulProblem(130, 200, 72),
        {"tile_n": 96, "split": "n", "epilogue_n": 16},
        3,
    ),
}
IN_TILES = (
    "batch, padded",
    "both transposed",
    "swapped, one row, one warpgroup",
    "one computing warpgroup, rows of 208 bytes",
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
@pytest.mark.parametrize("name", IN_TILES)
def test_padded_copies_give_the_same_products(name, tiled_only):
    test_products_are_right_to_the_last_ragged_edge(name)


RACES = {
    "ragged, slots used again, cluster": (
        MatmulProblem(133, 264, 200),
        {"cluster": "m", "tile_m": 64, "split": "n", "stages": 2},
        2,
    ),
    "slots used again, a block without a second tile": (MatmulProblem(256, 256, 320), {"stages": 2}, 3),
    "ring filled across tiles": (MatmulProblem(256, 256, 64), {"tile_m": 64, "split": "n", "stages": 4}, 2),
    "cluster along m": (MatmulProblem(256, 256, 192), {"cluster": "m", "stages": 2}, 2),
    "cluster along n": (MatmulProblem(128, 512, 192), {"cluster": "n", "stages": 2, "epilogue_n": 32}, 2),
    "a tile shared along k": (MatmulProblem(128, 256, 512), {"cluster": "k", "split": "none", "stages": 2}, 4),
    "swapped, parts of k": (
        MatmulProblem(16, 256, 512),
        {"swap": True, "tile_m": 16, "split": "n", "split_k": 2, "stages": 2},
        3,
    ),
    "steps in flight, as many slots as keep them": (MatmulProblem(256, 256, 320), {"stages": 2, "in_flight": 1}, 2),
    "steps in flight, cluster": (MatmulProblem(256, 256, 192), {"cluster": "m", "stages": 3, "in_flight": 1}, 2),
    "tiles in turns, more steps than stages, a block with one": (
        MatmulProblem(192, 192, 320),
        {"split": "tiles", "tile_m": 64, "tile_n": 64, "stages": 3, "in_flight": 1},
        4,
    ),
    "tiles in turns, fewer steps than stages, cluster": (
        MatmulProblem(256, 384, 128),
        {"split": "tiles", "tile_m": 64, "stages": 5, "in_flight": 1, "cluster": "n"},
        2,
    ),
    "tiles in turns, bias and residual": (
        MatmulProblem(128, 128, 128, bias="bfloat16", activation="relu", residual="bfloat16"),
        {"split": "tiles", "tile_m": 64, "tile_n": 64, "epilogue_n": 32, "in_flight": 1},
        1,
    ),
    "slots of bias and residual used again within a tile and by the next, cluster": (
        MatmulProblem(128, 128, 64, bias="bfloat16", residual="bfloat16"),
        {"tile_m": 64, "tile_n": 64, "split": "none", "epilogue_n": 16, "cluster": "m"},
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


@pytest.mark.parametrize("problem", LARGE + FUSED[:1], ids=str)
def test_the_legal_space_of_a_large_problem_is_near_three_thousand(problem):
    assert 1000 <= len(KERNEL.space(problem, TARGET).legal()[0]) <= 4000


@pytest.mark.parametrize("problem", LARGE + SMALL + FUSED, ids=str)
def test_every_problem_has_a_schedule_that_fits(problem):
    found = footprint(problem, KERNEL.space(problem, TARGET).legal()[0])
    assert np.any(fits(found))


def fits(found):
    h200 = hopper.H200
    return (
        (found.onchip_bytes <= h200.onchip_bytes)
        & (found.registers <= h200.registers_per_thread)
        & (found.registers_per_block <= h200.registers_per_core)
    )


@pytest.mark.parametrize("problem", LARGE + SMALL, ids=str)
def test_every_legal_schedule_gives_each_warpgroup_what_wgmma_multiplies(problem):
    points, _ = KERNEL.space(problem, TARGET).legal()
    along_m = np.where(points.split == "m", points.tile_m // 2, points.tile_m)
    along_n = np.where(points.split == "n", points.tile_n // 2, points.tile_n)
    rows, columns = np.where(points.swap, [along_n, along_m], [along_m, along_n])
    assert np.all(rows % 64 == 0)
    assert np.all((columns % 8 == 0) & (columns <= 256))
    shared = points.cluster == "k"
    assert np.all((columns % 16 == 0) | ~shared)
    own = np.where(shared & ~points.swap, along_n // 2, along_n)
    assert np.all(own % points.epilogue_n == 0), "a piece that does not divide its tile loses columns silently"
    assert np.all(~points.swap | (points.tile_m >= problem.m) | (problem.m > 64))


def test_a_space_of_a_million_points_and_its_footprint_take_little_more_python_than_one_of_thousands():
    def taken(problem):
        return bytecodes(lambda: footprint(problem, KERNEL.space(problem, TARGET).legal()[0]))

    few, many = MatmulProblem(100, 72, 40, batch=3, transpose_a=True), MatmulProblem(512, 512, 65536)
    assert KERNEL.space(many, TARGET).size > 300 * KERNEL.space(few, TARGET).size
    assert taken(many) < 1.5 * taken(few)


@pytest.mark.parametrize("problem", LARGE + SMALL, ids=str)
def test_a_footprint_accounts_for_the_whole_product(problem):
    points, _ = KERNEL.space(problem, TARGET).legal()
    found = footprint(problem, points)
    blocks = np.prod(np.broadcast_arrays(*found.grid), axis=0)
    result = problem.result()
    assert np.all(found.flops * found.steps * blocks >= problem.flops)
    written = np.where(points.split_k > 1, 4 * points.split_k, result.dtype.itemsize)
    np.testing.assert_allclose(found.bytes_written * blocks, np.prod(result.shape) * written)
    for operand, array in zip(found.operands, problem.operands(), strict=True):
        readers = blocks / np.prod([found.grid[axis] for axis in operand.axes], axis=0)
        np.testing.assert_allclose(
            operand.bytes * found.steps * blocks, readers * np.prod(array.shape) * array.dtype.itemsize
        )
    assert np.all(blocks % found.cluster == 0)
    assert np.all((found.exchanged_bytes > 0) == (points.cluster == "k"))


@pytest.mark.parametrize("raster", ["m", "n"])
@pytest.mark.parametrize(("rows", "columns", "width"), [(1, 1, 4), (8, 8, 2), (7, 5, 4), (3, 10, 8), (10, 3, 16)])
def test_the_walk_visits_every_tile_once_and_turns_to_a_neighbour_between_bands(rows, columns, width, raster):
    visit = jax.vmap(lambda number: walk(number, rows, columns, raster, width))
    batch, row, column = (np.asarray(x) for x in visit(np.arange(2 * rows * columns, dtype=np.int32)))
    assert sorted(zip(batch, row, column, strict=True)) == list(np.ndindex(2, rows, columns))
    minor, major = (row, column) if raster == "m" else (column, row)
    inside = np.flatnonzero(np.diff(batch) == 0)
    assert np.all(np.abs(np.diff(major))[inside] <= 1)
    assert np.all(np.abs(np.diff(minor // width))[inside] <= 1)


def test_192_accumulators_are_the_most_that_fit_the_registers():
    problem = MatmulProblem(4096, 4096, 4096)
    tiles = [schedule(tile_m=256, tile_n=n, epilogue_n=32) for n in (192, 224, 256)]
    assert fits(footprint(problem, Columns.of(tiles))).tolist() == [True, False, False]


@untiled
@pytest.mark.parametrize(
    ("problem", "copied"),
    [
        (MatmulProblem(4000, 4096, 4160), 0),
        (MatmulProblem(4001, 4040, 4104), 0),
        (MatmulProblem(1024, 50257, 768, transpose_b=True), 0),  # threads write the result
        (MatmulProblem(1000, 1000, 1000, transpose_a=True, residual="float32"), 0),
        # Rows of k, and of m, that are no multiple of 16 bytes.
        (MatmulProblem(4001, 4096, 4101), 2 * 4001 * (4101 + 4104)),
        (MatmulProblem(4001, 4096, 4096, transpose_a=True), 2 * 4096 * (4001 + 4008)),
        (MatmulProblem(300, 200, 100, batch=3, dtype="float32", transpose_b=True), 0),
        (MatmulProblem(300, 200, 101, batch=3, dtype="float32", transpose_b=True), 4 * 3 * (300 + 200) * (101 + 104)),
    ],
    ids=str,
)
def test_only_operands_whose_rows_start_between_16_bytes_are_padded(problem, copied):
    found = footprint(problem, Columns.of([schedule(tile_k=32) if problem.dtype == "float32" else BASE]))
    assert found.copied_bytes[0] == copied
    launched = str(jax.make_jaxpr(lambda *args: KERNEL.run(problem, BASE, TARGET, *args))(*problem.operands()))
    assert found.launches[0] == 1 + launched.count(" pad[")


@untiled
def test_arrays_that_tiles_divide_lie_in_tiles():
    reached = [(4000, 4096, 4160), (4000, 4112, 4128), (5, 128, 64), (8, 24, 40)]
    beyond = [(4001, 4096, 4096), (4096, 4104, 4096), (4096, 4096, 4104), (9, 128, 64)]
    assert not any(geometry.Geometry(MatmulProblem(*extents), BASE).exact for extents in reached)
    assert all(geometry.Geometry(MatmulProblem(*extents), BASE).exact for extents in beyond)


def test_in_tiles_only_arrays_that_these_do_not_divide_are_padded(tiled_only):
    reached = [
        MatmulProblem(4000, 4096, 4160),
        MatmulProblem(4000, 4112, 4128),
        MatmulProblem(5, 128, 64),
        MatmulProblem(8, 24, 40),
    ]
    for problem in reached:
        found = footprint(problem, Columns.of([BASE]))
        assert (found.launches[0], found.copied_bytes[0]) == (1, 0), problem
    problem = MatmulProblem(
        4001, 4096, 4104
    )  # a and the result have an odd row, a's rows of k are not whole swizzled rows
    found = footprint(problem, Columns.of([BASE]))
    a, c = 4001 * 4104 + 4008 * 4160, 4001 * 4096 + 4008 * 4096  # b has 4104 rows: a multiple of 8
    assert found.copied_bytes[0] == 2 * (a + c)
    assert found.launches[0] == 3


def test_parts_of_k_cost_their_sums_and_a_launch_that_also_cuts_out_the_result(tiled_only):
    problem = MatmulProblem(1000, 1000, 1024)  # b and the result have rows of 2000 bytes
    b, c = 1024 * 1000 + 1024 * 1024, 1000 * 1000 + 1000 * 1024
    found = footprint(problem, Columns.of([schedule(), schedule(split_k=2)]))
    assert found.copied_bytes.tolist() == [2 * (b + c), 2 * b + 1000 * 1000 * (2 * 4 + 2)]
    assert found.launches.tolist() == [3, 3]
    assert found.grid[0].tolist() == [1, 2]
    assert found.steps.tolist() == [16, 8]


def test_what_follows_the_sums_costs_its_bytes_where_they_are_complete():
    bias, residual = 320 * 4, 256 * 320 * 2
    problem = MatmulProblem(256, 320, 512, bias="float32", activation="gelu", residual="bfloat16")
    schedules = Columns.of([schedule(), schedule(split_k=2)])
    found, plain = footprint(problem, schedules), footprint(problem.plain, schedules)
    blocks, readers = 2 * 3, [2, 1]  # every row of tiles reads the bias
    loaded = [operand.bytes * found.steps * blocks for operand in found.operands[2:]]
    assert [load[0] for load in loaded] == pytest.approx([bias * readers[0], residual * readers[1]])
    assert [load[1] for load in loaded] == [0, 0]
    assert (found.copied_bytes - plain.copied_bytes).tolist() == [0, bias + residual]
    assert (found.special_ops * found.steps).tolist() == [128 * 128, 0]
    # For each warpgroup 128 columns of the bias, and two pieces of 64 x 64 of the residual; a barrier for each of them.
    assert (found.onchip_bytes - plain.onchip_bytes).tolist() == [2 * (128 * 4 + 2 * 64 * 64 * 2 + 3 * 8), 0]


@untiled
def test_rows_start_where_the_pitch_of_their_array_lets_them():
    problem = MatmulProblem(1000, 504, 2000)  # rows of 4000, 1008 and 1008 bytes
    a, b = footprint(problem, Columns.of([BASE])).operands
    assert (a.start_bytes, b.start_bytes) == (32, 16)
    a, b = footprint(dataclasses.replace(problem, transpose_a=True), Columns.of([BASE])).operands
    assert (a.start_bytes, b.start_bytes) == (16, 16)
    a, b = footprint(MatmulProblem(1, 4096, 4096), Columns.of([BASE])).operands
    assert (a.start_bytes, b.start_bytes) == (0, 8192), "a single row starts where the array does"


def test_rows_beyond_an_edge_count_in_whole_groups_of_eight():
    def outside(m, tile_m):
        few = footprint(MatmulProblem(m, 4096, 4096), Columns.of([schedule(tile_m=tile_m, split="n")]))
        return few.operands[0].outside_rows[0]

    assert outside(1, 64) == 56, "of 64 rows of 128 bytes"
    assert outside(8, 64) == 56
    assert outside(9, 64) == 48
    assert outside(64, 64) == 0
    assert outside(1000, 128) == 24 / 8, "on average over eight tiles"


def test_a_step_in_flight_keeps_a_slot_and_runs_ahead():
    points = [
        schedule(stages=4, split=split, in_flight=flight) for split, flight in (("m", 0), ("none", 1), ("tiles", 1))
    ]
    found = footprint(MatmulProblem(4096, 4096, 4096), Columns.of(points))
    assert found.stages.tolist() == [4, 3, 3]
    assert found.multipliers.tolist() == [2, 1, 1]
    assert found.ahead.tolist() == [0, 1, 1]
    assert found.alternating.tolist() == [False, False, True]


@untiled
def test_threads_write_only_what_no_copy_reaches_and_half_a_warp_takes_as_long_as_a_whole_one():
    points = Columns.of([schedule(epilogue_n=64), schedule(epilogue_n=32), schedule(split_k=2)])
    copied, written = (footprint(MatmulProblem(1024, n, 768), points) for n in (1000, 1001))
    assert not np.any(copied.vector_ops)
    wide, narrow, sums = written.vector_ops * written.steps
    assert wide > 0
    assert (narrow, sums) == (2 * wide, 0)


def test_narrow_pieces_leave_room_for_four_stages_of_the_large_tile_beside_a_residual():
    problem = FUSED[0]
    points, _ = KERNEL.space(problem, TARGET).legal()
    roomy = fits(footprint(problem, points)) & (points.tile_m * points.tile_n == 128 * 256) & (points.stages == 4)
    assert set(points.epilogue_n[roomy & (points.tile_k == 64)]) == {32}


def test_a_residual_is_padded_as_its_result_is_and_a_bias_where_its_rows_are_odd(tiled_only):
    problem = MatmulProblem(104, 333, 512, batch=2, bias="bfloat16", out_dtype="float32", residual="bfloat16")
    schedules = Columns.of([schedule(), schedule(split_k=2)])
    found, plain = footprint(problem, schedules), footprint(problem.plain, schedules)
    bias, residual = 2 * 2 * (333 + 336), 2 * 2 * 104 * (333 + 384)
    assert (found.copied_bytes - plain.copied_bytes).tolist() == [bias + residual, 2 * 2 * (333 + 104 * 333)]
    assert (found.launches - plain.launches).tolist() == [2, 0]


@interpreted
def test_parts_of_k_are_added_up_in_the_same_order_each_time():
    problem = MatmulProblem(64, 64, 256)
    one = schedule(tile_m=64, tile_n=64, split="n", epilogue_n=32, split_k=4)
    times = [hopper.interpret(KERNEL, problem, one, cores=cores)[0] for cores in (1, 4)]
    np.testing.assert_array_equal(*times)


def test_a_schedule_stored_before_the_later_fields_existed_is_read_as_it_ran():
    stored = {name: value for name, value in dataclasses.asdict(BASE).items() if name in OLD_FIELDS}
    space = KERNEL.space(MatmulProblem(4096, 4096, 4096), TARGET)
    assert space.decode(stored) == BASE
    assert space.encode(dataclasses.asdict(BASE)) == stored


@pytest.mark.parametrize(
    "recording", sorted(SWEEPS.glob("matmul-*.jsonl.gz")), ids=lambda path: path.name.split(".")[0]
)
def test_the_space_still_holds_every_schedule_that_was_swept_and_spells_it_as_then(recording):
    sweep, trials = replay.read(recording)
    space = KERNEL.space(MatmulProblem.from_canonical(sweep.problem), TARGET)
    today = {frozenset(space.encode(dataclasses.asdict(one)).items()) for one in space.schedules(space.legal()[0])}
    swept = {frozenset(trial.schedule.items()) for trial in trials if trial.backend == KERNEL.backend}
    assert len(swept) > 40
    assert swept <= today


def test_few_rows_are_swapped_and_only_where_it_pays_is_k_split():
    def fields(problem):
        points, _ = KERNEL.space(problem, TARGET).legal()
        return set(points.swap.tolist()), max(points.split_k), set(points.split.tolist())

    assert fields(MatmulProblem(65, 8192, 8192, transpose_a=True))[0] == {False}
    assert fields(MatmulProblem(64, 8192, 8192)) == ({False, True}, 4, {"n", "none"})
    assert fields(MatmulProblem(4096, 4096, 4096, transpose_b=True)) == ({False}, 1, {"m", "n", "tiles"})
    assert fields(MatmulProblem(64, 64, 65536))[1] == 64
    assert fields(MatmulProblem(64, 64, 128))[1] == 1


@pytest.mark.parametrize(
    ("problem", "wanted"),
    [
        (MatmulProblem(256, 10240, 8192), {(128, 192, 1, False), (256, 160, 2, False)}),
        (MatmulProblem(2048, 576, 7168), {(96, 192, 2, True), (80, 128, 1, True)}),
        (MatmulProblem(2048, 5120, 5120), {(256, 160, 1, False), (160, 256, 1, True)}),
        (MatmulProblem(2048, 5120, 5120, transpose_b=True), {(256, 160, 1, False)}),
    ],
    ids=str,
)
def test_tiles_of_no_power_of_two_keep_more_cores_busy_than_larger_ones_of_powers_of_two(problem, wanted):
    points, _ = KERNEL.space(problem, TARGET).legal()
    points = points.take(fits(footprint(problem, points)))
    area = points.tile_m * points.tile_n
    parts = points.split_k * (1 + (points.cluster == "k"))
    shares = -(-problem.m // points.tile_m) * -(-problem.n // points.tile_n) * parts
    work = -(-shares // TARGET.cores) * area / parts
    square = area & (area - 1) == 0
    tiles = zip(points.tile_m.tolist(), points.tile_n.tolist(), parts.tolist(), points.swap.tolist(), strict=True)
    assert wanted <= set(tiles)
    for one in np.flatnonzero(~square):
        rivals = square & (parts == parts[one])
        rivals &= 1 / points.tile_m + 1 / points.tile_n <= 1 / points.tile_m[one] + 1 / points.tile_n[one]
        assert np.all(work[one] < work[rivals]), points.row(one)
    assert not problem.transpose_b or not np.any(points.swap), "columns of b are as fine as rows of a"


def test_tiles_are_shared_along_k_where_cores_idle_and_the_ring_has_room_for_sums():
    for problem in LARGE + SMALL + FUSED:
        points, _ = KERNEL.space(problem, TARGET).legal()
        shared = points.take(points.cluster == "k")
        found = footprint(problem, shared)
        tiles = problem.batch * -(-problem.m // shared.tile_m) * -(-problem.n // shared.tile_n)
        assert np.all(2 * tiles <= TARGET.cores)
        assert np.all(shared.split_k == 1)
        a, b = (operand.filled_bytes for operand in found.operands[:2])
        assert np.all(shared.stages * np.maximum(a, b) >= found.exchanged_bytes)
    assert set(KERNEL.space(MatmulProblem(4096, 4096, 4096), TARGET).legal()[0].cluster) == {"none", "m", "n"}


def test_tiles_are_taken_in_turns_where_a_block_has_several_and_wait_for_each_step_only_in_groups():
    for problem in LARGE + SMALL + FUSED:
        points, _ = KERNEL.space(problem, TARGET).legal()
        found = footprint(problem, points)
        blocks = np.prod(np.broadcast_arrays(*found.grid), axis=0)
        in_turns = points.split == "tiles"
        assert np.all(~in_turns | (blocks > TARGET.cores))
        assert np.all(~in_turns | (points.in_flight == (not geometry.in_groups(problem))))
        tiles = problem.batch * -(-problem.m // points.tile_m) * -(-problem.n // points.tile_n)
        once = (tiles * points.split_k <= TARGET.cores) & (points.stages >= 6)
        assert np.all((points.in_flight == 0) | in_turns | (points.split == "none") | once)
        assert np.all((points.in_flight == 0) | (points.stages > 2))


def test_the_model_alone_takes_only_what_a_device_has_checked():
    elsewhere = dataclasses.replace(TARGET, architecture="sm_100")
    for problem in LARGE + SMALL + FUSED:
        points, _ = KERNEL.space(problem, TARGET).legal()
        assert np.all(KERNEL.verified(problem, points, TARGET))
        assert not np.any(KERNEL.verified(problem, points, elsewhere))


def test_what_it_cannot_do_it_refuses_in_words():
    product = MatmulProblem(128, 128, 128)
    assert KERNEL.supports(product, TARGET) is None
    assert "sm_80" in KERNEL.supports(product, Target("cuda", "NVIDIA A100-SXM4-80GB", "sm_80", 108))
    assert "sm_90" in KERNEL.supports(product, Target("cpu", "cpu", "cpu", 1))
    exact = dataclasses.replace(product, dtype="float32", precision="highest", transpose_b=True)
    assert "highest" in KERNEL.supports(exact, TARGET)
    assert "last axis" in KERNEL.supports(dataclasses.replace(exact, precision="default", transpose_b=False), TARGET)
    assert KERNEL.supports(dataclasses.replace(exact, precision="default"), TARGET) is None


def test_a_chip_with_one_core_gets_no_cluster():
    points, _ = KERNEL.space(MatmulProblem(512, 512, 512), dataclasses.replace(TARGET, cores=1)).legal()
    assert set(points.cluster) == {"none"}


def test_every_rule_drops_what_no_other_rule_drops():
    needed = set()
    for problem in LARGE + SMALL:
        space = KERNEL.space(problem, TARGET)
        if space.size > 600_000:  # takes seconds, and shows nothing that the others do not
            continue
        points = space.points()
        holds = {reason: np.asarray(rule(points)) for reason, rule in space.rules.items()}
        for reason, column in holds.items():
            others = np.all([other for name, other in holds.items() if name != reason], axis=0)
            if np.any(others & ~column):
                needed.add(reason)
        assert list(holds) == list(space.rules)
    assert needed == set(space.rules)


def test_blocks_that_share_tiles_have_one_each():
    problem, two_cores = MatmulProblem(128, 256, 512), dataclasses.replace(TARGET, cores=2)
    with pytest.raises(ValueError, match="too many"):
        jax.eval_shape(lambda *args: KERNEL.run(problem, schedule(cluster="k"), two_cores, *args), *problem.operands())


def test_a_ring_too_small_for_the_sums_of_a_shared_tile_is_refused_before_anything_is_overwritten():
    with pytest.raises(ValueError, match="more stages"):
        hopper.lower(
            KERNEL, MatmulProblem(256, 128, 2048), schedule(cluster="k", tile_m=256, tile_n=128, tile_k=32, stages=2)
        )
