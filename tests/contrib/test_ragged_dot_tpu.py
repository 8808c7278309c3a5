"""Grouped products for TPUs: right for any boundaries in the interpreter, and compiled for chips that are absent."""

import dataclasses
import functools
import itertools
import json
import random
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental.pallas import tpu as pltpu
from static_profiles import compiled, needs_libtpu

from scheduler.contrib.tpu import estimate
from scheduler.core.hardware import find
from scheduler.model.pruning import illegal
from search_spaces import Columns
from search_spaces.contrib.tpu.ragged_dot import (
    MosaicTpuGatedRaggedDot,
    MosaicTpuRaggedDot,
    MosaicTpuRaggedDotWeights,
    RaggedTpuSchedule,
)
from search_spaces.contrib.tpu.visits import visits_of
from search_spaces.matmul import epilogue
from search_spaces.ragged_dot.problem import (
    GatedRaggedDotProblem,
    RaggedDotProblem,
    RaggedDotWeightsProblem,
    covering,
    random_boundaries,
)
from tests.failures import failures

pytestmark = pytest.mark.slow_but_first

KERNELS = {
    RaggedDotProblem: MosaicTpuRaggedDot(),
    GatedRaggedDotProblem: MosaicTpuGatedRaggedDot(),
    RaggedDotWeightsProblem: MosaicTpuRaggedDotWeights(),
}
V6E = find("v6e")


def kernel(problem):
    return KERNELS[type(problem)]


def schedules(problem, hardware=V6E):
    space = kernel(problem).space(problem, hardware.target)
    return list(space.schedules(space.legal()[0]))


def expected(problem, *args):
    """The result, by a loop over groups in NumPy."""
    *operands, boundaries = (np.asarray(x) for x in args)
    lhs, *others = (x.astype(np.float32) for x in operands)
    out = np.zeros(problem.result().shape, np.float32)
    for group, rows in enumerate(slice(*each) for each in itertools.pairwise(boundaries)):
        if isinstance(problem, RaggedDotWeightsProblem):
            out[group] = lhs[rows].T @ others[0][rows]
            continue
        products = [lhs[rows] @ (x[group].T if problem.transpose_rhs else x[group]) for x in others]
        if isinstance(problem, GatedRaggedDotProblem):
            gate = epilogue.apply(jnp.asarray(products[0]), activation=problem.activation)
            products = [np.asarray(gate) * products[1]]
        out[rows] = products[0]
    return out


def operands(problem, boundaries, seed=0):
    """Draws operands; rows of no group are NaN."""
    *drawn, _ = problem.inputs(seed)
    row = np.arange(problem.rows)[:, None]
    nowhere = (row < boundaries[0]) | (row >= boundaries[-1])
    return *(jnp.where(nowhere, np.nan, x).astype(x.dtype) if x.ndim == 2 else x for x in drawn), jnp.asarray(
        boundaries
    )


def compare(problem, schedule, actual, args):
    tolerance = problem.tolerance()
    np.testing.assert_allclose(
        np.asarray(actual, np.float32), expected(problem, *args),
        atol=tolerance.absolute, rtol=tolerance.relative, err_msg=f"{problem} {schedule} {np.asarray(args[-1])}",
    )  # fmt: skip


def check(problem, schedule, boundaries, seed=0):
    """Memory that nothing was written to, and what lies beyond edges, is NaN in this interpreter."""
    args = operands(problem, boundaries, seed)
    with pltpu.force_tpu_interpret_mode(pltpu.InterpretParams()):
        compare(problem, schedule, kernel(problem).run(problem, schedule, V6E.target, *args), args)


def boundaries_of_all_kinds(rows, groups):
    ends = {0, 1, rows // 2, rows - 1, rows}
    empty = [[end] * (groups + 1) for end in sorted(ends)]
    one = [[0] * (first + 1) + [rows] * (groups - first) for first in (0, groups // 2, groups - 1)]
    tiles = [[min(16 * group, rows) for group in range(groups + 1)]]
    drawn = [random_boundaries(seed, rows, groups) for seed in range(24)]
    return [np.asarray(each, np.int32) for each in (*empty, *one, *tiles, *drawn)]


COMPILED_ONCE = [
    (RaggedDotProblem(70, 6, 200, 130), RaggedTpuSchedule(16, 128, 130, 0)),
    (RaggedDotProblem(70, 6, 200, 130, transpose_rhs=True, out_dtype="float32"), RaggedTpuSchedule(32, 200, 130, 0)),
    (GatedRaggedDotProblem(70, 6, 200, 130, activation="gelu"), RaggedTpuSchedule(16, 128, 130, 0)),
    pytest.param(
        GatedRaggedDotProblem(70, 6, 200, 130, "float32", transpose_rhs=True),
        RaggedTpuSchedule(32, 200, 130, 0),
        marks=pytest.mark.always,
    ),
    (RaggedDotWeightsProblem(70, 6, 200, 130), RaggedTpuSchedule(16, 128, 130, 0)),
    (RaggedDotWeightsProblem(70, 6, 130, 130, "float32"), RaggedTpuSchedule(32, 130, 130, 0)),
]


@pytest.mark.parametrize(("problem", "schedule"), COMPILED_ONCE, ids=str)
def test_one_compiled_function_is_right_for_all_boundaries(problem, schedule):
    run = jax.jit(functools.partial(kernel(problem).run, problem, schedule, V6E.target))
    with pltpu.force_tpu_interpret_mode(pltpu.InterpretParams()):
        for boundaries in boundaries_of_all_kinds(problem.rows, problem.groups):
            args = operands(problem, boundaries)
            compare(problem, schedule, run(*args), args)
    assert run._cache_size() == 1


@pytest.mark.always
@pytest.mark.parametrize("kind", [RaggedDotWeightsProblem, RaggedDotProblem])
def test_special_values_stay_in_their_rows_and_groups(kind):
    """A row of NaN and one of infinities change nothing but their own row, or the gradient of their own group."""
    problem, schedule = kind(40, 4, 128, 128), RaggedTpuSchedule(16, 128, 128, 0)
    boundaries = np.array([3, 9, 20, 20, 37], np.int32)
    lhs, rhs, _ = operands(problem, boundaries)
    lhs = lhs.at[8].set(np.nan).at[19].set(np.inf)
    if kind is RaggedDotWeightsProblem:
        rhs = rhs.at[8].set(np.inf)
    with pltpu.force_tpu_interpret_mode(pltpu.InterpretParams()):
        out = kernel(problem).run(problem, schedule, V6E.target, lhs, rhs, jnp.asarray(boundaries))
    finite = np.isfinite(np.asarray(out, np.float32)).reshape(len(out), -1).all(axis=1)
    assert [index for index, fine in enumerate(finite) if not fine] == (
        [0, 1] if kind is RaggedDotWeightsProblem else [8, 19]
    )


LARGE = [
    RaggedDotProblem(600, 5, 600, 700),
    GatedRaggedDotProblem(600, 5, 600, 700),
    RaggedDotWeightsProblem(600, 5, 600, 700),
]


@pytest.mark.slow
@pytest.mark.parametrize("problem", LARGE, ids=str)
def test_every_choice_of_the_space_is_right_at_least_once(problem):
    space = kernel(problem).space(problem, V6E.target)
    left = {(field, value) for field, values in space.choices.items() for value in values}
    drawn = schedules(problem)
    random.Random(0).shuffle(drawn)
    for seed, schedule in enumerate(drawn):
        if new := left & set(vars(schedule).items()):
            check(problem, schedule, random_boundaries(seed, problem.rows, problem.groups), seed)
            left -= new
    assert not left


SMALL = [
    RaggedDotProblem(1, 1, 1, 1),
    RaggedDotProblem(300, 3, 300, 260, "float32", transpose_rhs=True),
    GatedRaggedDotProblem(300, 3, 300, 260),
    RaggedDotWeightsProblem(300, 3, 300, 260),
    RaggedDotWeightsProblem(7, 3, 130, 5, out_dtype="float32"),
]


@pytest.mark.parametrize("problem", SMALL, ids=str)
def test_every_schedule_of_a_small_space_is_lowered_for_tpus(problem):
    def lowered(schedule):
        run = jax.jit(functools.partial(kernel(problem).run, problem, schedule, V6E.target))
        assert "tpu_custom_call" in run.trace(*problem.operands()).lower(lowering_platforms=("tpu",)).as_text()

    assert not failures(lowered, schedules(problem))


@pytest.mark.parametrize("chip", ["v4", "v6e"])
@pytest.mark.parametrize("kind", KERNELS)
def test_a_space_has_some_hundred_points_and_some_that_fit(kind, chip):
    for rows, groups, k, n in ((4096, 8, 4096, 14336), (1, 1, 1, 1), (65536, 128, 2048, 768), (64, 32, 7168, 2048)):
        problem, hardware = kind(rows, groups, k, n), find(chip)
        points = schedules(problem, hardware)
        assert 1 <= len(points) <= 400
        space = kernel(problem).space(problem, hardware.target)
        fit = [one for one in points if illegal(kernel(problem), problem, hardware, space.encode(vars(one))) is None]
        assert fit


def test_the_default_of_64_bits_changes_nothing():
    with jax.enable_x64(True):
        check(RaggedDotProblem(40, 3, 128, 128), RaggedTpuSchedule(16, 128, 128, 0), random_boundaries(0, 40, 3))


def test_chips_and_dtypes_that_are_not_supported():
    problem = RaggedDotProblem(64, 2, 64, 64)
    assert kernel(problem).supports(problem, V6E.target) is None
    assert "TPU" in kernel(problem).supports(problem, find("h200").target)
    for half in ({"dtype": "float16"}, {"out_dtype": "float16"}):
        assert "float16" in kernel(problem).supports(dataclasses.replace(problem, **half), V6E.target)


# ------------------------------------------------------------------------------
# Visits.


@pytest.mark.parametrize("least", [0, 1])
@pytest.mark.parametrize(("rows", "groups", "tile_rows"), [(70, 6, 16), (64, 40, 16), (7, 3, 16), (50, 1, 4)])
def test_visits_are_the_tiles_of_each_group(rows, groups, tile_rows, least):
    visits = jax.jit(lambda bounds: dataclasses.astuple(visits_of(bounds, rows, tile_rows, least)))
    for bounds in boundaries_of_all_kinds(rows, groups):
        tile, group, _, count = visits(jnp.asarray(bounds))
        right = []
        for each, (begin, end) in enumerate(itertools.pairwise(bounds)):
            right += [(each, one) for one in dict.fromkeys(row // tile_rows for row in range(begin, end))]
            if begin == end and least:
                right.append((each, min(begin // tile_rows, (rows - 1) // tile_rows)))
        assert list(zip(group[:count].tolist(), tile[:count].tolist(), strict=True)) == right


@pytest.mark.parametrize("distribution", ["", "100+0+300+500"])
@pytest.mark.parametrize("kind", KERNELS)
def test_a_footprint_counts_the_visits_of_the_boundaries_that_are_timed(kind, distribution):
    problem = kind(2048, 4, 512, 640, distribution=distribution)
    for schedule in schedules(problem):
        footprint = kernel(problem).footprint(problem, Columns.of([schedule]), V6E.target)
        steps = np.prod([np.ravel(x)[0] for x in (*footprint.grid, footprint.steps)])
        least = int(kind is RaggedDotWeightsProblem)
        bounds = [jnp.asarray(x) if least else covering(jnp.asarray(x), problem.rows) for x in problem.draws()]
        visits = [int(visits_of(x, problem.rows, schedule.tile_rows, least).count) for x in bounds]
        others = -(-problem.k // schedule.tile_k) * -(-problem.n // schedule.tile_n)
        assert steps == pytest.approx(np.mean(visits) * others)
        assert float(np.ravel(footprint.step.flops)[0]) * steps >= problem.flops


# ------------------------------------------------------------------------------
# Compiled for TPUs.

COMPILED = [
    RaggedDotProblem(1024, 8, 512, 384),
    RaggedDotProblem(1024, 64, 640, 512, transpose_rhs=True, out_dtype="float32"),
    RaggedDotProblem(512, 8, 512, 384, "float32"),
    GatedRaggedDotProblem(1024, 8, 512, 384),
    RaggedDotWeightsProblem(1024, 8, 512, 384),
    RaggedDotWeightsProblem(512, 8, 512, 384, "float32"),
]


@needs_libtpu
@pytest.mark.parametrize("chip", ["v5e", "v6e"])
def test_vmem_is_what_the_compiler_allocates_beside_spills(chip, tmp_path):
    found = json.loads(compiled(__file__, chip, tmp_path).splitlines()[-1])
    assert len(found) == 2 * len(COMPILED)
    assert [(x["text"], x["allocated"]) for x in found] == [(x["text"], x["predicted"]) for x in found]


def _compile(chip):
    """VMEM of two schedules of each problem as predicted and as allocated, in bytes.

    Extents are whole lanes: what XLA copies first, it may leave in VMEM.
    """
    hardware, found, draw = find(chip), [], random.Random(0)
    for problem in COMPILED:
        for schedule in draw.sample(schedules(problem, hardware), 2):
            run = functools.partial(kernel(problem).run, problem, schedule, hardware.target)
            profile = estimate.static_profile(run, problem.operands(), hardware)
            predicted = kernel(problem).footprint(problem, Columns.of([schedule]), hardware.target).onchip_bytes[0]
            found.append({
                "text": f"{problem} {schedule}",
                "allocated": profile.onchip_bytes - profile.spill_bytes,
                "predicted": int(predicted),
            })  # fmt: skip
    return found


if __name__ == "__main__":
    print(json.dumps(_compile(sys.argv[1])))
