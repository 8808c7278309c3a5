"""What the Hopper matmul demands of a chip: registers, bytes, copies, launches."""

import dataclasses

import hopper
import jax
import numpy as np
import pytest
from counting import bytecodes
from failures import failures
from hopper_matmul import BASE, FUSED, KERNEL, LARGE, SMALL, TARGET, fits, footprint, legal, schedule, untiled

from scheduler.model.cost import CostModel
from scheduler.model.pruning import prune
from search_spaces import Columns
from search_spaces.matmul.hopper.schedule import Tiling
from search_spaces.matmul.problem import MatmulProblem


def test_a_space_of_a_million_points_and_its_footprint_take_little_more_python_than_one_of_thousands():
    def taken(problem):
        return bytecodes(lambda: footprint(problem, KERNEL.space(problem, TARGET).legal()[0]))

    few, many = MatmulProblem(100, 72, 40, batch=3, transpose_a=True), MatmulProblem(512, 512, 65536)
    assert KERNEL.space(many, TARGET).size > 300 * KERNEL.space(few, TARGET).size
    assert taken(many) < 1.5 * taken(few)


def test_a_footprint_accounts_for_the_whole_product():
    def check(problem):
        points = legal(problem)
        found = footprint(problem, points)
        blocks = np.prod(np.broadcast_arrays(*found.grid), axis=0)
        result = problem.result()
        assert np.all(found.step.flops * found.steps * blocks >= problem.flops)
        written = np.where(points.split_k > 1, 4 * points.split_k, result.dtype.itemsize)
        np.testing.assert_allclose(found.tile.bytes_written * blocks, np.prod(result.shape) * written)
        for operand, array in zip(found.mean_step.loads, problem.operands(), strict=True):
            readers = blocks / np.prod([found.grid[axis] for axis in operand.axes], axis=0)
            np.testing.assert_allclose(
                operand.bytes * found.steps * blocks, readers * np.prod(array.shape) * array.dtype.itemsize
            )
        assert np.all(blocks % found.cluster == 0)
        assert np.all((found.dsmem_bytes > 0) == (points.cluster == "split_k"))

    assert failures(check, LARGE + SMALL) == []


def test_192_accumulators_are_the_most_that_fit_the_registers():
    problem = MatmulProblem(4096, 4096, 4096)
    tiles = [schedule(tile_m=256, tile_n=n, epi_tile_n=32) for n in (192, 224, 256)]
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
def test_arrays_that_tiles_divide_are_tiled():
    reached = [(4000, 4096, 4160), (4000, 4160, 4096), (5, 128, 64), (8, 24, 40)]
    beyond = [(4001, 4096, 4096), (4096, 4104, 4096), (4096, 4096, 4104), (9, 128, 64)]
    narrowly = [(4096, 4112, 4096), (4096, 4096, 4128), (4096, 4128, 4112)]  # by rows of 32 or 64 bytes
    assert not any(Tiling(MatmulProblem(*extents), BASE).untiled for extents in reached)
    assert all(Tiling(MatmulProblem(*extents), BASE).untiled for extents in beyond + narrowly)


@untiled
@pytest.mark.parametrize(
    "problem",
    [
        MatmulProblem(7232, 9904, 672),
        MatmulProblem(5832, 4304, 1152),
        MatmulProblem(5832, 1152, 4304),
        MatmulProblem(4096, 32016, 4096),
        MatmulProblem(64, 32016, 4096),
        MatmulProblem(840, 3360, 4208),
        MatmulProblem(2016, 5008, 6576, transpose_a=True, transpose_b=True),
    ],
    ids=str,
)
def test_whatever_the_extents_operands_are_loaded_and_results_stored_in_rows_of_128_bytes(problem):
    first = prune(KERNEL, problem, hopper.H200, CostModel(hopper.H200)).candidates()[0]
    found = Tiling(problem, KERNEL.space(problem, TARGET).decode(first.schedule))
    assert found.swizzle == 128
    assert found.out_swizzle in ((128,) if found.epi_n == 64 else (64, 128))


def test_tiled_only_arrays_that_tiles_do_not_divide_are_padded(tiled_only):
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


def test_split_k_costs_its_accumulators_and_a_reduction_that_also_cuts_out_the_result(tiled_only):
    problem = MatmulProblem(1000, 1000, 1024)  # b and the result have rows of 2000 bytes
    b, c = 1024 * 1000 + 1024 * 1024, 1000 * 1000 + 1000 * 1024
    found = footprint(problem, Columns.of([schedule(), schedule(split_k=2)]))
    assert found.copied_bytes.tolist() == [2 * (b + c), 2 * b + 1000 * 1000 * (2 * 4 + 2)]
    assert found.launches.tolist() == [3, 3]
    assert found.grid[0].tolist() == [1, 2]
    assert found.steps.tolist() == [16, 8]


def test_an_epilogue_costs_its_bytes_where_accumulators_are_complete():
    bias, residual = 320 * 4, 256 * 320 * 2
    problem = MatmulProblem(256, 320, 512, bias="float32", activation="gelu", residual="bfloat16")
    schedules = Columns.of([schedule(), schedule(split_k=2)])
    found, plain = footprint(problem, schedules), footprint(problem.plain, schedules)
    blocks, readers = 2 * 3, [2, 1]  # every row of tiles reads the bias
    loaded = [operand.bytes * blocks for operand in found.tile.loads]
    assert [load[0] for load in loaded] == pytest.approx([bias * readers[0], residual * readers[1]])
    assert [load[1] for load in loaded] == [0, 0]
    assert (found.copied_bytes - plain.copied_bytes).tolist() == [0, bias + residual]
    assert found.tile.mufu_ops.tolist() == [128 * 128, 0]
    # For each consumer 128 columns of the bias, and two subtiles of 64 x 64 of the residual; a barrier for each.
    assert (found.onchip_bytes - plain.onchip_bytes).tolist() == [2 * (128 * 4 + 2 * 64 * 64 * 2 + 3 * 8), 0]


@untiled
def test_rows_start_where_the_pitch_of_their_array_lets_them():
    problem = MatmulProblem(1000, 504, 2000)  # rows of 4000, 1008 and 1008 bytes
    a, b = footprint(problem, Columns.of([BASE])).step.loads
    assert (a.start_bytes, b.start_bytes) == (32, 16)
    a, b = footprint(dataclasses.replace(problem, transpose_a=True), Columns.of([BASE])).step.loads
    assert (a.start_bytes, b.start_bytes) == (16, 16)
    a, b = footprint(MatmulProblem(1, 4096, 4096), Columns.of([BASE])).step.loads
    assert (a.start_bytes, b.start_bytes) == (0, 8192), "a single row starts where the array does"


def test_rows_beyond_an_edge_count_in_whole_groups_of_eight():
    def outside(m, tile_m):
        few = footprint(MatmulProblem(m, 4096, 4096), Columns.of([schedule(tile_m=tile_m, consumers="cooperative_n")]))
        return few.step.loads[0].fill_rows[0]

    assert outside(1, 64) == 56, "of 64 rows of 128 bytes"
    assert outside(8, 64) == 56
    assert outside(9, 64) == 48
    assert outside(64, 64) == 0
    assert outside(1000, 128) == 24 / 8, "on average over eight tiles"


def test_delay_release_keeps_a_stage_and_runs_ahead():
    points = [
        schedule(stages=4, consumers=consumers, delay_release=delay)
        for consumers, delay in (("cooperative_m", 0), ("one", 1), ("ping_pong", 1))
    ]
    found = footprint(MatmulProblem(4096, 4096, 4096), Columns.of(points))
    assert found.stages.tolist() == [4, 3, 3]
    assert found.consumers.tolist() == [2, 1, 1]
    assert found.delay_release.tolist() == [0, 1, 1]
    assert found.ping_pong.tolist() == [False, False, True]


@untiled
def test_threads_store_only_what_tma_cannot_address_and_half_a_warp_takes_as_long_as_a_whole_one():
    points = Columns.of([schedule(epi_tile_n=64), schedule(epi_tile_n=32), schedule(split_k=2)])
    copied, written = (footprint(MatmulProblem(1024, n, 768), points) for n in (1000, 1001))
    assert not np.any(copied.tile.fp32_ops)
    wide, narrow, split = written.tile.fp32_ops
    assert wide > 0
    assert (narrow, split) == (2 * wide, 0)


def test_narrow_subtiles_leave_space_for_four_stages_of_the_large_tile_beside_a_residual():
    problem = FUSED[0]
    points = legal(problem)
    roomy = fits(footprint(problem, points)) & (points.tile_m * points.tile_n == 128 * 256) & (points.stages == 4)
    assert set(points.epi_tile_n[roomy & (points.tile_k == 64)]) == {32}


def test_a_residual_is_padded_as_its_result_is_and_a_bias_where_its_rows_are_odd(tiled_only):
    problem = MatmulProblem(104, 333, 512, batch=2, bias="bfloat16", out_dtype="float32", residual="bfloat16")
    schedules = Columns.of([schedule(), schedule(split_k=2)])
    found, plain = footprint(problem, schedules), footprint(problem.plain, schedules)
    bias, residual = 2 * 2 * (333 + 336), 2 * 2 * 104 * (333 + 384)
    assert (found.copied_bytes - plain.copied_bytes).tolist() == [bias + residual, 2 * 2 * (333 + 104 * 333)]
    assert (found.launches - plain.launches).tolist() == [2, 0]
