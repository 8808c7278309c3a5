"""The scaled product: as users call it, its programs, and its Hopper kernel on a CPU, lowered and interpreted."""

import dataclasses
import random

import hopper
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from scheduler import tuned_scaled_matmul
from scheduler.core.hardware import find
from scheduler.model.cost import CostModel
from scheduler.model.pruning import prune
from search_spaces import Columns, Library, checking
from search_spaces.jax_compat import HAS_GPU_INTERPRETER
from search_spaces.matmul.hopper.schedule import PING_PONG
from search_spaces.scaled_matmul import SCALED_MATMUL, ScaledMatmulProblem

pytestmark = pytest.mark.slow_but_first

KERNEL, LIBRARY = SCALED_MATMUL.kernel("mosaic_gpu"), SCALED_MATMUL.library
H200 = find("NVIDIA H200")
KINDS = [(a, b) for a in ("blocks", "rows") for b in ("blocks", "rows")]


def quantized(shape, seed):
    return jnp.asarray(np.random.default_rng(seed).normal(size=shape), jnp.float8_e4m3fn)


def scales(shape, seed):
    return jnp.asarray(np.random.default_rng(seed).uniform(0.5, 2, size=shape), jnp.float32)


def expected(a, b, a_scale, b_scale):
    """By element, in float64."""
    (m, k), n = a.shape, b.shape[1]
    left, right = np.empty((m, k)), np.empty((k, n))
    for i in range(k):
        left[:, i] = np.asarray(a_scale)[:, i // 128] if a_scale.ndim == 2 else np.asarray(a_scale)
        right[i] = np.repeat(np.asarray(b_scale)[i // 128], 128)[:n] if b_scale.ndim == 2 else np.asarray(b_scale)
    return (np.asarray(a, np.float64) * left) @ (np.asarray(b, np.float64) * right)


@pytest.mark.parametrize("transpose_b", [False, True])
@pytest.mark.parametrize("kinds", KINDS, ids="-".join)
def test_a_call_is_the_product_of_operands_times_their_scales(kinds, transpose_b):
    m, k, n = 6, 300, 200
    a, b = quantized((m, k), 0), quantized((k, n), 1)
    a_scale = scales((m, 3) if kinds[0] == "blocks" else (m,), 2)
    b_scale = scales((3, 2) if kinds[1] == "blocks" else (n,), 3)
    turned = (b.T, b_scale.T) if transpose_b else (b, b_scale)
    out = tuned_scaled_matmul(a, turned[0], a_scale, turned[1], transpose_b=transpose_b, out_dtype=jnp.float32)
    np.testing.assert_allclose(out, expected(a, b, a_scale, b_scale), rtol=1e-4, atol=1e-2)


def test_scales_of_rows_have_one_axis_or_two_and_one_number_is_for_all():
    a, b = quantized((2, 5, 300), 0), quantized((300, 200), 1)
    whole = tuned_scaled_matmul(a, b, 2.0, jnp.float32(0.5))
    assert (whole.shape, whole.dtype) == ((2, 5, 200), jnp.bfloat16)
    for a_scale in (jnp.full((2, 5), 2.0), jnp.full((2, 5, 1), 2.0), jnp.full((2, 5, 3), 2.0)):
        for b_scale in (jnp.full(200, 0.5), jnp.full((1, 200), 0.5), jnp.full((3, 2), 0.5)):
            np.testing.assert_allclose(
                np.asarray(tuned_scaled_matmul(a, b, a_scale, b_scale), np.float32),
                np.asarray(whole, np.float32),
                rtol=0.02,
                atol=0.2,
            )


@pytest.mark.parametrize(
    ("a_scale", "b_scale", "message"),
    [
        ((3,), (200,), r"a_scale has shape \(5,\) or \(5, 1\) or \(5, 3\) \(blocks of 128\).*not \(3,\)"),
        ((5,), (2, 3), r"b_scale has shape \(200,\) or \(1, 200\) or \(3, 2\) \(blocks of 128\).*not \(2, 3\)"),
    ],
)
def test_a_scale_of_another_shape_is_told_those_that_it_may_have(a_scale, b_scale, message):
    with pytest.raises(ValueError, match=message):
        tuned_scaled_matmul(quantized((5, 300), 0), quantized((300, 200), 1), scales(a_scale, 2), scales(b_scale, 3))


def test_operands_of_other_dtypes_are_for_xla():
    a, b = (quantized(shape, 0).astype(jnp.bfloat16) for shape in ((5, 300), (300, 200)))
    a_scale, b_scale = scales((5, 3), 2), scales((3, 2), 3)
    out = tuned_scaled_matmul(a, b, a_scale, b_scale, out_dtype=jnp.float32)
    np.testing.assert_allclose(out, expected(a, b, a_scale, b_scale), rtol=1e-4, atol=1e-2)


def test_vmapped_rows_are_more_rows_of_one_call():
    a, b = quantized((4, 5, 256), 0), quantized((256, 128), 1)
    a_scale, b_scale = scales((4, 5, 2), 2), scales((128,), 3)
    call = jax.vmap(lambda a, s: tuned_scaled_matmul(a, b, s, b_scale))
    assert "m=20" in str(jax.make_jaxpr(call)(a, a_scale))
    np.testing.assert_array_equal(call(a, a_scale), tuned_scaled_matmul(a, b, a_scale, b_scale))
    shared = jax.vmap(lambda a: tuned_scaled_matmul(a, b, a_scale[0], b_scale))
    np.testing.assert_array_equal(shared(a)[2], tuned_scaled_matmul(a[2], b, a_scale[0], b_scale))


def test_a_scale_has_a_derivative():
    a, b, b_scale = quantized((5, 300), 0), quantized((300, 200), 1), scales((3, 2), 3)

    def loss(a_scale):
        return jnp.sum(tuned_scaled_matmul(a, b, a_scale, b_scale, out_dtype=jnp.float32))

    slope = jax.grad(loss)(scales((5, 3), 2))
    one_block = expected(a[:, :128], b[:128], jnp.ones((5, 1)), b_scale[:1]).sum(axis=1)
    np.testing.assert_allclose(slope[:, 0], one_block, rtol=1e-3, atol=1e-2)


@pytest.mark.parametrize("program", ["float32", "plain"])
@pytest.mark.parametrize("kinds", KINDS, ids="-".join)
def test_programs_of_xla_are_within_their_tolerance(kinds, program):
    p = ScaledMatmulProblem(40, 200, 300, transpose_b=True, a_scales=kinds[0], b_scales=kinds[1], out_dtype="float32")
    args, schedule = p.inputs(0), Library(program)
    off = np.abs(np.asarray(LIBRARY.run(p, schedule, H200.target, *args)) - np.asarray(p.reference(*args)))
    assert off.max() <= LIBRARY.tolerance(p, schedule).absolute
    if program == "plain":
        assert off.max() > 1e-3, "operands are rounded"


PROBLEMS = [
    ScaledMatmulProblem(4096, 7168, 2048, transpose_b=True),
    ScaledMatmulProblem(4096, 7168, 2048, transpose_b=True, a_scales="rows", b_scales="rows"),
    ScaledMatmulProblem(64, 24576, 1536, transpose_b=True),
    ScaledMatmulProblem(1, 2112, 7168, transpose_b=True, a_scales="rows"),
    ScaledMatmulProblem(1001, 1003, 1000, transpose_b=True, out_dtype="float32"),
    ScaledMatmulProblem(77, 72, 130, transpose_b=True, b_scales="rows", dtype="float8_e5m2"),
]


def legal(problem):
    return prune(KERNEL, problem, H200, CostModel(H200))


def sample(problem, count):
    found = legal(problem)
    rows = random.Random(str(problem)).sample(range(len(found.points)), min(count, len(found.points)))
    return [found.space.decode(found.schedule(row)) for row in rows]


@pytest.mark.parametrize("problem", PROBLEMS, ids=str)
def test_onchip_bytes_are_what_lowering_asks_for(problem):
    schedules = sample(problem, 6)
    assert schedules
    asked = KERNEL.footprint(problem, Columns.of(schedules), H200.target).onchip_bytes
    for one, predicted in zip(schedules, asked, strict=True):
        hopper.check_onchip_bytes(KERNEL, problem, one, predicted)


def test_with_scales_by_blocks_a_consumer_holds_two_sets_of_accumulators():
    for problem, most in ((PROBLEMS[0], 64 * 128), (PROBLEMS[1], 128 * 160)):
        found = legal(problem)
        points = found.points
        each = points.tile_m * points.tile_n // np.where(points.consumers == "one", 1, 2)
        each = np.where(np.isin(points.consumers, PING_PONG), 2 * each, each)
        assert each.max() == most


def test_where_k_is_not_the_last_axis_of_both_xla_answers():
    assert "k is the last axis" in KERNEL.supports(ScaledMatmulProblem(64, 64, 64), H200.target)


SMALL = [
    ScaledMatmulProblem(136, 200, 384, transpose_b=True),
    ScaledMatmulProblem(130, 136, 304, transpose_b=True, a_scales="rows", out_dtype="float32"),
    ScaledMatmulProblem(77, 75, 130, transpose_b=True, b_scales="rows", dtype="float8_e5m2"),
    ScaledMatmulProblem(136, 264, 256, transpose_b=True, a_scales="rows", b_scales="rows"),
    ScaledMatmulProblem(3, 300, 100, transpose_b=True, out_dtype="float16"),
]


@pytest.mark.skipif(not HAS_GPU_INTERPRETER, reason="this JAX interprets no GPU kernels")
@pytest.mark.parametrize("problem", SMALL, ids=str)
def test_drawn_schedules_compute_the_right_numbers(problem):
    allowed = problem.tolerance()
    for one in sample(problem, 4):
        actual, right = hopper.interpret(KERNEL, problem, one, cores=4)
        off = np.abs(actual - right) - allowed.relative * np.abs(right)
        assert off.max() <= allowed.absolute, one


@pytest.mark.skipif(not HAS_GPU_INTERPRETER, reason="this JAX interprets no GPU kernels")
def test_steps_ask_for_no_scale_before_the_stage_of_another_is_read():
    problem = dataclasses.replace(SMALL[0], m=64, n=64)
    one = dataclasses.replace(sample(SMALL[0], 1)[0], tile_m=64, tile_n=64, consumers="one", cluster="none", stages=2)
    actual, right = hopper.interpret(KERNEL, problem, one, cores=1, detect_races=True)
    assert np.abs(actual - right).max() <= problem.tolerance().absolute + 0.01 * np.abs(right).max()


@pytest.mark.parametrize("dtype", ["float8_e4m3fn", "float8_e5m2"])
def test_a_reference_reads_8_bit_floats_by_a_table_of_their_values(dtype):
    every = jnp.asarray(np.arange(256, dtype=np.uint8).view(dtype)).reshape(16, 16)
    np.testing.assert_array_equal(checking.widened(every), np.asarray(every).astype(np.float32))
    assert checking.widened(jnp.int8(-128)) == -128
    assert "convert_element_type[new_dtype=float32" not in str(jax.make_jaxpr(checking.widened)(every))


def test_a_long_sum_of_the_reference_is_as_exact_as_float32():
    p = ScaledMatmulProblem(4, 8, 65536, transpose_b=True, out_dtype="float32", a_scales="rows")
    a, b, a_scale, b_scale = p.inputs(0)
    turned = np.repeat(np.repeat(np.asarray(b_scale, np.float64), 128, 0), 128, 1)[:8] * np.asarray(b, np.float64)
    wanted = (np.asarray(a, np.float64) * np.asarray(a_scale, np.float64)[:, None]) @ turned.T
    assert np.abs(np.asarray(p.reference(a, b, a_scale, b_scale)) - wanted).max() < 1e-6 * np.abs(wanted).max()
