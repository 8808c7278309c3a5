"""Attention of few queries on Hopper: lowered for CUDA, its on-chip memory compared, small problems interpreted."""

import dataclasses
import functools

import hopper
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from scheduler.model.cost import CostModel
from scheduler.model.pruning import prune
from search_spaces import Columns
from search_spaces.flash_attention.hopper import FlashDecodingSchedule, decode
from search_spaces.flash_attention.problem import FlashAttentionProblem
from search_spaces.jax_compat import HAS_GPU_INTERPRETER, HAS_UNTILED_SWIZZLE, gpu_interpreter
from search_spaces.problem import as_tuple

pytestmark = pytest.mark.slow_but_first

TARGET = hopper.H200.target
LLAMA = FlashAttentionProblem(1, 1, 8192, 32, 8, 128)


def space(problem):
    return decode.MosaicGpuFlashDecoding().space(problem, TARGET)


def lowering(problem, schedule):
    """Traces; what is returned lowers, each time anew."""
    run = jax.jit(lambda *args: decode.run(problem, schedule, *args))
    return functools.partial(run.trace(*problem.operands()).lower, lowering_platforms=("cuda",))


def lower(problem, schedule):
    return lowering(problem, schedule)()


PROBLEMS = [
    LLAMA,
    dataclasses.replace(LLAMA, batch=32, kv_len=4096),
    dataclasses.replace(LLAMA, q_len=16, kv_lengths=True, q_lengths=True, return_lse=True, causal=True),
    dataclasses.replace(LLAMA, heads=8, head_dim=64, dtype="float16"),
    dataclasses.replace(LLAMA, head_dim=256, softcap=True, window_left=100),
    dataclasses.replace(LLAMA, heads=3, kv_heads=3, head_dim=80, head_dim_v=96, kv_len=1003),
    dataclasses.replace(LLAMA, q_len=16, heads=64, kv_len=65536),
]


@pytest.mark.parametrize("problem", PROBLEMS, ids=str)
def test_onchip_bytes_are_what_lowering_asks_for(problem):
    points, _ = space(problem).legal()
    found = decode.footprint(problem, points, TARGET.cores)
    fits = np.flatnonzero(found.onchip_bytes <= hopper.H200.onchip_bytes)
    assert len(fits) >= 4
    for index in fits[:: max(1, len(fits) // 3)]:
        schedule = FlashDecodingSchedule(**points.row(index))
        traced = lowering(problem, schedule)
        assert hopper.onchip_bytes_asked(traced) == found.onchip_bytes[index], schedule
        traced()


@pytest.mark.skipif(not HAS_UNTILED_SWIZZLE, reason="this JAX swizzles tiles of 8 rows only")
def test_keys_that_8_does_not_divide_are_not_copied():
    problem = dataclasses.replace(LLAMA, kv_len=3001)
    points, _ = space(problem).legal()
    schedule = FlashDecodingSchedule(**points.row(0))
    assert "stablehlo.pad" not in lower(problem, schedule).as_text()
    copied, of_even = (decode.footprint(p, points, TARGET.cores).copied_bytes for p in (problem, LLAMA))
    np.testing.assert_array_equal(copied, of_even)


def test_a_few_heads_are_split_over_all_cores_and_many_are_not():
    points, _ = space(LLAMA).legal()
    ctas = LLAMA.kv_heads * points.split_kv
    assert set(np.unique(points.cluster)) == {1, 8}
    assert np.any((ctas > TARGET.cores * 0.95) & (ctas <= TARGET.cores))
    assert np.any(ctas == 2 * TARGET.cores)
    assert np.all((ctas * 3 > TARGET.cores) & (ctas <= 2 * TARGET.cores))
    many, _ = space(dataclasses.replace(LLAMA, batch=64)).legal()
    assert np.all(many.split_kv == 1)


def test_ctas_that_fill_one_core_and_half_of_another_are_left_out():
    points, _ = space(dataclasses.replace(LLAMA, kv_len=65536)).legal()
    assert 15 <= len(points) <= 60
    assert set(np.unique(points.split_kv)) == {16, 32, 33}


def test_clusters_combine_all_splits_or_eight_of_them():
    few = dataclasses.replace(LLAMA, kv_len=1024, kv_heads=4)
    for problem in (LLAMA, few):
        points, _ = space(problem).legal()
        cluster, split_kv = points.cluster, points.split_kv
        assert np.all((cluster == 1) | (cluster == split_kv) | (cluster == 8))
        assert np.all((cluster <= 2) | (2 * problem.kv_heads * split_kv <= TARGET.cores))  # a GPC has room for few
    assert np.any((cluster == 8) & (split_kv > 8))


@pytest.mark.parametrize(("split_kv", "cluster", "launches"), [(8, 1, 2), (8, 8, 1), (32, 8, 2)])
def test_a_cluster_of_all_splits_saves_the_second_launch(split_kv, cluster, launches):
    found = decode.footprint(LLAMA, Columns.of([by(split_kv=split_kv, cluster=cluster)]), TARGET.cores)
    assert found.launches[0] == launches


# NVIDIA H200, 32 heads on 4 of keys (benchmarks/results/attention-nvidia-h200.json, and records): of so many sequences
# and keys, microseconds by block_kv, stages, split_kv, cluster.
MEASURED = {
    (1, 1024): {(128, 2, 8, 8): 4.90, (64, 2, 8, 8): 5.18, (64, 2, 16, 1): 6.22},
    (1, 8192): {(64, 3, 32, 1): 10.34, (64, 4, 32, 1): 10.37, (64, 3, 33, 1): 10.53},
    (1, 65536): {(64, 3, 32, 1): 37.0, (64, 3, 33, 1): 37.1, (64, 4, 33, 1): 37.3},
    (16, 32768): {(128, 3, 2, 2): 234.0, (64, 4, 2, 2): 238.2, (64, 2, 4, 4): 295.4},
    (32, 4096): {(64, 3, 1, 1): 63.0, (64, 4, 1, 1): 64.6, (128, 3, 1, 1): 64.7, (64, 2, 2, 2): 65.2},
    (64, 1024): {(64, 2, 1, 1): 34.0},
    (64, 16384): {(64, 2, 1, 1): 467.1, (64, 3, 1, 1): 472.7, (128, 2, 1, 1): 482.0},
}


# The same of 64 sequences of up to 16384 keys, drawn (`random_lengths`).
OF_MANY_LENGTHS = {
    (64, 2, 8, 8): 249.9, (64, 2, 8, 1): 265.0, (64, 2, 4, 4): 265.7, (128, 2, 8, 1): 267.1, (64, 2, 6, 1): 267.2,
    (64, 2, 3, 1): 275.2, (64, 2, 2, 2): 287.9, (64, 2, 2, 1): 291.4, (64, 2, 1, 1): 294.7, (64, 4, 1, 1): 336.6,
}  # fmt: skip


def ranked(batch, kv_len, **fields):
    """Schedules of the space, best prediction first, and their seconds."""
    problem, kernel = (
        dataclasses.replace(LLAMA, batch=batch, kv_len=kv_len, kv_heads=4, **fields),
        decode.MosaicGpuFlashDecoding(),
    )
    pruned = prune(kernel, problem, hopper.H200, CostModel(hopper.H200))
    return {tuple(pruned.points.row(i).values()): pruned.predicted_s[i] for i in range(len(pruned.points))}


@pytest.mark.parametrize("point", MEASURED)
def test_of_what_was_measured_the_top_prediction_is_nearly_the_fastest(point):
    times, predicted = MEASURED[point], ranked(*point)
    top = next(schedule for schedule in predicted if schedule in times)
    assert times[top] * 0.97 <= min(times.values())


def test_of_sequences_of_many_lengths_the_longest_end_alone_the_later_the_fewer_parts_they_have():
    predicted = ranked(64, 16384, kv_lengths=True)
    assert next(schedule for schedule in predicted if schedule in OF_MANY_LENGTHS) == (64, 2, 8, 8)
    by_parts = [schedule for schedule in OF_MANY_LENGTHS if schedule[:2] == (64, 2)]
    assert sorted(by_parts, key=predicted.__getitem__)[-3:] == by_parts[-3:]
    ratios = [1e6 * predicted[schedule] / OF_MANY_LENGTHS[schedule] for schedule in by_parts]
    assert min(ratios) > 0.97
    assert max(ratios) < 1.16
    even = ranked(64, 16384)
    one = (64, 2, 1, 1)
    assert predicted[one] > 1.3 * even[one] / 2  # half as many keys
    assert ranked(1, 8192, kv_lengths=True)[(64, 3, 32, 1)] < ranked(1, 8192)[(64, 3, 32, 1)]  # one has no longest


def test_a_cluster_beats_a_second_launch_where_keys_are_few():
    predicted, measured = ranked(1, 1024), MEASURED[1, 1024]
    assert [schedule for schedule in predicted if schedule in measured] == sorted(measured, key=measured.__getitem__)
    ratios = [predicted[schedule] / (1e-6 * time) for schedule, time in measured.items()]
    assert min(ratios) > 0.85
    assert max(ratios) < 1.05


def test_keys_that_32_bit_indices_do_not_reach_are_refused():
    kernel = decode.MosaicGpuFlashDecoding()
    assert kernel.supports(dataclasses.replace(LLAMA, batch=8, kv_len=131072), TARGET) is None
    assert "indices" in kernel.supports(dataclasses.replace(LLAMA, batch=64, kv_len=131072), TARGET)


def check(problem, schedule, *args):
    args = args or problem.inputs(seed=0)
    with gpu_interpreter():
        actual = as_tuple(jax.jit(lambda *args: decode.run(problem, schedule, *args))(*args))
    expected = as_tuple(problem.reference(*args))
    for one, right, tolerance in zip(actual, expected, as_tuple(problem.tolerance()), strict=True):
        one, right = (np.asarray(x, np.float32) for x in (one, right))
        np.testing.assert_allclose(one, right, atol=tolerance.absolute, rtol=tolerance.relative)


def by(block_kv=64, stages=2, split_kv=1, cluster=1):
    return FlashDecodingSchedule(block_kv, stages, split_kv, cluster)


SMALL = FlashAttentionProblem(2, 1, 320, 4, 1, 64, return_lse=True)
CASES = [
    (SMALL, by(split_kv=5)),
    (dataclasses.replace(SMALL, q_len=3, heads=8, causal=True), by(split_kv=2)),
    (
        dataclasses.replace(SMALL, q_len=16, kv_len=203, window_left=60, window_right=20),
        by(split_kv=2),
    ),
    (dataclasses.replace(SMALL, q_len=16, heads=8, kv_len=128), by(split_kv=2)),
    (dataclasses.replace(SMALL, kv_heads=4, causal=True), by()),
    (dataclasses.replace(SMALL, head_dim=128, softcap=True, dtype="float16"), by(128, 2, 2, 2)),
    (
        dataclasses.replace(SMALL, q_len=2, head_dim=80, head_dim_v=96, q_lengths=True),
        by(split_kv=2),
    ),
    (dataclasses.replace(SMALL, return_lse=False), by(split_kv=4, cluster=2)),
    (dataclasses.replace(SMALL, kv_len=201, head_dim=128), by(128, 2, 2)),
    (dataclasses.replace(SMALL, q_len=9, kv_len=77, head_dim=256, head_dim_v=96, causal=True), by()),
    (dataclasses.replace(SMALL, kv_len=5), by()),
]


interpreted = pytest.mark.skipif(not HAS_GPU_INTERPRETER, reason="this JAX interprets no GPU kernels")


@interpreted
@pytest.mark.parametrize(("problem", "schedule"), CASES, ids=str)
def test_results_are_right(problem, schedule):
    check(problem, schedule)


@interpreted
@pytest.mark.parametrize("schedule", [by(split_kv=5), by(split_kv=8, cluster=8), by(split_kv=8, cluster=2)], ids=str)
def test_lengths_divide_the_keys_that_are_there(schedule):
    problem = dataclasses.replace(SMALL, batch=3, kv_len=512, kv_lengths=True)
    q, k, v, _ = problem.inputs(seed=1)
    check(problem, schedule, q, k, v, jnp.array([0, 512, 70], jnp.int32))
