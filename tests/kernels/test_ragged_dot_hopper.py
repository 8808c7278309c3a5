"""The Hopper kernels of grouped products on a CPU: on-chip memory compared, small ones interpreted, maps of tiles."""

import dataclasses
import random

import hopper
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hopper_matmul import interpreted, schedule, untiled

from search_spaces import Columns
from search_spaces.jax_compat import gpu_interpreter
from search_spaces.ragged_dot.hopper import (
    MosaicGpuGatedRaggedDot,
    MosaicGpuRaggedDot,
    MosaicGpuRaggedDotWeights,
    k_ranges,
    most_row_tiles,
    row_tiles,
)
from search_spaces.ragged_dot.problem import (
    GatedRaggedDotProblem,
    RaggedDotProblem,
    RaggedDotWeightsProblem,
    random_boundaries,
)

pytestmark = pytest.mark.slow_but_first

TARGET = hopper.H200.target
ROWS, GATED, WEIGHTS = MosaicGpuRaggedDot(), MosaicGpuGatedRaggedDot(), MosaicGpuRaggedDotWeights()
SPACES = [
    (ROWS, RaggedDotProblem(8192, 8, 4096, 2048)),
    (ROWS, RaggedDotProblem(512, 64, 1024, 512, transpose_rhs=True)),
    (GATED, GatedRaggedDotProblem(4096, 16, 512, 1024)),
    (GATED, GatedRaggedDotProblem(128, 16, 512, 1024)),
    (WEIGHTS, RaggedDotWeightsProblem(4096, 8, 512, 1024, out_dtype="float32")),
]
ORDERED = {"consumers": "ordered_ping_pong", "delay_release": 1}
FEW_ROWS = {"tile_m": 16, "swap_ab": True, "consumers": "cooperative_n"}
# Boundaries of 300 rows: from one end to the other with an empty group, groups within a tile, one group with all rows,
# no rows in any group, and random ones.
BOUNDARIES = [
    [0, 60, 60, 188, 260, 300],
    [7, 8, 9, 30, 31, 290],
    [0, 0, 0, 300, 300, 300],
    [150, 150, 150, 150, 150, 150],
    random_boundaries(1, 300, 5).tolist(),
]


@untiled
@pytest.mark.parametrize(("kernel", "problem"), SPACES, ids=[f"{type(p).__name__} {p}" for _, p in SPACES])
def test_onchip_bytes_are_what_lowering_asks_for(kernel, problem):
    points, _ = kernel.space(problem, TARGET).legal()
    few = random.Random(str(problem)).sample(range(len(points)), 4)
    for one in kernel.space(problem, TARGET).schedules(points.take(sorted(few))):
        predicted = kernel.footprint(problem, Columns.of([one]), TARGET).onchip_bytes[0]
        hopper.check_onchip_bytes(kernel, problem, one, predicted)


def check(kernel, problem, one, boundaries=BOUNDARIES):
    """Asserts that a schedule is right for all boundaries, with NaN (99 in integers) in rows of no group."""
    *operands, _ = problem.inputs(0)
    target, tolerance = dataclasses.replace(TARGET, cores=4), problem.tolerance()
    with gpu_interpreter():
        run = jax.jit(lambda *args: kernel.run(problem, one, target, *args))
        for each in boundaries:
            edges = jnp.asarray(each, jnp.int32)
            row = np.arange(problem.rows)
            no_group = ((row < each[0]) | (row >= each[-1]))[:, None]
            floats = jnp.issubdtype(operands[0].dtype, jnp.floating)
            other = jnp.asarray(jnp.nan if floats else 99, operands[0].dtype)
            args = [jnp.where(no_group, other, x) if x.shape[0] == problem.rows else x for x in operands]
            found = np.asarray(run(*args, edges), np.float32)
            wanted = np.asarray(problem.reference(*args, edges), np.float32)
            np.testing.assert_allclose(
                found, wanted, atol=tolerance.absolute, rtol=tolerance.relative, err_msg=f"{one} {each}"
            )


@interpreted
@pytest.mark.parametrize(
    "fields",
    [
        {},
        ORDERED,
        FEW_ROWS,
        {"cluster": "m", "consumers": "cooperative_n"},
        {"cluster": "n"},
        {"consumers": "one", "tile_m": 64},
    ],
    ids=str,
)
def test_rows_times_the_matrix_of_their_group(fields):
    check(ROWS, RaggedDotProblem(300, 5, 128, 256), schedule(**fields))


@interpreted
@pytest.mark.parametrize("fields", [{}, ORDERED, FEW_ROWS], ids=str)
def test_transposed_matrices_and_float32_results(fields):
    check(
        ROWS,
        RaggedDotProblem(300, 5, 96, 136, "float16", "float32", transpose_rhs=True),
        schedule(**fields),
        BOUNDARIES[:3],
    )


EIGHT_BITS = [
    RaggedDotProblem(300, 5, 384, 128, dtype, out_dtype, transpose_rhs=True)
    for dtype, out_dtype in (("float8_e4m3fn", "bfloat16"), ("float8_e5m2", "float32"), ("int8", "int32"))
]


@interpreted
@pytest.mark.parametrize("problem", EIGHT_BITS, ids=str)
def test_operands_of_8_bits(problem):
    for fields in ({}, ORDERED, FEW_ROWS):
        check(ROWS, problem, schedule(**fields | {"tile_k": 128}), BOUNDARIES[1:3])


@untiled
def test_8_bit_matrices_have_k_last_and_are_selected_only_if_measured():
    (problem, *_) = EIGHT_BITS
    assert ROWS.supports(problem, TARGET) is None
    assert "transpose_rhs=True" in ROWS.supports(dataclasses.replace(problem, transpose_rhs=False), TARGET)
    points, _ = ROWS.space(problem, TARGET).legal()
    assert not np.any(ROWS.verified(problem, points, TARGET))
    assert np.all(ROWS.verified(RaggedDotProblem(300, 5, 384, 128), points, TARGET))


@interpreted
@pytest.mark.parametrize("fields", [{"tile_n": 64}, FEW_ROWS | {"stages": 2}], ids=str)
def test_gated_products(fields):
    check(GATED, GatedRaggedDotProblem(300, 5, 128, 128), schedule(**fields), BOUNDARIES[:4])


@interpreted
@pytest.mark.parametrize(
    "fields",
    [
        {},
        ORDERED,
        {"consumers": "ping_pong"},
        {"consumers": "ping_pong", "delay_release": 1},
        {"cluster": "m"},
        {"cluster": "n"},
    ],
    ids=str,
)
def test_the_gradient_of_the_matrices(fields):
    check(WEIGHTS, RaggedDotWeightsProblem(300, 5, 128, 256), schedule(**fields))


@interpreted
def test_values_of_a_neighbours_rows_do_not_enter_the_gradient_of_a_matrix():
    problem = RaggedDotWeightsProblem(300, 3, 128, 128)
    lhs, rhs, _ = problem.inputs(0)
    rows = slice(70, 75)  # within a step of k that begins in group 0
    lhs, rhs = lhs.at[rows].set(jnp.nan), rhs.at[rows].set(jnp.inf)
    edges = jnp.asarray([0, 70, 75, 300], jnp.int32)
    with gpu_interpreter():
        found = np.asarray(WEIGHTS.run(problem, schedule(), dataclasses.replace(TARGET, cores=4), lhs, rhs, edges))
    assert np.isfinite(found[[0, 2]].astype(np.float32)).all()
    assert np.isnan(found[1].astype(np.float32)).all()


@pytest.mark.parametrize(("rows", "groups", "tile"), [(333, 7, 64), (3, 9, 8), (500, 1, 128)])
def test_each_row_is_in_one_row_of_tiles_of_its_group(rows, groups, tile):
    tiles = jax.jit(lambda edges: row_tiles(edges, rows, tile))
    for seed in range(100):
        edges = random_boundaries(seed, rows, groups)
        found = np.asarray(tiles(edges))
        most = most_row_tiles(rows, groups, tile)
        (in_groups, zeros), (group, first, end) = found[:2], found[2:].reshape(3, most)
        assert in_groups + zeros <= most
        of_row = np.full(rows, -1)
        for number in range(in_groups + zeros):
            own = slice(first[number], min(first[number] + tile, end[number]))
            assert own.start < own.stop
            assert (of_row[own] == -1).all()
            of_row[own] = group[number] if number < in_groups else groups
        wanted = np.searchsorted(edges, np.arange(rows), side="right") - 1
        np.testing.assert_array_equal(of_row, np.where((wanted < 0) | (wanted >= groups), groups, wanted))


def test_groups_of_k_are_ordered_by_size():
    edges = jnp.asarray([3, 5, 5, 30, 34], jnp.int32)
    order, first, end = np.asarray(k_ranges(edges)).reshape(3, 4)
    assert list(order) == [2, 3, 0, 1]
    assert (list(first), list(end)) == ([5, 30, 3, 5], [30, 34, 5, 5])
