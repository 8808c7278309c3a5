"""The row-wise kernels for TPUs on a host without one: interpreted, grids walked, VMEM asked of a compiler."""

import dataclasses
import json
import random
import sys

import jax
import numpy as np
import pytest
from jax.experimental.pallas import tpu as pltpu

from scheduler.core.hardware import find
from scheduler.measure import estimate
from scheduler.model.pruning import onchip_demand, onchip_limit
from search_spaces import Columns
from search_spaces.problem import as_tuple
from search_spaces.rows.formulas import ADD_RMS_NORM, RMS_NORM, SILU_AND_MUL, SILU_AND_MUL_BACKWARD, SOFTMAX
from search_spaces.rowwise.tpu.row_blocks import ChunkGrid
from search_spaces.rowwise.tpu.space import HalvesSchedule, RowSchedule
from tests.static_profiles import compiled, needs_libtpu

pytestmark = pytest.mark.slow_but_first

REDUCTIONS = (SOFTMAX, RMS_NORM, ADD_RMS_NORM)
OF_HALVES = (SILU_AND_MUL, SILU_AND_MUL_BACKWARD)
OPERATIONS = {operation.name: operation for operation in (*REDUCTIONS, *OF_HALVES)}
CHIPS = ("v4", "v5e", "v5p", "v6e", "tpu7x")
TARGET = find("v5p").target  # of two cores


def kernel(operation):
    return operation.kernel("mosaic_tpu")


def points(operation, problem, target=TARGET):
    space = kernel(operation).space(problem, target)
    return space, space.legal()[0]


def covering(operations, extents, seed):
    """Operations, problems and schedules: each value of each choice that these extents offer is in one of few."""
    rng, cases, seen = random.Random(seed), [], set()
    for rows, columns, dtype in extents:
        while True:
            operation = rng.choice(operations)
            problem = operation.problem(rows=rows, columns=columns, dtype=dtype)
            space, legal = points(operation, problem)
            names = [name for name in space.choices if name != "columns"]
            new = [
                {(name, value) for name, value in legal.row(i).items() if name in names} - seen
                for i in range(len(legal))
            ]
            most = max(map(len, new))
            if not most:
                break
            row = rng.choice([i for i, values in enumerate(new) if len(values) == most])
            cases.append((operation, problem, space.schedule(**legal.row(row))))
            seen |= new[row]
    return cases


DRAWN = [
    *covering(REDUCTIONS, [(20, 66000, "bfloat16"), (1023, 130, "float32")], seed=1),
    *covering(OF_HALVES, [(30, 1100, "bfloat16"), (1023, 70, "float32")], seed=2),
]
CHOSEN = {
    "a row of one block": (SOFTMAX, (1, 1, "float32"), RowSchedule("window", 8, 1, 8, 128, 8)),
    "an odd row, steps and a rest": (SOFTMAX, (20, 1003, "bfloat16"), RowSchedule("window", 16, 1003, 8, 128, 4)),
    "no rest beside steps": (RMS_NORM, (9, 1024, "bfloat16"), RowSchedule("window", 8, 1024, 8, 256, 4)),
    "two results": (ADD_RMS_NORM, (20, 1003, "bfloat16"), RowSchedule("window", 16, 1003, 16, 256, 2)),
    "kept by two cores, one with less": (SOFTMAX, (40, 1500, "float32"), RowSchedule("scratch", 8, 512, 8, 128, 2)),
    "a sum kept": (ADD_RMS_NORM, (20, 1500, "bfloat16"), RowSchedule("scratch", 16, 512, 16, 128, 2)),
    "whole chunks twice": (RMS_NORM, (20, 1536, "bfloat16"), RowSchedule("reread", 8, 512, 8, 128, 2)),
    "a sum made twice": (ADD_RMS_NORM, (9, 1500, "float32"), RowSchedule("reread", 8, 256, 8, 256, 2)),
    "halves of whole registers": (SILU_AND_MUL_BACKWARD, (20, 384, "bfloat16"), HalvesSchedule(16, 8, 256)),
    "halves of less than one": (SILU_AND_MUL_BACKWARD, (9, 50, "float32"), HalvesSchedule(8, 8, 512)),
    "halves of more than half of one": (SILU_AND_MUL_BACKWARD, (9, 100, "bfloat16"), HalvesSchedule(8, 8, 512)),
    "halves of an odd number": (SILU_AND_MUL_BACKWARD, (20, 1003, "float32"), HalvesSchedule(16, 16, 256)),
    "one column": (SILU_AND_MUL, (20, 1, "bfloat16"), HalvesSchedule(8, 8, 512)),
}


def check(operation, problem, schedule):
    """In TPU interpret mode, in which memory that nobody wrote is NaN."""
    operands = problem.inputs(0)
    with pltpu.force_tpu_interpret_mode(pltpu.InterpretParams()):
        results = as_tuple(jax.jit(lambda *args: kernel(operation).run(problem, schedule, TARGET, *args))(*operands))
        jax.block_until_ready(results)
    expected = as_tuple(problem.reference(*operands))
    tolerances = problem.tolerance()
    each = tolerances if isinstance(tolerances, tuple) else (tolerances,) * len(expected)
    for result, shape, right, allowed in zip(results, problem.results(), expected, each, strict=True):
        assert (result.shape, result.dtype) == (shape.shape, shape.dtype)
        result, right = np.asarray(result, np.float64), np.asarray(right, np.float64)
        assert np.all(np.abs(result - right) <= allowed.absolute + allowed.relative * np.abs(right))


@pytest.mark.parametrize(
    ("operation", "problem", "schedule"), DRAWN, ids=[f"{o.name} {p} {s}".replace(" ", "-") for o, p, s in DRAWN]
)
def test_drawn_schedules_are_right(operation, problem, schedule):
    check(operation, problem, schedule)


@pytest.mark.parametrize(("operation", "extents", "schedule"), CHOSEN.values(), ids=CHOSEN)
def test_rows_of_all_kinds_are_right(operation, extents, schedule):
    check(operation, operation.problem(*extents), schedule)


def test_a_wide_weight_and_a_small_epsilon_are_right():
    problem = RMS_NORM.problem(9, 300, "bfloat16", weight_dtype="float32")
    check(RMS_NORM, problem, RowSchedule("window", 8, 300, 8, 128, 2))


@pytest.mark.parametrize("cores", [1, 2, 3])
@pytest.mark.parametrize("keeps", [True, False])
def test_a_grid_computes_each_chunk_once_after_it_took_all_of_its_block_in(cores, keeps):
    for blocks in range(1, 8):
        for chunks in (1, 2, 5):
            over = ChunkGrid(blocks, chunks, keeps, cores)
            computed, windows = [], []
            for outer in range(over.grid[0]):
                taken = set()
                for step, chunk in np.ndindex(*over.grid[1:]):
                    source, target = (tuple(map(int, of(outer, step, chunk))) for of in (over.source, over.target))
                    if over.computes(outer, step):
                        assert {(target[0], each) for each in range(chunks)} <= taken
                        computed.append(target)
                    if over.takes_in(outer, step):
                        taken.add(source)
                    windows.append(target)
            assert sorted(computed) == list(np.ndindex(blocks, chunks))
            # A window that was left is written, and must not be entered again.
            entered = [now for before, now in zip([None, *windows], windows, strict=False) if now != before]
            assert len(set(entered)) == len(entered)


@pytest.mark.parametrize("operation", OPERATIONS.values(), ids=OPERATIONS)
def test_other_chips_and_half_precision_are_refused_in_words(operation):
    problem = operation.problem(rows=64, columns=256)
    assert kernel(operation).supports(problem, find("v6e").target) is None
    assert "is written for TPUs" in kernel(operation).supports(problem, find("h200").target)
    half = dataclasses.replace(problem, dtype="float16")
    assert "float16" in kernel(operation).supports(half, find("v6e").target)


def legal(operation, problem, chip):
    """Schedules, and which of them the model lets a chip try."""
    hardware = find(chip)
    space, found = points(operation, problem, hardware.target)
    demand = kernel(operation).footprint(problem, found, hardware.target)
    return space, found, onchip_demand(demand) <= onchip_limit(demand, hardware)


@pytest.mark.parametrize("chip", CHIPS)
@pytest.mark.parametrize("operation", REDUCTIONS, ids=lambda operation: operation.name)
def test_rows_of_any_length_fit_every_chip_and_moderate_ones_move_once(operation, chip):
    for columns in (1, 1003, 16384, 131072, 1_000_000):
        for dtype in ("bfloat16", "float32"):
            _, found, fits = legal(operation, operation.problem(4096, columns, dtype), chip)
            residencies = set(found.residency[fits].tolist())
            assert residencies if columns > 131072 else residencies - {"reread"}


@pytest.mark.parametrize("operation", OPERATIONS.values(), ids=OPERATIONS)
def test_two_cores_with_a_block_each_keep_one_buffer_as_one_core_with_one_block_does(operation):
    def onchip_bytes(rows, chip):
        problem, target = operation.problem(rows=rows, columns=2048, dtype="float32"), find(chip).target
        _, found = points(operation, problem, target)
        of_blocks = found.take((found.rows == 512) & (getattr(found, "residency", "window") == "window"))
        return set(kernel(operation).footprint(problem, of_blocks, target).onchip_bytes.tolist())

    assert onchip_bytes(1024, "v5p") == onchip_bytes(512, "v6e") == onchip_bytes(512, "v5p")
    assert min(onchip_bytes(1536, "v5p")) > 1.4 * max(onchip_bytes(1024, "v5p"))


def drawn(chip, count, seed):
    """Problems and schedules that the model calls legal, of few blocks: a compiler's report costs time by the block."""
    rng = random.Random(seed)
    while count:
        operation = rng.choice(list(OPERATIONS.values()))
        columns = rng.choice([1024, 4096, 8192, 16384, 128 * rng.randint(64, 320)])
        whole = operation.problem(rows=4096, columns=columns, dtype=rng.choice(["bfloat16", "float32"]))
        space, found, fits = legal(operation, whole, chip)
        if not fits.any():
            continue
        schedule = space.schedule(**found.row(rng.choice(np.flatnonzero(fits).tolist())))
        # An array so small that XLA may keep it in VMEM itself needs no window.
        rows = schedule.rows * max(3, -(-(2**25) // (columns * whole.itemsize * schedule.rows)))
        if rows <= 64 * schedule.rows:
            yield operation, dataclasses.replace(whole, rows=rows), schedule
            count -= 1


@needs_libtpu
@pytest.mark.parametrize("chip", ["v5e", "v6e"])
def test_vmem_is_what_the_compiler_allots_but_for_spills(chip, tmp_path):
    asked = json.loads(compiled(__file__, chip, tmp_path, "8").splitlines()[-1])
    assert len(asked) == 8
    for case, predicted, allotted in asked:
        assert predicted == allotted, case


def _compile(chip, count):
    hardware = find(chip)
    for operation, problem, schedule in drawn(chip, int(count), seed=chip):
        demand = kernel(operation).footprint(problem, Columns.of([schedule]), hardware.target)
        said = estimate.static_profile(
            lambda *args: kernel(operation).run(problem, schedule, hardware.target, *args),  # noqa: B023
            problem.operands(),
            hardware,
        )
        yield (
            f"{operation.name} {problem} {schedule}",
            int(demand.onchip_bytes[0]),
            said.onchip_bytes - said.spill_bytes,
        )


if __name__ == "__main__":
    print(json.dumps(list(_compile(*sys.argv[1:]))))
