"""The space of the Hopper matmul: what is worth considering, and in which order tiles are computed."""

import dataclasses
from pathlib import Path

import jax
import numpy as np
import pytest
from failures import failures
from hopper_matmul import BASE, FUSED, KERNEL, LARGE, SMALL, TARGET, fits, footprint, legal

from scheduler.measure import replay
from search_spaces.jax_compat import plgpu
from search_spaces.matmul.hopper import schedule
from search_spaces.matmul.hopper.schedule import PING_PONG
from search_spaces.matmul.problem import MatmulProblem
from search_spaces.matmul.tiles import planar_snake

FIRST_FIELDS = (
    "tile_m",
    "tile_n",
    "tile_k",
    "stages",
    "consumers",
    "cluster",
    "grid_minor_dim",
    "grid_tile_width",
    "epi_tile_n",
)
SWEEPS = Path(__file__).parents[2] / "sweeps" / "nvidia-h200"


def test_the_legal_space_of_a_large_problem_is_some_thousands():
    def check(problem):
        assert 1000 <= len(legal(problem)) <= 5000

    assert failures(check, LARGE + FUSED[:1]) == []


def test_every_problem_has_a_schedule_that_fits():
    def check(problem):
        found = footprint(problem, legal(problem))
        assert np.any(fits(found))

    assert failures(check, LARGE + SMALL + FUSED) == []


@pytest.mark.parametrize(("added", "most"), [({}, 5), ({"bias": "bfloat16"}, 5), ({"residual": "bfloat16"}, 4)])
def test_ping_pong_of_the_largest_tiles_has_a_fifth_stage_where_no_residual_arrives(added, most):
    problem = MatmulProblem(16384, 16384, 512, **added)
    points = legal(problem)
    largest = (points.consumers == "ordered_ping_pong") & (points.tile_m * points.tile_n == 128 * 192)
    largest &= (points.tile_k == 64) & np.logical_not(points.swap_ab)
    assert points.stages[largest & fits(footprint(problem, points))].max() == most


def test_every_legal_schedule_gives_each_warpgroup_what_wgmma_multiplies():
    def check(problem):
        points = legal(problem)
        along_m = np.where(points.consumers == "cooperative_m", points.tile_m // 2, points.tile_m)
        along_n = np.where(points.consumers == "cooperative_n", points.tile_n // 2, points.tile_n)
        rows, columns = np.where(points.swap_ab, [along_n, along_m], [along_m, along_n])
        assert np.all(rows % 64 == 0)
        assert np.all((columns % 8 == 0) & (columns <= 256))
        shared = points.cluster == "split_k"
        assert np.all((columns % 16 == 0) | ~shared)
        own = np.where(shared & ~points.swap_ab, along_n // 2, along_n)
        assert np.all(own % points.epi_tile_n == 0), "a subtile that does not divide its tile loses columns silently"
        assert np.all(~points.swap_ab | (points.tile_m >= problem.m) | (problem.m > 64))

    assert failures(check, LARGE + SMALL) == []


@pytest.mark.parametrize("grid_minor_dim", ["m", "n"])
@pytest.mark.parametrize(("rows", "columns", "width"), [(1, 1, 4), (8, 8, 2), (7, 5, 4), (3, 10, 8), (10, 3, 16)])
def test_planar_snake_visits_every_tile_once_and_turns_to_a_neighbour_between_groups(
    rows, columns, width, grid_minor_dim
):
    visit = jax.vmap(lambda number: planar_snake(number, (rows, columns), grid_minor_dim, width))
    batch, row, column = (np.asarray(x) for x in visit(np.arange(2 * rows * columns, dtype=np.int32)))
    assert sorted(zip(batch, row, column, strict=True)) == list(np.ndindex(2, rows, columns))
    minor, major = (row, column) if grid_minor_dim == "m" else (column, row)
    inside = np.flatnonzero(np.diff(batch) == 0)
    assert np.all(np.abs(np.diff(major))[inside] <= 1)
    assert np.all(np.abs(np.diff(minor // width))[inside] <= 1)
    snake = jax.vmap(
        lambda number: plgpu.planar_snake(number, (rows, columns), 0 if grid_minor_dim == "m" else 1, width)
    )
    jax_row, jax_column = snake(np.arange(rows * columns, dtype=np.int32))
    np.testing.assert_array_equal(jax_row, row[: rows * columns])
    np.testing.assert_array_equal(jax_column, column[: rows * columns])


def test_a_schedule_stored_before_the_later_fields_existed_is_read_as_it_ran():
    stored = {name: value for name, value in dataclasses.asdict(BASE).items() if name in FIRST_FIELDS}
    space = KERNEL.space(MatmulProblem(4096, 4096, 4096), TARGET)
    assert space.decode(stored) == BASE
    assert space.encode(dataclasses.asdict(BASE)) == stored


def test_the_space_still_holds_every_schedule_that_was_swept_and_spells_it_as_it_is_read():
    def check(recording):
        sweep, trials = replay.read(recording)
        space = KERNEL.space(MatmulProblem.from_canonical(sweep.problem), TARGET)
        today = {frozenset(space.encode(dataclasses.asdict(one)).items()) for one in space.schedules(space.legal()[0])}
        swept = {frozenset(trial.schedule.items()) for trial in trials if trial.backend == KERNEL.backend}
        assert len(swept) > 40
        assert swept <= today

    assert failures(check, sorted(SWEEPS.glob("matmul-*.jsonl.gz")), lambda path: path.name) == []


def test_few_rows_take_swap_ab_and_only_where_it_pays_is_k_split():
    def fields(problem):
        points = legal(problem)
        return set(points.swap_ab.tolist()), max(points.split_k), set(points.consumers.tolist())

    assert fields(MatmulProblem(65, 8192, 8192, transpose_a=True))[0] == {False}
    assert fields(MatmulProblem(64, 8192, 8192)) == ({False, True}, 4, {"cooperative_n", "one"})
    assert fields(MatmulProblem(4096, 4096, 4096, transpose_b=True)) == (
        {False},
        1,
        {"cooperative_m", "cooperative_n", "ordered_ping_pong", "ping_pong"},
    )
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
    points = legal(problem)
    # Ping-pong in order has tiles of its own, whatever the waves.
    points = points.take(fits(footprint(problem, points)) & (points.consumers != "ordered_ping_pong"))
    area = points.tile_m * points.tile_n
    splits = points.split_k * (1 + (points.cluster == "split_k"))
    work_tiles = -(-problem.m // points.tile_m) * -(-problem.n // points.tile_n) * splits
    work = -(-work_tiles // TARGET.cores) * area / splits
    square = area & (area - 1) == 0
    tiles = zip(points.tile_m.tolist(), points.tile_n.tolist(), splits.tolist(), points.swap_ab.tolist(), strict=True)
    assert wanted <= set(tiles)
    for one in np.flatnonzero(~square):
        rivals = square & (splits == splits[one])
        rivals &= 1 / points.tile_m + 1 / points.tile_n <= 1 / points.tile_m[one] + 1 / points.tile_n[one]
        assert np.all(work[one] < work[rivals]), points.row(one)
    assert not problem.transpose_b or not np.any(points.swap_ab), "columns of b are as fine as rows of a"


def test_clusters_split_k_where_sms_idle_and_the_stages_hold_the_accumulators():
    for problem in LARGE + SMALL + FUSED:
        points = legal(problem)
        shared = points.take(points.cluster == "split_k")
        found = footprint(problem, shared)
        tiles = problem.batch * -(-problem.m // shared.tile_m) * -(-problem.n // shared.tile_n)
        assert np.all(2 * tiles <= TARGET.cores)
        assert np.all(shared.split_k == 1)
        a, b = (operand.filled_bytes for operand in found.step.loads)
        assert np.all(shared.stages * np.maximum(a, b) >= found.dsmem_bytes)
    assert set(legal(MatmulProblem(4096, 4096, 4096)).cluster) == {"none", "m", "n"}


def test_a_last_wave_is_split_where_all_parts_have_sms_and_as_many_as_these_take():
    found = set()
    for problem in (*LARGE, *SMALL, MatmulProblem(5000, 3000, 7000), MatmulProblem(1736, 5512, 7464)):
        points = legal(problem)
        points = points.take(points.tail_split_k > 1)
        pair = 1 + np.isin(points.cluster, ("m", "n"))
        rows, columns = ((points.cluster == axis) + 1 for axis in "mn")
        of_clusters = -(-problem.m // (points.tile_m * rows)) * -(-problem.n // (points.tile_n * columns))
        waves, tail = np.divmod(problem.batch * of_clusters, TARGET.cores // pair)
        assert np.all((waves >= 1) & (waves <= 6) & (tail > 0))
        assert np.all(tail * points.tail_split_k <= TARGET.cores // pair)
        steps = -(-problem.k // points.tile_k)
        assert np.all(steps >= 8 * points.tail_split_k)
        more = (tail * (points.tail_split_k + 1) <= TARGET.cores // pair) & (steps >= 8 * (points.tail_split_k + 1))
        assert np.all(~more | (points.tail_split_k == 4))
        assert np.all((points.split_k == 1) & (points.cluster != "split_k"))
        found |= set(points.tail_split_k.tolist())
    assert found == {2, 3, 4}


def test_ping_pong_is_for_ctas_with_several_tiles_and_may_wait_for_each_step_only_where_untiled():
    for problem in LARGE + SMALL + FUSED:
        points = legal(problem)
        found = footprint(problem, points)
        blocks = np.prod(np.broadcast_arrays(*found.grid), axis=0)
        ping_pong = np.isin(points.consumers, PING_PONG)
        assert np.all(~ping_pong | (blocks > TARGET.cores))
        may_wait = schedule.untiled(problem) & (points.consumers == "ping_pong")
        assert np.all(~ping_pong | (points.delay_release == 1) | may_wait)
        tiles = problem.batch * -(-problem.m // points.tile_m) * -(-problem.n // points.tile_n)
        once = (tiles * points.split_k <= TARGET.cores) & (points.stages >= 6)
        assert np.all((points.delay_release == 0) | ping_pong | (points.consumers == "one") | once)
        assert np.all((points.delay_release == 0) | (points.stages > 2))


def test_consumers_in_order_have_the_tiles_that_one_consumer_holds_but_none_whose_rows_load_at_half_speed():
    def tiles(problem):
        points = legal(problem)
        points = points.take(fits(footprint(problem, points)) & (points.consumers == "ordered_ping_pong"))
        assert np.all(points.tile_m * points.tile_n <= 128 * 192)
        return set(zip(points.tile_m.tolist(), points.tile_n.tolist(), points.swap_ab.tolist(), strict=True))

    wide = {(128, 192, False), (192, 128, False), (128, 192, True), (192, 128, True), (160, 128, True)}
    assert wide <= tiles(MatmulProblem(4096, 14336, 1024))
    assert (128, 160, False) not in tiles(MatmulProblem(4096, 14336, 1024)), "rows of 64 bytes of b"
    assert {(128, 160, False), (128, 192, False)} <= tiles(MatmulProblem(4096, 14336, 1024, transpose_b=True))
    assert not any(swap_ab for *_, swap_ab in tiles(MatmulProblem(4096, 14336, 1024, transpose_a=True)))
    assert wide <= tiles(MatmulProblem(5000, 3000, 7000)), "rows that TMA cannot address"


def test_the_model_alone_takes_only_what_a_device_has_checked():
    elsewhere = dataclasses.replace(TARGET, architecture="sm_100")
    for problem in LARGE + SMALL + FUSED:
        points = legal(problem)
        assert np.all(KERNEL.verified(problem, points, TARGET))
        assert not np.any(KERNEL.verified(problem, points, elsewhere))


def test_a_chip_with_one_core_gets_no_cluster():
    points, _ = KERNEL.space(MatmulProblem(512, 512, 512), dataclasses.replace(TARGET, cores=1)).legal()
    assert set(points.cluster) == {"none"}


@pytest.mark.slow
def test_every_rule_drops_what_no_other_rule_drops():
    needed = set()
    more_than_stages_hold = MatmulProblem(777, 1097, 1000, dtype="int8", out_dtype="int32", transpose_b=True)
    short_last_waves = MatmulProblem(17992, 368, 2048, transpose_a=True)
    for problem in [*LARGE, *SMALL, more_than_stages_hold, short_last_waves]:
        space = KERNEL.space(problem, TARGET)
        if space.size > 650_000:  # takes seconds, and shows nothing that the others do not
            continue
        points = space.points()
        holds = {reason: np.asarray(rule(points)) for reason, rule in space.rules.items()}
        for reason, column in holds.items():
            others = np.all([other for name, other in holds.items() if name != reason], axis=0)
            if np.any(others & ~column):
                needed.add(reason)
        assert list(holds) == list(space.rules)
    assert needed == set(space.rules)
