"""Products of float32 on Hopper, in all layouts: as TF32, and as three products of bfloat16."""

import dataclasses
import functools
import json
import sys

import hopper
import jax
import jax.numpy as jnp
import machine_code
import numpy as np
import pytest
from hopper_matmul import KERNEL, TARGET, interpreted, schedule
from jax import lax

from scheduler.core.arguments import named_backends
from scheduler.measure.verification import mismatch
from search_spaces import Columns, Target, matmul
from search_spaces.kernel import Library
from search_spaces.matmul import MATMUL
from search_spaces.matmul.hopper import k_last, split_bf16_3x, sum_of_parts
from search_spaces.matmul.problem import MatmulProblem
from search_spaces.matmul.xla import XlaMatmul

pytestmark = pytest.mark.slow_but_first

THREE = MATMUL.kernel("mosaic_gpu_bf16_3x")
LAYOUTS = [{"transpose_a": a, "transpose_b": b} for a in (False, True) for b in (False, True)]
HIGH = MatmulProblem(64, 48, 40, dtype="float32", precision="high")
SMALL_TILES = {"tile_m": 64, "tile_n": 64, "consumers": "one", "stages": 2, "epi_tile_n": 32}


def footprint(kernel, problem, one=None):
    return kernel.footprint(problem, Columns.of([one or schedule()]), TARGET)


def check(kernel, problem, fields, cores=4):
    actual, expected = hopper.interpret(kernel, problem, schedule(**fields), cores=cores)
    tolerance = problem.tolerance()
    for got, wanted in zip(*(x if isinstance(x, tuple) else (x,) for x in (actual, expected)), strict=True):
        np.testing.assert_allclose(got, wanted, rtol=tolerance.relative, atol=tolerance.absolute)


@interpreted
@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
@pytest.mark.parametrize(
    ("kernel", "problem", "fields"),
    [
        (THREE, HIGH, {}),
        (THREE, dataclasses.replace(HIGH, precision="default", m=33, n=37, k=41, batch=2), {}),
        (KERNEL, dataclasses.replace(HIGH, precision="default", m=33, n=37, k=41, batch=2), {"tile_k": 32}),
        (KERNEL, MatmulProblem(40, 24, 70, dtype="int8", out_dtype="int32"), {"tile_k": 128}),
        (KERNEL, MatmulProblem(40, 24, 70, dtype="float8_e4m3fn", out_dtype="float32"), {"tile_k": 128}),
    ],
    ids=lambda x: x.backend if hasattr(x, "backend") else None,
)
def test_every_layout_has_a_kernel(kernel, problem, fields, layout):
    check(kernel, dataclasses.replace(problem, **layout), SMALL_TILES | fields)


@interpreted
@pytest.mark.parametrize(
    ("problem", "fields"),
    [
        (
            dataclasses.replace(HIGH, m=61, n=36, k=50, bias="float32", activation="gelu", residual="float32"),
            {"epi_tile_n": 16},
        ),
        (dataclasses.replace(HIGH, m=61, n=37, k=200, bias="bfloat16", activation="silu"), {"split_k": 2}),
        (dataclasses.replace(HIGH, n=96, split_sizes="64+32", out_dtype="bfloat16"), {}),
        (
            dataclasses.replace(HIGH, m=12, n=136),
            {"swap_ab": True, "tile_m": 16, "tile_n": 128, "consumers": "cooperative_n", "epi_tile_n": 64},
        ),
        (dataclasses.replace(HIGH, m=1, n=1, k=1), {}),
    ],
    ids=["epilogue", "split-K", "several results", "swap_ab", "scalars"],
)
def test_three_products_have_all_that_a_launch_of_bfloat16_has(problem, fields):
    check(THREE, problem, SMALL_TILES | fields)


@pytest.mark.parametrize("k", [64, 1000, 4096])
def test_at_high_precision_three_products_are_right_and_tf32_is_not(k):
    problem = MatmulProblem(256, 256, k, dtype="float32", precision="high")
    a, b = problem.inputs(seed=0)
    expected, tolerance = problem.reference(a, b), problem.tolerance()

    def rounded(bits):
        return problem.reference(*(lax.reduce_precision(x, 8, bits) for x in (a, b)))

    assert mismatch(product_of_parts(problem, a, b), expected, tolerance) is None
    assert mismatch(rounded(10), expected, tolerance) is not None
    assert mismatch(rounded(7), expected, tolerance) is not None
    default = dataclasses.replace(problem, precision="default").tolerance()
    assert mismatch(rounded(10), expected, default) is None


def product_of_parts(problem, a, b):
    """What a launch is given, multiplied by XLA."""
    a, b = jax.jit(lambda a, b: split_bf16_3x(problem, a, b))(a, b)
    return sum_of_parts(problem).reference(a, b)


def test_xla_does_not_take_the_low_parts_for_nothing():
    (a, b), of_parts = HIGH.inputs(seed=0), sum_of_parts(HIGH)
    program = jax.jit(lambda a, b: split_bf16_3x(HIGH, a, b)).lower(a, b).compile()
    assert "reduce-precision" in program.as_text()
    parts, other = program(a, b)
    assert [x.shape for x in (parts, other)] == [x.shape for x in of_parts.operands()]
    low, high, whole = (np.asarray(x, np.float32)[:, :40] for x in np.split(np.asarray(parts), 3, axis=1))
    np.testing.assert_array_equal(high, whole)
    np.testing.assert_array_equal(high, np.asarray(a.astype(jnp.bfloat16), np.float32))
    assert np.count_nonzero(low) > 0.9 * low.size
    np.testing.assert_allclose(high + low, a, rtol=2.0**-16)


def test_infinities_nans_and_the_largest_numbers_come_out_as_of_float32():
    largest = float(jnp.finfo(jnp.float32).max)
    a = jnp.array([[jnp.inf, 1.0], [1.0, -jnp.inf], [jnp.nan, 0.0], [largest, 0.0], [0.3, 0.7], [jnp.inf, -jnp.inf]])
    b = jnp.array([[1.1, 0.0, -2.7, jnp.inf, 0.7, 0.5], [1.3, 1.0, 3.3, 1.0, -jnp.inf, jnp.nan]])
    problem = MatmulProblem(6, 6, 2, dtype="float32", precision="high")
    got, wanted = product_of_parts(problem, a, b), problem.reference(a, b)
    np.testing.assert_allclose(got, wanted, rtol=2.0**-14)
    assert np.isnan(got).any()
    assert np.isinf(got).any()


@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
def test_copies_before_the_launch_are_counted(layout):
    high = MatmulProblem(512, 384, 256, dtype="float32", precision="high", **layout)
    of_parts = sum_of_parts(high)
    launch = footprint(KERNEL, of_parts)
    found = footprint(THREE, high)
    assert of_parts.k == 3 * 256
    assert found.step.flops[0] * found.steps[0] * np.prod([float(np.ravel(x)[0]) for x in found.grid]) == 3 * high.flops
    assert hopper.H200.peak(found.arithmetic) == 3 * hopper.H200.peak(high.arithmetic)
    assert found.copied_bytes[0] - launch.copied_bytes[0] == (4 + 6) * (512 + 384) * 256
    assert found.launches[0] == launch.launches[0] + 2

    default = dataclasses.replace(high, precision="default")
    one = schedule(tile_k=32)
    launch, found = (footprint(KERNEL, p, one) for p in (k_last(default), default))
    turned = [layout["transpose_a"] * 512, (not layout["transpose_b"]) * 384]
    assert found.copied_bytes[0] - launch.copied_bytes[0] == 2 * 4 * 256 * sum(turned)
    assert found.launches[0] - launch.launches[0] == np.count_nonzero(turned)
    assert KERNEL.space(default, TARGET).size == KERNEL.space(k_last(default), TARGET).size


def test_a_row_or_column_lies_the_same_either_way():
    for n, turned in ((1, 0), (64, 1)):
        columns, one = MatmulProblem(512, n, 256, dtype="float32"), schedule(tile_k=32)
        found, launch = (footprint(KERNEL, p, one) for p in (columns, k_last(columns)))
        assert found.launches[0] - launch.launches[0] == turned


@pytest.mark.parametrize("k", [40, 41, 48])
def test_parts_of_any_length_are_whole_sectors(k):
    problem = MatmulProblem(64, 64, k, dtype="float32", precision="high", transpose_b=True)
    assert footprint(THREE, problem).launches[0] == 3, "nothing else is padded"


@pytest.mark.parametrize("problem", [HIGH, dataclasses.replace(HIGH, m=1000, n=1000, k=1000, batch=2)], ids=str)
def test_onchip_bytes_are_what_lowering_asks_for(problem):
    space = THREE.space(problem, TARGET)
    points, _ = space.legal()
    for one in list(space.schedules(points))[:: max(1, len(points) // 3)]:
        hopper.check_onchip_bytes(THREE, problem, one, footprint(THREE, problem, one).onchip_bytes[0])


def test_what_it_cannot_do_it_refuses_in_words():
    assert THREE.supports(HIGH, TARGET) is None
    assert THREE.supports(dataclasses.replace(HIGH, precision="default"), TARGET) is None
    assert "'highest'" in THREE.supports(dataclasses.replace(HIGH, precision="highest"), TARGET)
    assert "bfloat16" in THREE.supports(MatmulProblem(64, 64, 64), TARGET)
    assert "sm_80" in THREE.supports(HIGH, Target("cuda", "NVIDIA A100-SXM4-80GB", "sm_80", 108))
    assert "32 columns" in THREE.supports(dataclasses.replace(HIGH, split_sizes="8+40"), TARGET)
    assert "'high'" in KERNEL.supports(HIGH, TARGET)
    assert THREE.backend in named_backends(MATMUL, "pallas")


@pytest.mark.parametrize("precision", ["high", "bfloat16_3x", "tensorfloat32", lax.Precision.HIGH, ("high", "high")])
def test_a_call_of_high_precision_poses_a_problem_of_it(precision):
    a, b = HIGH.inputs(seed=0)
    assert matmul.bind(a, b, precision=precision).problem == HIGH


def test_a_default_of_high_precision_reaches_a_call():
    a, b = HIGH.inputs(seed=0)
    with jax.default_matmul_precision("high"):
        assert matmul.bind(a, b).problem == HIGH


CASES = {  # name: fields of the problem
    "three products": {"precision": "high"},
    "three products, weight gradient, epilogue": {
        "transpose_a": True,
        "precision": "high",
        "bias": "float32",
        "activation": "gelu",
        "residual": "float32",
    },
    "three products, ragged": {"m": 1000, "n": 1000, "k": 1000, "precision": "high"},
    "TF32, both turned": {"transpose_a": True},
}


@machine_code.needed()
@pytest.mark.parametrize("name", CASES)
def test_nothing_is_spilled_and_no_product_waits_for_the_one_before(name, tmp_path):
    said, *_ = machine_code.compiled(__file__, tmp_path, json.dumps(CASES[name]))
    assert machine_code.sound(said), said


def main(case: str) -> None:
    from scheduler.model.cost import CostModel
    from scheduler.model.pruning import prune

    problem = MatmulProblem(**{"m": 4096, "n": 4096, "k": 4096, "dtype": "float32"} | json.loads(case))
    kernel = THREE if problem.precision == "high" else KERNEL
    first = prune(kernel, problem, hopper.H200, CostModel(hopper.H200)).candidates()[0].schedule
    one = kernel.space(problem, TARGET).decode(first)
    print(one)
    machine_code.compile_for_h200(lambda *args: kernel.run(problem, one, TARGET, *args), problem.operands())


if __name__ == "__main__":
    main(sys.argv[1])


@pytest.mark.parametrize(("architecture", "asked"), [("sm_90", True), ("sm_80", True), ("sm_75", False)])
def test_at_high_precision_xla_is_asked_for_three_products_where_the_chip_multiplies_bfloat16(architecture, asked):
    target = dataclasses.replace(TARGET, architecture=architecture)
    for precision in ("high", "default", "highest"):
        problem = dataclasses.replace(HIGH, precision=precision)
        run = jax.jit(functools.partial(XlaMatmul().run, problem, Library(), target))
        text = run.trace(*problem.operands()[:2]).lower(lowering_platforms=("cuda",)).as_text()
        assert ("num_primitive_operations = 3" in text) is (asked and precision == "high")
