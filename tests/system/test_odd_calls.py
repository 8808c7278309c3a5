"""Calls of which no kernel is selected, or that are wrong: computed as plain JAX would, or refused in a sentence."""

import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from scheduler import (
    NoCandidate,
    plan,
    rows,
    tuned_cross_entropy,
    tuned_flash_attention,
    tuned_gated_matmul,
    tuned_gated_ragged_dot,
    tuned_group_norm,
    tuned_matmul,
    tuned_ragged_dot,
    tuned_rms_norm,
    tuned_scaled_matmul,
    tuned_silu_and_mul,
    tuned_softmax,
)

COMPLEX = jnp.arange(6.0).reshape(2, 3) * (1 - 0.5j)
X, W = jnp.ones((3, 4)), jnp.ones((4, 12))
MATRICES, SIZES = jnp.ones((2, 5, 4)), jnp.array([1, 2])
Q, K = jnp.ones((1, 5, 2, 4)), jnp.ones((1, 7, 1, 4))


def shape(dims, dtype="float32", scope=None):
    return jax.ShapeDtypeStruct(jax.export.symbolic_shape(dims, scope=scope), jnp.dtype(dtype))


# Computed


def test_rows_of_complex_numbers_stay_complex():
    np.testing.assert_allclose(tuned_softmax(COMPLEX), jax.nn.softmax(COMPLEX), rtol=1e-6)
    normed = COMPLEX / jnp.sqrt(jnp.mean(COMPLEX * COMPLEX, -1, keepdims=True) + 1e-6)
    np.testing.assert_allclose(tuned_rms_norm(COMPLEX, jnp.ones(3)), normed, rtol=1e-6)
    halves = jnp.concatenate([COMPLEX, COMPLEX], -1)
    np.testing.assert_allclose(tuned_silu_and_mul(halves), jax.nn.silu(COMPLEX) * COMPLEX, rtol=1e-6)


def test_softmax_of_rows_without_columns_is_empty():
    empty = jnp.zeros((7, 0), jnp.bfloat16)
    assert (tuned_softmax(empty).shape, tuned_softmax(empty).dtype) == ((7, 0), jnp.bfloat16)
    p, lse = tuned_softmax(empty, return_lse=True)
    assert p.shape == (7, 0)
    assert (lse == -jnp.inf).all()
    assert lse.shape == (7,)
    assert jax.grad(lambda x: tuned_softmax(x).sum())(jnp.zeros((3, 0))).shape == (3, 0)


def test_softmax_of_integers_is_as_wide_as_that_of_jax_along_any_axis():
    with jax.enable_x64(True):
        integers = jnp.arange(6).reshape(2, 3)
        for axis in (0, 1):
            found, wanted = tuned_softmax(integers, axis), jax.nn.softmax(integers, axis)
            assert found.dtype == wanted.dtype == jnp.float64
            np.testing.assert_allclose(found, wanted, rtol=1e-12)


def test_the_log_sum_exp_of_eight_bits_is_that_of_float32_along_any_axis():
    x = jnp.ones((3, 4), jnp.float8_e4m3fn)
    for axis, count in ((0, 3), (1, 4)):
        p, lse = tuned_softmax(x, axis, return_lse=True)
        assert p.dtype == x.dtype
        np.testing.assert_allclose(lse, 1 + math.log(count), rtol=1e-6)


@pytest.mark.parametrize("how", [{}, {"causal": True}, {"return_lse": True}], ids=str)
@pytest.mark.parametrize("dims", ["b, 5, 2, 4", "b, s, 2, 4", "b, s, h, 4"])
def test_attention_of_symbolic_extents_is_exported(dims, how):
    q = jax.random.normal(jax.random.key(0), (3, 5, 2, 4))

    def attention(q):
        return tuned_flash_attention(q, q, q, **how)

    exported = jax.export.export(jax.jit(attention))(shape(dims))
    for found, wanted in zip(jax.tree.leaves(exported.call(q)), jax.tree.leaves(attention(q)), strict=True):
        np.testing.assert_allclose(found, wanted, rtol=1e-5, atol=1e-6)


def test_scaled_products_of_symbolic_extents_are_exported():
    scope = jax.export.SymbolicScope()
    exported = jax.export.export(jax.jit(lambda a, b: tuned_scaled_matmul(a, b, 2.0, 1.0)))(
        shape("b, 6", "float8_e4m3fn", scope), shape("6, n", "float8_e4m3fn", scope)
    )
    ones = jnp.ones((6, 6), jnp.float8_e4m3fn)
    assert (exported.call(ones, ones) == 12).all()


def test_attention_of_no_keys_or_no_width_is_zeros():
    with jax.enable_x64(True):
        none = jnp.ones((1, 0, 1, 4), jnp.float32)
        out, lse = tuned_flash_attention(Q.astype(jnp.float32), none, none, return_lse=True)
        assert not out.any()
        assert (lse.dtype, lse.weak_type, bool((lse == -jnp.inf).all())) == (jnp.float32, False, True)
    narrow = jnp.zeros((1, 7, 1, 0))
    assert tuned_flash_attention(jnp.zeros((1, 5, 2, 0)), narrow, narrow).shape == (1, 5, 2, 0)


def test_numbers_of_numpy_are_numbers():
    wanted = tuned_flash_attention(Q, K, K, window=2)
    np.testing.assert_array_equal(tuned_flash_attention(Q, K, K, window=(np.int64(2), np.int32(2))), wanted)
    assert [c.shape for c in tuned_matmul(X, W, split_sizes=np.array([4, 8]))] == [(3, 4), (3, 8)]


@pytest.mark.parametrize("narrow", ["int4", "uint4", "int2", "float4_e2m1fn"])
@pytest.mark.parametrize("wide", ["float32", "int32", "bfloat16"])
def test_products_of_less_than_a_byte_have_wider_results_though_xla_has_none(narrow, wide):
    a, b = (jax.random.randint(jax.random.key(i), (8, 8), 0, 2).astype(narrow) for i in range(2))
    found = tuned_matmul(a, b, preferred_element_type=wide)
    assert found.dtype == wide
    np.testing.assert_array_equal(found.astype(jnp.float32), a.astype(jnp.float32) @ b.astype(jnp.float32))


def test_products_of_four_bits_are_those_of_jax_where_it_has_some():
    a, b = (jax.random.randint(jax.random.key(i), (8, 8), -8, 8).astype("int4") for i in range(2))
    np.testing.assert_array_equal(tuned_matmul(a, b).astype(int), jnp.matmul(a, b).astype(int))


@pytest.mark.parametrize("backends", [None, "interpret"])
@pytest.mark.parametrize(("dtype", "ignored"), [("int32", -100), ("uint8", 255)])
def test_a_cross_entropy_ignores_rows_of_a_label(dtype, ignored, backends):
    logits, labels = (
        jax.random.normal(jax.random.key(0), (2, 3, 8)),
        jnp.array([[1, ignored, 7], [ignored, 0, 3]], dtype),
    )
    counted = labels != jnp.array(ignored, dtype)

    def loss(logits, **options):
        return tuned_cross_entropy(logits, jnp.where(counted | bool(options), labels, 0), backends=backends, **options)

    found, gradient = (
        loss(logits, ignore_index=ignored),
        jax.grad(lambda x: loss(x, ignore_index=ignored).sum())(logits),
    )
    np.testing.assert_array_equal(found, jnp.where(counted, loss(logits), 0))
    expected = jax.grad(lambda x: jnp.where(counted, loss(x), 0).sum())(logits)
    np.testing.assert_allclose(gradient, expected, rtol=1e-5, atol=1e-6)
    assert not gradient[~counted].any()
    assert jnp.isnan(tuned_cross_entropy(logits, jnp.full((2, 3), -100))).all()


# Refused


@pytest.mark.parametrize(
    ("call", "error", "words"),
    [
        (lambda: tuned_softmax([1.0, 2.0]), TypeError, "x must be an array, not list: give it as jnp.asarray"),
        (lambda: tuned_softmax(None), TypeError, "x must be an array, not NoneType"),
        (lambda: tuned_rms_norm(X, [1.0] * 4), TypeError, "weight must be an array, not list"),
        (lambda: tuned_rms_norm(X, X[0], residual=[X]), TypeError, "residual must be an array, not list"),
        (lambda: tuned_silu_and_mul((1.0, 2.0)), TypeError, "x must be an array, not tuple"),
        (lambda: tuned_rms_norm(X, X[0], eps=None), TypeError, "eps is None; it is part of the compiled program"),
        (lambda: jax.jit(lambda s: tuned_flash_attention(Q, K, K, scale=s))(1.0), TypeError, "scale is a traced array"),
        (lambda: tuned_flash_attention(Q, K, K, softcap=math.inf), ValueError, "softcap=inf is no finite number"),
        (lambda: tuned_flash_attention(Q, K, K, window=2.5), ValueError, "window=2.5 is neither a number of keys"),
        (lambda: tuned_flash_attention(Q, K, K, window=(1, -2)), ValueError, "is neither a number of keys"),
        (
            lambda: tuned_flash_attention(Q.astype(jnp.bfloat16), K, K, return_lse=True),
            ValueError,
            "q is bfloat16, k is float32 and v is float32; attention is of one dtype: use .astype",
        ),
        (lambda: tuned_scaled_matmul(X + 1j, W, 1.0, 1.0), TypeError, "a is complex64; operands and scales are real"),
        (lambda: tuned_scaled_matmul(X, W, 1.0, 1.0, out_dtype="int8"), TypeError, "out_dtype is int8; a result is"),
        (lambda: tuned_gated_matmul(X, W, bias=W[0] + 1j), TypeError, "a bias is complex64, which a result of float32"),
        (lambda: tuned_group_norm(X, X[0], X[0], groups=2.0), ValueError, "4 channels are not 2.0 groups"),
        (
            lambda: tuned_ragged_dot(X, MATRICES, SIZES[:1]),
            TypeError,
            "1 group sizes do not fit: .rows, k., .groups, k",
        ),
        (
            lambda: tuned_ragged_dot(X[0], MATRICES, SIZES),
            TypeError,
            r"rows of shape \(4,\), matrices of shape \(2, 5, 4",
        ),
        (lambda: tuned_ragged_dot(X, MATRICES[0], SIZES, transpose_rhs=True), TypeError, r"\[groups, n, k\]"),
        (lambda: tuned_gated_ragged_dot(X, MATRICES, MATRICES, SIZES), TypeError, "a size for each group are needed"),
        (
            lambda: tuned_cross_entropy(X, SIZES, ignore_index=1.5),
            TypeError,
            "ignore_index=1.5 is a float; give an int",
        ),
        (lambda: rows(lambda x: None)(X), TypeError, "<lambda> of one row must return rows, scalars, .* found None"),
        (lambda: rows(lambda x: {"a": x, "b": "no"})(X), TypeError, "found 'no' of type str"),
        (lambda: plan(None).__enter__(), TypeError, "expected a scheduler.Plan or the path of its file, found None"),
        (lambda: tuned_gated_matmul(X + 1j, W), TypeError, "give x and w as real numbers of 16 bits or more"),
    ],
)
def test_what_is_wrong_is_refused_with_what_is_wanted(call, error, words):
    with pytest.raises(error, match=words):
        call()


def test_a_precision_that_comes_from_the_configuration_is_named():
    with (
        jax.default_matmul_precision("F32_F32_F32"),
        pytest.raises(NoCandidate, match="precision='F32_F32_F32' is not default, high or highest"),
    ):
        tuned_matmul(X, W, backends="interpret")
