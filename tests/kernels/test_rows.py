"""The row-wise kernels for Hopper on a CPU: lowered for CUDA, their SMEM compared, small rows interpreted."""

import dataclasses
import functools
import random

import hopper
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from failures import failures

from search_spaces import Columns, Target, load
from search_spaces.jax_compat import HAS_GPU_INTERPRETER
from search_spaces.problem import as_tuple, nbytes
from search_spaces.rows.formulas import (
    RMS_NORM,
    SILU_AND_MUL,
    SOFTMAX,
    AddRmsNormProblem,
    RmsNormProblem,
    SiluAndMulProblem,
    SoftmaxProblem,
)
from search_spaces.rows.hopper import RowSchedule, coalescing
from search_spaces.rows.hopper.partition import persistent_ctas

pytestmark = pytest.mark.slow_but_first

TARGET = hopper.H200.target
FORMULAS = (SoftmaxProblem, RmsNormProblem, AddRmsNormProblem, SiluAndMulProblem)
EXTENTS = [
    (65536, 1024, "bfloat16"),
    (32768, 4096, "bfloat16"),
    (2048, 65536, "float16"),
    (4096, 131072, "bfloat16"),
    (2048, 65536, "float32"),
    (1000, 4040, "float32"),
    (37, 1002, "bfloat16"),
    (7, 151936, "bfloat16"),
    (2048, 50257, "bfloat16"),
    (64, 65537, "float32"),
    (300, 4128, "bfloat16"),
    (5, 129, "float16"),
    (4, 32, "float32"),
    (2, 200, "bfloat16"),
]
SUMS = [
    (problem, extents)
    for problem in ("layer_norm_backward", "rms_norm_backward")
    for extents in ((16384, 4096), (600, 1024), (3000, 8192), (37, 1002), (9, 4096))
]
PROBLEMS = [problem(*extents) for problem in FORMULAS for extents in EXTENTS] + [
    RmsNormProblem(*extents, weight_dtype="float32") for extents in EXTENTS if extents[2] != "float32"
]
PROBLEMS += [load(name).problem(*extents) for name, extents in SUMS]
interpreted = pytest.mark.skipif(not HAS_GPU_INTERPRETER, reason="JAX interprets GPU kernels from 0.11 on")


def kernel_of(problem):
    return SOFTMAX.kernel("mosaic_gpu")  # one kernel computes any row program


def named(problem):
    return f"{type(problem).__name__}({problem})"


def space(problem):
    return kernel_of(problem).space(problem, TARGET)


@functools.cache
def legal(problem):
    """The legal schedules of the space, as columns."""
    return space(problem).legal()[0]


def footprint(problem, schedules):
    return kernel_of(problem).footprint(problem, schedules, TARGET)


def registers(warps, vector, rows=1):
    return RowSchedule("registers", warps, vector, rows)


def span(warps, vector, accesses, rows=1):
    return RowSchedule("span", warps, vector, rows, accesses)


def smem(warps, vector, accesses, register_chunks=0, cluster=1):
    return RowSchedule("smem", warps, vector, accesses=accesses, register_chunks=register_chunks, cluster=cluster)


def pipeline(warps, vector, accesses, stages, prefetch=0, cluster=1):
    return RowSchedule("pipeline", warps, vector, accesses=accesses, stages=stages, prefetch=prefetch, cluster=cluster)


def fits(found):
    h200 = hopper.H200
    return (
        (found.onchip_bytes <= h200.onchip_bytes)
        & (found.registers <= h200.registers_per_thread)
        & (found.registers_per_block <= h200.registers_per_core)
    )


def sample(problem, count):
    """Legal schedules, whether or not they fit on the chip; none with so many accesses that lowering drags."""
    points = legal(problem)
    found = footprint(problem, points)
    quick = np.flatnonzero((found.registers <= 80) | (found.steps > 1))
    chosen = random.Random(str(problem)).sample(list(quick), min(count, len(quick)))
    return list(space(problem).schedules(points.take(sorted(chosen))))


@pytest.mark.parametrize("problem", PROBLEMS, ids=named)
def test_smem_bytes_are_what_lowering_asks_for_and_decide_whether_it_succeeds(problem):
    kernel = kernel_of(problem)
    for one in sample(problem, 1):
        predicted = footprint(problem, Columns.of([one])).onchip_bytes[0]
        hopper.check_onchip_bytes(kernel, problem, one, predicted)


@pytest.mark.parametrize(
    ("columns", "schedule"),
    [
        (32768, smem(8, 8, 4)),
        (32768, smem(8, 8, 2, register_chunks=2)),
        (131072, smem(8, 8, 4, register_chunks=1, cluster=4)),
        (65536, pipeline(16, 8, 2, 13, prefetch=1)),
        (131072, pipeline(16, 8, 4, 6, cluster=2)),
        (2**20, smem(8, 8, 4, cluster=8)),  # more than an H200 has
        (50257, smem(8, 8, 4)),
        (50257, pipeline(16, 8, 4, 6, prefetch=1)),
        (128257, smem(8, 8, 4, register_chunks=1, cluster=4)),
    ],
    ids=str,
)
def test_smem_bytes_of_chunks_are_what_lowering_asks_for(columns, schedule):
    problem = SoftmaxProblem(64, columns)
    predicted = footprint(problem, Columns.of([schedule])).onchip_bytes[0]
    assert space(problem).broken(schedule) is None
    hopper.check_onchip_bytes(kernel_of(problem), problem, schedule, predicted)


def test_the_sample_holds_each_residency_and_each_size_of_cluster():
    rows = [one for p in PROBLEMS for one in sample(p, 24)]
    assert {one.residency for one in rows} == {"registers", "span", "ring", "smem", "pipeline"}
    assert {one.cluster for one in rows} == {1, 2, 4, 8}


def test_64_bit_indices_elsewhere_change_nothing_here():
    before = jax.config.jax_enable_x64
    jax.config.update("jax_enable_x64", True)
    try:
        hopper.lower(SOFTMAX.kernel("mosaic_gpu"), SoftmaxProblem(64, 4352), pipeline(8, 8, 1, 4, cluster=2))
        hopper.lower(SILU_AND_MUL.kernel("mosaic_gpu"), SiluAndMulProblem(64, 4352), span(4, 8, 2, 1))
    finally:
        jax.config.update("jax_enable_x64", before)


ROWS = {  # name: problem, schedule
    "a ragged end of rows and of a row": (SoftmaxProblem(5, 1000, "float32"), registers(4, 4, rows=2)),
    "odd columns": (SoftmaxProblem(3, 333, "float16"), registers(4, 1)),
    "a warp a row, the last block and the last fragment overlap": (RmsNormProblem(9, 328), registers(1, 8)),
    "several rows a warp": (SoftmaxProblem(17, 72, "float32"), registers(1, 2, rows=2)),
    "an SMEM-resident row, and the last chunk overlaps": (RmsNormProblem(3, 128 * 37), smem(8, 4, 2)),
    "an SMEM-resident row, two chunks of it in registers": (SoftmaxProblem(3, 4096), smem(4, 4, 2, register_chunks=2)),
    "rows pipelined, and the last chunk overlaps": (SoftmaxProblem(5, 128 * 37), pipeline(8, 4, 1, 7, prefetch=1)),
    "rows pipelined, two accesses a chunk": (RmsNormProblem(5, 4096), pipeline(4, 4, 2, 6)),
    "a row a core": (SoftmaxProblem(2, 2048, "float32"), pipeline(4, 4, 1, 6, prefetch=1)),
    "a cluster, SMEM-resident, whose parts and last chunks overlap": (
        SoftmaxProblem(3, 128 * 37),
        smem(4, 4, 2, register_chunks=1, cluster=2),
    ),
    "the same without chunks in registers": (RmsNormProblem(3, 128 * 37), smem(4, 4, 2, cluster=2)),
    "rows pipelined through a cluster, parts and last chunks overlap": (
        RmsNormProblem(3, 128 * 37),
        pipeline(4, 4, 2, 5, cluster=2),
    ),
    "the same, prefetched": (SoftmaxProblem(3, 128 * 37, "float32"), pipeline(4, 4, 2, 5, prefetch=1, cluster=2)),
    "rows that start anywhere, SMEM-resident, two fragments after the lines": (
        RmsNormProblem(9, 4863),
        smem(8, 8, 1, register_chunks=1),
    ),
    "rows that start anywhere, one warpgroup for all of their ends": (SoftmaxProblem(9, 2303), pipeline(4, 8, 1, 4)),
    "rows that start anywhere, prefetched": (RmsNormProblem(9, 4743, "float16"), pipeline(8, 8, 1, 7, prefetch=1)),
    "rows that start anywhere, a cluster, SMEM-resident": (
        SoftmaxProblem(5, 4739, "float32"),
        smem(4, 4, 2, register_chunks=1, cluster=2),
    ),
    "rows that start anywhere, pipelined through a cluster": (RmsNormProblem(9, 4741), pipeline(4, 8, 2, 5, cluster=2)),
    "rows that start at even elements": (RmsNormProblem(5, 2310), smem(4, 8, 1)),
    "rows that start at multiples of an access and end anywhere": (SoftmaxProblem(3, 2504), smem(4, 8, 2)),
    "a wider weight in registers": (RmsNormProblem(5, 1032, weight_dtype="float32"), registers(4, 8)),
    "a wider weight, a warp a row": (RmsNormProblem(9, 328, "float16", "float32"), registers(1, 8)),
    "a wider weight beside chunks": (RmsNormProblem(3, 4608, weight_dtype="float32"), smem(8, 8, 2)),
    "a wider weight of rows that start anywhere": (
        RmsNormProblem(9, 4743, weight_dtype="float32"),
        pipeline(8, 8, 1, 7, prefetch=1),
    ),
    "two operands and two results in registers, the last fragment overlaps": (
        AddRmsNormProblem(5, 1000),
        registers(4, 4, rows=2),
    ),
    "the same, a warp a row, a wider weight": (AddRmsNormProblem(9, 328, "float16", "float32"), registers(1, 8)),
    "the same, odd columns": (AddRmsNormProblem(3, 333, "float32"), registers(4, 1)),
    "two operands, SMEM-resident, a chunk of both in registers, the last one overlaps": (
        AddRmsNormProblem(3, 128 * 37),
        smem(8, 4, 2, register_chunks=1),
    ),
    "two operands in a cluster, parts and last chunks overlap": (
        AddRmsNormProblem(3, 128 * 37, "float32"),
        smem(4, 4, 2, register_chunks=1, cluster=2),
    ),
    "two operands pipelined, prefetched": (AddRmsNormProblem(5, 128 * 37), pipeline(8, 4, 1, 7, prefetch=1)),
    "two operands pipelined through a cluster": (
        AddRmsNormProblem(3, 128 * 37, weight_dtype="float32"),
        pipeline(4, 4, 2, 5, cluster=2),
    ),
    "two operands whose rows start anywhere, SMEM-resident": (AddRmsNormProblem(9, 4863), smem(8, 8, 1)),
    "two operands whose rows start anywhere, pipelined, a wider weight": (
        AddRmsNormProblem(9, 4743, "float16", "float32"),
        pipeline(8, 8, 1, 7, prefetch=1),
    ),
    "a row that each stage reads again, parts and last chunks overlap": (
        SoftmaxProblem(3, 128 * 37),
        RowSchedule("reread", 4, 4, accesses=2, cluster=2),
    ),
    "rows that start anywhere, read again": (RmsNormProblem(9, 4863), RowSchedule("reread", 8, 8, accesses=1)),
    "one row that ends anywhere": (RmsNormProblem(1, 2305, "float32"), pipeline(4, 4, 2, 4)),
    "all of a row in registers, two warpgroups, the last chunk overlaps": (
        SoftmaxProblem(2, 256 * 19, "float32"),
        smem(8, 4, 1, register_chunks=5),
    ),
}


@interpreted
@pytest.mark.parametrize("name", ROWS)
def test_rows_are_right_to_the_last_ragged_edge(name):
    problem, schedule = ROWS[name]
    found = hopper.interpret(kernel_of(problem), problem, schedule, cores=2)
    for actual, expected, tolerance in zip(*map(as_tuple, (*found, problem.tolerance())), strict=True):
        np.testing.assert_allclose(actual, expected, rtol=tolerance.relative, atol=tolerance.absolute)


RINGS = {
    "a warpgroup a row, the last fragment overlaps": ("layer_norm_backward", 300, 1304, {"warps": 4, "stages": 2}),
    "two warpgroups a row, rows in turn": ("rms_norm_backward", 41, 2056, {"warps": 8, "stages": 3}),
    "a warp a row, the last rows overlap": ("layer_norm_backward", 603, 512, {"warps": 1, "stages": 2}),
    "a warp a row, two rows each": ("add_rms_norm_backward", 77, 256, {"warps": 1, "rows": 2, "stages": 2}),
}


@interpreted
@pytest.mark.parametrize("name", RINGS)
def test_sums_over_rows_are_right_to_the_last_ragged_edge(name):
    operation, rows, columns, fields = RINGS[name]
    problem = load(operation).problem(rows, columns)
    for schedule in (
        RowSchedule("ring", vector=8, blocks=1, **fields),
        RowSchedule(
            "registers", vector=8, blocks=2, **{"rows": 1, **fields, "warps": min(4, fields["warps"]), "stages": 0}
        ),
    ):
        found = hopper.interpret(kernel_of(problem), problem, schedule, cores=2)
        for actual, expected in zip(*map(as_tuple, found), strict=True):
            np.testing.assert_allclose(actual, expected, rtol=2e-2, atol=1e-2 * float(jnp.max(jnp.abs(expected))))


HALVES = {
    "a warpgroup a row, the last block of a row overlaps": (3, 1304, "bfloat16", span(4, 8, 1, 1)),
    "a warp a row, the last rows overlap": (7, 512, "float16", span(1, 8, 2, 1)),
    "odd columns, several rows a warp": (9, 99, "float32", span(1, 1, 3, 2)),
}


@interpreted
@pytest.mark.parametrize("name", HALVES)
def test_halves_are_right_to_the_last_ragged_edge(name):
    rows, columns, dtype, schedule = HALVES[name]
    problem = SiluAndMulProblem(rows, columns, dtype)
    actual, expected = hopper.interpret(kernel_of(problem), problem, schedule, cores=2)
    tolerance = problem.tolerance()
    np.testing.assert_allclose(actual, expected, rtol=tolerance.relative, atol=tolerance.absolute)


RACES = {
    "an SMEM-resident row": (SoftmaxProblem(2, 3072), smem(8, 4, 1, register_chunks=1)),
    "two rows at a time": (SoftmaxProblem(3, 3072), pipeline(4, 4, 1, 8, prefetch=1)),
    "lines and ends": (SoftmaxProblem(2, 24 * 256 + 128), smem(8, 8, 1)),
    "lines and ends, two rows at a time": (SoftmaxProblem(3, 24 * 256 + 128), pipeline(8, 8, 1, 6, prefetch=1)),
    "a cluster, two rows at a time": (SoftmaxProblem(3, 3072), pipeline(4, 4, 1, 5, prefetch=1, cluster=2)),
    "two operands, SMEM-resident": (AddRmsNormProblem(2, 3072), smem(8, 4, 1)),
    "two operands, two rows at a time": (AddRmsNormProblem(3, 3072), pipeline(4, 4, 1, 8, prefetch=1)),
}


@interpreted
@pytest.mark.parametrize("name", RACES)
def test_no_warpgroup_touches_what_another_still_uses(name, capfd):
    problem, schedule = RACES[name]
    found = hopper.interpret(kernel_of(problem), problem, schedule, cores=1, detect_races=True)
    for actual, expected, tolerance in zip(*map(as_tuple, (*found, problem.tolerance())), strict=True):
        np.testing.assert_allclose(actual, expected, rtol=tolerance.relative)
    assert "RACE" not in capfd.readouterr().out


@interpreted
@pytest.mark.parametrize("schedule", [registers(4, 4), pipeline(4, 4, 1, 4)], ids=["registers", "pipeline"])
def test_infinities_mean_what_they_mean_to_jax(schedule):
    class Given(SoftmaxProblem):
        def inputs(self, seed):
            (x,) = super().inputs(seed)
            x = x.at[0, 5:700].set(-jnp.inf).at[1].set(-jnp.inf).at[2, 17].set(jnp.inf).at[3, 3].set(jnp.nan)
            return (x.at[4].mul(1e4),)

    actual, expected = hopper.interpret(SOFTMAX.kernel("mosaic_gpu"), Given(5, 1024, "float32"), schedule, cores=2)
    assert np.isnan(expected[1:4]).all()
    np.testing.assert_allclose(actual, expected, rtol=1e-5, atol=1e-30)


@interpreted
def test_a_row_of_minus_infinities_is_no_number_where_its_fragments_overlap_or_it_has_ends():
    class Nothing(SoftmaxProblem):
        def inputs(self, seed):
            return (jnp.full((self.rows, self.columns), -jnp.inf, self.dtype),)

    for problem, schedule in [(Nothing(2, 128 * 19, "float32"), smem(8, 4, 1)), (Nothing(2, 2303), smem(4, 8, 1))]:
        actual, expected = hopper.interpret(SOFTMAX.kernel("mosaic_gpu"), problem, schedule, cores=2)
        assert np.isnan(expected).all()
        assert np.isnan(actual).all(), schedule


@interpreted
def test_epsilon_reaches_the_kernel():
    problem, target = RmsNormProblem(4, 512, "float32"), dataclasses.replace(TARGET, cores=2)
    args = problem.inputs(seed=0)
    with hopper.gpu_interpreter():
        out = jax.jit(lambda *a: RMS_NORM.kernel("mosaic_gpu").run(problem, registers(4, 4), target, *a, eps=3.0))(
            *args
        )
    np.testing.assert_allclose(out, problem.reference(*args, eps=3.0), rtol=1e-5)


def test_rows_are_dealt_to_as_few_persistent_ctas_as_take_as_many_waves():
    def ctas(cluster, rows):
        return persistent_ctas(cluster, 132, rows)

    assert [ctas(1, rows) for rows in (1, 100, 132, 133, 1024, 8192)] == [1, 100, 132, 67, 128, 131]
    assert [ctas(2, rows) for rows in (512, 4096)] == [64, 66]
    assert [ctas(4, 992), ctas(8, 992)] == [32, 16], "four cores are left over where clusters are larger"


def test_every_legal_schedule_stays_within_its_arrays_and_starts_at_multiples_of_its_accesses():
    def check(problem):
        points = legal(problem)
        found = footprint(problem, points)
        assert np.all(found.access_bytes <= 16)
        if isinstance(problem, SiluAndMulProblem):
            assert np.all(problem.columns % points.vector == 0)
            assert np.all(32 * points.warps * points.vector * points.accesses <= problem.columns)
            assert np.all(np.where(points.warps == 1, 4, 1) * points.rows <= problem.rows)
            return
        in_chunks = points.residency != "registers"
        assert np.all(in_chunks | (32 * points.warps * points.vector <= problem.columns))
        assert np.all(in_chunks | (np.where(points.warps == 1, 4, 1) * points.rows <= problem.rows))
        with_ends = in_chunks & (problem.columns % (32 * points.vector) != 0)
        assert np.all(with_ends | (problem.columns % points.vector == 0))
        assert np.all(~with_ends | (points.vector * problem.operands()[0].dtype.itemsize == 16)), (
            "lines start at multiples of 16 bytes"
        )
        assert np.all(
            ~in_chunks | (points.cluster * points.warps * points.accesses * 32 * points.vector <= problem.columns)
        )
        assert np.all(~in_chunks | (32 * points.vector * problem.operands()[0].dtype.itemsize % 16 == 0)), (
            "bulk copies move multiples of 16 bytes"
        )
        assert np.all(points.stages <= 32), "Mosaic GPU has groups of up to 32 barriers"

    assert failures(check, PROBLEMS, named) == []


def test_a_footprint_accounts_for_every_byte_once():
    def check(problem):
        points = legal(problem)
        found = footprint(problem, points)
        blocks = np.prod(np.broadcast_arrays(*found.grid), axis=0)
        written = [x for x, o in zip(problem.results(), problem.arrays[1], strict=True) if o.kind != "row sum"]
        np.testing.assert_allclose(found.tile.bytes_written * blocks, sum(map(nbytes, written)))
        for number, x in enumerate(problem.operands()):
            if len(x.shape) < 2:
                continue
            (load,) = [load for load in found.step.loads if load.name == f"operand {number + 1}"]
            np.testing.assert_allclose(load.bytes * found.steps * blocks / nbytes(x), 1)
        assert np.all(found.step.flops * found.steps * blocks >= problem.flops * (1 - 1e-9))

    assert failures(check, PROBLEMS, named) == []


def test_every_problem_has_a_schedule_that_fits_in_a_space_of_some_tens():
    def check(problem):
        found = footprint(problem, legal(problem))
        assert np.any(fits(found))
        assert len(legal(problem)) <= 80

    assert failures(check, PROBLEMS, named) == []


@pytest.mark.parametrize("kind", [SoftmaxProblem, RmsNormProblem, AddRmsNormProblem])
@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_a_row_of_any_length_that_a_cluster_has_room_for_has_a_schedule_that_fits(kind, dtype):
    lengths = [128, 129, 1001, 8193, 12345, 24575, 24577, 32001, 50257, 50272, 65537, 98305, 128257, 131073, 151665]
    for columns in [*lengths, 262143, 393217]:
        problem = kind(64, columns, dtype)
        if sum(nbytes(x) for x in problem.operands() if len(x.shape) == 2) > problem.rows * 8 * 200 * 1024:
            continue
        assert np.any(fits(footprint(problem, legal(problem)))), problem


OF_RESIDENCY = {
    "registers": {"rows"},
    "span": {"rows", "accesses"},
    "reread": {"accesses", "cluster"},
    "smem": {"accesses", "register_chunks", "cluster"},
    "pipeline": {"accesses", "stages", "prefetch", "cluster"},
}


@pytest.mark.parametrize("columns", [8192, 65536, 131072, 50257])
def test_a_schedule_has_the_fields_of_its_residency_and_is_stored_without_others(columns):
    schedules = space(SoftmaxProblem(4096, columns))
    points, _ = schedules.legal()
    for schedule in schedules.schedules(points):
        stored = schedules.encode(dataclasses.asdict(schedule))
        assert stored.keys() <= {"residency", "warps", "vector"} | OF_RESIDENCY[schedule.residency]
        assert schedules.decode(stored) == schedule
        assert schedules.broken(schedule) is None


@pytest.mark.parametrize(
    ("schedule", "field"),
    [
        (dataclasses.replace(smem(8, 8, 4, cluster=2), stages=13), "stages"),
        (dataclasses.replace(pipeline(8, 8, 4, 13, cluster=2), register_chunks=1), "register_chunks"),
        (dataclasses.replace(registers(4, 8), cluster=2), "cluster"),
        (pipeline(4, 8, 4, 13, cluster=2), "warps"),
    ],
)
def test_a_schedule_with_a_field_of_another_residency_is_told_which(schedule, field):
    assert f"'{field}: a value that schedules of this residency take'" in space(SoftmaxProblem(4096, 131072)).broken(
        schedule
    )


@pytest.mark.parametrize(
    "problem", [SoftmaxProblem(4096, 16384), SoftmaxProblem(512, 50257), RmsNormProblem(512, 50257)]
)
def test_a_schedule_demands_the_same_alone_and_among_those_of_other_residencies(problem):
    points = legal(problem)
    assert len(set(points.residency)) == 2
    together = footprint(problem, points)
    for index in range(len(points)):
        alone = footprint(problem, points.take(np.array([index])))
        for field in dataclasses.fields(together):
            for one, other in zip(
                leaves(getattr(alone, field.name)), leaves(getattr(together, field.name)), strict=True
            ):
                assert np.broadcast_to(one, 1)[0] == np.broadcast_to(other, len(points))[index], field.name


def leaves(value):
    """The columns and scalars of a field of a footprint."""
    if dataclasses.is_dataclass(value):
        return leaves(tuple(vars(value).values()))
    return [leaf for each in value for leaf in leaves(each)] if isinstance(value, tuple) else [value]


def test_a_row_that_no_cluster_has_room_for_is_read_again():
    for columns, expected in ((2**19, {"smem", "pipeline"}), (2**20, {"reread"}), (3 * 2**20 + 1, {"reread"})):
        points = legal(SoftmaxProblem(64, columns))
        fitting = points.take(fits(footprint(SoftmaxProblem(64, columns), points)))
        assert set(fitting.residency) == expected


def test_narrow_accesses_are_more_of_them():
    problem = SoftmaxProblem(4096, 4096)
    wide, narrow = (footprint(problem, Columns.of([registers(4, v)])) for v in (8, 4))
    assert narrow.step.transactions[0] == 2 * wide.step.transactions[0]
    assert wide.access_bytes[0] == 16
    odd = footprint(SoftmaxProblem(4096, 4095), Columns.of([registers(4, 1)]))
    assert odd.step.transactions[0] == 8 * wide.step.transactions[0]
    assert odd.coalescing[0] == 64 / (64 + 30)


def test_rows_that_start_anywhere_touch_sectors_in_vain():
    np.testing.assert_array_equal(coalescing(np.array([64, 96, 100]), np.array([2, 16, 4])), [1, 1, 128 / 156])


def test_every_rule_drops_what_no_other_rule_drops():
    needed, rules = set(), set()
    kinds = (SoftmaxProblem, RmsNormProblem, AddRmsNormProblem)
    between = [kind(*extents) for kind in kinds for extents in ((4096, 8192), (2048, 32768))]
    for problem in [*PROBLEMS, *between, SoftmaxProblem(2, 4096), SiluAndMulProblem(40, 1024)]:
        points = space(problem).points()
        with np.errstate(divide="ignore"):  # points that another rule drops may have chunks of no accesses
            holds = {
                reason: np.broadcast_to(rule(points), len(points)) for reason, rule in space(problem).rules.items()
            }
        for reason, column in holds.items():
            others = np.all([other for name, other in holds.items() if name != reason], axis=0)
            if np.any(others & ~column):
                needed.add(reason)
        rules |= set(holds)
    assert needed == rules


def test_what_they_cannot_do_they_refuse_in_words():
    kernel = SOFTMAX.kernel("mosaic_gpu")
    assert kernel.supports(SoftmaxProblem(8, 1024), TARGET) is None
    assert "sm_75" in kernel.supports(SoftmaxProblem(8, 1024), Target("cuda", "NVIDIA T4", "sm_75", 40))
    assert "less than a warpgroup" in kernel.supports(SoftmaxProblem(8, 31), TARGET)
    assert "less than a warpgroup" in kernel.supports(SoftmaxProblem(3, 127), TARGET)
    assert "indices" in kernel.supports(SoftmaxProblem(2**16, 2**15), TARGET)
    assert "indices" in SILU_AND_MUL.kernel("mosaic_gpu").supports(SiluAndMulProblem(2**16, 2**14), TARGET)


def test_a_neighbour_keeps_what_a_schedule_needs_and_drops_what_divides():
    near = SoftmaxProblem(1024, 65536).neighbour()
    assert (near.rows % 2, near.columns) == (1, 65280)
    for schedule in (pipeline(8, 8, 4, 13, prefetch=1), smem(8, 8, 4, cluster=2)):
        assert space(near).broken(schedule) is None
    assert SoftmaxProblem(3, 20).neighbour() is None
    assert isinstance(RmsNormProblem(9, 64).neighbour(), RmsNormProblem)
