"""Products of 8-bit operands: what they may give, and that every kernel on a CPU and every transformation gives it."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from scheduler import tuned_matmul
from scheduler.core import hardware
from scheduler.measure.verification import mismatch
from search_spaces.matmul import MATMUL, MatmulProblem
from search_spaces.matmul.problem import RESULTS

pytestmark = pytest.mark.slow

NARROW = {dtype: given for dtype, given in RESULTS.items() if jnp.dtype(dtype).itemsize == 1}
PAIRS = [(dtype, out) for dtype, given in NARROW.items() for out in given]


def operands(dtype, m=33, n=40, k=70):
    return MatmulProblem(m, n, k, dtype=dtype, out_dtype="float32", transpose_b=True).inputs(seed=0)


@pytest.mark.parametrize("dtype", NARROW)
def test_sums_do_not_fit_8_bits_so_a_result_must_be_named(dtype):
    with pytest.raises(ValueError, match=f"is not one of .*float32, which {dtype} operands give"):
        MatmulProblem(8, 8, 8, dtype=dtype)
    with pytest.raises(ValueError, match="is not one of"):
        MatmulProblem(8, 8, 8, out_dtype=dtype)
    assert MatmulProblem(8, 8, 8, dtype=dtype, out_dtype="bfloat16", precision="highest").precision == "default"


def test_sums_of_int8_do_not_fit_float16():
    assert float(jnp.finfo(jnp.float16).max) < 5 * 127**2
    with pytest.raises(ValueError, match="is not one of int32, bfloat16, float32, which int8 operands give"):
        MatmulProblem(8, 8, 8, dtype="int8", out_dtype="float16")


@pytest.mark.parametrize(("dtype", "out"), PAIRS)
@pytest.mark.parametrize("backends", ["xla", "interpret"])
def test_a_call_gives_what_jnp_matmul_gives(dtype, out, backends):
    a, b = operands(dtype)
    wanted = jnp.matmul(a, b.T, preferred_element_type=jnp.int32 if dtype == "int8" else jnp.float32)
    got = tuned_matmul(a, b, transpose_b=True, preferred_element_type=out, backends=backends)
    assert got.dtype == out
    problem = MatmulProblem(33, 40, 70, dtype=dtype, out_dtype=out, transpose_b=True)
    assert mismatch(got, wanted, problem.tolerance()) is None
    assert mismatch(got, problem.reference(a, b), problem.tolerance()) is None


@pytest.mark.parametrize("dtype", NARROW)
def test_a_call_without_a_result_s_dtype_is_jnp_matmul_s(dtype):
    a, b = operands(dtype)
    got = tuned_matmul(a, b, transpose_b=True)
    assert got.dtype == dtype
    np.testing.assert_array_equal(np.asarray(got, np.float32), np.asarray(jnp.matmul(a, b.T), np.float32))


@pytest.mark.parametrize("dtype", NARROW)
def test_what_follows_their_sums_is_for_xla_to_compute(dtype):
    with pytest.raises(ValueError, match="take no bias, activation or residual"):
        MatmulProblem(8, 8, 8, dtype=dtype, out_dtype="float32", activation="relu")
    a, b = operands(dtype)
    bias = jnp.linspace(-50, 50, 40)
    got = tuned_matmul(a, b, transpose_b=True, preferred_element_type="float32", bias=bias, activation="relu")
    wanted = jnp.maximum(jnp.matmul(a, b.T, preferred_element_type="float32") + bias, 0)
    np.testing.assert_allclose(got, wanted, rtol=1e-5, atol=1e-4)


@pytest.mark.parametrize("dtype", [dtype for dtype in NARROW if dtype != "int8"])
def test_derivatives_of_8_bit_floats_are_those_of_jnp_matmul(dtype):
    a, b = operands(dtype)

    def tuned(a, b):
        return tuned_matmul(a, b, transpose_b=True, preferred_element_type="float32")

    def plain(a, b):
        return jnp.matmul(a, b.T, preferred_element_type="float32")

    for got, wanted in zip(
        *(jax.grad(lambda a, b, f=f: jnp.sin(f(a, b) / 8).sum(), argnums=(0, 1))(a, b) for f in (tuned, plain)),
        strict=True,
    ):
        assert got.dtype == dtype
        step = float(jnp.finfo(dtype).eps)
        np.testing.assert_allclose(*(np.asarray(x, np.float32) for x in (got, wanted)), rtol=step, atol=step / 8)
    (got, dgot), (wanted, dwanted) = (jax.jvp(f, (a, b), (a, b)) for f in (tuned, plain))
    np.testing.assert_allclose(got, wanted, rtol=1e-5, atol=1e-4)
    np.testing.assert_allclose(dgot, dwanted, rtol=1e-5, atol=1e-4)


def test_int8_inputs_use_their_range_and_their_sums_stay_exact_in_float32():
    a, b = MatmulProblem(256, 256, 8192, dtype="int8", out_dtype="int32").inputs(seed=0)
    assert a.dtype == b.dtype == jnp.int8
    assert 30 < np.std(np.asarray(a)) < 34
    assert (a.min(), a.max()) <= (-120, 127)
    sums = np.cumsum(np.asarray(a[:8], np.int64)[:, :, None] * np.asarray(b[:, :8], np.int64), axis=1)
    assert np.abs(sums).max() < 2**24


def test_one_wrong_unit_of_an_int8_product_is_seen():
    problem = MatmulProblem(64, 64, 4096, dtype="int8", out_dtype="int32")
    right = problem.reference(*problem.inputs(seed=0))
    assert right.dtype == jnp.int32
    assert mismatch(right, right, problem.tolerance()) is None
    assert "1 of 4096 elements" in mismatch(right.at[3, 5].add(1), right, problem.tolerance())


def test_a_missing_step_of_an_8_bit_float_product_is_seen_through_its_tolerance():
    problem = MatmulProblem(64, 64, 8192, dtype="float8_e4m3fn", out_dtype="float32", transpose_b=True)
    a, b = problem.inputs(seed=0)
    whole, without = problem.reference(a, b), problem.reference(a.at[:, -256:].set(0), b)
    assert mismatch(without, whole, problem.tolerance()) is not None


@pytest.mark.parametrize("dtype", NARROW)
def test_hopper_multiplies_them_and_copies_what_has_not_k_last(dtype):
    kernel, h200 = MATMUL.kernel("mosaic_gpu"), hardware.find("NVIDIA H200")
    problem = MatmulProblem(256, 256, 256, dtype=dtype, out_dtype="bfloat16", transpose_b=True)
    assert kernel.supports(problem, h200.target) is None
    assert h200.peak(problem.arithmetic) > 1.9 * h200.peak("bfloat16")
    assert np.all(kernel.verified(problem, kernel.space(problem, h200.target).legal()[0], h200.target))
    other = MatmulProblem(256, 256, 256, dtype=dtype, out_dtype="bfloat16", transpose_a=True)
    assert kernel.supports(other, h200.target) is None
    points, _ = kernel.space(other, h200.target).legal()
    copied = [kernel.footprint(p, points, h200.target).copied_bytes[0] for p in (problem, other)]
    assert copied[1] - copied[0] == 2 * 2 * 256 * 256
