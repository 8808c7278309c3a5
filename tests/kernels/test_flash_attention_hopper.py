"""Flash attention forward on Hopper without a GPU: lowered, its on-chip memory compared, small problems interpreted."""

import dataclasses
import random
import re

import hopper
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from search_spaces import Columns
from search_spaces.attention.xla import attention
from search_spaces.flash_attention.hopper import FlashAttentionSchedule, MosaicGpuFlashAttention
from search_spaces.flash_attention.hopper.schedule import TileOrder, Tiling, step_imbalance
from search_spaces.flash_attention.problem import FlashAttentionProblem as Problem
from search_spaces.jax_compat import HAS_GPU_INTERPRETER, HAS_UNTILED_SWIZZLE, gpu_interpreter

pytestmark = pytest.mark.slow_but_first

KERNEL, TARGET = MosaicGpuFlashAttention(), hopper.H200.target
SCHEDULE = FlashAttentionSchedule(
    consumers=1,
    block_kv=64,
    stages=2,
    ping_pong=False,
    persistent=False,
    order="plain",
    section=1,
    epi_tile_n=64,
)
PERSISTENT = dataclasses.replace(SCHEDULE, persistent=True)
interpreted_only = pytest.mark.skipif(not HAS_GPU_INTERPRETER, reason="JAX interprets GPU kernels from 0.11 on")

LARGE = [
    Problem(1, 4096, 4096, 16, 4, 128),
    Problem(4, 1000, 777, 8, 8, 64, causal=True, return_lse=True),
    Problem(1, 500, 500, 8, 8, 256, kv_lengths=True),
    Problem(1, 512, 640, 8, 8, 192, 128, q_lengths=True, return_lse=True),
    Problem(2, 300, 1000, 4, 4, 96, window_left=100, dtype="float16"),
    Problem(2, 300, 1000, 4, 4, 80, softcap=True),
]


@pytest.mark.parametrize("problem", LARGE, ids=str)
def test_onchip_bytes_are_what_lowering_asks_for_and_decide_whether_it_succeeds(problem):
    space = KERNEL.space(problem, TARGET)
    points, _ = space.legal()
    schedules = random.Random(str(problem)).sample(list(space.schedules(points)), 3)
    predictions = KERNEL.footprint(problem, Columns.of(schedules), TARGET).onchip_bytes
    for one, predicted in zip(schedules, predictions, strict=True):
        hopper.check_onchip_bytes(KERNEL, problem, one, int(predicted))


@pytest.mark.parametrize("problem", LARGE, ids=str)
def test_every_problem_has_schedules_that_fit_an_h200(problem):
    points, _ = KERNEL.space(problem, TARGET).legal()
    footprint = KERNEL.footprint(problem, points, TARGET)
    assert (footprint.onchip_bytes <= hopper.H200.onchip_bytes).any()
    assert np.all(footprint.registers * footprint.threads <= 65536)


@pytest.mark.parametrize(
    ("problem", "reason"),
    [
        (Problem(1, 64, 64, 1, 1, 64, dtype="float32"), "not float32"),
        (Problem(1, 64, 64, 1, 1, 72), "head_dim that is a multiple of 16"),
        (Problem(1, 64, 64, 1, 1, 64, 24), "head_dim_v that is a multiple of 16"),
        (Problem(1, 64, 64, 1, 1, 512), "at most 256"),
    ],
)
def test_what_is_not_supported_is_said_in_words(problem, reason):
    assert reason in KERNEL.supports(problem, TARGET)


def test_other_chips_are_not_supported():
    assert "sm_90" in KERNEL.supports(LARGE[0], dataclasses.replace(TARGET, architecture="sm_100"))


def test_steps_of_causal_tiles_are_counted():
    problem = Problem(1, 512, 512, 1, 1, 64, causal=True)
    footprint = KERNEL.footprint(problem, Columns.of([dataclasses.replace(SCHEDULE, consumers=2)]), TARGET)
    # 128 queries see the blocks of 64 keys up to theirs: 2, 4, 6, 8.
    assert (footprint.step_range[0][0], footprint.steps[0], footprint.step_range[1][0]) == (2, 5, 8)


def test_the_longest_tile_is_that_of_those_that_start_last():
    problem = Problem(1, 8192, 8192, 16, 16, 128, causal=True)
    one = dataclasses.replace(SCHEDULE, consumers=2, block_kv=128, order="longest_first", epi_tile_n=128)
    columns = Columns.of([dataclasses.replace(one, section=section) for section in (1, 4, 16)])
    # 132 cores: all tiles of a last head, the 33 shortest ones of four heads, those of 16 are shorter than the mean.
    assert KERNEL.footprint(problem, columns, TARGET).step_range[1].tolist() == [64, 33, 32.5]


@pytest.mark.parametrize(("section", "cores"), [(1, 4), (1, 3), (2, 5), (4, 5), (3, 5)])
def test_imbalance_is_that_of_the_tiles_that_ctas_take(section, cores):
    problem = Problem(2, 500, 500, 2, 2, 64, causal=True)
    schedule = dataclasses.replace(PERSISTENT, order="snake", section=section)
    tiling, work = Tiling(problem, schedule), []
    for cta in range(cores):
        order = TileOrder(tiling, jnp.int32(cta), cores)
        work.append(sum(int(order.tile(jnp.int32(n)).steps) for n in range(int(order.count))))
    assert step_imbalance(problem, schedule, cores) == pytest.approx(max(work) / (sum(work) / cores))


@pytest.mark.parametrize("section", [1, 2, 3, 5])
def test_every_tile_is_dealt_once_also_where_the_last_section_has_fewer_heads(section):
    problem = Problem(1, 500, 500, 5, 5, 64, causal=True)
    tiling = Tiling(problem, dataclasses.replace(PERSISTENT, order="snake", section=section))
    orders = [TileOrder(tiling, jnp.int32(cta), 3) for cta in range(3)]
    tiles = [order.tile(jnp.int32(n)) for order in orders for n in range(int(order.count))]
    dealt = sorted((int(tile.head), int(tile.row)) for tile in tiles)
    assert dealt == [(head, 64 * q_tile) for head in range(5) for q_tile in range(8)]


@pytest.mark.parametrize(("q_len", "cores"), [(1024, 12), (1024, 7), (300, 4), (300, 3), (384, 4)])
def test_last_tiles_which_take_less_time_are_dealt_to_all_ctas_alike(q_len, cores):
    problem = Problem(1, q_len, 64, 24, 24, 64)
    tiling = Tiling(problem, dataclasses.replace(PERSISTENT, consumers=3))
    orders = [TileOrder(tiling, jnp.int32(cta), cores) for cta in range(cores)]
    tiles = [[order.tile(jnp.int32(n)) for n in range(int(order.count))] for order in orders]
    dealt = sorted((int(tile.head), int(tile.row)) for each in tiles for tile in each)
    assert dealt == [(head, row) for head in range(24) for row in range(0, q_len, 192)]
    if q_len % 192:
        last = [sum(int(tile.row) + 192 > q_len for tile in each) for each in tiles]
        assert max(last) - min(last) <= 1 + tiling.q_tiles // 4
        assert tiling.computed_rows == pytest.approx(64 * -(-q_len // 64) / tiling.q_tiles)
    assert tiling.idles == (q_len % 192 > 0)


def test_tiles_of_as_many_heads_as_fill_rounds_are_tried_where_dealing_by_heads_is_uneven():
    """16 tiles of 128 queries: those of 33 heads are four rounds of 132 CTAs."""
    problem = Problem(8, 2048, 2048, 32, 32, 64, causal=True)
    points, _ = KERNEL.space(problem, TARGET).legal()
    two = points.take(points.persistent & (points.consumers == 2) & (points.block_kv == 128))
    found = dict(zip(two.section.tolist(), step_imbalance(problem, two, TARGET.cores), strict=True))
    assert found == {section: pytest.approx(ratio, abs=1e-3) for section, ratio in EVEN.items()}
    unchecked = np.unique(points.section[~KERNEL.verified(problem, points, TARGET)])
    assert set(unchecked.tolist()) == {12, 24, 33, 66}


EVEN = {1: 1.031, 256: 1.031, 33: 1.008, 66: 1.005}


def test_tiles_are_dealt_to_persistent_ctas_where_that_is_fair():
    long, short = (Problem(16384 // n, n, n, 16, 16, 128, causal=True) for n in (8192, 1024))
    (of_long, _), (of_short, _) = (KERNEL.space(problem, TARGET).legal() for problem in (long, short))
    assert not of_long.persistent.any()
    assert of_short.persistent.any()
    assert (step_imbalance(short, of_short.take(of_short.persistent), TARGET.cores) < 1.1).all()


@pytest.mark.parametrize(
    "problem",
    [Problem(1, 8192, 8192, 16, 16, 128), Problem(1, 8192, 8192, 16, 16, 128, causal=True), *LARGE],
    ids=str,
)
def test_a_search_covers_the_space(problem):
    points, _ = KERNEL.space(problem, TARGET).legal()
    assert 1 <= len(points) <= 128


def test_a_user_s_defaults_for_types_do_not_reach_into_the_kernel():
    before = jax.config.jax_enable_x64
    jax.config.update("jax_enable_x64", True)
    try:
        hopper.lower(KERNEL, Problem(1, 256, 200, 2, 1, 64, causal=True, return_lse=True), PERSISTENT)
    finally:
        jax.config.update("jax_enable_x64", before)


@pytest.mark.skipif(not HAS_UNTILED_SWIZZLE, reason="this JAX swizzles tiles of 8 rows only")
@pytest.mark.parametrize("fields", [{}, {"causal": True}, {"head_dim": 256}, {"kv_len": 3000}], ids=str)
def test_lengths_that_8_does_not_divide_are_neither_padded_nor_cut_out(fields):
    problem = dataclasses.replace(Problem(5, 3001, 3001, 16, 16, 128), **fields)
    space = KERNEL.space(problem, TARGET)
    points, _ = space.legal()
    footprint = KERNEL.footprint(problem, points, TARGET)
    fitting = points.take(footprint.onchip_bytes <= hopper.H200.onchip_bytes)
    around = hopper.lower(KERNEL, problem, next(space.schedules(fitting))).as_text()
    assert around.count("custom_call @mosaic_gpu") == 1
    assert not re.findall(r"stablehlo\.(pad|slice|concatenate|dynamic_slice)", around)
    assert not np.any(footprint.copied_bytes)
    assert np.all(footprint.launches == 1)


CASES = {  # name: problem, schedule, cores, lengths
    "one tile for each CTA": (Problem(1, 128, 192, 2, 1, 64), SCHEDULE, 4, ()),
    "one block of keys": (Problem(1, 64, 64, 3, 1, 64), PERSISTENT, 2, ()),
    "persistent": (Problem(1, 128, 192, 2, 2, 64), PERSISTENT, 3, ()),
    "two consumers, three stages": (
        Problem(1, 256, 320, 1, 1, 64, dtype="float16"),
        dataclasses.replace(SCHEDULE, consumers=2, stages=3, ping_pong=True),
        2,
        (),
    ),
    "three consumers": (
        Problem(1, 250, 90, 2, 1, 64, causal=True, return_lse=True),
        dataclasses.replace(PERSISTENT, consumers=3, block_kv=32, order="snake"),
        2,
        (),
    ),
    "last tiles with queries for one of three consumers, which take turns": (
        Problem(1, 250, 100, 3, 3, 64, return_lse=True),
        dataclasses.replace(PERSISTENT, consumers=3, block_kv=32, ping_pong=True),
        2,
        (),
    ),
    "last tiles with queries for two of three consumers, in a window": (
        Problem(1, 300, 300, 2, 1, 64, window_left=100, window_right=30, return_lse=True),
        dataclasses.replace(SCHEDULE, consumers=3, block_kv=32, ping_pong=True),
        4,
        (),
    ),
    "lengths that leave consumers without queries": (
        Problem(4, 256, 200, 1, 1, 64, q_lengths=True, kv_lengths=True, return_lse=True),
        dataclasses.replace(PERSISTENT, consumers=2),
        3,
        ([192, 64, 0, 130], [70, 130, 200, 64]),
    ),
    "three consumers, as measured with head size 64": (
        Problem(1, 384, 512, 1, 1, 64),
        dataclasses.replace(SCHEDULE, consumers=3, block_kv=128),
        2,
        (),
    ),
    "all heads dealt back and forth": (
        Problem(2, 320, 320, 2, 1, 64, causal=True, return_lse=True),
        dataclasses.replace(PERSISTENT, consumers=2, ping_pong=True, order="snake", section=4),
        3,
        (),
    ),
    "ragged, causal, more keys than queries": (
        Problem(1, 135, 201, 2, 1, 64, causal=True, return_lse=True),
        dataclasses.replace(SCHEDULE, consumers=2, block_kv=48, order="longest_first"),
        2,
        (),
    ),
    "sections of heads, dealt back and forth": (
        Problem(2, 192, 192, 2, 1, 64, causal=True, return_lse=True),
        dataclasses.replace(PERSISTENT, order="snake", section=2),
        2,
        (),
    ),
    "sections of heads, of which the last has fewer": (
        Problem(1, 192, 192, 3, 1, 64, causal=True, return_lse=True),
        dataclasses.replace(PERSISTENT, order="snake", section=2),
        2,
        (),
    ),
    "window": (
        Problem(1, 256, 300, 1, 1, 64, window_left=50, window_right=20, return_lse=True),
        dataclasses.replace(PERSISTENT, consumers=2, block_kv=32),
        2,
        (),
    ),
    "window beyond the keys": (
        Problem(1, 256, 96, 1, 1, 64, window_left=10, window_right=0, return_lse=True),
        SCHEDULE,
        2,
        (),
    ),
    "lengths": (
        Problem(3, 140, 200, 1, 1, 64, q_lengths=True, kv_lengths=True, return_lse=True),
        PERSISTENT,
        2,
        ([140, 70, 0], [0, 130, 200]),
    ),
    "77 queries and keys, in a window, grouped": (
        Problem(2, 77, 77, 4, 2, 128, window_left=20, window_right=9, return_lse=True),
        PERSISTENT,
        3,
        (),
    ),
    "129 queries and keys, causal, two boxes a copy": (
        Problem(2, 129, 129, 2, 1, 128, causal=True, return_lse=True),
        dataclasses.replace(SCHEDULE, consumers=2, block_kv=48, epi_tile_n=128, order="longest_first"),
        2,
        (),
    ),
    "129 queries and keys, of which some count": (
        Problem(3, 129, 129, 1, 1, 96, q_lengths=True, kv_lengths=True, causal=True, return_lse=True),
        dataclasses.replace(PERSISTENT, epi_tile_n=96),
        2,
        ([129, 70, 0], [1, 0, 129]),
    ),
    "fewer keys than a tile of 8 rows has": (Problem(1, 3, 5, 2, 1, 80, 64, dtype="float16"), SCHEDULE, 2, ()),
    "early rescale, odd lengths, the result in parts": (
        Problem(1, 129, 201, 1, 1, 256),
        dataclasses.replace(PERSISTENT, consumers=2, epi_tile_n=64),
        1,
        (),
    ),
    "capped logits, values of another width": (
        Problem(1, 128, 200, 1, 1, 128, 64, softcap=True),
        dataclasses.replace(PERSISTENT, epi_tile_n=32),
        1,
        (),
    ),
    "early rescale": (
        Problem(1, 128, 200, 1, 1, 256, causal=True),
        dataclasses.replace(PERSISTENT, epi_tile_n=64),
        1,
        (),
    ),
}


def _compare(problem, schedule, cores, lengths, *, detect_races=False, **params):
    args = list(problem.inputs(seed=0))
    args[3:] = [jnp.array(each, jnp.int32) for each in lengths] or args[3:]
    target = dataclasses.replace(TARGET, cores=cores)
    with gpu_interpreter(detect_races=detect_races):
        got = jax.block_until_ready(
            jax.jit(lambda *args: KERNEL.results(problem, schedule, target, *args, **params))(*args)
        )
    tolerance = problem.tolerance()
    tolerances = tolerance if isinstance(tolerance, tuple) else (tolerance,)
    for one, right, allowed in zip(got, attention(problem, *args, **params), tolerances, strict=False):
        np.testing.assert_allclose(
            np.asarray(one, np.float32), np.asarray(right), rtol=allowed.relative, atol=allowed.absolute
        )


@interpreted_only
@pytest.mark.parametrize("name", CASES)
def test_values_are_those_of_the_formula(name):
    _compare(*CASES[name])


@interpreted_only
@pytest.mark.parametrize("scale", [0.05, -0.2])
def test_logits_are_scaled_by_any_number(scale):
    _compare(Problem(1, 64, 128, 1, 1, 64, return_lse=True), SCHEDULE, 1, (), scale=scale)


@interpreted_only
@pytest.mark.parametrize(
    "name",
    [
        "persistent",
        "three consumers",
        "last tiles with queries for one of three consumers, which take turns",
        "77 queries and keys, in a window, grouped",
    ],
)
def test_no_race_is_found(name, capfd):
    _compare(*CASES[name], detect_races=True)
    out = capfd.readouterr()
    assert "RACE" not in out.out + out.err
