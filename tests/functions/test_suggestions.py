"""What `scheduler.problems` suggests: products and patterns that are there, and nothing that only looks like one."""

from __future__ import annotations

import operator

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from jax import lax
from jax.experimental import pallas as pl

import scheduler

pytestmark = pytest.mark.slow_but_first

X = jax.ShapeDtypeStruct((8, 64), jnp.bfloat16)
WIDE = jax.ShapeDtypeStruct((8, 64), jnp.float32)
ROW = jax.ShapeDtypeStruct((64,), jnp.bfloat16)
# [batch, length, heads, head_dim]
Q = jax.ShapeDtypeStruct((2, 16, 4, 32), jnp.bfloat16)
KV = jax.ShapeDtypeStruct((2, 16, 2, 32), jnp.bfloat16)


def suggested(fn, *args):
    """``{"softmax rows=8 ...": count}``"""
    return {f"{s.row.operation.name} {s.row.problem}": s.row.count for s in scheduler.problems(fn, *args).untuned}


def names(fn, *args):
    return {text.partition(" ")[0] for text in suggested(fn, *args)}


def formula(x):
    e = jnp.exp(x - jnp.max(x, axis=-1, keepdims=True))
    return e / jnp.sum(e, axis=-1, keepdims=True)


@pytest.mark.parametrize(
    "fn",
    [
        jax.nn.softmax,
        formula,
        lambda x: jnp.exp(x) / jnp.exp(x).sum(-1)[:, None],
        lambda x: jax.nn.softmax(x.astype(jnp.float32)).astype(x.dtype),
        lambda x: jax.nn.softmax(x, axis=1),
        jax.vmap(jax.nn.softmax),
    ],
)
def test_a_softmax_is_seen_however_it_is_written(fn):
    assert suggested(fn, X) == {"softmax rows=8 columns=64 dtype=bfloat16": 1}


def test_a_softmax_that_stays_in_float32_is_one_of_float32():
    found = suggested(lambda x: jax.nn.softmax(x.astype(jnp.float32)), X)
    assert found == {"softmax rows=8 columns=64 dtype=float32": 1}


def test_it_counts_as_often_as_it_runs_and_its_derivative_does_not():
    def loss(x):
        return jnp.sum(lax.scan(lambda x, _: (jax.nn.softmax(x), None), x, length=5)[0] ** 2)

    assert suggested(jax.grad(loss), WIDE) == {"softmax rows=8 columns=64 dtype=float32": 5}


@pytest.mark.parametrize(
    "fn",
    [
        lambda x: jax.nn.softmax(x, axis=0),
        lambda x: jnp.exp(x) / (jnp.sum(jnp.exp(x), -1, keepdims=True) + 1),
        lambda x: jnp.exp(x) / jnp.sum(jnp.exp(x), 0, keepdims=True),
        lambda x: jnp.exp(x) / jnp.sum(jnp.exp(2 * x), -1, keepdims=True),
        lambda x: jnp.exp(x) / jnp.mean(jnp.exp(x), -1, keepdims=True),
        lambda x: jnp.exp2(x) / jnp.sum(jnp.exp2(x), -1, keepdims=True),
        lambda x: jnp.exp(x) / jnp.sum(jnp.exp(x)),
        lambda x: jax.nn.softmax(x, where=x > 0),
        jax.nn.log_softmax,
        jax.nn.sigmoid,
    ],
)
def test_what_only_looks_like_a_softmax_is_none(fn):
    assert suggested(fn, WIDE) == {}


def rms(x, weight, *, eps=1e-6):
    wide = x.astype(jnp.float32)
    return (wide * lax.rsqrt(jnp.mean(wide**2, -1, keepdims=True) + eps)).astype(x.dtype) * weight


@pytest.mark.parametrize(
    "fn",
    [
        rms,
        lambda x, w: x / jnp.sqrt(jnp.mean(x * x, -1, keepdims=True) + 1e-5) * w,
        lambda x, w: x * (w * lax.rsqrt(jnp.mean(jnp.square(x), axis=-1, keepdims=True))),
        lambda x, w: x * (1 / jnp.sqrt(jnp.sum(x**2, -1, keepdims=True) / 64 + 1e-6)) * w,
    ],
)
def test_a_norm_is_seen_however_it_is_written(fn):
    assert suggested(fn, X, ROW) == {"rms_norm rows=8 columns=64 dtype=bfloat16": 1}


def test_a_weight_in_float32_or_plus_one_is_a_weight():
    wide = jax.ShapeDtypeStruct((64,), jnp.float32)

    def gemma(x, w):
        h = x.astype(jnp.float32)
        return (h * lax.rsqrt(jnp.mean(h * h, -1, keepdims=True) + 1e-6) * (1 + w)).astype(x.dtype)

    assert suggested(gemma, X, wide) == {"rms_norm rows=8 columns=64 dtype=bfloat16 weight_dtype=float32": 1}


def layer_norm(x, w):
    centred = x - jnp.mean(x, -1, keepdims=True)
    return centred * lax.rsqrt(jnp.mean(centred**2, -1, keepdims=True) + 1e-6) * w


@pytest.mark.parametrize(
    "fn",
    [
        layer_norm,
        lambda x, w: x * lax.rsqrt(jnp.mean(x * x, -1, keepdims=True) + 1e-6),
        lambda x, w: x * lax.rsqrt(jnp.sum(x * x, -1, keepdims=True) + 1e-6) * w,
        lambda x, w: x * lax.rsqrt(jnp.mean(x * x, 0, keepdims=True) + 1e-6) * w,
        lambda x, w: x * lax.rsqrt(jnp.mean(x * x) + 1e-6) * w,
        lambda x, w: x * lax.rsqrt(jnp.mean(jnp.sin(x) ** 2, -1, keepdims=True) + 1e-6) * w,
        lambda x, w: x * jnp.sqrt(jnp.mean(x * x, -1, keepdims=True) + 1e-6) * w,
        lambda x, w: x * lax.rsqrt(jnp.mean(x**3, -1, keepdims=True) + 1e-6) * w,
        lambda x, w: x * lax.rsqrt(jnp.mean(x * x, -1, keepdims=True) + 1e-6) * w[:8, None],
        lambda x, w: x * lax.rsqrt(jnp.mean(x * x, -1, keepdims=True) + w) * w,
    ],
)
def test_what_only_looks_like_a_norm_is_none(fn):
    assert suggested(fn, WIDE, jax.ShapeDtypeStruct((64,), jnp.float32)) == {}


def test_a_norm_of_a_sum_is_the_call_that_adds_too():
    found = scheduler.problems(lambda x, r, w: (rms(x + r, w), x + r), X, X, ROW)
    assert [(str(each.row.problem), each.call) for each in found.untuned] == [
        ("rows=8 columns=64 dtype=bfloat16", "tuned_rms_norm(residual=)")
    ]


@pytest.mark.parametrize("added", [lambda x, w: x + 1, lambda x, w: x + w, lambda x, w: x - jnp.sin(x)])
def test_a_norm_after_what_only_looks_like_a_residual_is_a_norm(added):
    assert names(lambda x, w: rms(added(x, w), w), X, ROW) == {"rms_norm"}


def split(x):
    gate, up = jnp.split(x, 2, -1)
    return jax.nn.silu(gate) * up


@pytest.mark.parametrize(
    "fn",
    [
        split,
        lambda x: jax.nn.silu(x[:, :32]) * x[:, 32:],
        lambda x: x[:, 32:] * (x[:, :32] * jax.nn.sigmoid(x[:, :32])),
        lambda x: x[:, :32] / (1 + jnp.exp(-x[:, :32])) * x[:, 32:],
        lambda x: split(x.astype(jnp.float32)).astype(x.dtype),
    ],
)
def test_a_gate_is_seen_however_it_is_written(fn):
    assert suggested(fn, X) == {"silu_and_mul rows=8 columns=32 dtype=bfloat16": 1}


@pytest.mark.parametrize(
    "fn",
    [
        lambda x: jax.nn.silu(x[:, 32:]) * x[:, :32],
        lambda x: jax.nn.silu(x[:, :32]) * x[:, :32],
        lambda x: jax.nn.silu(x[:, :32]) * x[:, 16:48],
        lambda x: jax.nn.silu(x[:, :16]) * x[:, 16:32],
        lambda x: jax.nn.silu(x[:, ::2]) * x[:, 1::2],
        lambda x: jax.nn.gelu(x[:, :32]) * x[:, 32:],
        lambda x: jax.nn.sigmoid(x[:, :32]) * x[:, 32:],
        lambda x: jax.nn.silu(x[:4]) * x[4:],
        lambda x: jax.nn.silu(x[:, :32]) * jnp.sin(x)[:, 32:],
        lambda x: jax.nn.silu(x)[:, :32] * x[:, 32:] * x[:, 32:],
        lambda x: x * x * x[:, :1],
    ],
)
def test_what_only_looks_like_a_gate_is_none(fn):
    assert suggested(fn, X) == {}


W = jax.ShapeDtypeStruct((64, 32), jnp.bfloat16)
JOINED = jax.ShapeDtypeStruct((64, 64), jnp.bfloat16)
T = jax.ShapeDtypeStruct((32, 64), jnp.bfloat16)
GATED = "gated_matmul m=8 n=32 k=64 dtype=bfloat16"


@pytest.mark.parametrize(
    ("fn", "weights", "fields"),
    [
        (lambda x, gate, up: jax.nn.silu(x @ gate) * (x @ up), (W, W), " pair=True"),
        (lambda x, gate, up: (x @ up) * jax.nn.silu(x @ gate), (W, W), " pair=True"),
        (lambda x, gate, up: jax.nn.silu(x @ gate.T) * (x @ up.T), (T, T), " transpose_w=True pair=True"),
        (lambda x, w: split(x @ w), (JOINED,), ""),
        (lambda x, w: split(jnp.matmul(x, w, preferred_element_type=jnp.float32)).astype(x.dtype), (JOINED,), ""),
    ],
)
def test_a_gated_product_is_one_suggestion_in_place_of_its_parts(fn, weights, fields):
    assert suggested(fn, X, *weights) == {GATED + fields: 1}


@pytest.mark.parametrize(
    ("fn", "weights"),
    [
        (lambda x, gate, up: jax.nn.silu(x @ gate) * (jnp.sin(x) @ up), (W, W)),
        (lambda x, gate, up: jax.nn.silu(x @ gate) * (x @ up.T), (W, T)),
        (lambda x, gate, up: jax.nn.silu(x @ gate) + (x @ up), (W, W)),
        (lambda x, gate, up: jax.nn.gelu(x @ gate) * (x @ up), (W, W)),
        (lambda x, gate, up: jax.nn.silu(x @ gate + 1) * (x @ up), (W, W)),
        (lambda x, w: jax.nn.silu((x @ w)[:, 32:]) * (x @ w)[:, :32], (JOINED,)),
    ],
)
def test_what_only_looks_like_a_gated_product_is_some_products(fn, weights):
    assert names(fn, X, *weights) == {"matmul"}


def einsum_attention(q, k, v, mask=lambda s: s):
    logits = jnp.einsum("bqhd,bkhd->bhqk", q, k).astype(jnp.float32) / np.sqrt(q.shape[-1])
    return jnp.einsum("bhqk,bkhd->bqhd", jax.nn.softmax(mask(logits)).astype(q.dtype), v)


def positions(s):
    return jnp.arange(s.shape[-2])[:, None], jnp.arange(s.shape[-1])[None]


def causal(s):
    i, j = positions(s)
    return jnp.where(i >= j, s, -1e30)


PLAIN = "flash_attention batch=2 q_len=16 kv_len=16 heads=4 kv_heads=4 head_dim=32 dtype=bfloat16"
CAUSAL = PLAIN.replace(" dtype", " causal=True dtype")


@pytest.mark.parametrize(
    "mask",
    [
        causal,
        lambda s: jnp.where(jnp.tril(jnp.ones(s.shape[-2:], bool)), s, -jnp.inf),
        lambda s: jnp.where(positions(s)[1] > positions(s)[0], jnp.finfo(s.dtype).min, s),
        lambda s: s + jnp.where(positions(s)[1] <= positions(s)[0], 0.0, -1e9),
        lambda s: jnp.where(~(positions(s)[0] < positions(s)[1]), s, -1e30),
        lambda s: jnp.where(positions(s)[1] < positions(s)[0] + 1, s, -1e30),
        lambda s: jnp.where(lax.broadcasted_iota(int, s.shape, 2) >= lax.broadcasted_iota(int, s.shape, 3), s, -1e30),
    ],
)
def test_a_causal_mask_is_seen_however_it_is_written(mask):
    assert suggested(lambda q, k, v: einsum_attention(q, k, v, mask), Q, Q, Q) == {CAUSAL: 1}


@pytest.mark.parametrize(
    ("mask", "fields"),
    [
        (lambda s: jnp.where(positions(s)[0] <= positions(s)[1], s, -1e30), "window_left=0"),
        (lambda s: jnp.where(positions(s)[0] + 1 >= positions(s)[1], s, -1e30), "window_right=1"),
        (
            lambda s: jnp.where(
                (positions(s)[0] >= positions(s)[1]) & (positions(s)[0] < positions(s)[1] + 4), s, -1e30
            ),
            "causal=True window_left=3",
        ),
        (lambda s: 30 * jnp.tanh(s / 30), "softcap=True"),
    ],
)
def test_a_window_and_a_softcap_are_fields_of_attention(mask, fields):
    extents = "batch=2 q_len=16 kv_len=16 heads=4 kv_heads=4 head_dim=32"
    found = suggested(lambda q, k, v: einsum_attention(q, k, v, mask), Q, Q, Q)
    assert found == {f"flash_attention {extents} {fields} dtype=bfloat16": 1}


@pytest.mark.parametrize(
    "mask",
    [
        lambda s: jnp.where(positions(s)[0] > positions(s)[1], s, -1e30),
        lambda s: jnp.where(positions(s)[0] >= positions(s)[1], -1e30, s),
        lambda s: jnp.where(positions(s)[0] >= positions(s)[1], s, 0.0),
        lambda s: jnp.where(positions(s)[0] >= 2 * positions(s)[1], s, -1e30),
        lambda s: jnp.where(jnp.arange(4)[:, None, None] >= positions(s)[1], s, -1e30),
        lambda s: s + jnp.sin(s),
    ],
)
def test_with_another_mask_there_is_a_softmax_and_no_attention(mask):
    found = names(lambda q, k, v: einsum_attention(q, k, v, mask), Q, Q, Q)
    assert "flash_attention" not in found
    assert "softmax" in found


@settings(max_examples=60, deadline=None)
@given(
    compare=st.sampled_from([operator.ge, operator.gt, operator.le, operator.lt]),
    offsets=st.tuples(st.integers(-2, 2), st.integers(-2, 2)),
    queries_first=st.booleans(),
    negated=st.booleans(),
    keeps=st.booleans(),
)
def test_a_comparison_of_positions_is_causal_exactly_where_it_is(compare, offsets, queries_first, negated, keeps):
    def seen(length):
        i, j = jnp.arange(length)[:, None] + offsets[0], jnp.arange(length)[None] + offsets[1]
        mask = compare(i, j) if queries_first else compare(j, i)
        return ~mask if negated else mask

    def mask(s):
        return jnp.where(seen(s.shape[-1]), s, -1e30) if keeps else jnp.where(seen(s.shape[-1]), -1e30, s)

    is_causal = bool(jnp.all((seen(16) == keeps) == jnp.tril(jnp.ones((16, 16), bool))))
    found = suggested(lambda q, k, v: einsum_attention(q, k, v, mask), Q, Q, Q)
    assert (CAUSAL in found) == is_causal
    assert PLAIN not in found


def test_a_mask_that_is_an_argument_is_not_known():
    seen = jax.ShapeDtypeStruct((16, 16), jnp.bool_)
    found = names(lambda q, k, v, seen: einsum_attention(q, k, v, lambda s: jnp.where(seen, s, -1e30)), Q, Q, Q, seen)
    assert "flash_attention" not in found


def heads_first(q, k, v):
    q, k, v = (x.swapaxes(1, 2) for x in (q, k, v))
    return (jax.nn.softmax(q @ k.swapaxes(2, 3)) @ v).swapaxes(1, 2)


@pytest.mark.parametrize("fn", [einsum_attention, jax.nn.dot_product_attention, heads_first])
def test_attention_is_seen_wherever_its_heads_are(fn):
    assert suggested(fn, Q, Q, Q) == {PLAIN: 1}


def test_heads_that_share_keys_are_seen():
    grouped = CAUSAL.replace("kv_heads=4", "kv_heads=2")

    def by_hand(q, k, v):
        q = q.reshape(2, 16, 2, 2, 32)
        logits = jnp.einsum("bqkgd,bskd->bkgqs", q, k)
        return jnp.einsum("bkgqs,bskd->bqkgd", jax.nn.softmax(causal(logits)), v)

    assert suggested(lambda *x: jax.nn.dot_product_attention(*x, is_causal=True), Q, KV, KV) == {grouped: 1}
    assert suggested(by_hand, Q, KV, KV) == {grouped: 1}


def test_each_step_of_decoding_is_seen():
    """Softmaxes whose maximum JAX takes before it transposes the logits, one after the other."""
    weights = jax.ShapeDtypeStruct((3, 128, 128), jnp.bfloat16)
    x, cache = jax.ShapeDtypeStruct((2, 128), jnp.bfloat16), jax.ShapeDtypeStruct((2, 16, 2, 32), jnp.bfloat16)

    def decode(x, ws, k, v):
        for i in range(3):
            q = (x @ ws[i]).reshape(2, 1, 4, 32)
            x = x + jax.nn.dot_product_attention(q, k, v).reshape(2, 128)
        return x

    attention = "flash_attention batch=2 q_len=1 kv_len=16 heads=4 kv_heads=2 head_dim=32 dtype=bfloat16"
    assert suggested(decode, x, weights, cache, cache) == {attention: 3, "matmul m=2 n=128 k=128 dtype=bfloat16": 3}


def test_one_head_alone_and_other_lengths_and_values_are_seen():
    q, k, v = (jax.ShapeDtypeStruct(shape, jnp.float32) for shape in ((5, 8), (7, 8), (7, 16)))
    found = suggested(lambda q, k, v: jax.nn.softmax(q @ k.T) @ v, q, k, v)
    fields = "batch=1 q_len=5 kv_len=7 heads=1 kv_heads=1 head_dim=8 head_dim_v=16 dtype=float32"
    assert found == {f"flash_attention {fields}": 1}


@pytest.mark.parametrize(
    "fn",
    [
        lambda q, k, v: jax.nn.softmax(q @ k.T).T @ v,
        lambda q, k, v: jax.nn.softmax(q @ k.T, axis=0) @ v,
        lambda q, k, v: jnp.exp(q @ k.T) @ v,
        lambda q, k, v: jax.nn.softmax(q) @ v,
    ],
)
def test_products_beside_a_softmax_are_no_attention(fn):
    x = jax.ShapeDtypeStruct((16, 16), jnp.float32)
    found = names(fn, x, x, x)
    assert "flash_attention" not in found
    assert "matmul" in found


def block(x, w):
    q, k, v = (jnp.reshape(x @ w[i], (2, 16, 4, 32)) for i in range(3))
    return x + einsum_attention(q, k, v, causal).reshape(2, 16, 128) @ w[3], None


def test_the_backward_pass_of_attention_goes_with_it():
    """Also where masks are hoisted out of the scan, and `jax.checkpoint` computes the weights again."""
    x, ws = jax.ShapeDtypeStruct((2, 16, 128), jnp.bfloat16), jax.ShapeDtypeStruct((3, 4, 128, 128), jnp.bfloat16)

    def loss(ws, x, layer):
        return jnp.sum(lax.scan(layer, x, ws)[0].astype(jnp.float32) ** 2)

    projections = "matmul m=32 n=128 k=128 dtype=bfloat16"
    for layer, times in ((block, 1), (jax.checkpoint(block), 2)):
        found = suggested(jax.grad(lambda ws, x, layer=layer: loss(ws, x, layer)), ws, x)
        assert found[CAUSAL] == 3 * times
        assert set(found) == {
            CAUSAL,
            projections,
            f"{projections} transpose_b=True",
            "matmul m=128 n=128 k=32 dtype=bfloat16 transpose_a=True",
        }


def test_a_product_is_suggested_with_its_lines_and_what_the_model_expects():
    x, w = jax.ShapeDtypeStruct((256, 4096), jnp.bfloat16), jax.ShapeDtypeStruct((4096, 28672), jnp.bfloat16)
    with scheduler.target("NVIDIA H200"):
        found = scheduler.problems(lambda x, w: jax.nn.softmax(x @ w), x, w)
    calls = {each.call: each for each in found.untuned}
    assert set(calls) == {"tuned_matmul", "tuned_softmax"}
    assert calls["tuned_softmax"].gain > 1
    assert [line.file for line in calls["tuned_matmul"].row.lines] == [__file__]
    assert "x expected" in repr(found)


def test_what_is_tuned_already_is_not_suggested():
    assert (
        suggested(lambda x, w: scheduler.tuned_softmax(scheduler.tuned_matmul(x, w)), WIDE, WIDE.update(shape=(64, 8)))
        == {}
    )


def test_products_of_mixed_or_integer_operands_are_not_suggested():
    x, w = jax.ShapeDtypeStruct((8, 8), jnp.int32), jax.ShapeDtypeStruct((8, 8), jnp.float32)
    assert suggested(lambda x: x @ x, x) == {}
    assert suggested(lambda x, w: lax.dot(x, w, preferred_element_type=jnp.float32), x, w) == {}


def test_a_long_function_is_read_in_seconds():
    def fn(x, w):
        for _ in range(1500):
            x = x * w * jnp.tanh(x @ w)
        return x

    square = jax.ShapeDtypeStruct((16, 16), jnp.float32)
    assert suggested(fn, square, square) == {"matmul m=16 n=16 k=16 dtype=float32": 1500}


def test_what_no_operation_knows_is_read_without_harm():
    def kernel(x, out):
        out[...] = x[...] @ x[...]

    def fn(key, x):
        x = x + jax.random.normal(key, x.shape)
        x = pl.pallas_call(kernel, out_shape=jax.ShapeDtypeStruct(x.shape, x.dtype), interpret=True)(x)
        x = lax.custom_linear_solve(lambda y: 2 * y, x, lambda matvec, y: y / 2 @ jnp.eye(8), symmetric=True)
        x = jnp.sort(x) + lax.fori_loop(0, jnp.int32(x[0, 0]), lambda _, y: jnp.fft.fft(y).real, x)
        jax.debug.print("{}", x[0, 0])
        return lax.switch(jnp.argmax(x[0]), [jnp.sin, jnp.linalg.inv, lambda x: x @ x], x), jax.random.split(key)

    square = jax.ShapeDtypeStruct((8, 8), jnp.float32)
    found = scheduler.problems(fn, jax.eval_shape(lambda: jax.random.key(0)), square)
    products = {str(each.row.problem): each.row.count for each in found.untuned if each.call == "tuned_matmul"}
    assert products["m=8 n=8 k=8 dtype=float32"] >= 2
    assert {loop.kind for loop in found.loops} >= {"while", "cond"}


def test_a_product_in_which_one_array_is_two_factors_is_read_without_harm():
    """As in the derivative of a GELU."""
    assert suggested(lambda x, y: x * x * y, X, X) == {}
