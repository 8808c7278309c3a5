"""The cost model where a grid is a loop of each core: what it does not copy again, copies that it starts."""

import dataclasses
import itertools

import numpy as np
import pytest
from failures import failures
from hypothesis import given, settings
from hypothesis import strategies as st

from scheduler.contrib.tpu.chips import TPUS
from scheduler.core.hardware import find
from scheduler.model import traffic
from scheduler.model.cost import BY_PLATFORM, CostModel
from search_spaces import Footprint, Operand, Phase, load
from search_spaces.matmul.problem import MatmulProblem

pytestmark = pytest.mark.always  # the model is no part of the shelf

V5E, H200 = find("v5e"), find("h200")


def launch(grid, *loads, steps=1, tile=(), flops=0.0, minor=0, group=1, stages=2):
    """A footprint of one schedule."""
    return Footprint(
        arithmetic="bfloat16",
        grid=tuple(np.array([extent]) for extent in grid),
        step=Phase(loads=loads, flops=np.array([flops])),
        tile=Phase(loads=tile),
        steps=np.array([steps]),
        onchip_bytes=np.array([1]),
        minor=minor,
        group=group,
        stages=stages,
    )


@settings(max_examples=300, deadline=None)
@given(data=st.data())
def test_a_block_is_fetched_whenever_it_is_another_than_in_the_step_before(data):
    grid = tuple(data.draw(st.lists(st.integers(1, 4), min_size=1, max_size=4)))
    minor, steps = data.draw(st.integers(0, len(grid) - 1)), data.draw(st.integers(1, 3))
    group = data.draw(st.sampled_from([g for g in (1, 2, 3, 4) if grid[minor] % g == 0]))
    axes = tuple(sorted(data.draw(st.sets(st.integers(0, len(grid) - 1)))))
    each, once = Operand(bytes=1.0, axes=axes), Operand(bytes=1.0, axes=axes)
    footprint = launch(grid, each, tile=(once,), steps=steps, minor=minor, group=group)

    walked = traffic.walk(grid, minor, group)[:, list(axes)].tolist()
    tiles = [tuple(tile) for tile in walked]
    of_steps = [(tile, step if steps > 1 else 0) for tile in tiles for step in range(steps)]
    expected_each = 1 + sum(a != b for a, b in itertools.pairwise(of_steps))
    expected_once = 1 + sum(a != b for a, b in itertools.pairwise(tiles))

    each_share, once_share = traffic.shares_fetched(footprint)
    assert np.ravel(each_share)[0] * len(of_steps) == pytest.approx(expected_each)
    assert np.ravel(once_share)[0] * len(tiles) == pytest.approx(expected_once)


def test_what_stays_is_moved_once_where_a_grid_is_a_loop_and_by_each_block_elsewhere():
    """Walking 4 x 4 tiles row by row: a row's block stays for four of them, a column's is another in each."""
    rows, columns = Operand(bytes=1000.0, axes=(0,)), Operand(bytes=10.0, axes=(1,))
    footprint = launch((4, 4), rows, columns, minor=1, group=4)
    assert traffic.traffic(footprint, V5E, l2_share=0.5).memory_bytes == 4 * 1000 + 16 * 10
    assert traffic.traffic(footprint, V5E, l2_share=0.5).cache_bytes == 4 * 1000 + 16 * 10
    assert traffic.traffic(footprint, H200, l2_share=0.5).cache_bytes == 16 * 1000 + 16 * 10


def test_the_better_order_of_tiles_keeps_the_larger_block():
    large, small = Operand(bytes=4e6, axes=(0,)), Operand(bytes=1e5, axes=(1,))
    by_rows, by_columns = (launch((4, 4), large, small, minor=minor, group=4) for minor in (1, 0))
    model = CostModel(V5E)
    assert model.seconds(by_rows) < 0.4 * model.seconds(by_columns)


def test_a_step_waits_for_the_whole_latency_of_the_copy_that_its_loop_started_one_step_before():
    footprint = launch((1000,), Operand(bytes=8.0, axes=(0,)))
    slow = dataclasses.replace(V5E, memory_latency_s=1e-5)
    per_step = CostModel(slow).seconds(footprint) / 1000
    assert per_step == pytest.approx(1e-5 + BY_PLATFORM["tpu"].step_s, rel=0.01)
    ahead = dataclasses.replace(footprint, stages=3)
    assert CostModel(slow).seconds(ahead) < 0.55 * CostModel(slow).seconds(footprint)


def test_no_wait_for_copies_shows_behind_a_long_step():
    footprint = launch((100,), Operand(bytes=8.0, axes=(0,)), flops=1e10)
    terms = CostModel(V5E).terms(footprint)
    assert CostModel(V5E).seconds(footprint) == pytest.approx(terms["mma"] + terms["step"], rel=0.01)


EXTREMES = {
    "matmul": (
        {"m": 1, "n": 1, "k": 1},
        {"m": 1, "n": 128256, "k": 8192},
        {"m": 40000, "n": 777, "k": 30001},
        {"m": 8, "n": 8, "k": 2**20},
    ),
    "gated_matmul": ({"m": 1, "n": 28672, "k": 8192}, {"m": 16384, "n": 1, "k": 1}),
    "softmax": ({"rows": 1, "columns": 16}, {"rows": 2**20, "columns": 17}, {"rows": 3, "columns": 2**19}),
    "rms_norm": ({"rows": 1, "columns": 128}, {"rows": 65537, "columns": 4097, "dtype": "float32"}),
    "layer_norm_backward": ({"rows": 1, "columns": 128}, {"rows": 65537, "columns": 4097}),
    "cross_entropy": ({"rows": 1, "columns": 1003}, {"rows": 4099, "columns": 2**19}),
    "silu_and_mul": ({"rows": 1, "columns": 16}, {"rows": 99999, "columns": 1000}),
    "flash_attention": (
        {"batch": 1, "q_len": 1, "kv_len": 1, "heads": 1, "kv_heads": 1, "head_dim": 64},
        {"batch": 64, "q_len": 1, "kv_len": 131072, "heads": 32, "kv_heads": 8, "head_dim": 128},
        {"batch": 1, "q_len": 65536, "kv_len": 65536, "heads": 8, "kv_heads": 1, "head_dim": 256, "causal": True},
    ),
}


def test_no_prediction_for_a_tpu_is_below_its_floor():
    def check(item):
        name, chip = item
        operation, model = load(name), CostModel(chip)
        kernel = operation.kernel("mosaic_tpu")
        able = [p for fields in EXTREMES[name] if not kernel.supports(p := operation.problem(**fields), chip.target)]
        assert able
        for problem in able:
            points, _ = kernel.space(problem, chip.target).legal()
            footprint = kernel.footprint(problem, points, chip.target)
            seconds, floor = model.seconds(footprint), model.floor(footprint)
            assert np.all(np.isfinite(seconds))
            assert np.all(floor > 0)
            assert np.all(seconds >= floor * (1 - 1e-9)), problem
            assert np.all(floor >= model.lower_bound(problem) * (1 - 1e-9)) or name != "matmul"

    assert failures(check, itertools.product(EXTREMES, TPUS), lambda item: f"{item[0]} on {item[1].kind}") == []


def test_small_tiles_pay_for_their_steps():
    """2048^3 by the static schedules of libtpu 0.0.50 for a v5e, in cycles: tiles of 256^3, 512^3, 1024^2 x 512."""
    estimated = {(256, 256, 256): 498800, (512, 512, 512): 159100, (1024, 1024, 512): 150200}
    problem = MatmulProblem(2048, 2048, 2048)
    predicted = []
    for m, n, k in estimated:
        a, b = Operand(bytes=m * k * 2.0, axes=(0,)), Operand(bytes=k * n * 2.0, axes=(1,))
        grid = (problem.m // m, problem.n // n)
        f = launch(grid, a, b, steps=problem.k // k, flops=2.0 * m * n * k, minor=1, group=grid[1])
        predicted.append(float(CostModel(V5E).seconds(f)[0]) * V5E.clock_hz)
    assert predicted == sorted(predicted, reverse=True)
    for cycles, found in zip(estimated.values(), predicted, strict=True):
        assert found == pytest.approx(cycles, rel=0.4)
