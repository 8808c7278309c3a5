"""Every option of every public call beside its counterpart in JAX: refused alike, or the same result."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

from scheduler import (
    tuned_flash_attention,
    tuned_gated_matmul,
    tuned_matmul,
    tuned_rms_norm,
    tuned_silu_and_mul,
    tuned_softmax,
)

pytestmark = pytest.mark.slow_but_first

RNG = np.random.default_rng(0)


def array(*shape, dtype="float32"):
    """Of NumPy, as JAX would compile something for each shape and dtype whenever tests are collected."""
    return jnp.asarray(RNG.standard_normal(shape).astype(dtype))


A, B, X, Q, K = (array(*shape) for shape in ((4, 8), (8, 6), (3, 4, 8), (2, 6, 4, 8), (2, 6, 2, 8)))
WEIGHT = jnp.asarray(np.ones(8, np.float32))


def matmul(a, b, transpose_a=False, transpose_b=False, **how):
    a, b = (jnp.swapaxes(x, -1, -2) if turned else x for x, turned in ((a, transpose_a), (b, transpose_b)))
    return jnp.matmul(a, b, **how)


def attention(q, k, v, causal=False, scale=None, window=None, q_lengths=None, kv_lengths=None):
    lengths = {"query_seq_lengths": q_lengths, "key_value_seq_lengths": kv_lengths}
    return jax.nn.dot_product_attention(q, k, v, is_causal=causal, scale=scale, local_window_size=window, **lengths)


def silu_and_mul(x):
    gate, up = jnp.split(x, 2, axis=-1)
    return jax.nn.silu(gate) * up


def rms_norm(x, weight, eps=1e-6):
    return x * lax.rsqrt(jnp.mean(jnp.square(x), -1, keepdims=True) + eps) * weight


SOFTMAX, MATMUL = (tuned_softmax, jax.nn.softmax), (tuned_matmul, matmul)
ATTENTION, SILU = (tuned_flash_attention, attention), (tuned_silu_and_mul, silu_and_mul)
RMS_NORM = tuned_rms_norm, rms_norm
SHAPES = [((4, 8), (9, 6)), ((8,), (8,)), ((8,), (8, 6)), ((4, 8), (8,)), ((), (8, 6)), ((2, 4, 8), (3, 8, 6))]
SHAPES += [((1, 4, 8), (5, 8, 6)), ((0, 8), (8, 4)), ((4, 0), (0, 4)), ((0,), (0,)), ((4, 8), (6, 8))]
NOT_ARRAYS = [None, "abc", [1.0, 2.0], (1.0, 2.0), {"a": 1}, b"x", float, np.array(["a", "b"]), range(2)]
CASES = [
    *((SOFTMAX, (X, axis), {}) for axis in (0, 1, 2, 3, -1, -3, -4, (0, 1), (2,), (-1, 2), (), None)),
    *((SOFTMAX, (X, axis), {}) for axis in (1.0, 2.0, -1.0, True, np.int32(2), np.array(2), (2.0,), np.float32(2))),
    *((SOFTMAX, (X, axis), {}) for axis in (np.bool_(True), jnp.array(2))),
    *((SOFTMAX, (array(3, 4, 8, dtype="bool"), axis), {}) for axis in (0, -1)),
    *((SOFTMAX, (jnp.asarray(np.arange(6, dtype=dtype).reshape(2, 3)),), {}) for dtype in ("int8", "int32")),
    *((SOFTMAX, (array(*shape),), {}) for shape in ((), (1,), (0,), (2, 0), (0, 2))),
    *((SOFTMAX, (x,), {}) for x in NOT_ARRAYS),
    *((SILU, (array(2, 4, dtype=dtype),), {}) for dtype in ("int32", "uint8", "bool", "float16", "complex64")),
    *((SILU, (array(*shape),), {}) for shape in ((), (1,), (3,), (0,), (2, 0))),
    *((SILU, (x,), {}) for x in NOT_ARRAYS),
    *((RMS_NORM, (X, WEIGHT), {"eps": eps}) for eps in (0, -1, float("nan"), np.float32(1e-3), True, "1e-6", None)),
    *((RMS_NORM, (X, array(n)), {}) for n in (7, 9)),
    *((RMS_NORM, (x, WEIGHT), {}) for x in NOT_ARRAYS),
    *((MATMUL, (array(*a), array(*b)), {}) for a, b in SHAPES),
    *((MATMUL, (array(*a), array(*b)), {"transpose_b": True}) for a, b in SHAPES if len(a) * len(b) > 1),
    *((MATMUL, (A, B), {"precision": p}) for p in ("high", "bad", 3, 1, 1.5, True, lax.Precision.HIGH, np.float32)),
    *((MATMUL, (A, B), {"precision": p}) for p in (("high", "default"), ("bad", "high"), ("high",), ())),
    *((MATMUL, (A, B), {"preferred_element_type": d}) for d in ("bfloat16", "int32", "complex64", "nonsense", 3)),
    *((MATMUL, (A, B), {"transpose_a": t}) for t in (np.ones(2), None, 0)),
    *(
        (MATMUL, (array(4, 8, dtype=a), array(8, 6, dtype=b)), {})
        for a in ("int8", "bfloat16", "bool")
        for b in ("float16", "complex64")
    ),
    *((MATMUL, (x, B), {}) for x in NOT_ARRAYS),
    *((ATTENTION, (Q, K, K), {"causal": causal}) for causal in (True, 1, None, np.ones(2))),
    *((ATTENTION, (Q, K, K), {"scale": scale}) for scale in (-1, 0.0, np.float32(0.3), [1.0, 2.0])),
    *((ATTENTION, (Q, K, K), {"window": window}) for window in (0, 1, (1, 2), (1,), (1, 2, 3), "3", 2.0, True)),
    *((ATTENTION, (Q, K, K), {"kv_lengths": n}) for n in ([3, 5], (3, 5), np.array([3, 5]), jnp.array([3, 99]))),
    *((ATTENTION, (Q, K, K), {"kv_lengths": n}) for n in (jnp.array([3]), jnp.array(3), jnp.array([[3, 5]]))),
    *((ATTENTION, (Q, K, K), {"kv_lengths": n}) for n in (jnp.array([3.0, 5.0]), jnp.array([3, 5], jnp.int16), "ab")),
    *((ATTENTION, [array(*x.shape, dtype=d) for x in (Q, K, K)], {}) for d in ("int32", "bool", "float16")),
    (ATTENTION, (Q, array(*K.shape, dtype="bfloat16"), K), {}),
    (ATTENTION, (Q, array(2, 6, 0, 8), array(2, 6, 0, 8)), {}),
    (ATTENTION, (Q, array(1, 6, 2, 8), array(1, 6, 2, 8)), {}),
    (ATTENTION, (array(6, 4, 8), K, K), {}),
]


def outcome(call, args, how):
    try:
        return call(*args, **how)
    except Exception as error:
        return error


def name(case):
    (call, _), args, how = case
    return f"{call.__name__}({', '.join(map(short, args))}{''.join(f', {k}={short(v)}' for k, v in how.items())})"


def short(x):
    return f"{x.dtype}{list(x.shape)}" if isinstance(x, jax.Array | np.ndarray) and x.ndim else repr(x)[:30]


@pytest.mark.parametrize("case", CASES, ids=name)
def test_what_jax_refuses_is_refused_and_what_it_accepts_is_the_same(case):
    (ours, theirs), args, how = case
    wanted, found = outcome(theirs, args, how), outcome(ours, args, how)
    if isinstance(wanted, Exception):
        assert isinstance(found, TypeError | ValueError), f"JAX raises {wanted!r}, and this is {found!r}"
        return
    assert not isinstance(found, Exception), f"JAX accepts it: {found!r}"
    assert (found.shape, found.dtype) == (wanted.shape, wanted.dtype)
    np.testing.assert_allclose(found.astype(jnp.complex64), wanted.astype(jnp.complex64), rtol=2e-2, atol=2e-2)


def test_an_option_that_equals_another_is_not_taken_for_it():
    tuned_softmax(X, 1)
    tuned_flash_attention(Q, K, K, window=(1, 2))
    for call in (lambda: tuned_softmax(X, 1.0), lambda: tuned_softmax(X, (1.0,))):
        with pytest.raises(TypeError, match=r"axis is .*give an integer"):
            call()
    for window in ((1.0, 2.0), np.float32(1)):
        with pytest.raises(ValueError, match="neither a number of keys nor two"):
            tuned_flash_attention(Q, K, K, window=window)


@pytest.mark.parametrize(
    "call",
    [
        lambda flag: tuned_matmul(A, B, transpose_a=flag),
        lambda flag: tuned_gated_matmul(A, B, transpose_w=flag),
        lambda flag: tuned_flash_attention(Q, K, K, causal=flag),
        lambda flag: tuned_softmax(X, return_lse=flag),
    ],
)
def test_a_traced_flag_is_refused_in_a_sentence(call):
    with pytest.raises(TypeError, match="is a traced array; it is part of the compiled program, so give True or False"):
        jax.jit(call)(jnp.array(True))


def test_a_complex_weight_or_residual_is_not_cut_to_its_real_part():
    with pytest.raises(TypeError, match="weight is complex64, which a result of float32 cannot hold"):
        tuned_rms_norm(X, WEIGHT * 1j)
    with pytest.raises(TypeError, match="residual is complex64, which a result of float32 cannot hold"):
        tuned_rms_norm(X, WEIGHT, residual=X * 1j)


def test_a_bias_of_random_keys_is_a_type_error():
    with pytest.raises(TypeError, match="is no dtype of numbers"):
        tuned_matmul(A, B, bias=jax.random.split(jax.random.key(0), 6))
