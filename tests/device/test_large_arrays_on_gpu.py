"""Arrays of 2^31 elements and more on a GPU of 80 GB: calls are right there, whoever answers, in rows drawn at random.

pytest tests/device/test_large_arrays_on_gpu.py -q -s
"""

import gc

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from scheduler import tuned_matmul, tuned_rms_norm, tuned_scaled_matmul, tuned_softmax

pytestmark = pytest.mark.skipif(jax.default_backend() != "gpu", reason="needs a GPU")

M, N, K = 2**16 + 8, 2**15 + 64, 64
# The first and the last rows, those about the 2^31st element of results, and some between.
ROWS = np.unique([0, 1, M // 3, 2**31 // N - 1, 2**31 // N, 2**31 // N + 1, M - 2, M - 1])


def draw(seed, *shape, dtype=jnp.bfloat16):
    return jax.jit(lambda: jax.random.normal(jax.random.key(seed), shape, dtype))()


def rows_of(x):
    found = np.asarray(x[ROWS].astype(jnp.float32))
    x.delete()
    gc.collect()
    return found


def wanted_rows(a, b):
    return np.asarray(a[ROWS].astype(jnp.float32)) @ np.asarray(b.astype(jnp.float32))


def test_a_result_of_more_than_2_to_the_31_elements():
    a, b, bias = draw(0, M, K), draw(1, K, N), draw(2, N)
    found = rows_of(tuned_matmul(a, b, bias=bias))
    np.testing.assert_allclose(found, wanted_rows(a, b) + np.asarray(bias, np.float32), rtol=2e-2, atol=0.1)


def test_an_operand_of_more_than_2_to_the_31_elements():
    a, b = draw(0, M, N), draw(1, N, K)
    np.testing.assert_allclose(rows_of(tuned_matmul(a, b)), wanted_rows(a, b), rtol=2e-2, atol=3.0)


def test_a_scaled_result_of_more_than_2_to_the_31_elements():
    a, b = (draw(i, *shape).astype(jnp.float8_e4m3fn) for i, shape in enumerate(((M, 128), (N, 128))))
    found = rows_of(tuned_scaled_matmul(a, b, jnp.full(M, 0.5), jnp.ones(N), transpose_b=True))
    np.testing.assert_allclose(found, 0.5 * wanted_rows(a, b.T), rtol=2e-2, atol=0.1)


@pytest.mark.parametrize("call", [tuned_softmax, lambda x: tuned_rms_norm(x, jnp.ones(N, x.dtype))])
def test_rows_of_more_than_2_to_the_31_elements(call):
    x = draw(0, M, N)
    expected = np.asarray(call(x[ROWS]).astype(jnp.float32))
    np.testing.assert_allclose(rows_of(call(x)), expected, rtol=2e-2, atol=1e-5)


def test_a_kernel_just_below_2_to_the_31_elements():
    m = 2**31 // (-(-N // 128) * 128) - 1  # a kernel pads columns to 128
    a, b = draw(0, m, K), draw(1, K, N)
    found = tuned_matmul(a, b, backends="pallas")
    last = np.asarray(found[-1].astype(jnp.float32))
    expected = np.asarray(a[-1].astype(jnp.float32)) @ np.asarray(b.astype(jnp.float32))
    np.testing.assert_allclose(last, expected, rtol=2e-2, atol=0.1)
