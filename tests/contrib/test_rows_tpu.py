"""Row programs on TPUs on a host without one: interpreted, grids walked, VMEM asked of a compiler."""

import dataclasses
import json
import random
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from failures import failures
from jax.experimental.pallas import tpu as pltpu
from static_profiles import compiled, needs_libtpu

from scheduler.contrib.tpu import estimate
from scheduler.core.hardware import find
from scheduler.measure.verification import mismatches
from scheduler.model.pruning import onchip_demand, onchip_limit
from search_spaces import Columns, load
from search_spaces.contrib.tpu.row_kernels import ChunkGrid, plan
from search_spaces.contrib.tpu.rows import RowSchedule, TpuRows
from search_spaces.problem import as_tuple
from search_spaces.rows.builder import Builder
from search_spaces.rows.problem import ProgramProblem
from search_spaces.rows.program import Number, Operand, Result

pytestmark = pytest.mark.slow_but_first

KERNEL = TpuRows()
REDUCTIONS = ("softmax", "rms_norm", "add_rms_norm", "cross_entropy")
IN_WINDOWS = ("layer_norm", "layer_norm_backward", "rms_norm_backward", "quantize_rows")
OF_ELEMENTS = ("silu_and_mul", "silu_and_mul_backward", "cross_entropy_backward")
OPERATIONS = (*REDUCTIONS, *IN_WINDOWS, *OF_ELEMENTS)
CHIPS = ("v4", "v5e", "v5p", "v6e", "tpu7x")
TARGET = find("v5p").target  # of two cores


def problem_of(name, rows, columns, dtype="bfloat16", **fields):
    return load(name).problem(rows=rows, columns=columns, dtype=dtype, **fields)


def covering(names, extents, seed):
    """Problems and schedules: each value of each choice that these extents offer is in one of few."""
    rng, cases, seen = random.Random(seed), [], set()
    for extent in extents:
        while True:
            problem = problem_of(rng.choice(names), *extent)
            space = KERNEL.space(problem, TARGET)
            legal = space.legal()[0]
            chosen = [name for name in space.choices if name != "columns"]
            new = [
                {(name, value) for name, value in legal.row(i).items() if name in chosen} - seen
                for i in range(len(legal))
            ]
            if not (most := max(map(len, new))):
                break
            row = rng.choice([i for i, values in enumerate(new) if len(values) == most])
            cases.append((problem, space.schedule(**legal.row(row))))
            seen |= new[row]
    return cases


def of_parts(columns):
    """Three vectors a row, numbers, truth values per row, elements by their column; all kinds of results."""
    kinds = ("row", "float32", 3), ("scalar", "bool"), ("shared", "int8", 2), ("number", "int32")
    make = Builder(columns, [Operand(*kind) for kind in kinds])
    x, y, z, chosen, _, shared, number = (make.read(*at) for at in [(0, 0), (0, 1), (0, 2), (1,), (2, 0), (2, 1), (3,)])
    product = make.emit("mul", make.emit("add", x, y), make.emit("to_float", shared, dtype="float32"))
    here = make.emit("lt", make.emit("index", dtype="int32"), number)
    either = make.emit("where", make.emit("and", chosen, here), product, z)
    total = make.reduce("reduce_sum", either)
    least = make.reduce("reduce_min", make.emit("sub", either, make.emit("mul", total, Number(1 / columns))))
    results = [
        Result("row", "bfloat16", (either, least, make.emit("add", x, total))),
        Result("scalar", "bool", (make.emit("gt", least, Number(-3.0)),)),
        Result("row sum", "float32", (either, y)),
        Result("row", "int16", (make.convert(z, "float32", "int16"),)),
    ]
    return ProgramProblem(rows=20, text=make.program(results).text(), name="parts")


def window(rows, step_rows, lanes, fragments):
    return lambda columns: RowSchedule("window", rows, columns, step_rows, lanes, fragments)


def elements(rows, step_rows, lanes):
    return lambda columns: RowSchedule("elements", rows, columns, step_rows, lanes, 1)


def chunks(residency, rows, columns, lanes):
    return lambda _: RowSchedule(residency, rows, columns, rows, lanes, 2)


DRAWN = [
    *covering(REDUCTIONS, [(20, 66000, "bfloat16"), (1023, 130, "float32")], seed=1),
    *covering(IN_WINDOWS, [(1023, 130, "bfloat16")], seed=2),
    *covering(OF_ELEMENTS, [(30, 1100, "bfloat16"), (1023, 70, "float32")], seed=3),
]
CHOSEN = {
    "the shortest row": (problem_of("softmax", 1, 16, "float32"), window(8, 8, 128, 8)),
    "an odd row, steps and a rest": (problem_of("softmax_with_lse", 20, 1003), window(16, 8, 128, 4)),
    "no rest beside steps": (problem_of("rms_norm", 9, 1024), window(8, 8, 256, 4)),
    "a wide weight": (problem_of("rms_norm", 9, 300, weight_dtype="float32"), window(8, 8, 128, 2)),
    "two results": (problem_of("add_rms_norm", 20, 1003), window(16, 16, 256, 2)),
    "kept by two cores, one with less": (problem_of("softmax", 40, 1500, "float32"), chunks("scratch", 8, 512, 128)),
    "a sum kept": (problem_of("add_rms_norm", 20, 1500), chunks("scratch", 16, 512, 128)),
    "whole chunks twice": (problem_of("rms_norm", 20, 1536), chunks("reread", 8, 512, 128)),
    "a sum made twice": (problem_of("add_rms_norm", 9, 1500, "float32"), chunks("reread", 8, 256, 256)),
    "scalars of long rows": (problem_of("cross_entropy", 40, 1500), chunks("scratch", 16, 512, 128)),
    "scalars of rows in chunks": (problem_of("cross_entropy", 9, 1500, "float32"), chunks("reread", 8, 512, 128)),
    "a late weight": (problem_of("rms_norm", 40, 1500), chunks("scratch", 16, 512, 128)),
    "two stages": (problem_of("layer_norm", 20, 1003), window(16, 8, 128, 4)),
    "sums over odd rows by two cores": (problem_of("layer_norm_backward", 20, 1003), window(8, 8, 128, 4)),
    "sums over whole blocks": (problem_of("rms_norm_backward", 32, 256, "float32"), window(16, 16, 128, 2)),
    "8-bit floats": (problem_of("quantize_rows", 40, 500, result_dtype="float8_e4m3fn"), window(32, 32, 128, 2)),
    "8-bit integers": (problem_of("quantize_rows", 20, 1003, result_dtype="int8"), window(32, 32, 128, 2)),
    "halves of whole registers": (problem_of("silu_and_mul_backward", 20, 384), elements(16, 8, 256)),
    "halves of less than one": (problem_of("silu_and_mul_backward", 9, 50, "float32"), elements(8, 8, 512)),
    "halves of more than half of one": (problem_of("silu_and_mul_backward", 9, 100), elements(8, 8, 512)),
    "halves of an odd number": (problem_of("silu_and_mul_backward", 20, 1003, "float32"), elements(16, 16, 256)),
    "an odd half": (problem_of("silu_and_mul", 20, 17), elements(8, 8, 512)),
    "three parts of less than one register": (of_parts(50), window(8, 8, 128, 4)),
    "three odd parts": (of_parts(333), window(16, 8, 128, 2)),
    "three whole parts": (of_parts(256), window(16, 16, 128, 2)),
}


def operands(problem):
    """Operands of which integers are columns: labels."""
    columns = problem.columns_of_program
    return tuple(x % columns if x.dtype == jnp.int32 else x for x in problem.inputs(0))


def check(problem, schedule, args):
    """In TPU interpret mode, in which memory that was never written is NaN."""
    with pltpu.force_tpu_interpret_mode(pltpu.InterpretParams()):
        results = as_tuple(jax.jit(lambda *args: KERNEL.run(problem, schedule, TARGET, *args))(*args))
        jax.block_until_ready(results)
    assert [(x.shape, x.dtype) for x in results] == [(x.shape, x.dtype) for x in problem.results()]
    expected = as_tuple(problem.reference(*args))
    assert mismatches(problem, results, expected, problem.tolerance()) is None


@pytest.mark.parametrize(("problem", "schedule"), DRAWN, ids=[f"{p} {s}".replace(" ", "-")[:99] for p, s in DRAWN])
def test_drawn_schedules_are_right(problem, schedule):
    check(problem, schedule, operands(problem))


@pytest.mark.parametrize(("problem", "schedule"), CHOSEN.values(), ids=CHOSEN)
def test_rows_of_all_kinds_are_right(problem, schedule):
    check(problem, schedule(problem.columns_of_program), operands(problem))


@pytest.mark.always
def test_infinities_and_nan_stay_in_their_rows():
    for residency in ("window", "scratch", "reread"):
        problem = problem_of("softmax_with_lse", 20, 600, "float32")
        (x,) = problem.inputs(0)
        x = x.at[1, 3].set(jnp.inf).at[2, 300].set(-jnp.inf).at[3].set(-jnp.inf).at[4, 599].set(jnp.nan)
        made = (window(8, 8, 128, 2) if residency == "window" else chunks(residency, 8, 256, 128))(600)
        check(problem, made, (x,))


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


def test_other_chips_and_dtypes_are_refused_in_words():
    def check(name):
        problem = problem_of(name, 64, 256)
        assert KERNEL.supports(problem, find("v6e").target) is None
        assert "is written for TPUs" in KERNEL.supports(problem, find("h200").target)
        half = dataclasses.replace(problem, dtype="float16")
        assert "float16" in KERNEL.supports(half, find("v6e").target)

    assert failures(check, OPERATIONS) == []
    make = Builder(64, [Operand("row", "bool")])
    truth = make.program([Result("row", "float32", (make.emit("bool_to_float", make.read(0), dtype="float32"),))])
    assert "rows of bool" in KERNEL.supports(ProgramProblem(rows=8, text=truth.text()), find("v6e").target)


def test_a_scratch_array_keeps_the_fewest_bytes():
    def kept(name, dtype):
        made = plan(problem_of(name, 64, 2**17, dtype).program, "scratch")
        return [str(made.kept_dtype(x)) for x in made.kept]

    assert kept("add_rms_norm", "bfloat16") == ["bfloat16"]  # the rounded sum of two rows
    assert kept("add_rms_norm", "float32") == kept("rms_norm", "float32") == ["float32"]
    assert kept("cross_entropy", "float32") == []


def legal(problem, chip):
    """Schedules, and which of them the model lets a chip try."""
    hardware = find(chip)
    space = KERNEL.space(problem, hardware.target)
    found = space.legal()[0]
    demand = KERNEL.footprint(problem, found, hardware.target)
    return space, found, onchip_demand(demand) <= onchip_limit(demand, hardware)


@pytest.mark.parametrize("chip", CHIPS)
@pytest.mark.parametrize("name", REDUCTIONS)
def test_rows_of_any_length_fit_every_chip_and_moderate_ones_move_once(name, chip):
    for columns in (16, 1003, 16384, 131072, 1_000_000):
        for dtype in ("bfloat16", "float32"):
            _, found, fits = legal(problem_of(name, 4096, columns, dtype), chip)
            residencies = set(found.residency[fits].tolist())
            assert residencies if columns > 131072 else residencies - {"reread"}


@pytest.mark.parametrize("name", OPERATIONS)
def test_two_cores_with_a_block_each_keep_one_buffer_as_one_core_with_one_block_does(name):
    def onchip_bytes(rows, chip):
        problem, target = problem_of(name, rows, 2048, "float32"), find(chip).target
        found = KERNEL.space(problem, target).legal()[0]
        return set(KERNEL.footprint(problem, found.take(found.rows == 512), target).onchip_bytes.tolist())

    assert onchip_bytes(1024, "v5p") == onchip_bytes(512, "v6e") == onchip_bytes(512, "v5p")
    assert min(onchip_bytes(1536, "v5p")) > 1.4 * max(onchip_bytes(1024, "v5p"))


def _arrays(problem):
    return [x for each in problem.arrays for x in each]


def drawn(chip, count, seed):
    """Problems and schedules that the model calls legal, of few blocks: a compiler's report costs time by the block."""
    rng = random.Random(seed)
    while count:
        name = rng.choice(OPERATIONS)
        columns = rng.choice([1024, 4096, 8192, 16384, 128 * rng.randint(64, 320)])
        whole = problem_of(name, 4096, columns, rng.choice(["bfloat16", "float32"]))
        space, found, fits = legal(whole, chip)
        if not fits.any():
            continue
        schedule = space.schedule(**found.row(rng.choice(np.flatnonzero(fits).tolist())))
        # Rows of less than 32 MiB need no window if XLA keeps them in VMEM itself.
        rows_bytes = [columns * x.parts * jnp.dtype(x.dtype).itemsize for x in _arrays(whole) if x.kind == "row"]
        rows = schedule.rows * max(3, -(-(2**25 // min(rows_bytes)) // schedule.rows))
        if rows <= 64 * schedule.rows:
            yield dataclasses.replace(whole, rows=rows), schedule
            count -= 1


@needs_libtpu
@pytest.mark.parametrize("chip", ["v5e", "v6e"])
def test_vmem_is_what_the_compiler_allots_but_for_spills(chip, tmp_path):
    asked = json.loads(compiled(__file__, chip, tmp_path, "12").splitlines()[-1])
    assert len(asked) == 12
    for case, predicted, allotted, of_rows in asked:
        # XLA may keep scalars and sums over rows in VMEM itself.
        assert predicted == allotted if of_rows else 0.9 * predicted <= allotted <= predicted, case


def _compile(chip, count):
    hardware = find(chip)
    for problem, schedule in drawn(chip, int(count), seed=chip):
        demand = KERNEL.footprint(problem, Columns.of([schedule]), hardware.target)
        said = estimate.static_profile(
            lambda *args: KERNEL.run(problem, schedule, hardware.target, *args),  # noqa: B023
            problem.operands(),
            hardware,
        )
        of_rows = all(x.kind in ("row", "shared") for x in _arrays(problem))
        yield f"{problem} {schedule}", int(demand.onchip_bytes[0]), said.onchip_bytes - said.spill_bytes, of_rows


if __name__ == "__main__":
    print(json.dumps(list(_compile(*sys.argv[1:]))))
